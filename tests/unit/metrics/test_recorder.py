# SPDX-License-Identifier: Apache-2.0
"""From samples and events to figures."""

from __future__ import annotations

import pytest

from agentsandbox.metrics.recorder import EventCounter, summarise_ttfc
from agentsandbox.models.events import Event
from agentsandbox.models.timing import StartKind, TTFCSample, TTFCSummary


def sample(seconds: float, **options: object) -> TTFCSample:
    """Return a sample."""
    return TTFCSample(seconds=seconds, **options)


def test_nothing_gives_no_figures() -> None:
    """Without samples every figure is absent, not zero."""
    assert summarise_ttfc([]) == TTFCSummary()
    assert summarise_ttfc([]).mean is None


def test_figures() -> None:
    """The figures are of the whole sample."""
    summary = summarise_ttfc(sample(float(seconds)) for seconds in range(1, 101))

    assert summary.n == 100
    assert summary.mean == pytest.approx(50.5)
    assert summary.p50 == pytest.approx(50.5)
    assert summary.p95 == pytest.approx(95.05)
    assert summary.p99 == pytest.approx(99.01)
    assert summary.max == 100.0
    assert summary.censored == 0


def test_p56_censored_samples_are_counted_and_stay_out_of_the_figures() -> None:
    """An attempt that never came to a command is told apart, overall and for its kind of start."""
    summary = summarise_ttfc(
        [
            sample(1.0, start=StartKind.WARM),
            sample(300.0, start=StartKind.COLD, censored=True),
            sample(2.0, start=StartKind.COLD),
        ]
    )

    assert (summary.n, summary.censored, summary.max) == (2, 1, 2.0)
    assert list(summary.by_start) == ["cold", "warm"]
    assert (summary.by_start["cold"].n, summary.by_start["cold"].censored) == (1, 1)
    assert (summary.by_start["warm"].n, summary.by_start["warm"].censored) == (1, 0)


def test_only_censored_samples_give_only_their_number() -> None:
    """When no attempt came to a command, there is nothing to average."""
    summary = summarise_ttfc([sample(9.0, censored=True)] * 3)

    assert (summary.n, summary.mean, summary.censored) == (0, None, 3)


def test_stages_have_figures_of_their_own() -> None:
    """Each stage is summarised over the samples that went through it."""
    summary = summarise_ttfc(
        [
            sample(3.0, stages={"queue": 1.0, "start": 2.0}),
            sample(5.0, stages={"queue": 5.0}),
            sample(7.0, stages={"queue": 7.0}, censored=True),
        ]
    )

    assert list(summary.by_stage) == ["queue", "start"]
    assert (summary.by_stage["queue"].n, summary.by_stage["queue"].max) == (2, 5.0)
    assert (summary.by_stage["start"].n, summary.by_stage["start"].mean) == (1, 2.0)


def test_the_counter_counts_by_name() -> None:
    """Every event counts once under its name; the repr tells all."""
    counter = EventCounter()
    assert repr(counter) == "<EventCounter [nothing seen]>"
    for name in ("a", "b", "a"):
        counter(Event(name=name, at=0.0))

    assert counter["a"] == 2
    assert counter["never"] == 0
    assert counter.counts == {"a": 2, "b": 1}
    assert repr(counter) == "<EventCounter [a: 2, b: 1]>"
