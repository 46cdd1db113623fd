# SPDX-License-Identifier: Apache-2.0
"""What a cluster can show afterwards: Pods without the noise, events as lines, facts about nodes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsandbox.backends.kubernetes.owned import list_all, namespace_path
from agentsandbox.errors import ControlPlaneError, InfrastructureError, PermissionDenied

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import Json, KubernetesApi

__all__ = ["cluster_facts", "events_text", "last_warning", "shown"]

_LONG = 512
_WARNINGS = 100
_BRIEFLY = 5.0


def shown(pod: Json) -> Json:
    """Return a Pod as it is worth keeping: without managed fields, and without the text of our program."""
    pod = copy.deepcopy(pod)
    pod["metadata"].pop("managedFields", None)
    for container in (pod.get("spec") or {}).get("containers") or ():
        for key in ("command", "args"):
            if key in container:
                container[key] = [
                    word if len(word) <= _LONG else f"<{len(word.encode())} bytes>" for word in container[key]
                ]
    return pod


async def events_text(api: KubernetesApi, namespace: str, names: Collection[str] | None = None) -> str:
    """
    Return what a namespace's Events tell, a line each, oldest first. What went wrong is told there instead.

    Args:
        api: The API server.
        namespace: Which namespace.
        names: Of the objects that they may be about; ``None`` is every one.

    """
    try:
        events = await list_all(api, f"{namespace_path(namespace)}/events")
    except PermissionDenied as error:
        return f"# events may not be listed: {error}\n"
    except ControlPlaneError as error:
        return f"# events could not be listed: {error}\n"
    told = [event for event in events if names is None or event.get("involvedObject", {}).get("name") in names]
    return "".join(f"{_line(event)}\n" for event in sorted(told, key=_stamp))


async def last_warning(api: KubernetesApi, namespace: str, uid: str) -> str:
    """
    Return what was last warned of about an object; empty if nothing was, or Events may not be listed.

    A volume that cannot be mounted and a network that cannot be set up are told there and nowhere else.

    Args:
        api: The API server.
        namespace: The object's.
        uid: The object's.

    """
    params = {"fieldSelector": f"involvedObject.uid={uid},type=Warning", "limit": _WARNINGS}
    try:
        found = await api.request("GET", f"{namespace_path(namespace)}/events", params=params, timeout=_BRIEFLY)
    except InfrastructureError:
        return ""
    told = sorted(found.get("items") or (), key=_stamp)
    if not told:
        return ""
    message = " ".join(str(told[-1].get("message") or "").split())
    return f"{told[-1].get('reason')}: {message}"


def _stamp(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(
        event.get("lastTimestamp")
        or series.get("lastObservedTime")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def _line(event: Mapping[str, Any]) -> str:
    about = event.get("involvedObject") or {}
    source = (event.get("source") or {}).get("component") or event.get("reportingComponent") or "-"
    count = (event.get("series") or {}).get("count") or event.get("count") or 1
    message = " ".join(str(event.get("message") or "").split())
    what = f"{str(about.get('kind', '')).lower()}/{about.get('name')}"
    return f"{_stamp(event)}  {event.get('type')}  {event.get('reason')}  {what}  {source}  x{count}  {message}"


async def cluster_facts(api: KubernetesApi, images: Sequence[str] = ()) -> Json:
    """
    Return what figures of a cluster depend on: server, nodes, and how large the images are where they are already.

    Args:
        api: The API server.
        images: The images that are of interest.

    """
    facts: Json = {"context": api.context, "namespace": api.namespace}
    facts["server"] = (await api.request("GET", "/version")).get("gitVersion")
    facts["clock_offset_seconds"] = api.clock_offset
    try:
        nodes = await list_all(api, "/api/v1/nodes")
    except PermissionDenied:
        return {**facts, "nodes": "may not be listed"}
    facts["nodes"] = [_node(node) for node in nodes]
    facts["images"] = {image: _sizes(image, nodes) for image in images}
    return facts


def _node(node: Mapping[str, Any]) -> Json:
    status = node.get("status") or {}
    info, room = status.get("nodeInfo") or {}, status.get("allocatable") or {}
    return {
        "name": node["metadata"]["name"],
        **{key: room.get(key) for key in ("cpu", "memory", "pods", "ephemeral-storage")},
        "kubelet": info.get("kubeletVersion"),
        "runtime": info.get("containerRuntimeVersion"),
        "kernel": info.get("kernelVersion"),
        "schedulable": not (node.get("spec") or {}).get("unschedulable", False),
    }


def _sizes(image: str, nodes: Sequence[Mapping[str, Any]]) -> Json:
    """On how many nodes an image is known to be, and its size there. Kubelets list 50 images unless told otherwise."""
    endings = (image, f"/{image}", *((f"{image}:latest", f"/{image}:latest") if ":" not in image else ()))
    sizes = [
        one.get("sizeBytes")
        for node in nodes
        for one in (node.get("status") or {}).get("images") or ()
        if any(name.endswith(endings) for name in one.get("names") or ())
    ]
    return {"nodes": len(sizes), "bytes": max((size for size in sizes if size), default=None)}
