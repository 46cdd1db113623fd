# SPDX-License-Identifier: Apache-2.0
"""What may be believed about a command when its connection is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from agentsandbox.transport.exec import ExecConnection
    from agentsandbox.transport.websocket import ExecStatus

__all__ = ["ended", "final"]


def final(connection: ExecConnection, error: Exception) -> ExecStatus | None:
    """
    Return how a command ended, if its connection did so properly.

    Of one that broke, nothing is believed: what was on its way is lost, whatever the status says by now. Only with a
    proper end is all that was received all that there was.

    Args:
        connection: The connection.
        error: What receiving from it raised.

    """
    return connection.status if isinstance(error, anyio.EndOfStream) else None


def ended(status: ExecStatus) -> str:
    """Say how a command of ours ended that should not have."""
    return status.message or f"the shell ended with exit code {status.exit_code}"
