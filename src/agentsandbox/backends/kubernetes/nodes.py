# SPDX-License-Identifier: Apache-2.0
"""Nodes: which take no more work, so that what runs there is about to go or cannot be reached, and their room."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.options import quantity
from agentsandbox.backends.kubernetes.view import Change, ChangeType
from agentsandbox.backends.kubernetes.watch import Reflector
from agentsandbox.errors import InfrastructureError

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from agentsandbox.backends.kubernetes.watch import ListWatch

__all__ = ["NODES", "Nodes", "closed", "room", "shut_out"]

NODES = "/api/v1/nodes"

_OVER = ("Succeeded", "Failed")
_PODS = "110"
"""Pods that a kubelet takes unless it is told otherwise."""

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


def shut_out(node: Mapping[str, Any], tolerations: Iterable[Mapping[str, Any]]) -> str:
    """Return why no new Pod with these tolerations gets onto a node, in words; empty if one does."""
    if why := closed(node):
        return why
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not any(_bears(one, taint) for one in tolerations):
            return f"node {node['metadata']['name']} has the taint {taint['key']}"
    return ""


def _bears(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (taint.get("value") or "")


def room(node: Mapping[str, Any], pods: Iterable[Mapping[str, Any]], requests: Mapping[str, str]) -> int:
    """
    Return how many more Pods a node has room for.

    Args:
        node: The node.
        pods: Those that are there.
        requests: What each of the new ones asks for.

    """
    there = [pod.get("spec") or {} for pod in pods if (pod.get("status") or {}).get("phase") not in _OVER]
    asked = [
        resources
        for spec in there
        for resources in (
            spec.get("overhead") or {},
            *((one.get("resources") or {}).get("requests") or {} for one in spec.get("containers") or ()),
        )
    ]
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    left = quantity(str(allocatable.get("pods", _PODS))) - len(there)
    for resource, each in requests.items():
        taken = sum((quantity(str(one.get(resource, "0"))) for one in asked), Decimal(0))
        left = min(left, (quantity(str(allocatable.get(resource, "0"))) - taken) / quantity(each))
    return max(0, int(left))


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
        self.known: dict[str, Json] = {}
        """Those that there are, by name: as much of each as is needed here."""
        self.observers: list[Callable[[str], None]] = []
        """Told the name of a node that is new, has changed or is gone. They must be quick and must not raise."""
        self.refusal: InfrastructureError | None = None
        """Why nothing is known, if so."""

    def __repr__(self) -> str:
        known = "unknown" if self.refusal else f"{len(self.known)} known, {len(self._closed)} closed"
        return f"<Nodes [{known}]>"

    def closed(self, name: str | None) -> str:
        """Return why a node takes no more work; empty if it does, or nothing is known."""
        return self._closed.get(name or "", "")

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep it up to date until cancelled; returns at once where that is not allowed."""
        try:
            await self._reflector.run(task_status=task_status)
        except InfrastructureError as error:
            self.refusal = error
            task_status.started()  # it is refused before there is a first list, or never

    def _changed(self, change: Change) -> None:
        name = change.object["metadata"]["name"]
        if change.type is ChangeType.DELETED:
            self.known.pop(name, None)
            why = f"node {name} is gone"
        else:
            self.known[name] = change.object
            why = closed(change.object)
        if why:
            self._closed[name] = why
        else:
            self._closed.pop(name, None)
        for observer in self.observers:
            observer(name)


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
    meta, spec, status = (node.get(key) or {} for key in ("metadata", "spec", "status"))
    conditions = [one for one in status.get("conditions") or () if one.get("type") == "Ready"]
    return {
        "metadata": {key: meta[key] for key in ("name", "uid", "resourceVersion") if key in meta},
        "spec": {"unschedulable": bool(spec.get("unschedulable")), "taints": spec.get("taints") or []},
        "status": {"conditions": conditions, "allocatable": status.get("allocatable") or {}},
    }
