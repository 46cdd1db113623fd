# SPDX-License-Identifier: Apache-2.0
"""A stream inside of another session: the standard input and output of a process there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import InfrastructureError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentsandbox.session.process import Process

__all__ = ["ProcessStream"]

ENDED_WITHIN = 15.0
"""Seconds that a runner has to end everything in its place, and to be gone, after its stream was closed."""


class ProcessStream:
    """
    A duplex stream to whoever reads and writes the streams of a process, such as a runner in a jail.

    Its loss is the loss of the process: the session around it attaches again by itself, and then nothing is missing.

    Args:
        process: The process. Closing the stream closes its standard input, by which it ends.

    """

    def __init__(self, process: Process) -> None:
        self._process = process

    def __repr__(self) -> str:
        return f"<ProcessStream [{self._process!r}]>"

    async def receive(self) -> bytes:
        """Return the next bytes; see :meth:`agentsandbox.transport.ByteStream.receive`."""
        try:
            return await self._process.stdout.receive()
        except InfrastructureError as error:
            raise anyio.BrokenResourceError from error

    async def send(self, chunks: Sequence[bytes]) -> None:
        """Write *chunks* in order; see :meth:`agentsandbox.transport.ByteStream.send`."""
        try:
            for chunk in chunks:
                await self._process.stdin.send(chunk)
        except InfrastructureError as error:
            raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """End the process, and return when nothing of it is left. Idempotent."""
        await self._process.end(ENDED_WITHIN)
