# SPDX-License-Identifier: Apache-2.0
"""What no plan can beat."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentsandbox.hydration.placing import unloaded

if TYPE_CHECKING:
    from agentsandbox.hydration.records import ImageUse, NodeFacts

__all__ = ["load_bound", "pull_bound", "run_bound"]


def load_bound(uses: Sequence[ImageUse], nodes: Sequence[NodeFacts]) -> float:
    """Return the least that the busiest node can have to do, in seconds of fetching or of running."""
    work = sum(use.rollouts * use.seconds for use in uses) / sum(node.room for node in nodes)
    single = max((use.rollouts * use.seconds for use in uses), default=0.0) / max(node.room for node in nodes)
    return max(pull_bound(uses, nodes), work, single)


def pull_bound(uses: Sequence[ImageUse], nodes: Sequence[NodeFacts]) -> float:
    """
    Return the least number of seconds in which the images can be on nodes.

    Every layer that is nowhere is fetched once at least, by all nodes together; an image is fetched by one node; and a
    layer that more images share than one node can fetch in that time is fetched by several.
    """
    there = frozenset().union(*(node.layers for node in nodes))
    images = frozenset().union(*(node.images for node in nodes))
    new = [use for use in uses if use.name not in images]
    layers = {layer.digest: layer for use in new for layer in use.image.layers if layer.digest not in there}
    fetched = sum(layer.size for layer in layers.values()) / sum(node.network_rate for node in nodes)
    unpacked = sum(layer.unpacked for layer in layers.values()) / sum(node.unpack_rate for node in nodes)
    waits = len(new) * min((node.pull_overhead / node.pulls_at_once for node in nodes), default=0.0) / len(nodes)
    # A layer takes as long as the slower of both, so the sums are too low rather than too high: it is a bound.
    empty = unloaded(new, _kinds(nodes))
    single = max((min(load.adds(use) for load in empty) for use in new), default=0.0)
    return max(fetched + waits, unpacked + waits, single, _shared_bound(new, nodes))


def _kinds(nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """Take one of the nodes that are alike in all that matters to a pull."""
    return list(
        {(n.network_rate, n.unpack_rate, n.pull_overhead, n.pulls_at_once, n.layers): n for n in nodes}.values()
    )


def _shared_bound(new: Sequence[ImageUse], nodes: Sequence[NodeFacts]) -> float:
    """
    Count how often shared layers must be fetched.

    Each image belongs to the family of the heaviest layer that it shares. If a node has T seconds, a family whose own
    layers take s seconds and whose base takes b needs s / (T - b) nodes at least, and as many times the base; all of it
    must go into T seconds of all nodes.
    """
    there = frozenset().union(*(node.layers for node in nodes))
    network, unpack = max(node.network_rate for node in nodes), max(node.unpack_rate for node in nodes)
    wait = min(node.pull_overhead / node.pulls_at_once for node in nodes)
    layers = {layer.digest: layer for use in new for layer in use.image.layers if layer.digest not in there}
    weights = {digest: max(layer.size / network, layer.unpacked / unpack) for digest, layer in layers.items()}
    sharing = Counter(layer.digest for use in new for layer in use.image.layers if layer.digest in weights)
    own: defaultdict[str, float] = defaultdict(float)
    for use in new:
        common = [layer.digest for layer in use.image.layers if sharing[layer.digest] > 1]
        family = max(common, key=lambda digest: (weights[digest], digest), default="")
        own[family] += wait + sum(weights[la.digest] for la in use.image.layers if sharing[la.digest] == 1)
    bases = {family: weights.get(family, 0.0) for family in own}
    low, high = max(bases.values(), default=0.0), sum(own.values()) + sum(bases.values())
    for _ in range(50):
        middle = (low + high) / 2
        if _possible(middle, own, bases, len(nodes)):
            high = middle
        else:
            low = middle
    return low if new else 0.0


def _possible(seconds: float, own: Mapping[str, float], bases: Mapping[str, float], nodes: int) -> bool:
    total = 0.0
    for family, work in own.items():
        base = bases[family]
        if work > 0 and seconds <= base:
            return False
        total += work + base * max(1, math.ceil(work / (seconds - base) - 1e-9))
    return total <= seconds * nodes


def run_bound(uses: Sequence[ImageUse], nodes: Sequence[NodeFacts]) -> float:
    """Return the least number of seconds that the episodes take: all of them, in all the room there is."""
    room = sum(node.room for node in nodes)
    work = sum(use.rollouts * use.seconds for use in uses)
    return max(work / room, max((use.seconds for use in uses), default=0.0))
