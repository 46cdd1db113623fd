# SPDX-License-Identifier: Apache-2.0
"""How many sandboxes of which image are where in their lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agentsandbox.warmpool.lease import State

__all__ = ["Census"]


class Census:
    """
    Count sandboxes by image and state.

    Args:
        images: Those that are known from the beginning.

    """

    def __init__(self, images: Iterable[str]) -> None:
        self.counts: Counter[State] = Counter()
        """How many are in which state; ``gone`` counts all that ever were."""
        self._images = {image: Counter[State]() for image in images}

    @property
    def images(self) -> Iterable[str]:
        """Every image that is known."""
        return self._images.keys()

    def know(self, image: str) -> None:
        """Know an image from now on."""
        self._images.setdefault(image, Counter())

    def move(self, image: str, before: State | None, after: State | None) -> None:
        """Note that a sandbox of an image went from one state to another one; ``None`` for not being there."""
        for counts in (self.counts, self._images[image]):
            if before is not None:
                counts[before] -= 1
            if after is not None:
                counts[after] += 1

    def count(self, image: str, *states: State) -> int:
        """How many sandboxes of an image are in any of these states."""
        counts = self._images[image]
        return sum(counts[state] for state in states)

    def __repr__(self) -> str:
        return ", ".join(f"{n} {state}" for state, n in self.counts.items() if n and state is not State.GONE) or "empty"
