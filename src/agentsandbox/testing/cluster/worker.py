# SPDX-License-Identifier: Apache-2.0
"""The life of one Pod, from its creation to its end."""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import InfrastructureError
from agentsandbox.testing.cluster import images, statuses
from agentsandbox.testing.cluster.containers import Container, NotStarted, read
from agentsandbox.testing.cluster.peers import EchoContainer
from agentsandbox.testing.cluster.podspec import quantity
from agentsandbox.testing.cluster.pulling import pull
from agentsandbox.testing.cluster.replies import Json
from agentsandbox.testing.cluster.store import Event, Stored

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.kubelet import Kubelet

__all__ = ["End", "Worker"]

LOG_LINES = 50_000
_NOT_STARTED = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: {}: unknown"
)


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
        self.node: str = ""
        self.reserved = False
        self.gone = False
        """Whether the object is gone."""
        self.kept = False
        """Whether the Pod is over but its object is still there."""
        self.container: Container | EchoContainer | None = None
        self.log: deque[tuple[str, bytes]] = deque(maxlen=LOG_LINES)
        self.written = 0
        """How many lines were ever added to it."""
        self.previous_log: deque[tuple[str, bytes]] = deque()
        self.view = statuses.PodView(node_ip="", pod_ip="")
        self.began = math.inf
        self._wake = anyio.Event()
        self._deleted = False
        self._end: End | None = None
        self._kill_asked: tuple[int, bool] | None = None
        self._exited = False
        self._back_off: dict[str, float] = {}
        self._at_once = False
        self._finished = -math.inf
        self._known_exit = -math.inf
        self._exit_to_know: float | None = None
        self._started_at = -math.inf
        self._grace = stored.object["spec"].get("terminationGracePeriodSeconds", 30)

    def __repr__(self) -> str:
        state = next(iter(self.view.container.state), "none")
        return f"<Worker {self.namespace}/{self.name} [{self.view.phase}, {state}, {self.view.container.restarts} restarts]>"

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
        self._ring()

    def end(self, end: End) -> None:
        """Be told to end the Pod, its object stays."""
        self._end = end
        self._ring()

    def kill(self, code: int = 137, *, oom: bool = False) -> None:
        """Be told to end the container, as if it had ended by itself with that exit code."""
        self._kill_asked = (code, oom)
        self._ring()

    def _ring(self) -> None:
        self._wake.set()
        self._wake = anyio.Event()

    @property
    def interrupted(self) -> bool:
        """Whether it has to end."""
        return self.gone or self._deleted or self._end is not None

    async def pause(self, seconds: float) -> bool:
        """Wait, but not longer than until the Pod has to end; return whether it has."""
        with anyio.move_on_after(seconds):
            while not self.interrupted:
                await self._wake.wait()
        return self.interrupted

    async def wait_or(self, other: anyio.Event) -> None:
        """Wait for a change of the Pod or for something else."""
        async with anyio.create_task_group() as group:

            async def one(event: anyio.Event) -> None:
                await event.wait()
                group.cancel_scope.cancel()

            group.start_soon(one, other)
            group.start_soon(one, self._wake)

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

    async def _live(self) -> None:
        node = await self.kubelet.place(self)
        if node is None:
            await self._vanish()
            return
        self.node, self.reserved = node, True
        self.kubelet.bind(self, node)
        self.began = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(self._deadline)
            if await self._prepare():
                while await self._one_container():
                    pass
            await self._finish()
            group.cancel_scope.cancel()

    async def _deadline(self) -> None:
        while True:
            seconds = self.pod["spec"].get("activeDeadlineSeconds")
            wake = self._wake
            if seconds is not None:
                left = self.began + seconds - anyio.current_time()
                if left <= 0 and not self.interrupted:
                    words = "Pod was active on the node longer than the specified deadline"
                    self.end(End(reason="DeadlineExceeded", message=words))
                    return
                with anyio.move_on_after(left):
                    await wake.wait()
            else:
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

    def tell(self) -> None:
        """Tell the API server."""
        if not self.gone:
            self.kubelet.tell(self, self.view.status(self.pod, self.cluster.clock.stamp()))

    async def changed(self) -> None:
        """Wait for anything new."""
        await self._wake.wait()

    async def _one_container(self) -> bool:
        """Run one container to its end; return whether another is to follow."""
        if not await pull(self):
            return False
        spec = self.pod["spec"]["containers"][0]
        image = spec["image"]
        wait = 0.0 if self._at_once else self._back_off_left(image, self._finished)
        self._at_once = False
        if wait:
            words = f"back-off {_duration(self._back_off[image])} restarting failed container={spec['name']} "
            words += f"pod={self.name}_{self.namespace}({self.uid})"
            if "terminated" in self.view.container.state:
                self.view.container.last = self.view.container.state
            self.view.container.state = statuses.waiting("CrashLoopBackOff", words)
            self.tell()
            self.cluster.event(self.pod, "Warning", "BackOff", words)
            if await self.pause(wait):
                return False
        if self.cluster.timing.start and await self.pause(self.cluster.timing.start):
            return False
        return not self.interrupted and await self._start(spec, image)

    def _back_off_left(self, image: str, since: float) -> float:
        """Return how long to wait before an image is started again. The first restart is free; a change counts, too."""
        known = self._back_off.get(image)
        return 0.0 if known is None else max(0.0, known * self.cluster.timing.second - (anyio.current_time() - since))

    def _count_restart(self, image: str) -> None:
        timing = self.cluster.timing
        if self._known_exit == -math.inf:
            return  # nothing has ended yet, as far as the kubelet can see
        if self._finished - self._started_at > timing.reset_back_off:
            self._back_off.clear()
        known = self._back_off.get(image)
        self._back_off[image] = timing.back_off if known is None else min(known * 2, timing.back_off_max)

    async def _start(self, spec: Json, image: str) -> bool:
        view, clock = self.view.container, self.cluster.clock
        container_id = self.cluster.names.container_id()
        restarts = view.restarts + (1 if view.container_id and not _replaced(view) else 0)
        self._count_restart(image)
        try:
            container = await self._run(spec)
        except (NotStarted, InfrastructureError) as error:
            return await self._not_started(spec, container_id, str(error))
        if "terminated" in view.state:
            view.last = view.state
        started = clock.stamp()
        self.container = container
        if view.container_id:
            self.previous_log = self.log.copy()
            self.log.clear()
        self._exited = False
        self._kill_asked = None
        self._started_at = anyio.current_time()
        if self._exit_to_know is not None:
            self._known_exit, self._exit_to_know = self._exit_to_know, None
        view.state, view.restarts, view.container_id = {"running": {"startedAt": started}}, restarts, container_id
        view.image, view.image_id = image, images.digest(image)
        self.view.phase = "Running"
        self.tell()
        self.cluster.event(self.pod, "Normal", "Started", f"Container started: {spec['name']}")
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch_exit, container)
                for descriptor in container.output:
                    group.start_soon(self._collect, descriptor)
                again = await self._until_end(spec, image, container, started)
                group.cancel_scope.cancel()
        finally:
            for descriptor in container.output:
                anyio.notify_closing(descriptor)
                os.close(descriptor)
            container.output.clear()
        return again

    async def _until_end(self, spec: Json, image: str, container: Container | EchoContainer, started: str) -> bool:
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
                wanted = self.pod["spec"]["containers"][0]["image"]
                if wanted != image:
                    await self._change_image(container, started)
                    if self._exited:
                        continue  # it ended by itself while it was waited for, and how it did decides
                    return not self.interrupted
            await wake.wait()

    async def _change_image(self, container: Container | EchoContainer, started: str) -> None:
        # What the kubelet sees is the world before the kill: the exit that counts for the back-off is the one before.
        timing = self.cluster.timing
        with anyio.move_on_after(timing.observe):
            while not self.interrupted and not self._exited:
                await self._wake.wait()
        if self.interrupted or self._exited:
            return
        code = await self._stop(container, self._grace)
        view, now = self.view.container, self.cluster.clock.stamp()
        state = statuses.terminated(code, container_id=view.container_id, started=started, finished=now)
        wait = self._back_off_left(self.pod["spec"]["containers"][0]["image"], self._known_exit)
        self._finished = anyio.current_time()
        self._exited = False
        if wait:
            self._known_exit = self._finished
            view.state = state
            self.tell()
        else:
            self._at_once = True
            self._exit_to_know = self._finished
            view.last = state

    def _judge(self, code: int, started: str, *, oom: bool) -> bool:
        """Decide what follows the end of a container; tell of it."""
        view, spec = self.view.container, self.pod["spec"]
        self._finished = self._known_exit = anyio.current_time()
        view.state = statuses.terminated(
            code, container_id=view.container_id, started=started, finished=self.cluster.clock.stamp(), oom=oom
        )
        action = _rule(spec["containers"][0], code)
        if action == "RestartAllContainers":
            self.view.restarting = True
            self.tell()
            self.view.restarting = False
            view.state, view.last = statuses.removed()
            view.restarts += 1
            self._finished = self._known_exit = -math.inf
            self.tell()
            return True
        policy = spec["containers"][0].get("restartPolicy") or spec["restartPolicy"]
        if action == "Restart" or policy == "Always" or (policy == "OnFailure" and code):
            self.tell()
            return True
        self.view.phase = "Succeeded" if code == 0 else "Failed"
        return False

    async def _not_started(self, spec: Json, container_id: str, words: str) -> bool:
        view, clock = self.view.container, self.cluster.clock
        now = clock.stamp()
        message = _NOT_STARTED.format("error during container init: " + words)
        view.container_id, view.image, view.image_id = container_id, spec["image"], images.digest(spec["image"])
        self._finished = self._known_exit = anyio.current_time()
        state = statuses.terminated(
            128, container_id=container_id, started="1970-01-01T00:00:00Z", finished=now, reason="StartError", message=message
        )
        view.state = state
        self.cluster.event(self.pod, "Warning", "Failed", f"Error: {message}")
        if self.pod["spec"]["restartPolicy"] == "Never":
            self.view.phase = "Failed"
            return False
        view.last = state
        view.state = statuses.waiting("RunContainerError", message)
        self.view.phase = "Running"
        self.tell()
        return not self.interrupted

    async def _run(self, spec: Json) -> Container | EchoContainer:
        if self.cluster.process == "echo-runner":
            return EchoContainer(self.cluster.answer)
        image = self.kubelet.image(spec["image"])
        assert image is not None
        outer, inner = self.pod["spec"].get("securityContext") or {}, spec.get("securityContext") or {}
        user, group = (inner.get(key, outer.get(key)) for key in ("runAsUser", "runAsGroup"))
        limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
        # What volumes hold outlives containers; it lies where the parent of the containers keeps it.
        kept = {volume["name"]: f"/volumes/{self.uid}/{volume['name']}" for volume in self.pod["spec"].get("volumes") or ()}
        return await self.cluster.runtime.run(
            image,
            argv=[*(spec.get("command") or image.command), *(spec.get("args") or ())],
            env={
                "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                "KUBERNETES_SERVICE_PORT": "443",
                **{entry["name"]: str(entry.get("value", "")) for entry in spec.get("env") or ()},
            },
            workdir=spec.get("workingDir"),
            user=None if user is None else str(user),
            group=group,
            capabilities=inner.get("capabilities") or {},
            memory=int(quantity(limit)) if limit and self.cluster.enforce_memory else None,
            volumes=[(kept[mount["name"]], mount["mountPath"]) for mount in spec.get("volumeMounts") or ()],
            hostname=self.name,
        )

    async def _watch_exit(self, container: Container | EchoContainer) -> None:
        await container.wait()
        self._exited = True
        self._ring()

    async def _collect(self, descriptor: int) -> None:
        rest = b""
        while data := await read(descriptor):
            *lines, rest = (rest + data).split(b"\n")
            self.log.extend((self.cluster.clock.stamp(), line + b"\n") for line in lines)
            self.written += len(lines)
            self._ring()
        if rest:
            self.log.append((self.cluster.clock.stamp(), rest))
            self.written += 1
        self._ring()

    async def _stop(self, container: Container | EchoContainer, grace: float) -> int:
        """TERM, then KILL."""
        self.cluster.event(self.pod, "Normal", "Killing", f"Stopping container {self.pod['spec']['containers'][0]['name']}")
        await container.signal(signal.SIGTERM)
        with anyio.move_on_after(grace * self.cluster.timing.second):
            return await container.wait()
        await container.kill()
        return await container.wait()

    async def _finish(self) -> None:
        """End the processes, tell how it ended, and take the object away if that is asked for."""
        view, container = self.view.container, self.container
        if container is not None:
            if "running" in view.state:
                grace = 0 if self.gone or self._end is not None else self._grace
                code = await self._stop(container, grace)
                started = view.state["running"]["startedAt"]
                finished = self.cluster.clock.stamp()
                view.state = statuses.terminated(
                    code, container_id=view.container_id, started=started, finished=finished, oom=container.out_of_memory
                )
            self.container = None
        if self._end is not None and not self._deleted:
            self.view.phase, self.view.reason, self.view.message = self._end.phase, self._end.reason, self._end.message
            if self._end.condition is not None:
                self.view.extra = [self._end.condition]
        elif self._deleted and self.view.phase == "Running":
            state = view.state.get("terminated")
            self.view.phase = "Succeeded" if state is not None and state["exitCode"] == 0 else "Failed"
        self.view.sandbox_ready = False
        if not self.gone:
            self.tell()
        self.kubelet.release(self)
        self.kept = not self.gone
        while not self.gone:
            if self._deleted and self.node not in self.kubelet.frozen:
                await self._vanish()
                if self.gone:
                    break
            await self._wake.wait()
        self.kubelet.workers.pop(self.uid, None)
        self.kept = False

    async def _vanish(self) -> None:
        if self.cluster.timing.stop and self.view.node_ip:
            await anyio.sleep(self.cluster.timing.stop)
        stored = self.kubelet.current(self)
        if stored is not None and not stored.object["metadata"].get("finalizers"):
            self.cluster.store.remove(stored)
            self.gone = True


def _replaced(view: statuses.ContainerView) -> bool:
    return bool(view.state.get("waiting", {}).get("reason") == "RestartingAllContainers")


def _rule(container: Json, code: int) -> str:
    for rule in container.get("restartPolicyRules") or ():
        codes = rule.get("exitCodes") or {}
        within = code in (codes.get("values") or ())
        if within == (codes.get("operator", "In") == "In"):
            return str(rule.get("action"))
    return ""


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
