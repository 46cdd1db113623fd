# SPDX-License-Identifier: Apache-2.0
"""The distribution of the time to first command as shapes on a logarithmic axis. Pure geometry, in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.timing import StartKind, TTFCSample

__all__ = ["Bar", "Figure", "Mark", "Row", "seconds_text", "ttfc_figure"]

WIDTH = 720
LEFT, RIGHT, TOP = 104, 92, 8
HEIGHT, GAP, AXIS = 64, 34, 26
PER_DECADE = 6
"""Bars to a factor of ten: wide enough to have something in each, narrow enough to tell 1 s from 1.5 s."""
SHORTEST = 1e-4
"""Seconds at which the axis begins at the latest: what is shorter is in its first bar."""


@attrs.frozen(kw_only=True)
class Bar:
    """How many samples there are between two times."""

    x: float
    y: float
    width: float
    height: float
    text: str
    """What it stands for, for a person who points at it."""


@attrs.frozen(kw_only=True)
class Mark:
    """A place on the axis with its text."""

    x: float
    text: str
    anchor: str = "middle"
    """Where the text is: ``start`` (right of the place), ``middle`` or ``end``."""


@attrs.frozen(kw_only=True)
class Row:
    """The samples of one way to come by a sandbox."""

    name: str
    y: float
    """Where its base line is."""
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    """Its median and its 99th percentile."""
    count: int
    censored: int


@attrs.frozen(kw_only=True)
class Figure:
    """All of it."""

    width: int
    height: int
    left: int
    right: int
    rows: tuple[Row, ...]
    ticks: tuple[Mark, ...]


def ttfc_figure(samples: Iterable[TTFCSample]) -> Figure | None:
    """
    Lay out the distribution of the time to first command, one row for each way to come by a sandbox.

    Args:
        samples: One sample an attempt; censored ones are only counted, since their times are not known.

    Returns:
        The shapes, or nothing if no attempt came to a first command.

    """
    samples = tuple(samples)
    times = [max(sample.seconds, SHORTEST) for sample in samples if not sample.censored]
    if not times:
        return None
    low = math.floor(math.log10(min(times)))
    high = max(low + 1, math.ceil(math.log10(max(times)) + 1e-9))
    scale = (WIDTH - LEFT - RIGHT) / (high - low)

    def at(seconds: float) -> float:
        return round(LEFT + (math.log10(max(seconds, SHORTEST)) - low) * scale, 2)

    def marks(times: Sequence[float]) -> tuple[Mark, ...]:
        if not times:
            return ()
        # Their texts are on the outer sides, so that they cannot overlap however near they are.
        places = (
            (name, quantile(times, q), anchor) for name, q, anchor in (("p50", 0.5, "end"), ("p99", 0.99, "start"))
        )
        return tuple(
            Mark(x=at(value), text=f"{name} {seconds_text(value)}", anchor=anchor) for name, value, anchor in places
        )

    kinds = [kind for kind in StartKind if any(sample.start is kind for sample in samples)]
    rows = []
    for place, kind in enumerate(kinds):
        own = sorted(sample.seconds for sample in samples if sample.start is kind and not sample.censored)
        base = TOP + (place + 1) * HEIGHT + place * GAP
        rows.append(
            Row(
                name=kind.value,
                y=base,
                bars=_bars(own, low, high, scale, base),
                marks=marks(own),
                count=len(own),
                censored=sum(sample.start is kind and sample.censored for sample in samples),
            )
        )
    ticks = tuple(
        Mark(x=at(10.0**power), text=seconds_text(10.0**power), anchor="middle") for power in range(low, high + 1)
    )
    height = TOP + len(rows) * (HEIGHT + GAP) + AXIS
    return Figure(width=WIDTH, height=height, left=LEFT, right=WIDTH - RIGHT, rows=tuple(rows), ticks=ticks)


def _bars(times: Sequence[float], low: int, high: int, scale: float, base: float) -> tuple[Bar, ...]:
    counts = [0] * ((high - low) * PER_DECADE)
    for seconds in times:
        place = math.floor((math.log10(max(seconds, SHORTEST)) - low) * PER_DECADE + 1e-9)
        counts[min(place, len(counts) - 1)] += 1
    width, most = scale / PER_DECADE, max(counts, default=0)
    bars = []
    for place, count in enumerate(counts):
        if count:
            height = round(max(2.0, count / most * (HEIGHT - 14)), 2)
            begin, end = (seconds_text(10 ** (low + (place + step) / PER_DECADE)) for step in (0, 1))
            text = f"{begin} to {end}: {count} of {len(times)}"
            x = round(LEFT + place * width + 1, 2)
            bars.append(Bar(x=x, y=base - height, width=round(width - 2, 2), height=height, text=text))
    return tuple(bars)


def seconds_text(seconds: float | None) -> str:
    """Write a duration with three digits and its unit."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s".replace(",", " ")
