# SPDX-License-Identifier: Apache-2.0
"""What a plan needs to know of a cluster's nodes: their room, the images that are there, and their disks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentsandbox.backends.kubernetes.options import quantity
from agentsandbox.errors import ConfigurationError, ControlPlaneError
from agentsandbox.hydration.records import NodeFacts

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi

__all__ = ["node_facts", "read_nodes"]

_OVER = ("Succeeded", "Failed")


async def read_nodes(
    api: KubernetesApi, *, cpu_request: str = "250m", memory_request: str = "512Mi", **figures: float
) -> tuple[NodeFacts, ...]:
    """
    Ask a cluster for its nodes.

    Args:
        api: The API server. Nodes must be readable; Pods of all namespaces and the kubelets' statistics are used if
            they are, and make the figures better.
        cpu_request: What a sandbox asks for.
        memory_request: Likewise.
        figures: Fields of :class:`~agentsandbox.hydration.NodeFacts` that no cluster knows, such as ``unpack_rate``.

    Raises:
        ConfigurationError: If no node takes sandboxes.
        ControlPlaneError: If the API server refuses to list nodes.

    """
    nodes = await _list(api, "/api/v1/nodes")
    try:
        pods = await _list(api, "/api/v1/pods")
    except ControlPlaneError:
        pods = []
    facts = []
    for node in nodes:
        name = node["metadata"]["name"]
        try:
            statistics = await api.request("GET", f"/api/v1/nodes/{name}/proxy/stats/summary", timeout=10.0)
        except ControlPlaneError:
            statistics = {}
        there = [pod for pod in pods if (pod.get("spec") or {}).get("nodeName") == name]
        found = node_facts(node, there, statistics, cpu_request=cpu_request, memory_request=memory_request, **figures)
        if found is not None:
            facts.append(found)
    if not facts:
        raise ConfigurationError("no node takes sandboxes: all are full, tainted, cordoned or not ready")
    return tuple(facts)


async def _list(api: KubernetesApi, path: str) -> list[Mapping[str, Any]]:
    items: list[Mapping[str, Any]] = []
    token = ""
    while True:
        page = await api.request("GET", path, params={"limit": 500, **({"continue": token} if token else {})})
        items += page.get("items") or []
        token = (page.get("metadata") or {}).get("continue") or ""
        if not token:
            return items


def node_facts(
    node: Mapping[str, Any],
    pods: Iterable[Mapping[str, Any]] = (),
    statistics: Mapping[str, Any] | None = None,
    *,
    cpu_request: str = "250m",
    memory_request: str = "512Mi",
    **figures: Any,
) -> NodeFacts | None:
    """
    Read one node.

    Args:
        node: The node object.
        pods: The Pods on it: what they ask for is taken.
        statistics: The kubelet's summary, if it may be read: how full the disk with the images is.
        cpu_request: What a sandbox asks for.
        memory_request: Likewise.
        figures: Fields of the result that the node does not tell.

    Returns:
        Its facts, or ``None`` if it takes no sandboxes.

    """
    status, spec = node.get("status") or {}, node.get("spec") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    closed = [taint for taint in spec.get("taints") or () if taint.get("effect") in ("NoSchedule", "NoExecute")]
    if not ready or spec.get("unschedulable") or closed:
        return None
    allocatable = status.get("allocatable") or {}
    taken: Counter[str] = Counter()
    count = 0
    for pod in pods:
        if (pod.get("status") or {}).get("phase") in _OVER:
            continue
        count += 1
        overhead = (pod.get("spec") or {}).get("overhead") or {}
        requests = [
            (c.get("resources") or {}).get("requests") or {} for c in (pod.get("spec") or {}).get("containers") or ()
        ]
        for each in (overhead, *requests):
            for resource in ("cpu", "memory"):
                taken[resource] += float(quantity(str(each.get(resource, "0"))))  # type: ignore[assignment]
    if not (quantity(cpu_request) > 0 and quantity(memory_request) > 0):
        raise ConfigurationError("a sandbox asks for some processor and memory: requests must be above 0")
    room = min(
        int(quantity(str(allocatable.get("pods", "110")))) - count,
        int((float(quantity(str(allocatable.get("cpu", "0")))) - taken["cpu"]) / float(quantity(cpu_request))),
        int((float(quantity(str(allocatable.get("memory", "0")))) - taken["memory"]) / float(quantity(memory_request))),
    )
    if room < 1:
        return None
    images = status.get("images") or ()
    disk, used = _disk(status, statistics or {}, sum(int(image.get("sizeBytes", 0)) for image in images))
    return NodeFacts(
        name=node["metadata"]["name"],
        room=room,
        disk=disk,
        used=used,
        images=frozenset(name for image in images for name in image.get("names") or ()),
        **figures,
    )


def _disk(status: Mapping[str, Any], statistics: Mapping[str, Any], images: int) -> tuple[int, int]:
    """Return the size of the disk that images are on, and what is taken of it besides the images that are known."""
    runtime = ((statistics.get("node") or {}).get("runtime") or {}).get("imageFs") or {}
    if runtime.get("capacityBytes") and runtime.get("availableBytes") is not None:
        capacity = int(runtime["capacityBytes"])
        return capacity, max(0, capacity - int(runtime["availableBytes"]))
    capacity = int(quantity(str((status.get("capacity") or {}).get("ephemeral-storage", "100G"))))
    # Without the kubelet's figures: what is listed is there, and the list may be cut off.
    return max(1, capacity), images
