# SPDX-License-Identifier: Apache-2.0
"""What ``plan`` plans for, and how it says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.backends.simulated import ClusterModel
from agentsandbox.cli.workload import Workload
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.prepull import Hydration

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from agentsandbox.cli.cluster_options import ClusterOptions
    from agentsandbox.cli.workload import Inputs
    from agentsandbox.hydration import ImageUse, NodeFacts, Plan

__all__ = ["carry_out", "lines", "node_list", "read_batches", "report"]

_CONNECTIONS = 8
"""To a cluster, for a few questions."""

_SHOWN = 10
"""Nodes, and images that do not fit, that are printed; all are in the JSON."""


async def read_batches(
    inputs: Inputs, ahead: Iterable[Path], *, rollouts: int, seconds: float
) -> tuple[list[tuple[ImageUse, ...]], dict[str, str]]:
    """
    Read the images of a batch, and of those after it, which are listed in the same way.

    Returns:
        The batches; and image → why what it weighs is not known.

    Raises:
        ConfigurationError: If something cannot be read.

    """
    uses, unread = await inputs.read(rollouts=rollouts, seconds=seconds)
    batches = [uses]
    place = next(name for name in ("csv", "oci_layout", "registry_images") if getattr(inputs, name) is not None)
    for path in ahead:
        there: dict[str, Any] = {place: path}
        uses, more = await attrs.evolve(inputs, **there).read(rollouts=rollouts, seconds=seconds)
        batches.append(uses)
        unread |= more
    return batches, unread


async def node_list(
    backend: str,
    cluster: ClusterOptions,
    *,
    count: int,
    disk: float | None,
    pods_per_node: int | None,
    headroom: float,
) -> tuple[NodeFacts, ...]:
    """
    Return the nodes to plan for.

    Raises:
        ConfigurationError: If the backend has none, or a figure makes no sense.
        InfrastructureError: If a cluster does not answer.

    """
    model = ClusterModel(nodes=count)
    if disk is not None:
        model = attrs.evolve(model, disk=round(disk * 1e9))
    if pods_per_node is not None:
        model = attrs.evolve(model, pods_per_node=pods_per_node)
    if backend == "simulated":
        found = Workload(model=model, uses=(), episodes=()).nodes()
        return tuple(attrs.evolve(node, headroom=headroom) for node in found)
    if backend != "kubernetes":
        raise ConfigurationError(f"--backend is kubernetes or simulated, not {backend!r}: others have no nodes")
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.hydration.cluster import read_nodes

    api = await KubernetesApi.connect(
        context=cluster.context, namespace=cluster.namespace, max_connections=_CONNECTIONS
    )
    try:
        nodes = await read_nodes(
            api,
            unpack_rate=model.unpack_rate,
            network_rate=model.network_rate,
            writable_layer=model.writable_layer,
            headroom=headroom,
        )
    finally:
        await api.aclose()
    if disk is not None:
        nodes = tuple(attrs.evolve(node, disk=round(disk * 1e9)) for node in nodes)
    return nodes


async def carry_out(planned: Plan, backend: str, cluster: ClusterOptions, *, lanes: int) -> dict[str, str]:
    """
    Fetch the first wave of a plan on the nodes of a cluster.

    Returns:
        Image → why it could not be had.

    Raises:
        ConfigurationError: If there is no cluster.
        InfrastructureError: If it does not answer.

    """
    if backend != "kubernetes":
        raise ConfigurationError("--fetch needs nodes: give --backend kubernetes")
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.hydration.cluster_lanes import ClusterPuller

    options = {"runtime_class": cluster.runtime_class}
    api = await KubernetesApi.connect(
        context=cluster.context, namespace=cluster.namespace, max_connections=_CONNECTIONS
    )
    try:
        puller = ClusterPuller(api, options=options)
        async with puller.running():
            hydration = Hydration(planned, puller, lanes=lanes)
            await hydration.run(waves=1)
    finally:
        await api.aclose()
    return dict(hydration.failed)


def report(plan: Plan) -> dict[str, Any]:
    """Put a plan into dictionaries, lists, strings, numbers and ``None``."""
    ahead = [{**attrs.asdict(each), "stall_seconds": each.stall_seconds} for each in plan.ahead]
    made = {**attrs.asdict(plan), "stall_seconds": plan.stall_seconds, "ahead": ahead}
    return {**made, "total_seconds": plan.total_seconds}


def lines(made: dict[str, Any]) -> list[str]:
    """Say what a plan comes to."""
    placed, nodes = len(made["placement"]), made["nodes"]
    text = [
        f"{placed} images on {len(nodes)} nodes; {made['pulled'] / 1e9:.1f} GB to fetch",
        (
            f"predicted: the batch takes {made['complete_seconds']:.0f} s, and no plan could be faster than "
            f"{made['bound_seconds']:.0f} s (fetching {made['pull_bound_seconds']:.0f} s, episodes "
            f"{made['run_bound_seconds']:.0f} s); images on their way hold it up by {made['stall_seconds']:.0f} s"
        ),
        (f"Pods: {made['sandboxes']} if images are changed in place, up to {made['sandboxes_without_change']} if not"),
    ]
    for node in nodes[:_SHOWN]:
        waves = node["waves"]
        size = max((wave["size"] for wave in waves), default=0)
        text.append(
            f"  {node['node']}: {sum(len(wave['images']) for wave in waves)} images in {len(waves)} "
            f"{'wave' if len(waves) == 1 else 'waves'} of up to {size / 1e9:.1f} GB, {node['sandboxes']} sandboxes, "
            f"fetching {node['pull_seconds']:.0f} s, episodes {node['run_seconds']:.0f} s"
        )
    if len(nodes) > _SHOWN:
        text.append(f"  and {len(nodes) - _SHOWN} more nodes")
    text += _ahead(made)
    text += [f"could not be fetched: {image}: {why}" for image, why in (made.get("failed") or {}).items()]
    unplaced = {each["image"]: each["reason"] for batch in (made, *made["ahead"]) for each in batch["unplaced"]}
    text += [f"does not fit: {image}: {reason}" for image, reason in list(unplaced.items())[:_SHOWN]]
    if len(unplaced) > _SHOWN:
        text.append(f"and {len(unplaced) - _SHOWN} more images do not fit")
    if (advice := made["advice"]) is not None:
        text.append(f"what would help most: {advice['change']}: {advice['effect']}")
    return text


def _ahead(made: dict[str, Any]) -> list[str]:
    """Say what several batches come to, one after another."""
    if not made["ahead"]:
        return []
    batches = (made, *made["ahead"])
    fetched = sum(each["pulled"] for each in batches) / 1e9
    total, least = made["total_seconds"], made["total_bound_seconds"]
    first = f"{len(batches)} batches, one after another: predicted {total:.0f} s, and no plan could be faster than "
    text = [first + f"{least:.0f} s; {fetched:.1f} GB to fetch"]
    for number, each in enumerate(batches, 1):
        gone = sum(step["evict"] is not None for node in each["nodes"] for step in node["steps"])
        pulls = sum(step["pull"] is not None for node in each["nodes"] for step in node["steps"])
        text.append(
            f"  batch {number}: {each['complete_seconds']:.0f} s for {len(each['placement'])} images, {pulls} of them "
            f"to fetch ({each['pulled'] / 1e9:.1f} GB) and {gone} others to remove for that; "
            f"images on their way hold it up by {each['stall_seconds']:.0f} s"
        )
    return text
