# SPDX-License-Identifier: Apache-2.0
"""
Which image on which node: as little fetching as possible, and no node much busier than the others.

A node's load is the longer of its fetching and its running: they overlap. A layer is fetched once a node, whatever
images share it, so that an image costs less where its relatives are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from agentsandbox.hydration.records import ImageUse, NodeFacts

__all__ = ["Load", "Loads", "lpt", "place", "unloaded", "weigh"]

_EXACT = 40_000
"""Placements up to which all of them are tried."""

_EVALUATIONS = 150_000
"""Moves that the local search may look at: about a second for each 100,000."""

_NEAR = 1.001
"""How near to the bound is near enough."""

_STARTS = 8_000
"""Images times mixed orders that are tried."""

_SLACK = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""By how much a node may be filled beyond its fair share, one try each."""

_EPSILON = 1e-9


@attrs.define(eq=False)
class Load:
    """What is planned for one node."""

    node: NodeFacts
    weights: Mapping[str, float]
    """Layer → seconds that it takes to fetch it."""
    pull: float = 0.0
    """Seconds of fetching."""
    run: float = 0.0
    """Seconds of running."""
    images: dict[str, ImageUse] = attrs.field(factory=dict)
    layers: dict[str, int] = attrs.field(factory=dict)
    """Layer → how many of the images have it."""
    _budget: int = attrs.field(init=False)

    @_budget.default
    def _disk(self) -> int:
        return self.node.budget

    @property
    def value(self) -> float:
        """How busy it is, in seconds."""
        return max(self.pull, self.run)

    def adds(self, use: ImageUse) -> float:
        """Return by how many seconds of fetching an image would make it busier."""
        if use.name in self.node.images:
            return 0.0
        there, layers, weights = self.node.layers, self.layers, self.weights
        seconds = self.node.pull_overhead / self.node.pulls_at_once
        for layer in use.image.layers:
            if not layers.get(layer.digest) and layer.digest not in there:
                seconds += weights[layer.digest]
        return seconds

    def frees(self, use: ImageUse) -> float:
        """Return how many seconds of fetching less it would have without one of its images."""
        if use.name in self.node.images:
            return 0.0
        there, layers, weights = self.node.layers, self.layers, self.weights
        seconds = self.node.pull_overhead / self.node.pulls_at_once
        for layer in use.image.layers:
            if layers.get(layer.digest) == 1 and layer.digest not in there:
                seconds += weights[layer.digest]
        return seconds

    def runs(self, use: ImageUse) -> float:
        """Return by how many seconds of running an image makes it busier."""
        return use.rollouts * use.seconds / self.node.room

    def add(self, use: ImageUse) -> None:
        """Give it an image."""
        self.pull += self.adds(use)
        self.run += self.runs(use)
        self.images[use.name] = use
        if use.name not in self.node.images:
            for layer in use.image.layers:
                self.layers[layer.digest] = self.layers.get(layer.digest, 0) + 1

    def remove(self, use: ImageUse) -> None:
        """Take an image away from it."""
        self.pull -= self.frees(use)
        self.run -= self.runs(use)
        del self.images[use.name]
        if use.name not in self.node.images:
            for layer in use.image.layers:
                self.layers[layer.digest] -= 1

    def holds(self, use: ImageUse) -> bool:
        """Whether its disk is large enough for an image."""
        return use.image.unpacked <= self._budget or use.name in self.node.images

    def __repr__(self) -> str:
        return f"<Load {self.node.name!r} [{len(self.images)} images, {self.pull:.1f} s pull, {self.run:.1f} s run]>"


Loads = list[Load]
"""What is planned for all nodes."""


def place(
    uses: Sequence[ImageUse],
    nodes: Sequence[NodeFacts],
    *,
    search: bool = True,
    bound: float = 0.0,
    homes: Mapping[str, str] | None = None,
) -> Loads:
    """
    Spread images over nodes so that the busiest node is as little busy as possible.

    Args:
        uses: What is to be placed. Each fits on one of the nodes at least.
        nodes: Where.
        search: Whether to improve the best of several constructions by moving images; if the instance is small, by
            trying everything.
        bound: What no placement can beat, in seconds: near it the search stops.
        homes: Image → the node where it is to be, unless the busiest node becomes less busy without it.

    Returns:
        What each node gets. Never worse than :func:`lpt`, if nothing has a home.

    """
    if search and not homes and len(nodes) ** len(uses) <= _EXACT:
        return _exact(uses, nodes, bound)
    starts = max(1, _STARTS // max(1, len(uses))) if search and not homes else 1
    best = _best(uses, nodes, bound, starts=starts, homes=homes or {})
    if search:
        _improve(best, bound * _NEAR)
    return best


def _best(
    uses: Sequence[ImageUse],
    nodes: Sequence[NodeFacts],
    bound: float,
    *,
    starts: int = 1,
    homes: Mapping[str, str] = MappingProxyType({}),
) -> Loads:
    best: Loads = []
    enough = bound * _NEAR
    weighed = _weighed(uses, nodes, homes)
    free = [use for use in uses if use.name not in homes]
    for number, loads in enumerate(_constructions(free, weighed, bound, starts)):
        if not best or _worth(loads, enough) < _worth(best, enough):
            best = loads
        # Among placements that are near enough the one with the least fetching is wanted: look at each kind of them.
        if number > len(_SLACK) and _worth(best)[0] <= enough:
            break
    return best


def lpt(uses: Sequence[ImageUse], nodes: Sequence[NodeFacts]) -> Loads:
    """Place the longest first, each on the node that is least busy then; whatever they share."""
    return _lpt(uses, _weighed(uses, nodes))


def weigh(uses: Iterable[ImageUse], node: NodeFacts) -> dict[str, float]:
    """Return how many seconds a node takes to fetch each layer."""
    layers = {layer.digest: layer for use in uses for layer in use.image.layers}
    network, unpack = node.network_rate, node.unpack_rate
    return {digest: max(layer.size / network, layer.unpacked / unpack) for digest, layer in layers.items()}


def unloaded(uses: Sequence[ImageUse], nodes: Sequence[NodeFacts]) -> Loads:
    """Return what is planned for nodes before anything is."""
    return _empty(_weighed(uses, nodes))


_Weighed = list[tuple["NodeFacts", dict[str, float], list["ImageUse"]]]
"""Each node, what it takes to fetch each layer, and the images that are at home there."""


def _weighed(
    uses: Sequence[ImageUse], nodes: Sequence[NodeFacts], homes: Mapping[str, str] = MappingProxyType({})
) -> _Weighed:
    kinds: dict[tuple[float, float], dict[str, float]] = {}
    settled: defaultdict[str, list[ImageUse]] = defaultdict(list)
    for node in nodes:
        kind = (node.network_rate, node.unpack_rate)
        if kind not in kinds:
            kinds[kind] = weigh(uses, node)
    for use in uses:
        if use.name in homes:
            settled[homes[use.name]].append(use)
    return [(node, kinds[node.network_rate, node.unpack_rate], settled[node.name]) for node in nodes]


def _empty(weighed: _Weighed) -> Loads:
    loads = []
    for node, weights, settled in weighed:
        loads.append(Load(node, weights))
        for use in settled:
            loads[-1].add(use)
    return loads


def _lpt(uses: Sequence[ImageUse], weighed: _Weighed) -> Loads:
    loads = _empty(weighed)
    for use in _by_length(uses, loads):
        _least(loads, use, lambda load: (load.value,)).add(use)
    return loads


def _worth(loads: Loads, enough: float = 0.0) -> tuple[float, float, float]:
    return (
        max((enough, *(load.value for load in loads))),
        max((load.pull for load in loads), default=0.0),
        sum(load.pull for load in loads),
    )


def _by_length(uses: Iterable[ImageUse], loads: Loads) -> list[ImageUse]:
    first = loads[0]
    return sorted(uses, key=lambda use: (-max(first.adds(use), first.runs(use)), use.name))


def _least(loads: Loads, use: ImageUse, key: Callable[[Load], tuple[float, ...]]) -> Load:
    return min((load for load in loads if load.holds(use)), key=key)


def _then(use: ImageUse) -> Callable[[Load], tuple[float, ...]]:
    """Sort nodes by how busy they would be with an image."""
    return lambda load: (max(load.pull + load.adds(use), load.run + load.runs(use)), load.pull)


def _constructions(uses: Sequence[ImageUse], weighed: _Weighed, bound: float, starts: int) -> Iterator[Loads]:
    yield _lpt(uses, weighed)
    loads = _empty(weighed)
    for use in _by_length(uses, loads):
        _least(loads, use, _then(use)).add(use)
    yield loads
    shared = Counter(layer.digest for use in uses for layer in use.image.layers)
    families = {use.name: _family(use, shared) for use in uses}
    random = Random(0)  # noqa: S311 - the order is to be mixed, and the same each time
    for _ in range(starts):
        mixed = {name: random.random() for name in (*sorted(families), *sorted(set(families.values())))}
        related = sorted(uses, key=lambda use: (mixed[families[use.name]], families[use.name], mixed[use.name]))
        for slack in _SLACK:
            yield _fill(related, weighed, bound * (1 + slack))


def _family(use: ImageUse, shared: Mapping[str, int]) -> str:
    """Name the heaviest layer that an image shares: relatives are kept together by it."""
    common = [layer for layer in use.image.layers if shared[layer.digest] > 1]
    return max(common, key=lambda layer: (layer.unpacked, layer.digest)).digest if common else ""


def _fill(uses: Iterable[ImageUse], weighed: _Weighed, most: float) -> Loads:
    """Fill one node after another, relatives next to each other, so that few families are on two nodes."""
    loads = _empty(weighed)
    at = 0
    for use in uses:
        load = loads[at]
        if load.images and at + 1 < len(loads) and max(load.pull + load.adds(use), load.run + load.runs(use)) > most:
            at += 1
            load = loads[at]
        if not load.holds(use):
            load = _least(loads, use, lambda load: (load.value,))
        load.add(use)
    return loads


def _improve(loads: Loads, enough: float) -> None:
    """Move images away from the busiest node, or swap them, until it is good enough or nothing helps."""
    left = _EVALUATIONS
    while left > 0 and len(loads) > 1:
        worst = max(loads, key=lambda load: load.value)
        if worst.value <= enough:
            return
        others = sorted((load for load in loads if load is not worst), key=lambda load: load.value)
        found, used = _move(worst, others, left)
        left -= used
        if not found:
            found, used = _swap(worst, others, left)
            left -= used
        if not found:
            return


def _move(worst: Load, others: Loads, left: int) -> tuple[bool, int]:
    used, value = 0, worst.value
    for use in list(worst.images.values()):
        rest = max(worst.pull - worst.frees(use), worst.run - worst.runs(use))
        if rest >= value - _EPSILON:
            continue
        for other in others:
            used += 1
            if other.holds(use) and max(other.pull + other.adds(use), other.run + other.runs(use)) < value - _EPSILON:
                worst.remove(use)
                other.add(use)
                return True, used
        if used >= left:
            break
    return False, used


def _swap(worst: Load, others: Loads, left: int) -> tuple[bool, int]:
    used, value = 0, worst.value
    for use in list(worst.images.values()):
        worst.remove(use)
        for other in others:
            for back in list(other.images.values()):
                used += 1
                if not (worst.holds(back) and other.holds(use)):
                    continue
                if max(worst.pull + worst.adds(back), worst.run + worst.runs(back)) >= value - _EPSILON:
                    continue
                other.remove(back)
                if max(other.pull + other.adds(use), other.run + other.runs(use)) < value - _EPSILON:
                    other.add(use)
                    worst.add(back)
                    return True, used
                other.add(back)
            if used >= left:
                break
        worst.add(use)
        if used >= left:
            break
    return False, used


def _exact(uses: Sequence[ImageUse], nodes: Sequence[NodeFacts], bound: float) -> Loads:
    """Try every placement, leaving out what cannot be better than the best so far."""
    weighed = _weighed(uses, nodes)
    loads = _empty(weighed)
    ordered = _by_length(uses, loads)
    best = _best(uses, nodes, bound)
    worth, where = _worth(best), {name: at for at, load in enumerate(best) for name in load.images}
    chosen: dict[str, int] = {}

    def descend(number: int) -> None:
        nonlocal worth, where
        if number == len(ordered):
            if (found := _worth(loads)) < worth:
                worth, where = found, dict(chosen)
            return
        use = ordered[number]
        for at, load in enumerate(loads):
            if load.holds(use):
                load.add(use)
                if load.value <= worth[0]:
                    chosen[use.name] = at
                    descend(number + 1)
                load.remove(use)

    descend(0)
    placed = _empty(weighed)
    for use in ordered:
        placed[where[use.name]].add(use)
    return placed
