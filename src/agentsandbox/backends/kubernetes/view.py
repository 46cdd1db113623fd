# SPDX-License-Identifier: Apache-2.0
"""What is known of a collection of objects, and what each piece of news changes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import attrs

from agentsandbox.backends.kubernetes.refusals import error_of

__all__ = ["Change", "ChangeType", "View", "newer"]

Json = dict[str, Any]

_TOMBSTONES = 1_000


class ChangeType(StrEnum):
    """What happened to an object."""

    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"


@attrs.frozen
class Change:
    """One step in the life of one object."""

    type: ChangeType
    """What happened."""
    object: Json
    """As it is now; for a deleted one, the last that was seen of it."""
    previous: Json | None = None
    """As it was."""


def newer(object_: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Return whether one version of an object comes after another; of versions that are no numbers, the later told."""
    version, other = _version(object_), _version(than)
    return int(version) > int(other) if version.isdigit() and other.isdigit() else version != other


def _version(object_: Mapping[str, Any]) -> str:
    return str((object_.get("metadata") or {}).get("resourceVersion") or "")


def _trim(object_: Json) -> Json:
    # Thousands of them are kept. What nobody reads is most of it: who wrote which field, and our own program.
    object_["metadata"].pop("managedFields", None)
    for container in (object_.get("spec") or {}).get("containers") or ():
        container.pop("command", None)
    return object_


@attrs.define(eq=False, repr=False)
class View:
    """The objects of a collection as far as they are known, and what each piece of news changes. Pure."""

    objects: dict[str, Json] = attrs.field(factory=dict, init=False)
    """By UID."""
    version: str = attrs.field(default="", init=False)
    """Where a watch goes on."""
    gone: OrderedDict[str, Json] = attrs.field(factory=OrderedDict, init=False)
    """The last of the deleted, so that late news cannot bring them back."""

    def __repr__(self) -> str:
        return f"<View {len(self.objects)} objects at {self.version or 'no version'}>"

    def put(self, object_: Json) -> list[Change]:
        """Take in one version of an object, from a watch or from the answer to a call; older ones change nothing."""
        uid = _trim(object_)["metadata"]["uid"]
        known = self.objects.get(uid)
        if uid in self.gone or (known is not None and not newer(object_, known)):
            return []
        self.objects[uid] = object_
        return [Change(ChangeType.ADDED if known is None else ChangeType.MODIFIED, object_, known)]

    def drop(self, object_: Json) -> list[Change]:
        """Take in a deletion."""
        uid = _trim(object_)["metadata"]["uid"]
        known = self.objects.pop(uid, None)
        seen = uid in self.gone
        self.gone[uid] = object_
        while len(self.gone) > _TOMBSTONES:
            self.gone.popitem(last=False)
        return [] if seen else [Change(ChangeType.DELETED, object_, known)]

    def reconcile(self, listed: Iterable[Json], version: str) -> list[Change]:
        """
        Take in a whole list: what is missing in it is gone, unless it is younger than the list.

        Args:
            listed: Everything there is.
            version: Of the list.

        """
        changes: list[Change] = []
        present: set[str] = set()
        for object_ in listed:
            present.add(object_["metadata"]["uid"])
            changes += self.put(object_)
        for uid, object_ in list(self.objects.items()):
            own = _version(object_)
            younger = own.isdigit() and version.isdigit() and int(own) > int(version)
            if uid not in present and not younger:
                changes += self.drop(object_)
        self.version = version
        return changes

    def event(self, event: Mapping[str, Any]) -> list[Change]:
        """
        Take in one event of a watch.

        Raises:
            InfrastructureError: What an ``ERROR`` event says; a :exc:`Conflict` when the version is too old.

        """
        kind, object_ = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise error_of(int(object_.get("code") or 500), object_, {})
        self.version = (object_.get("metadata") or {}).get("resourceVersion") or self.version
        if kind in ("ADDED", "MODIFIED"):
            return self.put(object_)
        return self.drop(object_) if kind == "DELETED" else []
