# SPDX-License-Identifier: Apache-2.0
"""
How long something takes, learned while it is done. Pure.

What is still under way counts as longer than what it has outlasted, so that a quantile is never one of the quick half.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

import attrs

__all__ = ["Samples"]

_REMEMBERED = 1000
"""Durations that a quantile is taken of, the latest: enough for a 99th percentile, few enough to follow a drift."""


@attrs.define(eq=False, repr=False)
class Samples:
    """
    How long something takes, as far as that is known by now.

    Args:
        quantile: Share of all that is not a straggler.
        least: How many must have ended before anything is concluded.

    """

    quantile: float
    least: int
    _order: deque[float] = attrs.field(factory=deque, init=False)
    _ended: list[float] = attrs.field(factory=list, init=False)
    _began: list[float] = attrs.field(factory=list, init=False)

    def begin(self, now: float) -> None:
        """Note that one starts."""
        insort(self._began, now)

    def end(self, began: float, seconds: float | None) -> None:
        """Note that the one that began then is over; ``None`` if how long it took says nothing."""
        del self._began[bisect_left(self._began, began)]
        if seconds is None:
            return
        if len(self._order) == _REMEMBERED:
            del self._ended[bisect_left(self._ended, self._order.popleft())]
        self._order.append(seconds)
        insort(self._ended, seconds)

    def delay(self, now: float) -> float:
        """
        Say how long one may take before it is a straggler.

        That is the shortest known duration that enough of those stayed within of which that can be said: all that have
        ended, and what has been under way for longer.

        Args:
            now: The present, in seconds.

        Returns:
            Seconds; infinite while it cannot be said.

        """
        if len(self._ended) < self.least:
            return math.inf

        def enough(rank: int) -> bool:
            longer = bisect_right(self._began, now - self._ended[rank])
            return rank + 1 >= self.quantile * (len(self._ended) + longer)

        rank = bisect_left(range(len(self._ended)), 1, key=enough)
        return self._ended[rank] if rank < len(self._ended) else math.inf

    def __repr__(self) -> str:
        return f"<Samples [{len(self._ended)} ended, {len(self._began)} running]>"
