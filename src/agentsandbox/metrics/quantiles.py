# SPDX-License-Identifier: Apache-2.0
"""Quantiles by linear interpolation between the two nearest order statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["quantile"]


def quantile(values: Iterable[float], q: float) -> float:
    """
    Return a quantile of a sample.

    The position of the quantile is ``(n - 1) * q``; between two order statistics the value is interpolated linearly
    (type 7 of Hyndman and Fan, the default of NumPy and R). Nothing lies outside the sample.

    Args:
        values: The sample, in any order, at least one value.
        q: Which quantile, from 0 (the smallest) to 1 (the largest).

    Returns:
        The quantile, in the unit of the values.

    Raises:
        ValueError: If the sample is empty or *q* is not within 0 and 1.

    """
    if not 0 <= q <= 1:
        msg = f"q must be within 0 and 1, not {q!r}"
        raise ValueError(msg)
    ordered = sorted(values)
    if not ordered:
        msg = "an empty sample has no quantiles"
        raise ValueError(msg)
    position = (len(ordered) - 1) * q
    low, high = math.floor(position), math.ceil(position)
    between = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
    return min(between, ordered[high])  # Rounding may overshoot by the last bit.
