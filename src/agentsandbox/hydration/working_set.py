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
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.records import Step

if TYPE_CHECKING:
    from agentsandbox.models.image import ImageManifest

__all__ = ["WorkingSet", "steps"]


@attrs.define(eq=False, repr=False)
class WorkingSet:
    """
    The images on one node's disk.

    Args:
        budget: Bytes that images may take.

    """

    budget: int
    """Bytes that images may take."""
    size: int = attrs.field(default=0, init=False)
    """Bytes that they take, shared layers once."""
    images: dict[str, ImageManifest] = attrs.field(factory=dict, init=False)
    """What is there."""
    _users: Counter[str] = attrs.field(factory=Counter, init=False)

    def needs(self, image: ImageManifest) -> int:
        """Return how many bytes an image takes that are not there."""
        return sum({layer.digest: layer.unpacked for layer in image.layers if not self._users[layer.digest]}.values())

    def add(self, image: ImageManifest) -> None:
        """Have an image there."""
        self.size += self.needs(image)
        self.images[image.name] = image
        self._users.update(layer.digest for layer in image.layers)

    def remove(self, name: str) -> None:
        """Let an image go, with the layers that nothing else uses."""
        image = self.images.pop(name)
        self._users.subtract(layer.digest for layer in image.layers)
        self.size -= sum({la.digest: la.unpacked for la in image.layers if not self._users[la.digest]}.values())

    def __repr__(self) -> str:
        return f"<WorkingSet [{len(self.images)} images, {self.size / 1e9:.1f} of {self.budget / 1e9:.1f} GB]>"


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
    sequence = [(number, name) for number, batch in enumerate(batches) for name in batch]
    uses: defaultdict[str, deque[int]] = defaultdict(deque)
    for at, (_, name) in enumerate(sequence):
        uses[name].append(at)
    there = WorkingSet(budget)
    farthest: list[tuple[float, str]] = []
    for name in present:
        if name in manifests:
            there.add(manifests[name])
            heapq.heappush(farthest, (-_next(uses[name]), name))
    done: list[list[Step]] = [[] for _ in range(1 + max((number for number, _ in sequence), default=-1))]
    for number, name in sequence:
        uses[name].popleft()
        image = manifests[name]
        if name not in there.images:
            if image.unpacked > budget:
                raise ConfigurationError(
                    f"image {name!r} takes {image.unpacked / 1e9:.1f} GB, and {budget / 1e9:.1f} GB are for images"
                )
            while there.size + there.needs(image) > budget:
                done[number].append(Step(evict=_evict(there, uses, farthest)))
            there.add(image)
            done[number].append(Step(pull=name))
        heapq.heappush(farthest, (-_next(uses[name]), name))
    return [tuple(each) for each in done]


def _next(uses: Sequence[int]) -> float:
    return uses[0] if uses else math.inf


def _evict(there: WorkingSet, uses: Mapping[str, Sequence[int]], farthest: list[tuple[float, str]]) -> str:
    while True:
        key, name = heapq.heappop(farthest)
        # An entry that was made before a later use of the image is outdated; that use made another one.
        if name in there.images and -key == _next(uses[name]):
            there.remove(name)
            return name
