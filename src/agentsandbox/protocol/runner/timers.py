# SPDX-License-Identifier: Apache-2.0
"""Timers of a single-threaded loop."""

from __future__ import annotations

import heapq
import time
from typing import Callable, List, Optional, Tuple

FEW = 64
"""So many cancelled timers are left where they are."""


class Timer:
    """Something that is to happen."""

    __slots__ = ("_timers", "callback")

    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self.callback: Optional[Callable[[], None]] = callback
        self._timers = timers

    def cancel(self) -> None:
        """Make it not happen."""
        if self.callback is not None:
            self.callback = None
            self._timers.cancelled += 1


class Timers:
    """What is to happen, in order of time."""

    def __init__(self) -> None:
        self.now = time.monotonic
        self.cancelled = 0
        self._count = 0
        self._heap: List[Tuple[float, int, Timer]] = []

    def __repr__(self) -> str:
        return "<Timers [%d waiting]>" % (len(self._heap) - self.cancelled)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once so many seconds have passed."""
        timer = Timer(self, callback)
        self._count += 1
        heapq.heappush(self._heap, (self.now() + seconds, self._count, timer))
        if self.cancelled > FEW and self.cancelled * 2 > len(self._heap):
            # Commands end long before their limits: do not keep those until then.
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self.cancelled = 0
        return timer

    def until_next(self) -> float:
        """Return how long the loop may sleep, in seconds; -1 for ever."""
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)
            self.cancelled -= 1
        if not self._heap:
            return -1
        return max(0.0, self._heap[0][0] - self.now())

    def run(self) -> None:
        """Call back what is due."""
        now = self.now()
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            callback, timer.callback = timer.callback, None
            if callback is None:
                self.cancelled -= 1
            else:
                callback()
