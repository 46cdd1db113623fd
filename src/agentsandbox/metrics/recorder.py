# SPDX-License-Identifier: Apache-2.0
"""From samples and events to figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.timing import StartKind, TTFCSample, TTFCSummary

if TYPE_CHECKING:
    from agentsandbox.models.events import Event

__all__ = ["EventCounter", "summarise_ttfc"]


def summarise_ttfc(samples: Iterable[TTFCSample]) -> TTFCSummary:
    """
    Put samples of the time to first command into figures.

    Attempts that never came to a first command are counted as censored and stay out of the figures: their true value
    is larger than what was waited, so averaging them in would make a bad run look good.

    Args:
        samples: One sample an attempt, the censored ones too.

    Returns:
        The figures, overall, for each way a sandbox was come by and for each stage, all in seconds.

    """
    samples = tuple(samples)
    whole = tuple(sample for sample in samples if not sample.censored)
    by_start = {
        kind.value: _figures(
            [sample.seconds for sample in whole if sample.start is kind],
            censored=sum(sample.censored for sample in samples if sample.start is kind),
        )
        for kind in StartKind
        if any(sample.start is kind for sample in samples)
    }
    stages = dict.fromkeys(stage for sample in whole for stage in sample.stages)
    by_stage = {
        stage: _figures([sample.stages[stage] for sample in whole if stage in sample.stages]) for stage in stages
    }
    total = _figures([sample.seconds for sample in whole], censored=len(samples) - len(whole))
    return attrs.evolve(total, by_start=by_start, by_stage=by_stage)


def _figures(values: Sequence[float], *, censored: int = 0) -> TTFCSummary:
    if not values:
        return TTFCSummary(censored=censored)
    return TTFCSummary(
        n=len(values),
        mean=sum(values) / len(values),
        p50=quantile(values, 0.50),
        p95=quantile(values, 0.95),
        p99=quantile(values, 0.99),
        max=max(values),
        censored=censored,
    )


@attrs.define(eq=False, repr=False)
class EventCounter:
    """
    A sink that counts events by name: cheap enough to be always on.

    Hand it to a client or a pool as ``sink=``.
    """

    _counts: Counter[str] = attrs.field(factory=Counter, init=False)

    def __call__(self, event: Event) -> None:
        """Count *event*."""
        self._counts[event.name] += 1

    def __getitem__(self, name: str) -> int:
        """Return how many events of that name have been seen."""
        return self._counts[name]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many events of each name have been seen, in order of first appearance."""
        return dict(self._counts)

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}: {count}" for name, count in self._counts.items())
        return f"<EventCounter [{inner or 'nothing seen'}]>"
