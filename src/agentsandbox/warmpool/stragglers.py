# SPDX-License-Identifier: Apache-2.0
"""Which of the sandboxes being made take so long that nobody should count on them. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import attrs

from agentsandbox.metrics.durations import Samples
from agentsandbox.models import limits

__all__ = ["StragglerPolicy", "Stragglers"]


@attrs.frozen(kw_only=True)
class StragglerPolicy:
    """
    When a sandbox that is being made no longer counts as one of those to come.

    Rollouts that need its image are then given another one, mostly one that somebody lets go of and that changes its
    image in place. The straggler becomes a sandbox like any other when it comes.
    """

    quantile: float = attrs.field(default=0.95, validator=limits.quantile)
    """A straggler has taken ``times`` as long as this share of all others, of those made in the same way."""
    times: float = attrs.field(default=1.5, validator=limits.at_least(1))
    """See ``quantile``: a sandbox that takes a little longer is there before another one could be."""
    share: float = attrs.field(default=0.05, validator=limits.share)
    """Most stragglers at a time, as a share of all sandboxes, but one at least; 0 is for none, ever."""
    min_delay: float = attrs.field(default=2.0, validator=limits.at_least(0, "seconds"))
    """Seconds before which nothing is a straggler: another one would hardly be there sooner."""
    min_samples: int = attrs.field(default=20, validator=limits.at_least(1))
    """How many must have been made before anything is concluded: a quantile of fewer is noise."""


@attrs.define(eq=False)
class _Kind:
    """Sandboxes that are made in the same way."""

    samples: Samples
    waiting: dict[str, float] = attrs.field(factory=dict)
    """Name → since when, of those that are no stragglers yet, the oldest first."""
    due_at: float = math.inf
    """When to look at the oldest one."""


class Stragglers:
    """
    Tell which sandboxes being made are stragglers.

    Args:
        policy: When one is, and how many at most.

    """

    def __init__(self, policy: StragglerPolicy) -> None:
        self._policy = policy
        self._kinds: defaultdict[str, _Kind] = defaultdict(lambda: _Kind(Samples(policy.quantile, policy.min_samples)))
        self._making: dict[str, tuple[str, str, float]] = {}
        self._late: dict[str, None] = {}
        self._by_image: Counter[str] = Counter()
        self._full = False
        self.total = 0
        """How many there ever were."""

    @property
    def wake_at(self) -> float:
        """When to call :meth:`due` even if nothing happens; infinite for never."""
        return math.inf if self._full else min((kind.due_at for kind in self._kinds.values()), default=math.inf)

    def __len__(self) -> int:
        return len(self._late)

    def late(self, image: str) -> int:
        """How many of an image there are."""
        return self._by_image[image]

    def possible(self, alive: int) -> int:
        """How many more there may be of those that are being made now, if there are so many sandboxes."""
        watched = sum(len(kind.waiting) for kind in self._kinds.values() if kind.due_at < math.inf)
        return min(watched, self._most(alive) - len(self._late))

    def begin(self, name: str, image: str, way: str, now: float) -> None:
        """
        Note that a sandbox is being made.

        Args:
            name: Its name.
            image: From what.
            way: How: only sandboxes made in the same way are compared.
            now: The present, in seconds.

        """
        if self._policy.share:
            kind = self._kinds[way]
            self._making[name] = way, image, now
            kind.samples.begin(now)
            kind.waiting[name] = now
            if len(kind.waiting) == 1:
                kind.due_at = now + self._delay(kind, now)

    def end(self, name: str, now: float, *, made: bool = True) -> None:
        """Note that it is made, or will not be; one that nobody knows of is no news."""
        if (found := self._making.pop(name, None)) is None:
            return
        way, image, began = found
        kind = self._kinds[way]
        kind.samples.end(began, now - began if made else None)
        if name in self._late:
            del self._late[name]
            self._by_image[image] -= 1
            self._full = False
        else:
            del kind.waiting[name]
        self._look(kind, now)

    def due(self, now: float, alive: int) -> list[str]:
        """
        Find those that have become stragglers.

        Args:
            now: The present, in seconds.
            alive: Sandboxes that there are.

        Returns:
            The images that they are of.

        """
        images: list[str] = []
        most = self._most(alive)
        self._full = False
        for kind in self._kinds.values():
            while kind.due_at <= now:
                name, began = next(iter(kind.waiting.items()))
                delay = self._delay(kind, now)
                if began + delay > now:
                    kind.due_at = began + delay
                    break
                if len(self._late) >= most:
                    self._full = True
                    return images
                del kind.waiting[name]
                self._look(kind, now)
                image = self._making[name][1]
                self._late[name] = None
                self._by_image[image] += 1
                self.total += 1
                images.append(image)
        return images

    def _most(self, alive: int) -> int:
        return max(1, int(self._policy.share * alive))

    def _delay(self, kind: _Kind, now: float) -> float:
        return max(self._policy.min_delay, self._policy.times * kind.samples.delay(now))

    def _look(self, kind: _Kind, now: float) -> None:
        """Set when to look at the oldest one, not before now."""
        began = next(iter(kind.waiting.values()), None)
        kind.due_at = math.inf if began is None else max(now, began + self._delay(kind, now))

    def __repr__(self) -> str:
        return f"<Stragglers [{len(self._late)} of {len(self._making)} being made, {self.total} ever]>"
