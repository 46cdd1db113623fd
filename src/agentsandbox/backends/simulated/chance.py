# SPDX-License-Identifier: Apache-2.0
"""Chance that repeats: everything random in a simulation is drawn here."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentsandbox.backends.simulated.model import StartModel

__all__ = ["draw"]

_Z95 = 1.6448536269514722
"""The 95th percentile of the standard normal distribution."""


def draw(start: StartModel, random: Random) -> float:
    """Draw how long one try takes, in seconds."""
    sigma = math.log(start.p95 / start.median) / _Z95
    seconds = start.median * math.exp(sigma * random.gauss(0.0, 1.0)) if sigma else start.median
    return max(start.floor, seconds)
