# SPDX-License-Identifier: Apache-2.0
"""Sandboxes of a cluster that is a model: they take time, room and disk, and nothing else."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, cast

import anyio
import attrs

from agentsandbox.backends.base import Backend, BackendSandbox, Check
from agentsandbox.backends.simulated.catalogue import unknown_image
from agentsandbox.backends.simulated.chance import draw
from agentsandbox.backends.simulated.controlplane import ApiServer, Scheduler, choose
from agentsandbox.backends.simulated.model import ClusterModel
from agentsandbox.backends.simulated.node import Node
from agentsandbox.backends.simulated.session import SimulatedSession
from agentsandbox.errors import ConfigurationError, ImagePullFailed, ProvisionError, SandboxLost, UsageError
from agentsandbox.models.events import Event
from agentsandbox.models.placement import Placement
from agentsandbox.models.sandbox import Capabilities, Identity, SandboxSpec

if TYPE_CHECKING:
    from agentsandbox.backends.simulated.model import StartModel
    from agentsandbox.models.image import ImageManifest
    from agentsandbox.session import Session

__all__ = ["SimulatedBackend", "SimulatedSandbox"]


class SimulatedSandbox(BackendSandbox):
    """One Pod of the model."""

    def __init__(self, spec: SandboxSpec, name: str, pod: int, where: Node, round_trip: float) -> None:
        self.name = name
        self.spec = spec
        self.pod = pod
        self.where = where
        self.restarts = 0
        self.identity = Identity(uid=f"pod-{pod:06d}", instance=f"pod-{pod:06d}.0")
        self.capabilities = _CAPABILITIES
        self.node = where.name
        self.simulated = SimulatedSession(round_trip)
        self.session = cast("Session", self.simulated)

    async def check(self) -> None:
        """Say whether it is lost. That costs no time."""
        if (lost := self.simulated.lost) is not None:
            raise SandboxLost(lost.reason, lost.detail)

    def __repr__(self) -> str:
        return f"<SimulatedSandbox {self.name!r} of {self.spec.image!r} on {self.node} [{self.simulated!r}]>"


class SimulatedLane:
    """A Pod that fetches images for others."""

    def __init__(self, backend: SimulatedBackend, where: Node) -> None:
        self._backend = backend
        self._where = where

    async def pull(self, image: str) -> None:
        """
        Have an image on the node.

        Raises:
            ImagePullFailed: If the registry fails.
            ProvisionError: If the disk is full.
            ControlPlaneError: If the API server has too much to do.

        """
        await self._backend.fetch(self._where, image)

    def __repr__(self) -> str:
        return f"<SimulatedLane on {self._where!r}>"


_CAPABILITIES = Capabilities(isolation="none: it is simulated", rungs=("restart", "replace"))


@attrs.define(order=True)
class _Loss:
    at: float
    number: int
    sandbox: SimulatedSandbox = attrs.field(order=False)


class SimulatedBackend(Backend):
    """
    Make sandboxes of a model of a cluster, in virtual time. The same seed gives the same run.

    Run it under ``agentsandbox.testing.virtualtime.VirtualTimeLoop`` or trio's ``MockClock``; with a real clock
    it takes the time that it says. Commands take virtual time: ``sleep 30`` takes thirty seconds of it.

    Args:
        model: The cluster; ``None`` is :class:`ClusterModel` as it comes.
        images: What is known of the images. One that is not named is of the usual size and shares nothing.
        placement: Image to the node that its sandboxes go to. The scheduler chooses for the others.
        hydrated: Node to the images that are there at the beginning.
        reuse: Whether used sandboxes may restart in place, with the same or another image: of the node where they are.
        reserved: Places on each node that sandboxes leave to the Pods that fetch images.
        seed: Of everything that is left to chance.

    Raises:
        ConfigurationError: If a placement names a node that the model has not, or a disk cannot hold what is on it.

    """

    name: ClassVar[str] = "simulated"
    default_create_rate: float | None = 70.0
    default_creates_in_flight: int = 4096

    def __init__(
        self,
        *,
        model: ClusterModel | None = None,
        images: Iterable[ImageManifest] = (),
        placement: Mapping[str, str] | None = None,
        hydrated: Mapping[str, Iterable[str]] | None = None,
        reuse: bool = True,
        reserved: int = 0,
        seed: int = 0,
    ) -> None:
        self.model = model or ClusterModel()
        """The cluster."""
        self.nodes = {
            f"node-{number:02d}": Node(f"node-{number:02d}", self.model) for number in range(self.model.nodes)
        }
        """Its nodes."""
        self.api = ApiServer(self.model)
        """Its API server."""
        self.scheduler = Scheduler(self.model)
        """Its scheduler."""
        self.random: Random = Random(f"simulated {seed}")  # noqa: S311 - no secret
        """Where chance comes from."""
        self.pods_created = 0
        """Pods made, ever."""
        self.pods_peak = 0
        """The most Pods at a time, those that end included."""
        self._images = {image.name: image for image in images}
        self._placement = dict(placement or {})
        if self._placement:
            self.placement = Placement(
                nodes=self._placement, room=dict.fromkeys(self.nodes, self.model.room - reserved)
            )
        self._reuse = reuse
        self._alive: dict[str, SimulatedSandbox] = {}
        self._order = list(self.nodes.values())
        # Pods that no node has room for, in the order in which they came, by the node that they must go to, if any.
        self._pending: dict[str | None, dict[int, anyio.Event]] = {None: {}}
        self._numbers = itertools.count(1)
        self._losses: list[_Loss] = []
        self._news = anyio.Event()
        self._finished = False
        for image, node in self._placement.items():
            if node not in self.nodes:
                raise ConfigurationError(f"image {image!r} is placed on {node!r}, and there is {', '.join(self.nodes)}")
        for node, names in (hydrated or {}).items():
            if node not in self.nodes:
                raise ConfigurationError(f"images are hydrated on {node!r}, and there is {', '.join(self.nodes)}")
            try:
                for name in names:
                    self.nodes[node].hydrate(self.manifest(name))
            except ProvisionError as error:
                raise ConfigurationError(str(error)) from error

    def manifest(self, image: str) -> ImageManifest:
        """Return what is known of an image."""
        if (found := self._images.get(image)) is None:
            found = self._images[image] = unknown_image(self.model, image)
        return found

    async def validate(self, specs: Iterable[SandboxSpec]) -> None:
        """Accept everything: there is no image that a model could lack."""

    async def examine(self) -> list[Check]:
        """Say what it is."""
        return [Check(name="model", ok=True, detail=f"{self.model.nodes} nodes of {self.model.room} sandboxes each")]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let time pass; on exit every sandbox is gone at once."""
        try:
            if not self.model.faults.losses_per_hour:
                yield
                return
            async with anyio.create_task_group() as group:
                group.start_soon(self._lose)
                try:
                    yield
                finally:
                    group.cancel_scope.cancel()
        finally:
            self._alive.clear()

    async def create(self, spec: SandboxSpec, name: str) -> SimulatedSandbox:
        """
        Make a Pod: through the API server and the scheduler to a node, the image, and the start.

        Raises:
            ProvisionError: If the disk is full, the registry fails or the Pod does not start.
            ControlPlaneError: If the API server has too much to do.

        """
        manifest = self.manifest(spec.image)
        await anyio.sleep_until(self.api.write(anyio.current_time(), self.model.writes_start))
        number = next(self._numbers)
        self.pods_created += 1
        self._emit("host.created", name, {"kind": "Pod", "name": name, "uid": f"pod-{number:06d}"})
        await anyio.sleep_until(self.scheduler.next_at(anyio.current_time()))
        node = await self._bind(manifest, number)
        try:
            node.write(self.model.writable_layer)
            try:
                await self._hydrate(node, manifest)
            except BaseException:
                node.write(-self.model.writable_layer)
                raise
            try:
                await self._start(node, self.model.start)
                self._chance(self.model.faults.failed_starts, ProvisionError(f"{name} did not start"))
            except BaseException:
                node.leave(spec.image)
                node.write(-self.model.writable_layer)
                raise
        except BaseException:
            # What the kubelet still does with it takes no time here: its room is free at once.
            self._free(node)
            raise
        return self._made(SimulatedSandbox(spec, name, number, node, self.model.round_trip))

    def can_recycle(self, sandbox: BackendSandbox) -> bool:
        """Whether it may restart in place."""
        return self._reuse and self._alive.get(sandbox.name) is sandbox and sandbox.session.alive

    async def recycle(self, sandbox: BackendSandbox, spec: SandboxSpec, name: str) -> SimulatedSandbox:
        """
        Restart in place, with the same image or another one.

        Raises:
            ProvisionError: If the disk is full, the registry fails or the container does not start.
            ControlPlaneError: If the API server has too much to do.

        """
        old = self._own(sandbox)
        model, node, now = self.model, old.where, anyio.current_time()
        if self._alive.get(old.name) is not old:
            raise UsageError(f"{old!r} is gone")
        old.simulated.lose(SandboxLost("restarted"))
        if spec.image == old.spec.image:
            self.api.count(now, model.writes_restart)
            start = model.restart
        else:
            await anyio.sleep_until(self.api.write(now, model.writes_change))
            await self._hydrate(node, self.manifest(spec.image))
            node.leave(old.spec.image)
            old.spec = spec  # what it holds on the node from now on
            start = model.change
        await self._start(node, start)
        self._chance(model.faults.failed_starts, ProvisionError(f"{name} did not start again"))
        fresh = SimulatedSandbox(spec, name, old.pod, node, model.round_trip)
        fresh.restarts = old.restarts + 1
        fresh.identity = Identity(
            uid=old.identity.uid, instance=f"{old.identity.uid}.{fresh.restarts}", restarts=fresh.restarts
        )
        return self._made(fresh)

    async def destroy(self, sandbox: BackendSandbox) -> None:
        """Remove a Pod, and return when its room is free."""
        old = self._own(sandbox)
        if self._alive.get(old.name) is not old:
            return
        del self._alive[old.name]
        old.simulated.lose(SandboxLost("deleted"))
        node = old.where
        try:
            self.api.count(anyio.current_time(), self.model.writes_stop)
            if not self._finished:
                await anyio.sleep(draw(self.model.stop, self.random))
        finally:
            node.leave(old.spec.image)
            node.write(-self.model.writable_layer)
            self._free(node)

    @asynccontextmanager
    async def lane(self, node: str) -> AsyncIterator[SimulatedLane]:
        """Have a Pod on a node that fetches images, one after another; see :mod:`agentsandbox.hydration.prepull`."""
        model, where = self.model, self.nodes[node]
        self.pods_created += 1
        where.pods += 1
        try:
            self.api.count(anyio.current_time(), model.writes_start)
            await anyio.sleep_until(self.scheduler.next_at(anyio.current_time()))
            yield SimulatedLane(self, where)
        finally:
            self.api.count(anyio.current_time(), model.writes_stop)
            self._free(where)

    def finish(self) -> None:
        """Let removals take no time from now on: what was to be seen has been seen."""
        self._finished = True

    async def fetch(self, node: Node, image: str) -> None:
        """Fetch an image for a Pod whose image is changed for that."""
        await anyio.sleep_until(self.api.write(anyio.current_time(), self.model.writes_change))
        await self._hydrate(node, self.manifest(image))
        node.leave(image)

    async def _bind(self, image: ImageManifest, number: int) -> Node:
        """Find a node, and wait for one if there is no room."""
        where = self._placement.get(image.name)
        while True:
            nodes = self._order if where is None else [self.nodes[where]]
            if (node := choose(nodes, image.name, image.unpacked, anyio.current_time())) is not None:
                node.pods += 1
                self.pods_peak = max(self.pods_peak, sum(each.pods for each in self._order))
                return node
            event = anyio.Event()
            self._pending.setdefault(where, {})[number] = event
            try:
                await event.wait()
            finally:
                self._pending[where].pop(number, None)

    def _free(self, node: Node) -> None:
        node.pods -= 1
        heads = [
            (next(iter(waiting)), waiting) for waiting in (self._pending[None], self._pending.get(node.name)) if waiting
        ]
        if heads:
            number, waiting = min(heads, key=lambda head: head[0])
            waiting[number].set()

    async def _hydrate(self, node: Node, image: ImageManifest) -> None:
        ready_at = node.pull(image, anyio.current_time())
        try:
            if ready_at > anyio.current_time():
                await anyio.sleep_until(ready_at)
                self._chance(self.model.faults.failed_pulls, ImagePullFailed(f"{image.name}: the registry failed"))
        except BaseException:
            node.leave(image.name)
            raise

    async def _start(self, node: Node, start: StartModel) -> None:
        """Start a container. What fails is tried again after a pause that grows, as the kubelet does it."""
        share, pause = start.fails, self.model.backoff
        while True:
            await anyio.sleep_until(node.start(draw(start, self.random), anyio.current_time()))
            if not share or self.random.random() >= share:
                return
            self.api.count(anyio.current_time(), 1)  # what the kubelet says of it
            await anyio.sleep(pause)
            share, pause = start.fails_again, min(2 * pause, self.model.backoff_max)

    def _made(self, sandbox: SimulatedSandbox) -> SimulatedSandbox:
        self._alive[sandbox.name] = sandbox
        if rate := self.model.faults.losses_per_hour:
            at = anyio.current_time() + self.random.expovariate(rate / 3600)
            heapq.heappush(self._losses, _Loss(at, sandbox.pod, sandbox))
            self._news.set()
        return sandbox

    async def _lose(self) -> None:
        while True:
            self._news = anyio.Event()
            with anyio.CancelScope(deadline=self._losses[0].at if self._losses else float("inf")):
                await self._news.wait()
            while self._losses and self._losses[0].at <= anyio.current_time():
                sandbox = heapq.heappop(self._losses).sandbox
                if self._alive.get(sandbox.name) is sandbox and sandbox.simulated.alive:
                    sandbox.simulated.lose(SandboxLost("evicted", "by the model"))
                    self._emit("sandbox.lost", sandbox.name, {"reason": "evicted", "detail": "by the model"})

    def _chance(self, share: float, error: ProvisionError) -> None:
        if share and self.random.random() < share:
            raise error

    def _own(self, sandbox: BackendSandbox) -> SimulatedSandbox:
        if not isinstance(sandbox, SimulatedSandbox):
            raise UsageError(f"{sandbox!r} is not of this backend")
        return sandbox

    def _emit(self, name: str, sandbox: str, data: dict[str, Any]) -> None:
        self.sink(Event(name=name, at=anyio.current_time(), sandbox=sandbox, data=data))

    def __repr__(self) -> str:
        return f"<SimulatedBackend [{len(self.nodes)} nodes, {len(self._alive)} Pods, {self.pods_created} made]>"
