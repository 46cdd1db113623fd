# SPDX-License-Identifier: Apache-2.0
"""One command over a connection of its own, whatever carries it: what sessions without a runner are built on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentsandbox.transport.websocket import ExecStatus

__all__ = ["STDERR", "STDOUT", "Connect", "ExecConnection"]

STDOUT, STDERR = 1, 2
"""The channels that :meth:`ExecConnection.receive` tells apart."""


class ExecConnection(Protocol):
    """
    The connection of one command. :class:`agentsandbox.transport.websocket.ExecSocket` is one.

    One task receives while another one sends; there are never two of a kind at a time.
    """

    @property
    def protocol(self) -> str:
        """The protocol that was agreed on: ``v5.channel.k8s.io`` can end standard input, older ones cannot."""
        ...

    @property
    def status(self) -> ExecStatus | None:
        """
        How the command ended, once that was received, which is after everything that it wrote.

        It counts when :meth:`receive` has found the end. Without it, or when the connection broke, the outcome is
        unknown.
        """
        ...

    async def receive(self) -> tuple[int, bytes]:
        """
        Return the next piece of output, its channel first.

        Raises:
            anyio.EndOfStream: If the connection was ended; whether with a :attr:`status` decides what that means.
            anyio.BrokenResourceError: If it broke.

        """
        ...

    async def send(self, data: bytes) -> None:
        """
        Send a piece of standard input.

        Raises:
            anyio.BrokenResourceError: If the connection broke.

        """
        ...

    async def end_stdin(self) -> bool:
        """End standard input; ``False`` if the connection cannot."""
        ...

    async def keep_alive(self) -> None:
        """Send something that resets idle timers on the way, and nothing else."""
        ...

    async def aclose(self) -> None:
        """Close it. The command is not told, and may go on. Idempotent."""
        ...


class Connect(Protocol):
    """Starts a command in a sandbox, each call over a new connection."""

    async def __call__(self, command: Sequence[str], *, stdin: bool = False) -> ExecConnection:
        """
        Start *command*, which must be short: it travels in a URL.

        Args:
            command: The argument vector.
            stdin: Whether it has a standard input; else that is empty.

        Raises:
            InfrastructureError: If the connection is refused or cannot be made. The command may have started all the
                same.

        """
        ...
