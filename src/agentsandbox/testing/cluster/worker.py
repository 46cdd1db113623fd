# SPDX-License-Identifier: Apache-2.0
"""The life of one Pod, from its creation to its end."""

from __future__ import annotations

import math
import os
import signal
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import InfrastructureError
from agentsandbox.testing.cluster import images, starting, statuses
from agentsandbox.testing.cluster.backoff import BackOff
from agentsandbox.testing.cluster.containers import NotStarted, read
from agentsandbox.testing.cluster.logs import Log
from agentsandbox.testing.cluster.pulling import pull

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.containers import Container
    from agentsandbox.testing.cluster.kubelet import Kubelet
    from agentsandbox.testing.cluster.peers import EchoContainer
    from agentsandbox.testing.cluster.replies import Json
    from agentsandbox.testing.cluster.store import Event, Stored

    Started = Container | EchoContainer

__all__ = ["End", "Worker"]

LAST_WORDS = 2.0
"""Seconds in which what a dead container has written must have been read."""


@attrs.frozen(kw_only=True)
class End:
    """How somebody else ends a Pod."""

    phase: str = "Failed"
    reason: str = ""
    message: str = ""
    condition: Json | None = None


class Worker:
    """
    What a kubelet does for one Pod.

    Args:
        kubelet: Whose.
        stored: The Pod as it was created.

    """

    def __init__(self, kubelet: Kubelet, stored: Stored) -> None:
        self.kubelet = kubelet
        self.cluster = kubelet.cluster
        self.pod = stored.object
        self.uid, self.name, self.namespace = stored.uid, stored.name, stored.namespace
        self.node = ""
        self.reserved = False
        """Whether it takes room on its node."""
        self.gone = False
        """Whether the object is gone."""
        self.kept = False
        """Whether the Pod is over but its object is still there."""
        self.container: Started | None = None
        self.log = Log()
        self.view = statuses.PodView(node_ip="", pod_ip="")
        self._began = math.inf
        self._wake = anyio.Event()
        self._deleted = False
        self._end: End | None = None
        self._kill_asked: tuple[int, bool] | None = None
        self._exited = False
        self._back_off = BackOff(self.cluster.timing)
        self._grace = stored.object["spec"].get("terminationGracePeriodSeconds", 30)

    def __repr__(self) -> str:
        state = next(iter(self.view.container.state), "none")
        counts = f"{self.view.container.restarts} restarts"
        return f"<Worker {self.namespace}/{self.name} [{self.view.phase}, {state}, {counts}]>"

    # What it hears.

    def notice(self, event: Event) -> None:
        """Hear of a change of the object."""
        self.pod = event.now.object
        if event.type == "DELETED":
            self.gone = True
        meta = self.pod["metadata"]
        if meta.get("deletionTimestamp") and not self._deleted:
            self._deleted = True
            self._grace = meta.get("deletionGracePeriodSeconds", self._grace)
        self.wake()

    def end(self, end: End) -> None:
        """Be told to end the Pod; its object stays."""
        self._end = end
        self.wake()

    def kill(self, code: int = 137, *, oom: bool = False) -> None:
        """Be told to end the container, as if it had ended by itself with that exit code."""
        self._kill_asked = (code, oom)
        self.wake()

    def wake(self) -> None:
        """Let it look again at everything."""
        self._wake.set()
        self._wake = anyio.Event()

    @property
    def interrupted(self) -> bool:
        """Whether it has to end. A kubelet that is out of reach does not hear of it."""
        if self.node in self.kubelet.frozen:
            return self.gone
        return self.gone or self._deleted or self._end is not None

    async def changed(self) -> None:
        """Wait for anything new."""
        await self._wake.wait()

    async def pause(self, seconds: float) -> bool:
        """Wait, but not longer than until the Pod has to end; return whether it has."""
        with anyio.move_on_after(seconds):
            while not self.interrupted:
                await self._wake.wait()
        return self.interrupted

    # What it does.

    async def run(self) -> None:
        """Do it all."""
        try:
            await self._live()
        finally:
            self.kubelet.release(self)
            if self.container is not None:
                with anyio.move_on_after(30, shield=True):
                    await self.container.kill()

    def tell(self) -> None:
        """Tell the API server."""
        if not self.gone:
            self.kubelet.tell(self, self.view.status(self.pod, self.cluster.clock.stamp()))

    async def _live(self) -> None:
        node = await self.kubelet.place(self)
        if node is None:
            await self._vanish()
            return
        self.node, self.reserved = node, True
        self.kubelet.bind(self, node)
        self._began = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(self._deadline)
            if await self._prepare():
                while await self._one_container():
                    pass
            await self._finish()
            group.cancel_scope.cancel()

    async def _deadline(self) -> None:
        while True:
            seconds, wake = self.pod["spec"].get("activeDeadlineSeconds"), self._wake
            left = math.inf if seconds is None else self._began + seconds - anyio.current_time()
            if left <= 0 and not self.interrupted:
                words = "Pod was active on the node longer than the specified deadline"
                self.end(End(reason="DeadlineExceeded", message=words))
                return
            with anyio.move_on_after(left if left < math.inf else None):
                await wake.wait()

    async def _prepare(self) -> bool:
        view, timing = self.view, self.cluster.timing
        node = self.cluster.store.find(self.kubelet.nodes, "", self.node)
        view.node_ip = node.object["status"]["addresses"][0]["address"] if node is not None else self.node
        view.started = self.cluster.clock.stamp()
        self.tell()
        if timing.sandbox and await self.pause(timing.sandbox):
            return False
        view.pod_ip = self.cluster.names.address()
        view.sandbox_ready = True
        if timing.sandbox or timing.start:
            self.tell()
        return not self.interrupted

    async def _one_container(self) -> bool:
        """Run one container to its end; return whether another is to follow."""
        if not await pull(self):
            return False
        spec = self.pod["spec"]["containers"][0]
        image, view = spec["image"], self.view.container
        if wait := self._back_off.left(image, anyio.current_time()):
            words = f"back-off {starting.duration(self._back_off.nominal(image))} restarting failed "
            words += f"container={spec['name']} pod={self.name}_{self.namespace}({self.uid})"
            if "terminated" in view.state:
                view.last = view.state
            view.state = statuses.waiting("CrashLoopBackOff", words)
            self.tell()
            self.cluster.event(self.pod, "Warning", "BackOff", words)
            if await self.pause(wait):
                return False
        if self.cluster.timing.start and await self.pause(self.cluster.timing.start):
            return False
        return not self.interrupted and await self._start(image)

    async def _start(self, image: str) -> bool:
        view, clock = self.view.container, self.cluster.clock
        container_id = self.cluster.names.container_id()
        removed = (view.state.get("waiting") or {}).get("reason") == "RestartingAllContainers"
        restarts = view.restarts + (1 if view.container_id and not removed else 0)
        self._back_off.started(image, anyio.current_time())
        try:
            container = await starting.start(self)
        except (NotStarted, InfrastructureError) as error:
            return self._not_started(image, container_id, str(error))
        if "terminated" in view.state:
            view.last = view.state
        started = clock.stamp()
        self.container, self._exited, self._kill_asked = container, False, None
        if view.container_id:
            self.log.turn()
        view.state, view.restarts, view.container_id = {"running": {"startedAt": started}}, restarts, container_id
        view.image, view.image_id = image, images.digest(image)
        self.view.phase = "Running"
        self.tell()
        self.cluster.event(self.pod, "Normal", "Created", "Container created")
        self.cluster.event(self.pod, "Normal", "Started", "Container started")
        try:
            async with anyio.create_task_group() as group:
                heard = anyio.Event()
                group.start_soon(self._attend, container, heard)
                again = await self._until_end(image, container, started)
                if container.ended:
                    with anyio.move_on_after(LAST_WORDS):
                        await heard.wait()
                group.cancel_scope.cancel()
        finally:
            for descriptor in container.output:
                anyio.notify_closing(descriptor)
                os.close(descriptor)
            container.output.clear()
        return again

    async def _until_end(self, image: str, container: Started, started: str) -> bool:
        observed = self.pod["metadata"].get("generation")
        while True:
            wake = self._wake
            if self._exited:
                code = await container.wait()
                return self._judge(code, started, oom=container.out_of_memory)
            if self.interrupted:
                return False
            if self._kill_asked is not None:
                (code, oom), self._kill_asked = self._kill_asked, None
                await container.kill()
                return self._judge(code, started, oom=oom)
            if self.pod["metadata"].get("generation") != observed:
                observed = self.pod["metadata"]["generation"]
                self.tell()
                if self.pod["spec"]["containers"][0]["image"] != image:
                    await self._change_image(container, started)
                    if self._exited:
                        continue  # it ended by itself while it was waited for, and how it did decides
                    return not self.interrupted
            await wake.wait()

    async def _change_image(self, container: Started, started: str) -> None:
        with anyio.move_on_after(self.cluster.timing.observe):
            while not self.interrupted and not self._exited:
                await self._wake.wait()
        if self.interrupted or self._exited:
            return
        code = await self._stop(container, self._grace)
        self._exited = False
        view, now = self.view.container, self.cluster.clock.stamp()
        state = statuses.terminated(code, container_id=view.container_id, started=started, finished=now)
        if self._back_off.change(self.pod["spec"]["containers"][0]["image"], anyio.current_time()):
            view.state = state
            self.tell()
        else:
            view.last = state

    def _judge(self, code: int, started: str, *, oom: bool) -> bool:
        """Decide what follows the end of a container; tell of it."""
        view, spec = self.view.container, self.pod["spec"]
        self._back_off.exited(anyio.current_time())
        view.state = statuses.terminated(
            code, container_id=view.container_id, started=started, finished=self.cluster.clock.stamp(), oom=oom
        )
        action = starting.rule(spec["containers"][0], code)
        if action == "RestartAllContainers":
            self.view.restarting = True
            self.tell()
            self.view.restarting = False
            view.state, view.last = statuses.removed()
            view.restarts += 1
            self._back_off.forget()
            self.tell()
            return True
        policy = spec["containers"][0].get("restartPolicy") or spec["restartPolicy"]
        if action == "Restart" or policy == "Always" or (policy == "OnFailure" and code):
            self.tell()
            return True
        self.view.phase = "Succeeded" if code == 0 else "Failed"
        return False

    def _not_started(self, image: str, container_id: str, words: str) -> bool:
        view = self.view.container
        message = starting.NOT_STARTED.format(words)
        view.container_id, view.image, view.image_id = container_id, image, images.digest(image)
        self._back_off.exited(anyio.current_time())
        never, now = "1970-01-01T00:00:00Z", self.cluster.clock.stamp()
        view.state = statuses.terminated(
            128, container_id=container_id, started=never, finished=now, reason="StartError", message=message
        )
        self.cluster.event(self.pod, "Warning", "Failed", f"Error: {message}")
        if self.pod["spec"]["restartPolicy"] == "Never":
            self.view.phase = "Failed"
            return False
        view.last, view.state = view.state, statuses.waiting("RunContainerError", message)
        self.view.phase = "Running"
        self.tell()
        return not self.interrupted

    async def _attend(self, container: Started, heard: anyio.Event) -> None:
        """Read all that a container writes, then wait for its end."""
        async with anyio.create_task_group() as group:
            for descriptor in container.output:
                group.start_soon(self._collect, descriptor)
        heard.set()
        await container.wait()
        self._exited = True
        self.wake()

    async def _collect(self, descriptor: int) -> None:
        rest = b""
        while data := await read(descriptor):
            *lines, rest = (rest + data).split(b"\n")
            self._write([line + b"\n" for line in lines])
        if rest:
            self._write([rest])

    def _write(self, lines: list[bytes]) -> None:
        self.log.add(self.cluster.clock.stamp(), lines)
        self.wake()

    async def _stop(self, container: Started, grace: float) -> int:
        """TERM, then KILL."""
        name = self.pod["spec"]["containers"][0]["name"]
        self.cluster.event(self.pod, "Normal", "Killing", f"Stopping container {name}")
        await container.signal(signal.SIGTERM)
        with anyio.move_on_after(grace * self.cluster.timing.second):
            return await container.wait()
        await container.kill()
        return await container.wait()

    async def _finish(self) -> None:
        """End the processes, tell how it ended, and take the object away if that is asked for."""
        view, container = self.view.container, self.container
        if container is not None and "running" in view.state:
            code = await self._stop(container, 0 if self.gone or self._end is not None else self._grace)
            view.state = statuses.terminated(
                code,
                container_id=view.container_id,
                started=view.state["running"]["startedAt"],
                finished=self.cluster.clock.stamp(),
                oom=container.out_of_memory,
            )
        self.container = None
        if self._end is not None and not self._deleted:
            self.view.phase, self.view.reason, self.view.message = self._end.phase, self._end.reason, self._end.message
            self.view.extra = [self._end.condition] if self._end.condition is not None else self.view.extra
        elif self._deleted and self.view.phase == "Running":
            state = view.state.get("terminated") or {}
            self.view.phase = "Succeeded" if state.get("exitCode") == 0 else "Failed"
        self.view.sandbox_ready = False
        self.tell()
        self.kubelet.release(self)
        self.kept = not self.gone
        while not self.gone:
            if self._deleted and self.node not in self.kubelet.frozen:
                await self._vanish()
            if not self.gone:
                await self._wake.wait()
        self.kept = False

    async def _vanish(self) -> None:
        if self.cluster.timing.stop and self.view.node_ip:
            await anyio.sleep(self.cluster.timing.stop)
        stored = self.kubelet.current(self)
        if stored is not None and not stored.object["metadata"].get("finalizers"):
            self.cluster.store.remove(stored)
            self.gone = True
