# SPDX-License-Identifier: Apache-2.0
"""Which image comes up next: overall, or for what is on one node."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Mapping

__all__ = ["Turns"]


class Turns:
    """
    How many of each image there are, in the order in which they come up.

    Args:
        nodes: Image → the node that it belongs on, if that matters.
        rotating: Whether an image of which one was taken lets the others have their turn.
        closed: Nodes whose images may be on any other one now; looked at whenever that matters.

    """

    __slots__ = ("_before", "_closed", "_counts", "_nodes", "_numbers", "_on", "_rotating", "_ticks", "on", "total")

    def __init__(
        self, nodes: Mapping[str, str] | None = None, *, rotating: bool = True, closed: Collection[str] = ()
    ) -> None:
        # OrderedDict and not dict: taking the first of a dict again and again is quadratic.
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._rotating = rotating
        self.total = 0
        """How many there are of all images."""
        self.on: Counter[str | None] = Counter()
        """How many there are of the images that belong on each node."""
        # Where images belong on nodes, the same order once more, node by node.
        self._nodes = nodes
        self._closed = closed
        self._on: defaultdict[str | None, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._numbers: dict[str, int] = {}
        self._ticks = itertools.count()
        self._before = itertools.count(-1, -1)

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, image: str) -> bool:
        return image in self._counts

    def put(self, image: str, count: int, *, first: bool = False) -> None:
        """Set how many there are of an image; a new one comes last, or *first* of all."""
        before = self._counts.get(image, 0)
        self.total += max(0, count) - before
        if self._nodes is not None:
            self.on[self._nodes.get(image)] += max(0, count) - before
        if count > 0:
            self._counts[image] = count
            if first and not before:
                self._counts.move_to_end(image, last=False)
        elif before:
            del self._counts[image]
        if self._nodes is not None and (count > 0) != (before > 0):
            if count > 0:
                self._line_up(image, first=first)
            else:
                del self._on[self._nodes.get(image)][image]

    def first(self, full: Collection[str] = ()) -> str | None:
        """Name the image that comes up next, of those that do not belong on a node that is full."""
        if not full:
            return next(iter(self._counts), None)
        heads = [next(iter(images)) for node, images in self._on.items() if images and node not in full]
        return min(heads, key=self._numbers.__getitem__, default=None)

    def last(self, node: str | None = None) -> str | None:
        """Name the image that comes up last; of those that belong on a node, if one is given."""
        return next(reversed(self._counts if node is None else self._on[node]), None)

    def first_of(self, node: str) -> str | None:
        """Name the image that comes up next of those that belong on a node."""
        return next(iter(self._on[node]), None)

    def first_on(self, node: str | None) -> str | None:
        """Name the image that comes up next and may be on a node; what belongs there comes before the others."""
        if self._nodes is None or node is None:
            return self.first()
        return next((next(iter(images)) for on in (node, None, *self._closed) if (images := self._on.get(on))), None)

    def suits(self, image: str, node: str | None) -> bool:
        """Whether there are any of an image, and it may be on a node."""
        if image not in self._counts:
            return False
        return self._nodes is None or node is None or self._nodes.get(image, node) in (node, *self._closed)

    def take(self, image: str) -> None:
        """Count one less of an image, and let the others have their turn."""
        count = self._counts[image] - 1
        self.put(image, count)
        if count and self._rotating:
            self._counts.move_to_end(image)
            if self._nodes is not None:
                self._line_up(image)

    def _line_up(self, image: str, *, first: bool = False) -> None:
        assert self._nodes is not None
        images = self._on[self._nodes.get(image)]
        images[image] = None
        images.move_to_end(image, last=not first)
        self._numbers[image] = next(self._before if first else self._ticks)

    def __repr__(self) -> str:
        return f"<Turns [{self.total} of {len(self._counts)} images]>"
