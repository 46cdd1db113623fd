# SPDX-License-Identifier: Apache-2.0
"""What a plan needs to know of a cluster's nodes: their room, the images that are there, and their disks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentsandbox.backends.kubernetes.nodes import room, shut_out
from agentsandbox.backends.kubernetes.options import quantity
from agentsandbox.errors import ConfigurationError, ControlPlaneError
from agentsandbox.hydration.records import NodeFacts

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi

__all__ = ["node_facts", "read_nodes"]


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
    if not (quantity(cpu_request) > 0 and quantity(memory_request) > 0):
        raise ConfigurationError("a sandbox asks for some processor and memory: requests must be above 0")
    if shut_out(node, ()):
        return None
    free = room(node, pods, {"cpu": cpu_request, "memory": memory_request})
    if free < 1:
        return None
    status = node.get("status") or {}
    images = status.get("images") or ()
    disk, used = _disk(status, statistics or {}, sum(int(image.get("sizeBytes", 0)) for image in images))
    return NodeFacts(
        name=node["metadata"]["name"],
        room=free,
        disk=disk,
        used=used,
        images=frozenset(short for image in images for name in image.get("names") or () for short in _short(name)),
        **figures,
    )


def _short(name: str) -> Iterable[str]:
    """Yield what people may call an image that a container runtime spells out."""
    names = [
        name,
        *(name.removeprefix(start) for start in ("docker.io/", "docker.io/library/") if name.startswith(start)),
    ]
    yield from names
    yield from (each.removesuffix(":latest") for each in names if each.endswith(":latest"))


def _disk(status: Mapping[str, Any], statistics: Mapping[str, Any], images: int) -> tuple[int, int]:
    """Return the size of the disk that images are on, and what is taken of it besides the images that are known."""
    runtime = ((statistics.get("node") or {}).get("runtime") or {}).get("imageFs") or {}
    if runtime.get("capacityBytes") and runtime.get("availableBytes") is not None:
        capacity = int(runtime["capacityBytes"])
        return capacity, max(0, capacity - int(runtime["availableBytes"]))
    capacity = int(quantity(str((status.get("capacity") or {}).get("ephemeral-storage", "100G"))))
    # Without the kubelet's figures: what is listed is there, and the list may be cut off.
    return max(1, capacity), images
