# SPDX-License-Identifier: Apache-2.0
"""When the time of a command is over."""

from __future__ import annotations

import math

import pytest

from agentsandbox.models.command import Command
from agentsandbox.session.levels.limits import due


@pytest.mark.parametrize(
    ("timeout", "silence", "heard", "expected"),
    [
        (None, None, 100.0, (math.inf, "")),
        (5.0, None, 100.0, (15.0, "total")),
        (None, 5.0, 100.0, (105.0, "no_output")),
        (None, 5.0, None, (math.inf, "")),
        (90.0, 5.0, 94.0, (99.0, "no_output")),
        (90.0, 5.0, 96.0, (100.0, "total")),
        (90.0, 5.0, 95.0, (100.0, "total")),
    ],
    ids=["none", "total", "silence", "not started", "silence first", "total first", "both at once"],
)
def test_the_first_limit_counts(
    timeout: float | None, silence: float | None, heard: float | None, expected: tuple[float, str]
) -> None:
    """The limit that fires first is the one that is told; silence counts once there is somebody to be silent."""
    command = Command(command="x", timeout=timeout, no_output_timeout=silence)

    assert due(command, 10.0, heard) == expected
