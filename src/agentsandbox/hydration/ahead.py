# SPDX-License-Identifier: Apache-2.0
"""
Several batches, one after another: where their images belong, and when each batch is over.

A batch begins when the one before it is over on all nodes. A node fetches in the order of use, without a pause between
batches, and an image that has to make room holds the fetching up until its episodes are over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from agentsandbox.hydration.placing import unloaded
from agentsandbox.hydration.records import Step
from agentsandbox.hydration.working_set import Shelf, WorkingSet

if TYPE_CHECKING:
    from agentsandbox.hydration.placing import Load
    from agentsandbox.hydration.records import ImageUse, NodeFacts, NodePlan, Plan

__all__ = ["Batch", "follow", "left_behind", "spread"]

Batch = Mapping[str, "ImageUse"]
"""Image → what is done with it."""


def left_behind(node: NodeFacts, used: Sequence[ImageUse], wanted: Batch) -> NodeFacts:
    """
    Return a node as the next batch finds it.

    Args:
        node: The node as the first batch found it.
        used: The images of all batches so far in the order of their use there.
        wanted: The images of the next batch: they stay rather than others, which stay as long as there is room.

    """
    disk = WorkingSet(node.budget, node.layers)
    recent = used[::-1]
    for use in sorted(recent, key=lambda use: use.name not in wanted):
        if use.name not in disk.images and disk.size + disk.needs(use.image) <= disk.budget:
            disk.add(use.image)
    return node.with_(disk.images.values())


def spread(batches: Sequence[Batch], nodes: Sequence[NodeFacts]) -> dict[str, str]:
    """
    Give each image that returns one node for all batches, so that they are over soon. The most work goes first.

    Returns:
        Image → its node.

    """
    uses: defaultdict[str, dict[int, ImageUse]] = defaultdict(dict)
    for number, batch in enumerate(batches):
        for name, use in batch.items():
            uses[name][number] = use
    returning = [again for again in uses.values() if len(again) > 1]
    nothing = _Work([0.0] * len(batches), [0.0] * len(batches))
    loads = unloaded([again[min(again)] for again in returning], nodes)
    done, busiest = [nothing] * len(nodes), nothing
    weighty = [
        (max(sum(work.runs), work.fetched[-1]), again)
        for again in returning
        for work in [nothing.plus(again, loads[0])]
    ]
    homes: dict[str, str] = {}
    for _, again in sorted(weighty, key=lambda each: (-each[0], next(iter(each[1].values())).name)):
        use = again[min(again)]
        choices = []
        for at, load in enumerate(loads):
            if load.holds(use):
                then = done[at].plus(again, load)
                choices.append((busiest.or_(then).over, then.over, then.fetched[-1] - done[at].fetched[-1], at, then))
        *_, at, then = min(choices, key=lambda choice: choice[:4])
        loads[at].add(use)
        done[at], busiest = then, busiest.or_(then)
        homes[use.name] = nodes[at].name
    return homes


@attrs.frozen
class _Work:
    """What a node has to do batch by batch, or the busiest node at each."""

    runs: Sequence[float]
    """Seconds of running."""
    fetched: Sequence[float]
    """Seconds of fetching for it and all before it."""

    @property
    def over(self) -> float:
        """When the last batch is over."""
        over = 0.0
        for run, fetched in zip(self.runs, self.fetched, strict=True):
            over = max(over + run, fetched)
        return over

    def plus(self, again: Mapping[int, ImageUse], load: Load) -> _Work:
        """Return it with an image that is fetched for the first of its batches."""
        first = min(again)
        adds = load.adds(again[first])
        runs = [run + (load.runs(again[at]) if at in again else 0.0) for at, run in enumerate(self.runs)]
        return _Work(runs, [until + (adds if at >= first else 0.0) for at, until in enumerate(self.fetched)])

    def or_(self, other: _Work) -> _Work:
        """Return whatever is more."""
        return _Work(list(map(max, self.runs, other.runs)), list(map(max, self.fetched, other.fetched)))


def follow(
    plans: Sequence[Plan], batches: Sequence[Batch], nodes: Sequence[NodeFacts], *, least_recent: bool = False
) -> tuple[Plan, ...]:
    """
    Take nodes through several batches: what each fetches and removes for each of them, and when each batch is over.

    Args:
        plans: On which node the images of each batch are, and in which order they are used.
        batches: The images.
        nodes: The nodes as the first batch finds them.
        least_recent: Whether what was used least recently makes room, as if nothing were known of later batches.

    Returns:
        The plans with their steps, and with predictions that say what comes of them one after another.

    """
    courses: list[_Course] = []
    images = {name: use for batch in batches for name, use in batch.items()}
    for load in unloaded(list(images.values()), nodes):
        names = [name for plan in plans for name in plan.nodes[len(courses)].images if name not in load.node.images]
        order = [images[name].image for name in names]
        shelf = Shelf(WorkingSet(load.node.budget, load.node.layers), order, least_recent=least_recent)
        courses.append(_Course(load.node, load.weights, shelf))
    begins, done = 0.0, []
    for plan, batch in zip(plans, batches, strict=True):
        before = sum(course.pulled for course in courses)
        gone = [
            course.go(planned, [batch[name] for name in planned.images], begins)
            for course, planned in zip(courses, plan.nodes, strict=True)
        ]
        seconds = max(node.complete_seconds for node in gone)
        pulled = sum(course.pulled for course in courses) - before
        done.append(attrs.evolve(plan, nodes=tuple(gone), pulled=pulled, complete_seconds=seconds))
        begins += seconds
    return tuple(done)


@attrs.define(eq=False)
class _Course:
    """What happens on a node, batch after batch."""

    node: NodeFacts
    weights: Mapping[str, float]
    shelf: Shelf
    pulled: int = 0
    """Bytes that it has fetched."""
    fetched: float = 0.0
    """When it is through with all that it has fetched."""
    there: dict[str, float] = attrs.field(factory=dict)
    """Image → when it was fetched."""

    def go(self, planned: NodePlan, uses: Sequence[ImageUse], begins: float) -> NodePlan:
        """Go through the images of a batch, whose episodes may run from some time on."""
        self.shelf.all_over(begins)
        made: list[Step] = []
        fetching, ran, longest = 0.0, begins, begins
        for use in uses:
            at = begins
            if use.name not in self.node.images:
                fetching += self._have(use, made)
                at = max(begins, self.there[use.name])
            start = max(ran, at)
            ran = start + use.rollouts * use.seconds / self.node.room
            longest = max(longest, at + use.seconds)
            if use.name not in self.node.images:
                self.shelf.used(use.name, max(ran, start + use.seconds))
        over = max(ran, longest) - begins
        return attrs.evolve(planned, steps=tuple(made), pull_seconds=fetching, complete_seconds=over)

    def _have(self, use: ImageUse, made: list[Step]) -> float:
        """Have an image on the disk; return the seconds of fetching it."""
        if (arrival := self.shelf.bring(use.image, self.fetched)) is None:
            return 0.0
        made += [*(Step(evict=name) for name in arrival.gone), Step(pull=use.name)]
        seconds = sum(self.weights[layer.digest] for layer in arrival.missing)
        seconds += self.node.pull_overhead / self.node.pulls_at_once
        self.pulled += sum(layer.size for layer in arrival.missing)
        self.fetched = self.there[use.name] = arrival.at + seconds
        return seconds
