# SPDX-License-Identifier: Apache-2.0
"""When to start a second one of what takes too long, so that the budget goes to the true stragglers. Pure."""

from __future__ import annotations

import math

import attrs

from agentsandbox.metrics.durations import Samples
from agentsandbox.models import limits

__all__ = ["HedgePolicy", "Hedger"]


@attrs.frozen(kw_only=True)
class HedgePolicy:
    """Whether, and how much, to spend on stragglers."""

    quantile: float = attrs.field(default=0.95, validator=limits.quantile)
    """A second one is started when the first has taken longer than this share of all others."""
    budget: float = attrs.field(default=0.05, validator=limits.share)
    """Most extra sandboxes asked for, as a share of the attempts begun."""
    attempts: bool = False
    """Whether whole attempts get a twin, too; otherwise only the wait for a sandbox is hedged."""
    min_delay: float = attrs.field(default=1.0, validator=limits.at_least(0, "seconds"))
    """Seconds that nothing is a straggler before: sandboxes that come warm differ by milliseconds, which is no tail."""
    min_samples: int = attrs.field(default=20, validator=limits.at_least(1))
    """How many must have ended before anything is concluded: a quantile of fewer is noise."""


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
