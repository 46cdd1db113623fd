# SPDX-License-Identifier: Apache-2.0
"""The objects of the cluster, their versions, and what has changed since when."""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import attrs

from agentsandbox.testing.cluster.replies import (
    Json,
    already_exists,
    expired,
    modified,
    not_found,
    precondition_failed,
)

__all__ = ["BUILTIN", "Event", "Resource", "Store", "Stored"]

Listener = Callable[["Event"], None]

HISTORY = 20_000
"""Changes that watches can be served from; a resource version before them is too old."""


@attrs.frozen(kw_only=True)
class Resource:
    """A kind of objects that the server knows."""

    plural: str
    """Its name in paths."""
    kind: str
    """Its name in objects."""
    group: str = ""
    """Its API group; the core one is empty."""
    version: str = "v1"
    """The version that is served."""
    namespaced: bool = True
    """Whether its objects live in namespaces."""
    short: tuple[str, ...] = ()
    """Short names, for discovery."""

    @property
    def api_version(self) -> str:
        """What its objects say as ``apiVersion``."""
        return f"{self.group}/{self.version}" if self.group else self.version


BUILTIN = (
    Resource(plural="namespaces", kind="Namespace", namespaced=False, short=("ns",)),
    Resource(plural="nodes", kind="Node", namespaced=False, short=("no",)),
    Resource(plural="pods", kind="Pod", short=("po",)),
    Resource(plural="configmaps", kind="ConfigMap", short=("cm",)),
    Resource(plural="secrets", kind="Secret"),
    Resource(plural="serviceaccounts", kind="ServiceAccount", short=("sa",)),
    Resource(plural="events", kind="Event", short=("ev",)),
    Resource(plural="resourcequotas", kind="ResourceQuota", short=("quota",)),
    Resource(plural="limitranges", kind="LimitRange"),
    Resource(plural="jobs", kind="Job", group="batch"),
    Resource(plural="runtimeclasses", kind="RuntimeClass", group="node.k8s.io", namespaced=False),
    Resource(plural="priorityclasses", kind="PriorityClass", group="scheduling.k8s.io", namespaced=False),
    Resource(plural="networkpolicies", kind="NetworkPolicy", group="networking.k8s.io", short=("netpol",)),
    Resource(plural="leases", kind="Lease", group="coordination.k8s.io"),
)


@attrs.define(eq=False)
class Stored:
    """One version of one object. Nothing in it may be changed: a new version takes its place."""

    resource: Resource
    object: Json
    version: int
    _spec: bytes | None = None
    _whole: bytes | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.object["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace; empty if it lives in none."""
        return str(self.object["metadata"].get("namespace", ""))

    @property
    def uid(self) -> str:
        """Its UID."""
        return str(self.object["metadata"]["uid"])

    def raw(self) -> bytes:
        """Return its JSON. The spec of a Pod holds a whole program, so that it is encoded once for all versions."""
        if self._whole is None:
            parts = []
            for key, value in self.object.items():
                encoded = self._encoded_spec() if key == "spec" else _dump(value)
                parts.append(b'"' + key.encode() + b'":' + encoded)
            self._whole = b"{" + b",".join(parts) + b"}"
        return self._whole

    def _encoded_spec(self) -> bytes:
        if self._spec is None:
            self._spec = _dump(self.object["spec"])
        return self._spec

    def inherit(self, previous: Stored) -> None:
        """Take over what was encoded for the version before."""
        if self.object.get("spec") is previous.object.get("spec"):
            self._spec = previous._spec


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@attrs.frozen
class Event:
    """One change."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    """What happened."""
    now: Stored
    """The object after it; a deleted one as it was last, with the version of its deletion."""
    before: Stored | None
    """The object before it."""


class Store:
    """
    All objects.

    Args:
        resources: The kinds to know from the beginning.

    """

    def __init__(self, resources: Iterable[Resource] = BUILTIN) -> None:
        self.version = 1000
        """The version of the last change."""
        self.resources: dict[tuple[str, str, str], Resource] = {}
        self._objects: dict[Resource, dict[tuple[str, str], Stored]] = {}
        self._history: dict[Resource, deque[Event]] = {}
        self._oldest: dict[Resource, int] = {}
        self._listeners: dict[Resource | None, list[Listener]] = {}
        for resource in resources:
            self.register(resource)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(found)} {kind.plural}" for kind, found in self._objects.items() if found)
        return f"<Store at {self.version} [{counts or 'empty'}]>"

    def register(self, resource: Resource) -> None:
        """Serve another kind, for instance a custom resource."""
        self.resources[resource.group, resource.version, resource.plural] = resource
        self._objects[resource] = {}
        self._history[resource] = deque(maxlen=HISTORY)
        self._oldest[resource] = self.version

    def resource(self, plural: str) -> Resource:
        """Return a kind by its name in paths."""
        return next(one for one in self.resources.values() if one.plural == plural)

    def subscribe(self, resource: Resource | None, listener: Listener) -> Callable[[], None]:
        """Call *listener* at every change; return what ends that."""
        self._listeners.setdefault(resource, []).append(listener)
        return lambda: self._listeners[resource].remove(listener)

    def find(self, resource: Resource, namespace: str, name: str) -> Stored | None:
        """Return an object, or ``None``."""
        return self._objects[resource].get((namespace if resource.namespaced else "", name))

    def get(self, resource: Resource, namespace: str, name: str) -> Stored:
        """
        Return an object.

        Raises:
            Refusal: If there is none.

        """
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource.plural, name, group=resource.group)
        return found

    def all(self, resource: Resource, namespace: str = "") -> Iterator[Stored]:
        """Yield the objects of a kind, of one namespace or of all."""
        for (where, _), stored in list(self._objects[resource].items()):
            if not namespace or where == namespace:
                yield stored

    def count(self, resource: Resource) -> int:
        """Return how many objects of a kind there are."""
        return len(self._objects[resource])

    def create(self, resource: Resource, object_: Json, *, now: str) -> Stored:
        """
        Add an object. It gets its UID, version and time here.

        Raises:
            Refusal: If its name is taken.

        """
        stored = self.dress(resource, object_, now=now)
        key = (stored.namespace, stored.name)
        self._objects[resource][key] = stored
        self.version = stored.version
        self._publish(Event("ADDED", stored, None))
        return stored

    def dress(self, resource: Resource, object_: Json, *, now: str) -> Stored:
        """Return an object as :meth:`create` would add it, without adding it."""
        meta = dict(object_["metadata"])
        if self.find(resource, meta.get("namespace", ""), meta["name"]) is not None:
            raise already_exists(resource.plural, meta["name"], group=resource.group)
        version = self.version + 1
        meta.update(uid=str(uuid.uuid4()), resourceVersion=str(version), creationTimestamp=now)
        meta["generation"] = 1
        return Stored(resource, {**object_, "metadata": meta}, version)

    def replace(self, stored: Stored, object_: Json, *, generation: bool = False) -> Stored:
        """
        Put a new version in the place of an object.

        Args:
            stored: The version that it comes after; must still be the present one.
            object_: What to store.
            generation: Whether what was asked for has changed, and not only what is.

        Raises:
            Refusal: If the object is gone or has changed meanwhile.

        """
        current = self.get(stored.resource, stored.namespace, stored.name)
        if current is not stored:
            raise modified(stored.resource.plural, stored.name)
        meta = dict(object_["metadata"])
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        if generation:
            meta["generation"] = int(meta.get("generation") or 1) + 1
        new = Stored(stored.resource, {**object_, "metadata": meta}, self.version)
        new.inherit(stored)
        self._objects[stored.resource][stored.namespace, stored.name] = new
        self._publish(Event("MODIFIED", new, stored))
        return new

    def remove(self, stored: Stored) -> Stored:
        """Take an object away, whatever its version."""
        current = self._objects[stored.resource].get((stored.namespace, stored.name))
        if current is None or current.uid != stored.uid:
            return stored
        del self._objects[stored.resource][stored.namespace, stored.name]
        self.version += 1
        meta = {**current.object["metadata"], "resourceVersion": str(self.version)}
        last = Stored(stored.resource, {**current.object, "metadata": meta}, self.version)
        last.inherit(current)
        self._publish(Event("DELETED", last, current))
        return last

    def require(self, stored: Stored, preconditions: Json) -> None:
        """
        Compare an object with what a caller thinks it is.

        Raises:
            Refusal: If it is another one.

        """
        for field, what in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            given = preconditions.get(field)
            found = stored.object["metadata"][field]
            if given and given != found:
                raise precondition_failed(stored.resource.kind, stored.name, what, given, found)

    def since(self, resource: Resource, version: int) -> list[Event]:
        """
        Return the changes after a version.

        Raises:
            Refusal: If they are forgotten.

        """
        history = self._history[resource]
        oldest = self._oldest[resource]
        if len(history) == HISTORY:
            oldest = max(oldest, history[0].now.version - 1)
        if version < oldest:
            raise expired(version, oldest)
        found: list[Event] = []
        for event in reversed(history):
            if event.now.version <= version:
                break
            found.append(event)
        return found[::-1]

    def compact(self, resource: Resource | None = None) -> None:
        """Forget all changes so far: whoever wants to watch from before now is told that it is too late."""
        for one in (resource,) if resource else self._history:
            self._history[one].clear()
            self._oldest[one] = self.version

    def _publish(self, event: Event) -> None:
        self._history[event.now.resource].append(event)
        for listener in (*self._listeners.get(event.now.resource, ()), *self._listeners.get(None, ())):
            listener(event)
