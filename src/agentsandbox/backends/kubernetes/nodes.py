# SPDX-License-Identifier: Apache-2.0
"""Nodes that take no more work: what runs there is about to go, or cannot be reached."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from agentsandbox.backends.kubernetes.view import Change, ChangeType
from agentsandbox.backends.kubernetes.watch import Reflector
from agentsandbox.errors import InfrastructureError

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.watch import ListWatch

__all__ = ["NODES", "Nodes", "closed"]

NODES = "/api/v1/nodes"

Json = dict[str, Any]


def closed(node: Mapping[str, Any]) -> str:
    """Return why a node takes no more work, in words; empty if it does."""
    name = (node.get("metadata") or {}).get("name")
    if (node.get("spec") or {}).get("unschedulable"):
        return f"node {name} is cordoned"
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            words = str(condition.get("message") or condition.get("reason") or "")
            return f"node {name} is not ready" + (f": {words}" if words else "")
    return ""


class Nodes:
    """
    What is known of the nodes; run :meth:`run` in a task of its owner.

    It takes a permission on the whole cluster, and one can do without: then every node counts as open.

    Args:
        api: The API server.

    """

    def __init__(self, api: ListWatch) -> None:
        self._reflector = Reflector(_Lean(api), NODES)
        self._reflector.subscribe(self._changed)
        self._closed: dict[str, str] = {}
        self.refusal: InfrastructureError | None = None
        """Why nothing is known, if so."""

    def __repr__(self) -> str:
        known = "unknown" if self.refusal else f"{len(self._reflector.objects)} known, {len(self._closed)} closed"
        return f"<Nodes [{known}]>"

    def closed(self, name: str | None) -> str:
        """Return why a node takes no more work; empty if it does, or nothing is known."""
        return self._closed.get(name or "", "")

    async def run(self) -> None:
        """Keep it up to date until cancelled; returns at once where that is not allowed."""
        try:
            await self._reflector.run()
        except InfrastructureError as error:
            self.refusal = error

    def _changed(self, change: Change) -> None:
        name = change.object["metadata"]["name"]
        why = f"node {name} is gone" if change.type is ChangeType.DELETED else closed(change.object)
        if why:
            self._closed[name] = why
        else:
            self._closed.pop(name, None)


class _Lean:
    """An API server that tells of nodes no more than is needed: each lists every image that it has."""

    def __init__(self, api: ListWatch) -> None:
        self._api = api

    async def request(self, method: str, path: str, *, params: Mapping[str, Any] | None = None) -> Json:
        answer = await self._api.request(method, path, params=params)
        return {**answer, "items": [_lean(item) for item in answer.get("items") or ()]}

    async def watch(self, path: str, *, params: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        async with aclosing(self._api.watch(path, params=params)) as events:
            async for event in events:
                yield event if event.get("type") == "ERROR" else {**event, "object": _lean(event.get("object") or {})}


def _lean(node: Json) -> Json:
    meta = node.get("metadata") or {}
    conditions = [one for one in (node.get("status") or {}).get("conditions") or () if one.get("type") == "Ready"]
    return {
        "metadata": {key: meta[key] for key in ("name", "uid", "resourceVersion") if key in meta},
        "spec": {"unschedulable": bool((node.get("spec") or {}).get("unschedulable"))},
        "status": {"conditions": conditions},
    }
