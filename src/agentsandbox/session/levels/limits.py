# SPDX-License-Identifier: Apache-2.0
"""When the time of a command is over, for sessions that keep time themselves: pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentsandbox.models.command import Command

__all__ = ["due"]


def due(command: Command, began: float, heard: float | None) -> tuple[float, str]:
    """
    Return when the first of a command's time limits fires, and which: ``total`` or ``no_output``.

    Args:
        command: The command.
        began: When it began.
        heard: When it was last heard of; ``None`` if its silence does not count yet.

    """
    limits = []
    if command.timeout is not None:
        limits.append((began + command.timeout, "total"))
    if command.no_output_timeout is not None and heard is not None:
        limits.append((heard + command.no_output_timeout, "no_output"))
    return min(limits, key=lambda limit: limit[0], default=(math.inf, ""))
