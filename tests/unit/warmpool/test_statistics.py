# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import attrs
import pytest

from agentsandbox.warmpool.statistics import PoolStatistics


def test_one_line_of_what_matters():
    """The usual three are always there, the others only if there are any."""
    assert "local | 8 leased, 8 ready, 2 creating | 0 waiting" == str(
        PoolStatistics(backend="local", leased=8, ready=8, creating=2)
    )
    assert "local | 0 leased, 0 ready, 0 creating, 1 lost, 3 deleting, 2 stuck | 4 waiting" == str(
        PoolStatistics(backend="local", lost=1, deleting=3, stuck=2, waiting=4)
    )


def test_alive_is_everything_that_counts_against_the_cap():
    """Every state once; ``stuck`` is a part of ``deleting``."""
    statistics = PoolStatistics(
        backend="x", leased=1, ready=2, creating=4, resetting=8, quarantined=16, lost=32, deleting=64, stuck=64
    )
    assert 127 == statistics.alive


def test_it_is_frozen():
    """A snapshot does not change."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        PoolStatistics(backend="x").leased = 1
