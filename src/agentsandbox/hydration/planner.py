# SPDX-License-Identifier: Apache-2.0
"""From images and nodes to a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.ahead import follow, left_behind, spread
from agentsandbox.hydration.bounds import load_bound, pull_bound, run_bound
from agentsandbox.hydration.ordering import complete, waves
from agentsandbox.hydration.placing import place
from agentsandbox.hydration.records import Advice, NodePlan, Plan, Unplaced

if TYPE_CHECKING:
    from agentsandbox.hydration.ahead import Batch
    from agentsandbox.hydration.placing import Load
    from agentsandbox.hydration.records import ImageUse, NodeFacts
    from agentsandbox.models.image import ImageManifest

__all__ = ["plan"]

_WORTH_SAYING = 0.02
"""A change that shortens the batch by less than this share is not advised."""

_NEAR = 1.001
"""How near to the soonest is near enough to prefer what fetches less."""


def plan(
    uses: Iterable[ImageUse],
    nodes: Iterable[NodeFacts],
    *,
    ahead: Iterable[Iterable[ImageUse]] = (),
    advise: bool = True,
) -> Plan:
    """
    Decide which image goes to which node, in which order, and predict what comes of it.

    Args:
        uses: The images of a batch, each once.
        nodes: The nodes. Images that are there already cost nothing.
        ahead: The images of the batches that follow, as far as they are known. What returns in one of them stays where
            it is if that is better, and what a batch needs is fetched while the one before it runs.
        advise: Whether to look for the one change that would help most, which takes a plan for each candidate.

    Returns:
        The plan. What no node can hold is not in it, but in ``unplaced``. The plans of the batches that follow are in
        ``ahead``: all together are over no later than batches that are planned alone, and fetch no more than those do
        with a disk from which goes what was used least recently.

    Raises:
        ConfigurationError: If there is no node, something is named twice, or an image differs between batches.

    """
    batches, where = [list(batch) for batch in (uses, *ahead)], list(nodes)
    if not where:
        raise ConfigurationError("a plan needs at least one node")
    named = [("image", [use.name for use in batch]) for batch in batches]
    for what, names in (*named, ("node", [node.name for node in where])):
        if len(names) != len(set(names)):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigurationError(f"{what} {twice!r} appears twice")
    images: dict[str, ImageManifest] = {}
    for use in itertools.chain(*batches):
        if images.setdefault(use.name, use.image) != use.image:
            raise ConfigurationError(f"image {use.name!r} has other layers in another batch")
    made = _plan_all(batches, where, search=True)
    return attrs.evolve(made, advice=_advise(made, batches, where)) if advise else made


def _plan_all(batches: Sequence[Sequence[ImageUse]], nodes: Sequence[NodeFacts], *, search: bool) -> Plan:
    """Plan several batches in each of several ways, and take the best; without a search, in the most promising one."""
    if len(batches) == 1:
        return _plan(batches[0], nodes, search=search)
    fitting = [{use.name: use for use in batch if _does_not_fit(use, nodes) is None} for batch in batches]
    homes = spread(fitting, nodes)
    ways = [_one_after_another(batches, fitting, nodes, homes, search=search)]
    if not search:
        return _together(follow(ways[0], fitting, nodes), fitting, nodes)
    if homes:
        ways.append(_one_after_another(batches, fitting, nodes, {}, search=True))
    ways.append([_plan(batch, nodes, search=True) for batch in batches])
    usual = follow(ways[-1], fitting, nodes, least_recent=True)
    return _together(_best([usual, *(follow(way, fitting, nodes) for way in ways)]), fitting, nodes)


def _best(ways: Sequence[Sequence[Plan]]) -> Sequence[Plan]:
    """Take what fetches least of what is over soonest or nearly so, and in no respect is worse than the first way."""
    judged = [(sum(p.complete_seconds for p in way), sum(p.pulled for p in way), way) for way in ways]
    latest, most, _ = judged[0]
    fair = [each for each in judged if each[0] <= latest and each[1] <= most]
    enough = min(seconds for seconds, _, _ in fair) * _NEAR
    return min((each for each in fair if each[0] <= enough), key=lambda each: (each[1], each[0]))[2]


def _one_after_another(
    batches: Sequence[Sequence[ImageUse]],
    fitting: Sequence[Batch],
    nodes: Sequence[NodeFacts],
    homes: Mapping[str, str],
    *,
    search: bool,
) -> list[Plan]:
    """Plan each batch on nodes that hold what those before it left behind; what is there, or has a home, is there."""
    plans: list[Plan] = []
    used: list[list[ImageUse]] = [[] for _ in nodes]
    for batch, wanted in zip(batches, fitting, strict=True):
        there = [left_behind(node, mine, wanted) for node, mine in zip(nodes, used, strict=True)]
        stay = {name: home for name, home in homes.items() if name in wanted}
        stay |= {name: node.name for node in there for name in node.images if name in wanted}
        plans.append(_plan(batch, there, search=search, homes=stay))
        for mine, planned in zip(used, plans[-1].nodes, strict=True):
            mine += [wanted[name] for name in planned.images]
    return plans


def _together(plans: Sequence[Plan], fitting: Sequence[Batch], nodes: Sequence[NodeFacts]) -> Plan:
    """Put the plans of several batches into one. The images of a later one may all be there when it begins."""
    later = []
    for planned, wanted in zip(plans[1:], fitting[1:], strict=True):
        there = [node.with_(use.image for use in wanted.values()) for node in nodes]
        later.append(
            attrs.evolve(
                planned,
                bound_seconds=planned.run_bound_seconds,
                pull_bound_seconds=0.0,
                load_bound_seconds=load_bound(list(wanted.values()), there),
                load_seconds=max(max(node.pull_seconds, node.run_seconds) for node in planned.nodes),
                total_bound_seconds=planned.run_bound_seconds,
            )
        )
    everything = {name: use for batch in fitting for name, use in batch.items()}
    runs = sum(planned.run_bound_seconds for planned in plans)
    least = max(pull_bound(list(everything.values()), nodes), runs)
    return attrs.evolve(plans[0], ahead=tuple(later), total_bound_seconds=least)


def _plan(
    uses: Sequence[ImageUse],
    nodes: Sequence[NodeFacts],
    *,
    search: bool,
    homes: Mapping[str, str] | None = None,
) -> Plan:
    unplaced = [why for use in uses if (why := _does_not_fit(use, nodes)) is not None]
    missing = {each.image for each in unplaced}
    fitting = [use for use in uses if use.name not in missing]
    least = load_bound(fitting, nodes)
    loads = place(fitting, nodes, search=search, bound=least, homes=homes)
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
        total_bound_seconds=max(pulls, runs),
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


def _advise(made: Plan, batches: Sequence[Sequence[ImageUse]], nodes: Sequence[NodeFacts]) -> Advice | None:
    """Try what one can buy, and say what helps most. An image that does not fit comes first."""
    uses = {use.name: use for batch in batches for use in batch}
    names = {each.image for planned in made.batches for each in planned.unplaced}
    if names:
        largest = max((uses[name] for name in names), key=lambda use: use.image.unpacked)
        roomy = max(nodes, key=lambda node: node.budget)
        disk = (largest.image.unpacked + roomy.disk * roomy.headroom - roomy.budget) / roomy.headroom
        change = f"a disk of {disk / 1e9:.0f} GB on one node instead of {roomy.disk / 1e9:.0f} GB"
        bigger = [attrs.evolve(node, disk=int(disk) + 1) if node.name == roomy.name else node for node in nodes]
        then = _plan_all(batches, bigger, search=False)
        effect = f"all {len(uses)} images fit; without it {len(names)} do not"
        return Advice(change=change, effect=effect, complete_seconds=then.total_seconds)
    best: Advice | None = None
    what = "the batch takes" if len(batches) == 1 else f"the {len(batches)} batches take"
    most = made.total_seconds * (1 - _WORTH_SAYING)
    for change, other in _changes(nodes):
        then = _plan_all(batches, other, search=False)
        if then.total_seconds < most:
            most = then.total_seconds
            effect = f"{what} {then.total_seconds:.0f} s instead of {made.total_seconds:.0f} s"
            best = Advice(change=change, effect=effect, complete_seconds=then.total_seconds)
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
