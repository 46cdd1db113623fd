# SPDX-License-Identifier: Apache-2.0
"""Quantiles by linear interpolation."""

from __future__ import annotations

import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agentsandbox.metrics.quantiles import quantile

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        pytest.param([3.0], 0.99, 3.0, id="one value"),
        pytest.param([1.0, 2.0], 0.5, 1.5, id="between two"),
        pytest.param([4.0, 1.0, 3.0, 2.0], 0.5, 2.5, id="in any order"),
        pytest.param(list(range(1, 11)), 0.95, 9.55, id="ten values"),
        pytest.param(list(range(101)), 0.99, 99.0, id="exactly on a value"),
        pytest.param([5, 1, 3], 0, 1.0, id="the smallest"),
        pytest.param([5, 1, 3], 1, 5.0, id="the largest"),
        pytest.param(iter([1.0, 2.0, 3.0]), 0.5, 2.0, id="an iterator"),
    ],
)
def test_values(values: object, q: float, expected: float) -> None:
    """A quantile lies on the line between its two neighbours."""
    assert quantile(values, q) == pytest.approx(expected)


@given(samples)
def test_it_agrees_with_the_standard_library(values: list[float]) -> None:
    """The median and the inclusive quantiles of ``statistics`` are the same."""
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values), abs=1e-6)
    if len(values) > 1:
        expected = statistics.quantiles(values, n=20, method="inclusive")[-1]
        assert quantile(values, 0.95) == pytest.approx(expected, abs=1e-6)


@given(samples, st.floats(0, 1), st.floats(0, 1))
def test_it_grows_and_stays_within_the_sample(values: list[float], first: float, second: float) -> None:
    """A larger q never gives less, and nothing lies outside the sample."""
    low, high = sorted((first, second))

    assert min(values) <= quantile(values, low) <= max(values)
    assert quantile(values, low) <= quantile(values, high) + 1e-6


@pytest.mark.parametrize("q", [-0.01, 1.01, 95, float("nan")])
def test_q_is_a_share(q: float) -> None:
    """A q in percent is refused."""
    with pytest.raises(ValueError, match="within 0 and 1"):
        quantile([1.0], q)


def test_nothing_has_no_quantiles() -> None:
    """An empty sample is refused."""
    with pytest.raises(ValueError, match="empty sample"):
        quantile([], 0.5)
