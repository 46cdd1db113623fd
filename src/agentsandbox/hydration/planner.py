# SPDX-License-Identifier: Apache-2.0
"""From images and nodes to a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.bounds import load_bound, pull_bound, run_bound
from agentsandbox.hydration.ordering import complete, waves
from agentsandbox.hydration.placing import place
from agentsandbox.hydration.records import Advice, NodePlan, Plan, Unplaced

if TYPE_CHECKING:
    from agentsandbox.hydration.placing import Load
    from agentsandbox.hydration.records import ImageUse, NodeFacts

__all__ = ["plan"]

_WORTH_SAYING = 0.02
"""A change that shortens the batch by less than this share is not advised."""


def plan(uses: Iterable[ImageUse], nodes: Iterable[NodeFacts], *, advise: bool = True) -> Plan:
    """
    Decide which image goes to which node, in which order, and predict what comes of it.

    Args:
        uses: The images of a batch, each once.
        nodes: The nodes. Images that are there already cost nothing.
        advise: Whether to look for the one change that would help most, which takes a plan for each candidate.

    Returns:
        The plan. What no node can hold is not in it, but in ``unplaced``.

    Raises:
        ConfigurationError: If there is no node, or something is named twice.

    """
    wanted, where = list(uses), list(nodes)
    if not where:
        raise ConfigurationError("a plan needs at least one node")
    for what, names in (("image", [use.name for use in wanted]), ("node", [node.name for node in where])):
        if len(names) != len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigurationError(f"{what} {twice!r} appears twice")
    made = _plan(wanted, where, search=True)
    return attrs.evolve(made, advice=_advise(made, wanted, where)) if advise else made


def _plan(uses: Sequence[ImageUse], nodes: Sequence[NodeFacts], *, search: bool) -> Plan:
    unplaced = [why for use in uses if (why := _does_not_fit(use, nodes)) is not None]
    missing = {each.image for each in unplaced}
    fitting = [use for use in uses if use.name not in missing]
    least = load_bound(fitting, nodes)
    loads = place(fitting, nodes, search=search, bound=least)
    planned = [_node_plan(load) for load in loads]
    pulls, runs = pull_bound(fitting, nodes), run_bound(fitting, nodes)
    return Plan(
        nodes=tuple(planned),
        placement={name: load.node.name for load in loads for name in load.images},
        unplaced=tuple(unplaced),
        pulled=sum(_pulled(load) for load in loads),
        complete_seconds=max((each.complete_seconds for each in planned), default=0.0),
        bound_seconds=max(pulls, runs),
        pull_bound_seconds=pulls,
        run_bound_seconds=runs,
        load_bound_seconds=least,
        load_seconds=max((load.value for load in loads), default=0.0),
        sandboxes=sum(each.sandboxes for each in planned),
        sandboxes_without_change=sum(
            min(use.rollouts, load.node.room) for load in loads for use in load.images.values()
        ),
    )


def _does_not_fit(use: ImageUse, nodes: Sequence[NodeFacts]) -> Unplaced | None:
    if any(use.image.unpacked <= node.budget or use.name in node.images for node in nodes):
        return None
    best = max(nodes, key=lambda node: node.budget)
    reason = (
        f"it takes {use.image.unpacked / 1e9:.1f} GB on disk, and the roomiest node, {best.name}, has "
        f"{best.budget / 1e9:.1f} GB of {best.disk / 1e9:.1f} GB for images: {best.headroom:.0%} of the disk, less "
        f"{best.used / 1e9:.1f} GB that is taken and {best.room * best.writable_layer / 1e9:.1f} GB that "
        "sandboxes write"
    )
    return Unplaced(image=use.name, reason=reason)


def _node_plan(load: Load) -> NodePlan:
    planned = waves(load)
    seconds, fetching = complete(load, planned)
    return NodePlan(
        node=load.node.name,
        waves=planned,
        sandboxes=min(load.node.room, sum(use.rollouts for use in load.images.values())),
        pull_seconds=fetching,
        run_seconds=load.run,
        complete_seconds=seconds,
    )


def _pulled(load: Load) -> int:
    there = load.node.layers
    uses = [use for use in load.images.values() if use.name not in load.node.images]
    sizes = {layer.digest: layer.size for use in uses for layer in use.image.layers if layer.digest not in there}
    return sum(sizes.values())


def _advise(made: Plan, uses: Sequence[ImageUse], nodes: Sequence[NodeFacts]) -> Advice | None:
    """Try what one can buy, and say what helps most. An image that does not fit comes first."""
    if made.unplaced:
        names = {each.image for each in made.unplaced}
        largest = max((use for use in uses if use.name in names), key=lambda use: use.image.unpacked)
        roomy = max(nodes, key=lambda node: node.budget)
        disk = (largest.image.unpacked + roomy.disk * roomy.headroom - roomy.budget) / roomy.headroom
        change = f"a disk of {disk / 1e9:.0f} GB on one node instead of {roomy.disk / 1e9:.0f} GB"
        bigger = [attrs.evolve(node, disk=int(disk) + 1) if node.name == roomy.name else node for node in nodes]
        then = _plan(uses, bigger, search=False)
        effect = f"all {len(uses)} images fit; without it {len(names)} do not"
        return Advice(change=change, effect=effect, complete_seconds=then.complete_seconds)
    best: Advice | None = None
    most = made.complete_seconds * (1 - _WORTH_SAYING)
    for change, other in _changes(nodes):
        then = _plan(uses, other, search=False)
        if then.complete_seconds < most:
            most = then.complete_seconds
            effect = f"the batch takes {then.complete_seconds:.0f} s instead of {made.complete_seconds:.0f} s"
            best = Advice(change=change, effect=effect, complete_seconds=then.complete_seconds)
    return best


def _changes(nodes: Sequence[NodeFacts]) -> Iterable[tuple[str, list[NodeFacts]]]:
    """Return what can be changed by about half, and the nodes that come of it."""
    more = max(1, len(nodes) // 2)
    added = [attrs.evolve(nodes[0], name=f"{nodes[0].name}+{n}", images=(), layers=()) for n in range(more)]
    yield f"{len(nodes) + more} nodes instead of {len(nodes)}", [*nodes, *added]
    yield (
        "disks that write half as fast again",
        [
            attrs.evolve(node, unpack_rate=node.unpack_rate * 1.5, network_rate=node.network_rate * 1.5)
            for node in nodes
        ],
    )
    yield (
        "room for half as many sandboxes again on each node",
        [attrs.evolve(node, room=node.room + max(1, node.room // 2)) for node in nodes],
    )
    yield "disks of half the size again", [attrs.evolve(node, disk=node.disk + node.disk // 2) for node in nodes]
