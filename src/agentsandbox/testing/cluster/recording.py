# SPDX-License-Identifier: Apache-2.0
"""Events as a cluster records them: the same again is counted, and too many about one object are dropped."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.clock import Clock
    from agentsandbox.testing.cluster.replies import Json
    from agentsandbox.testing.cluster.store import Store

__all__ = ["BURST", "REFILL", "SIMILAR", "Recorder"]

BURST = 25
"""Events that a kubelet tells of one object without a pause, repeated ones included."""

REFILL = 300.0
"""Seconds after which it tells one more."""

SIMILAR = 10
"""Events of one reason about one object, from which on whatever differs only in its words is one Event."""


class Recorder:
    """
    Keeps Events.

    Args:
        store: Where.
        clock: The cluster's.
        keeps: Whether any are kept.

    """

    def __init__(self, store: Store, clock: Clock, *, keeps: bool) -> None:
        self._store = store
        self._clock = clock
        self._keeps = keeps
        self._names: dict[tuple[str, ...], str] = {}
        self._left: dict[str, tuple[float, float]] = {}
        self._words: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
        self.dropped = 0
        """How many there were too many."""

    def __repr__(self) -> str:
        return f"<Recorder [{len(self._names)} Events, {self.dropped} dropped]>"

    def tell(self, about: Json, kind: str, reason: str, message: str, *, component: str) -> None:
        """Tell something of an object."""
        if not self._keeps:
            return
        meta = about["metadata"]
        if component == "kubelet" and not self._may(meta["uid"]):
            self.dropped += 1
            return
        resource, now = self._store.resource("events"), self._clock.stamp()
        namespace = meta.get("namespace", "default")
        alike = (meta["uid"], component, kind, reason)
        self._words[alike].add(message)
        key: tuple[str, ...] = (*alike, message)
        if len(self._words[alike]) >= SIMILAR:
            key, message = alike, f"(combined from similar events): {message}"
        known = self._store.find(resource, namespace, self._names[key]) if key in self._names else None
        if known is not None:
            again = {"count": known.object["count"] + 1, "lastTimestamp": now, "message": message}
            self._store.replace(known, {**known.object, **again})
            return
        name = self._names[key] = f"{meta['name']}.{self._store.version:08x}{len(self._names):08x}"
        involved = {"kind": about["kind"], "namespace": namespace, "name": meta["name"], "uid": meta["uid"]}
        source = {"component": component}
        if component == "kubelet":
            spec = about.get("spec") or {}
            source["host"] = spec.get("nodeName", "")
            if containers := spec.get("containers"):
                involved["fieldPath"] = f"spec.containers{{{containers[0]['name']}}}"
        event = {"involvedObject": involved, "reason": reason, "message": message, "type": kind, "count": 1}
        event |= {"source": source, "reportingComponent": component, "firstTimestamp": now, "lastTimestamp": now}
        body = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": namespace}, **event}
        self._store.create(resource, body, now=now)

    def _may(self, uid: str) -> bool:
        now = self._clock.time()
        left, since = self._left.get(uid, (float(BURST), now))
        left = min(BURST, left + (now - since) / REFILL)
        self._left[uid] = (left - 1 if left >= 1 else left, now)
        return left >= 1
