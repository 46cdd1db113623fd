# SPDX-License-Identifier: Apache-2.0
"""
When to start a second one of what takes too long. Pure.

What is still under way counts as longer than what it has outlasted, so that the delay is never a quantile of the quick
half of a batch, and the budget goes to the true stragglers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["HedgePolicy", "Hedger", "Samples"]

_REMEMBERED = 1000
"""Durations that a quantile is taken of, the latest: enough for a 99th percentile, few enough to follow a drift."""


@attrs.frozen(kw_only=True)
class HedgePolicy:
    """Whether, and how much, to spend on stragglers."""

    quantile: float = attrs.field(default=0.95)
    """A second one is started when the first has taken longer than this share of all others."""
    budget: float = attrs.field(default=0.05)
    """Most extra sandboxes asked for, as a share of the attempts begun."""
    attempts: bool = False
    """Whether whole attempts get a twin, too; otherwise only the wait for a sandbox is hedged."""
    min_delay: float = attrs.field(default=1.0)
    """Seconds that nothing is a straggler before: sandboxes that come warm differ by milliseconds, which is no tail."""
    min_samples: int = attrs.field(default=20)
    """How many must have ended before anything is concluded: a quantile of fewer is noise."""

    @quantile.validator
    def _quantile(self, _: object, value: float) -> None:
        if not 0 < value < 1:
            raise ConfigurationError(f"quantile must be between 0 and 1, not {value!r}")

    @budget.validator
    def _budget(self, _: object, value: float) -> None:
        if not 0 <= value <= 1:
            raise ConfigurationError(f"budget is a share from 0 to 1, not {value!r}")

    @min_delay.validator
    def _min_delay(self, _: object, value: float) -> None:
        if not value >= 0:
            raise ConfigurationError(f"min_delay must be at least 0 seconds, not {value!r}")

    @min_samples.validator
    def _min_samples(self, _: object, value: int) -> None:
        if value < 1:
            raise ConfigurationError(f"min_samples must be at least 1, not {value!r}")


@attrs.define(eq=False, repr=False)
class Samples:
    """How long something takes, as far as that is known by now."""

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


class Hedger:
    """
    Decide when to start a second one, within one budget for all of a batch.

    Args:
        policy: Whether, and how much.

    """

    def __init__(self, policy: HedgePolicy) -> None:
        self.policy = policy
        self.acquires = Samples(policy.quantile, policy.min_samples)
        """Waits for a sandbox."""
        self.runs = Samples(policy.quantile, policy.min_samples)
        """Attempts, from the grant of their sandbox."""
        self.begun = 0
        """Attempts that began of themselves."""
        self.extra = 0
        """Sandboxes that were asked for beside theirs."""

    def begin(self) -> None:
        """Count an attempt, which adds to the budget."""
        self.begun += 1

    def due(self, samples: Samples, began: float, now: float) -> float:
        """
        Say when one that is under way becomes a straggler.

        Args:
            samples: What it is one of.
            began: Since when it runs.
            now: The present, in seconds.

        Returns:
            The moment, in seconds; infinite while that cannot be said, or the budget is used up.

        """
        return began + max(samples.delay(now), self.policy.min_delay) if self.affordable else math.inf

    @property
    def affordable(self) -> bool:
        """Whether the budget has one more."""
        return self.extra + 1 <= self.policy.budget * self.begun

    def take(self) -> bool:
        """Take an extra sandbox out of the budget; whether there was one."""
        if not self.affordable:
            return False
        self.extra += 1
        return True

    def __repr__(self) -> str:
        return f"<Hedger [{self.extra} extra beside {self.begun} | acquires {self.acquires!r}, runs {self.runs!r}]>"
