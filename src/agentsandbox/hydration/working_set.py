# SPDX-License-Identifier: Apache-2.0
"""
What a node keeps on its disk over several batches: what is needed next stays, what is needed last goes.

A trainer knows which images its next batches need, so that the rule which is optimal, and elsewhere is of theory only,
can be followed: evict what is not used for the longest time to come.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.records import Step

if TYPE_CHECKING:
    from agentsandbox.models.image import ImageManifest, Layer

__all__ = ["Arrival", "Shelf", "WorkingSet", "steps"]


@attrs.define(eq=False, repr=False)
class WorkingSet:
    """
    The images on one node's disk.

    Args:
        budget: Bytes that images may take.
        layers: Layers that are there for good, and whose bytes are not in the budget.

    """

    budget: int
    """Bytes that images may take."""
    layers: Iterable[str] = ()
    """Layers that are there for good."""
    size: int = attrs.field(default=0, init=False)
    """Bytes that they take, shared layers once."""
    images: dict[str, ImageManifest] = attrs.field(factory=dict, init=False)
    """What is there."""
    _users: Counter[str] = attrs.field(init=False)

    @_users.default
    def _whoever_uses(self) -> Counter[str]:
        return Counter(self.layers)

    def missing(self, image: ImageManifest) -> Collection[Layer]:
        """Return the layers of an image that are not there."""
        return {layer.digest: layer for layer in image.layers if not self._users[layer.digest]}.values()

    def alone(self, image: ImageManifest) -> list[Layer]:
        """Return the layers of an image that nothing else uses."""
        return [layer for layer in image.layers if self._users[layer.digest] == 1]

    def needs(self, image: ImageManifest) -> int:
        """Return how many bytes an image takes that are not there."""
        return sum(layer.unpacked for layer in self.missing(image))

    def add(self, image: ImageManifest) -> None:
        """Have an image there."""
        self.size += self.needs(image)
        self.images[image.name] = image
        self._users.update(layer.digest for layer in image.layers)

    def remove(self, name: str) -> None:
        """Let an image go, with the layers that nothing else uses."""
        image = self.images.pop(name)
        self._users.subtract(layer.digest for layer in image.layers)
        self.size -= self.needs(image)

    def __repr__(self) -> str:
        return f"<WorkingSet [{len(self.images)} images, {self.size / 1e9:.1f} of {self.budget / 1e9:.1f} GB]>"


@attrs.frozen(kw_only=True)
class Arrival:
    """What it takes to have an image on a disk."""

    gone: Sequence[str]
    """Images that make room."""
    missing: Collection[Layer]
    """Layers that are fetched."""
    at: float
    """From when on there is room."""


class Shelf:
    """
    A disk that images come to in the order of their use, and which some leave to make room.

    Of those whose episodes are over it is the one that is needed last.

    Args:
        there: What is on the disk.
        order: All uses, one after another.
        least_recent: Whether it is the one that was used least recently, as if nothing were known of what comes.

    """

    def __init__(self, there: WorkingSet, order: Iterable[ImageManifest], *, least_recent: bool = False) -> None:
        self.there = there
        """What is on the disk."""
        self._least_recent = least_recent
        self._at = -1
        self._images: defaultdict[str, deque[int]] = defaultdict(deque)
        self._layers: defaultdict[str, deque[int]] = defaultdict(deque)
        for at, image in enumerate(order):
            self._images[image.name].append(at)
            for digest in {layer.digest for layer in image.layers}:
                self._layers[digest].append(at)
        self._used: dict[str, tuple[int, float]] = {}
        self._busy: list[tuple[float, int, str]] = []
        self._idle: list[tuple[float, int, str]] = []

    def bring(self, image: ImageManifest, now: float = 0.0) -> Arrival | None:
        """
        Have the next image of the order on the disk.

        Returns:
            What it takes; ``None`` if it is there.

        Raises:
            ConfigurationError: If it is larger than all that images may take.

        """
        self._at += 1
        self._images[image.name].popleft()
        for digest in {layer.digest for layer in image.layers}:
            self._layers[digest].popleft()
        there, size = self.there, image.unpacked
        if image.name in there.images:
            return None
        if size > there.budget:
            raise ConfigurationError(
                f"image {image.name!r} takes {size / 1e9:.1f} GB, and {there.budget / 1e9:.1f} GB are for images"
            )
        gone: list[str] = []
        while there.size + there.needs(image) > there.budget:
            gone.append(self._farthest(now))
            now = max(now, self._used[gone[-1]][1])
            there.remove(gone[-1])
        arrival = Arrival(gone=gone, missing=there.missing(image), at=now)
        there.add(image)
        return arrival

    def used(self, name: str, over: float = 0.0) -> None:
        """Note when the episodes of an image are over."""
        self._used[name] = (self._at, over)
        # What was used least recently goes whenever that is.
        heapq.heappush(self._busy, (-math.inf if self._least_recent else over, self._at, name))

    def all_over(self, now: float) -> None:
        """Note that no episode runs any more from some time on."""
        self._used = {name: (at, min(over, now)) for name, (at, over) in self._used.items()}
        self._busy = [(min(over, now), at, name) for over, at, name in self._busy]
        heapq.heapify(self._busy)

    def _farthest(self, now: float) -> str:
        """Return what makes room: of what is idle now, or is so first."""
        while True:
            while self._busy and (self._busy[0][0] <= now or not self._idle):
                _, at, name = heapq.heappop(self._busy)
                if self._current(at, name):
                    heapq.heappush(self._idle, (self._key(name), at, name))
            key, at, name = heapq.heappop(self._idle)
            if self._current(at, name):
                # A layer that others had as well may be this image's alone by now.
                if (nearer := self._key(name)) <= key:
                    return name
                heapq.heappush(self._idle, (nearer, at, name))

    def _current(self, at: int, name: str) -> bool:
        """Whether an entry is of the last use of something that is there."""
        return name in self.there.images and self._used[name][0] == at

    def _key(self, name: str) -> float:
        """Return how far away the next use is of anything that only this image has there; the farthest sorts first."""
        if self._least_recent:
            return 0.0
        alone = [self._layers[layer.digest] for layer in self.there.alone(self.there.images[name])]
        return -min(uses[0] if uses else math.inf for uses in (alone or [self._images[name]]))


def steps(
    batches: Iterable[Sequence[str]],
    manifests: Mapping[str, ImageManifest],
    *,
    budget: int,
    present: Iterable[str] = (),
) -> list[tuple[Step, ...]]:
    """
    Say what a node fetches and removes for each of several batches.

    Args:
        batches: The images of each batch, in the order of their use.
        manifests: What they weigh.
        budget: Bytes that images may take on the disk.
        present: What is there already.

    Returns:
        The steps of each batch, in order. Within a batch an image that was used makes room for those that follow it.

    Raises:
        ConfigurationError: If one image alone is larger than the budget.

    """
    orders = [[manifests[name] for name in batch] for batch in batches]
    shelf = Shelf(WorkingSet(budget), (image for order in orders for image in order))
    for name in present:
        if name in manifests:
            shelf.there.add(manifests[name])
            shelf.used(name)
    done = []
    for order in orders:
        made: list[Step] = []
        for image in order:
            if (arrival := shelf.bring(image)) is not None:
                made += [*(Step(evict=name) for name in arrival.gone), Step(pull=image.name)]
            shelf.used(image.name)
        done.append(tuple(made))
    return done
