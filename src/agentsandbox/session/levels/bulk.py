# SPDX-License-Identifier: Apache-2.0
"""A connection of its own for what is too much, or takes too long, for the one that serves all requests."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import InfrastructureError, StreamBroken
from agentsandbox.session.levels.control import CLOSE, STREAM_ERRORS
from agentsandbox.session.levels.scripts import BOOT
from agentsandbox.transport.exec import STDOUT

if TYPE_CHECKING:
    from agentsandbox.transport.exec import Connect, ExecConnection

__all__ = ["Outcome", "run"]

PIECE = 256 * 1024
"""Bytes sent at a time."""

ERRORS_KEPT = 4096
"""Bytes of standard error that are kept to say what went wrong."""

Take = Callable[[bytes], Awaitable[None]]


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of it."""

    exit_code: int
    """The exit code of the code."""
    stdout: bytes
    """What it wrote, unless somebody took it piece by piece."""
    stderr: bytes
    """The beginning of what it wrote to standard error."""


async def run(
    connect: Connect,
    shell: str,
    code: str,
    *,
    data: bytes | AsyncIterable[bytes] = b"",
    take: Take | None = None,
    timeout: float,
) -> Outcome:
    """
    Run *code* in a shell of its own.

    Args:
        connect: Starts a command in the sandbox over a new connection.
        shell: The shell.
        code: Lines of shell. No line may be a single dot.
        data: What it finds on its standard input. It must know how much that is: the end may not show.
        take: Called with each piece of standard output, which is then not kept.
        timeout: Seconds it may take.

    Raises:
        StreamBroken: If the connection ended without saying how the code did, or time ran out.
        InfrastructureError: If the connection could not be made.

    """
    kept = bytearray()
    errors = bytearray()

    async def send(connection: ExecConnection) -> None:
        try:
            await connection.send(f"{code}\n.\n".encode())
            async for piece in _pieces(data):
                await connection.send(piece)
        except STREAM_ERRORS:
            pass  # the receiver sees the end, and whether there is a status

    connection: ExecConnection | None = None
    try:
        with anyio.fail_after(timeout):
            connection = await connect([shell, "-c", BOOT, "sh"], stdin=True)
            async with anyio.create_task_group() as group:
                group.start_soon(send, connection)
                while True:
                    try:
                        channel, piece = await connection.receive()
                    except STREAM_ERRORS:
                        break
                    if channel != STDOUT:
                        errors += piece[: ERRORS_KEPT - len(errors)]
                    elif take is not None:
                        await take(piece)
                    else:
                        kept += piece
                group.cancel_scope.cancel()
    except TimeoutError as error:
        raise StreamBroken("silent", f"a transfer took longer than {timeout:g} s") from error
    finally:
        if connection is not None:
            with anyio.move_on_after(CLOSE, shield=True):
                await connection.aclose()
    status = connection.status
    if status is None or status.exit_code is None:
        raise StreamBroken("stream_ended", status.message if status else "the connection of a transfer ended")
    return Outcome(exit_code=status.exit_code, stdout=bytes(kept), stderr=bytes(errors))


async def _pieces(data: bytes | AsyncIterable[bytes]) -> AsyncIterable[bytes]:
    if isinstance(data, bytes):
        view = memoryview(data)
        parts: Iterable[bytes] = (bytes(view[at : at + PIECE]) for at in range(0, len(view), PIECE))
        for part in parts:
            yield part
    else:
        async for piece in data:
            yield piece


def passing(error: InfrastructureError) -> bool:
    """Whether a transfer that failed so may be tried again."""
    return error.retryable and (isinstance(error, StreamBroken) or not hasattr(error, "stdout"))
