# SPDX-License-Identifier: Apache-2.0
"""Deletion: marks, grace periods, finalizers, and what goes with what it belonged to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from agentsandbox.testing.cluster.store import Event, Stored

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster

__all__ = ["Removal"]


OWNED = ("Pod", "Sandbox", "NetworkPolicy")
"""Kinds whose objects go with their owners."""


class Removal:
    """
    Removes objects.

    Args:
        cluster: Whose.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._store = cluster.store
        self._pods = self._store.resource("pods")
        self._gone: list[Stored] = []
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<Removal [{len(self._gone)} to follow]>"

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Remove what belongs to what is gone, until cancelled."""
        unsubscribe = self._store.subscribe(None, self._hear)
        try:
            task_status.started()
            while True:
                while self._gone:
                    owner = self._gone.pop()
                    for stored in self._dependents(owner):
                        self.delete(stored, None)
                    self._empty_namespaces()
                self._wake = anyio.Event()
                await self._wake.wait()
        finally:
            unsubscribe()

    def _dependents(self, owner: Stored) -> Iterator[Stored]:
        for resource in self._store.resources.values():
            if resource.kind in OWNED:
                for stored in self._store.all(resource, owner.namespace):
                    owners = stored.object["metadata"].get("ownerReferences") or ()
                    if any(one.get("uid") == owner.uid for one in owners):
                        yield stored

    def _hear(self, event: Event) -> None:
        if event.type == "DELETED" and event.now.resource.kind != "Event":
            self._gone.append(event.now)
            self._wake.set()

    def delete(self, stored: Stored, grace: int | None) -> Stored:
        """Delete an object as the API server does; return what is left of it."""
        meta = stored.object["metadata"]
        marked = meta.get("deletionTimestamp") is not None
        if stored.resource.kind == "Pod":
            spec, phase = stored.object["spec"], stored.object["status"].get("phase")
            seconds = spec.get("terminationGracePeriodSeconds", 30) if grace is None else grace
            if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
                seconds = 0
            if marked and seconds >= meta.get("deletionGracePeriodSeconds", 0) and seconds > 0:
                return stored
            if seconds > 0:
                return self._mark(stored, seconds)
        elif stored.resource.kind == "Namespace":
            if marked:
                return stored
            status = {**(stored.object.get("status") or {}), "phase": "Terminating"}
            new = self._mark(Stored(stored.resource, stored.object, stored.version), 0, status=status)
            self._clear_namespace(new.name)
            return new
        if meta.get("finalizers"):
            return stored if marked else self._mark(stored, 0)
        return self._store.remove(stored)

    def released(self, stored: Stored) -> None:
        """Nothing holds an object back any more: it goes, unless a kubelet still has to end it."""
        worker = self._cluster.kubelet.workers.get(stored.uid)
        if worker is None or stored.resource is not self._pods:
            self._store.remove(stored)

    def _mark(self, stored: Stored, seconds: int, *, status: dict[str, object] | None = None) -> Stored:
        current = self._store.get(stored.resource, stored.namespace, stored.name)
        meta = {
            **current.object["metadata"],
            "deletionTimestamp": self._cluster.clock.stamp(seconds),
            "deletionGracePeriodSeconds": seconds,
        }
        object_ = {**current.object, "metadata": meta}
        if status is not None:
            object_["status"] = status
        return self._store.replace(current, object_, generation=True)

    def _clear_namespace(self, name: str) -> None:
        for resource in self._store.resources.values():
            if resource.namespaced:
                for stored in self._store.all(resource, name):
                    self.delete(stored, None)
        self._gone.append(self._store.get(self._store.resource("namespaces"), "", name))
        self._wake.set()

    def _empty_namespaces(self) -> None:
        namespaces = self._store.resource("namespaces")
        for stored in list(self._store.all(namespaces)):
            if stored.object["metadata"].get("deletionTimestamp"):
                kinds = [one for one in self._store.resources.values() if one.namespaced and one.kind != "Event"]
                if not any(True for kind in kinds for _ in self._store.all(kind, stored.name)):
                    self._store.remove(stored)
