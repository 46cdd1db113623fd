# SPDX-License-Identifier: Apache-2.0
"""Scheduler and kubelets: they give every Pod a worker, as long as it lives."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc

from agentsandbox.testing.cluster import statuses
from agentsandbox.testing.cluster.images import Image, digest
from agentsandbox.testing.cluster.podspec import requests_of
from agentsandbox.testing.cluster.scheduler import place
from agentsandbox.testing.cluster.worker import Worker

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.replies import Json
    from agentsandbox.testing.cluster.store import Event, Stored

__all__ = ["Kubelet"]


class Kubelet:
    """
    The life of all Pods.

    Args:
        cluster: Whose.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.store = cluster.store
        self.pods = self.store.resource("pods")
        self.nodes = self.store.resource("nodes")
        self.workers: dict[str, Worker] = {}
        """By the Pod's UID."""
        self.frozen: set[str] = set()
        """Nodes whose kubelet says nothing any more."""
        self.have: dict[str, set[str]] = {}
        """Which images a node has."""
        self.fetched: Counter[tuple[str, str]] = Counter()
        """How many pulls were begun, by node and image."""
        self._used: dict[str, Counter[str]] = {}
        self._group: anyio.abc.TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Kubelet [{len(self.workers)} Pods]>"

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Look after Pods until cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            unsubscribe = self.store.subscribe(self.pods, self._changed)
            unsubscribe_nodes = self.store.subscribe(self.nodes, lambda _event: self.make_room())
            try:
                task_status.started()
                await anyio.sleep_forever()
            finally:
                unsubscribe()
                unsubscribe_nodes()

    def _changed(self, event: Event) -> None:
        uid = event.now.uid
        if event.type == "ADDED":
            assert self._group is not None
            worker = self.workers[uid] = Worker(self, event.now)
            self._group.start_soon(self._work, worker, name=f"pod {event.now.name}")
        elif uid in self.workers:
            self.workers[uid].notice(event)

    async def _work(self, worker: Worker) -> None:
        try:
            await worker.run()
        finally:
            if not worker.kept:
                self.workers.pop(worker.uid, None)

    def worker(self, namespace: str, name: str) -> Worker:
        """Return the worker of a Pod."""
        return self.workers[self.store.get(self.pods, namespace, name).uid]

    def current(self, worker: Worker) -> Stored | None:
        """Return the Pod of a worker as it is now, or ``None`` if it is gone."""
        found = self.store.find(self.pods, worker.namespace, worker.name)
        return found if found is not None and found.uid == worker.uid else None

    def tell(self, worker: Worker, status: Json) -> bool:
        """Write a Pod's status; ``False`` if there is no such Pod any more, or its node is out of reach."""
        stored = self.current(worker)
        if stored is None or worker.node in self.frozen:
            return False
        if status != stored.object["status"]:
            self.store.replace(stored, {**stored.object, "status": status})
        return True

    async def place(self, worker: Worker) -> str | None:
        """Find a node for a Pod and reserve it; ``None`` if the Pod is gone before there is one."""
        timing = self.cluster.timing
        if timing.schedule and await worker.pause(timing.schedule):
            return None
        while True:
            stored = self.current(worker)
            if stored is None or stored.object["metadata"].get("deletionTimestamp"):
                return None
            pod = stored.object
            chosen: str | None = pod["spec"].get("nodeName")
            words = ""
            if not chosen:
                chosen, words = place(pod, [one.object for one in self.store.all(self.nodes)], self._used)
            if chosen:
                self._reserve(pod, chosen, 1)
                return chosen
            status = statuses.unschedulable(pod, words, self.cluster.clock.stamp())
            earlier = {c["type"]: c for c in pod["status"].get("conditions") or ()}.get("PodScheduled")
            if earlier is None or earlier.get("message") != words:
                self.tell(worker, status)
                self.cluster.event(pod, "Warning", "FailedScheduling", words, component="default-scheduler")
            await worker.changed()
            if worker.gone:
                return None

    def bind(self, worker: Worker, node: str) -> None:
        """Tell a Pod its node."""
        stored = self.current(worker)
        if stored is None:
            return
        pod = stored.object
        condition = {
            "type": "PodScheduled",
            "observedGeneration": pod["metadata"]["generation"],
            "status": "True",
            "lastProbeTime": None,
            "lastTransitionTime": self.cluster.clock.stamp(),
        }
        spec = {**pod["spec"], "nodeName": node}
        self.store.replace(stored, {**pod, "spec": spec, "status": {**pod["status"], "conditions": [condition]}})
        words = f"Successfully assigned {worker.namespace}/{worker.name} to {node}"
        self.cluster.event(pod, "Normal", "Scheduled", words, component="default-scheduler")

    def release(self, worker: Worker) -> None:
        """Give back what a Pod has reserved."""
        if worker.node and worker.reserved:
            worker.reserved = False
            self._reserve(worker.pod, worker.node, -1)
            self.make_room()

    def make_room(self) -> None:
        """Let the scheduler look again at what it could not place."""
        for worker in [one for one in self.workers.values() if not one.node]:
            worker.wake()

    def _reserve(self, pod: Json, node: str, sign: int) -> None:
        used = self._used.setdefault(node, Counter())
        used["pods"] += sign
        for resource in ("cpu", "memory", "ephemeral-storage"):
            used[resource] += sign * requests_of(pod, resource)  # type: ignore[assignment]

    def image(self, name: str) -> Image | None:
        """Return what is behind the name of an image."""
        images = self.cluster.images
        if name in images:
            return images[name]
        bare = re.sub(r"^docker\.io/(library/)?", "", name)
        return images.get(bare) or images.get(bare.removesuffix(":latest"))

    def has_image(self, node: str, name: str) -> bool:
        """Return whether a node has an image."""
        image = self.image(name)
        return name in self.have.setdefault(node, set()) or (image is not None and image.present and not image.error)

    def pulled(self, node: str, name: str) -> None:
        """Note that a node has an image, and tell it in the node's status."""
        have = self.have.setdefault(node, set())
        if name in have:
            return
        have.add(name)
        stored = self.store.find(self.nodes, "", node)
        if stored is not None:
            status: dict[str, Any] = dict(stored.object.get("status") or {})
            image = self.image(name)
            entry = {"names": [f"{name}@{digest(name)}", name], "sizeBytes": image.size if image else 0}
            status["images"] = [*(status.get("images") or ()), entry]
            self.store.replace(stored, {**stored.object, "status": status})
