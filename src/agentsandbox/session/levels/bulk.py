# SPDX-License-Identifier: Apache-2.0
"""A connection of its own for what is too much, or takes too long, for the one that serves all requests."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import InfrastructureError, StreamBroken
from agentsandbox.session.levels.ending import final
from agentsandbox.session.levels.scripts import BOOT
from agentsandbox.session.streams import STREAM_ERRORS, close
from agentsandbox.transport.exec import STDOUT

if TYPE_CHECKING:
    from agentsandbox.transport.exec import Connect, ExecConnection
    from agentsandbox.transport.websocket import ExecStatus

__all__ = ["Outcome", "Read", "Take", "passing", "reader", "run"]

PIECE = 256 * 1024
"""Bytes sent at a time."""

KEEP_ALIVE = 30.0
"""Seconds after which idle timers on the way are reset."""

ERRORS_KEPT = 4096
"""Bytes of standard error that are kept to say what went wrong."""

Take = Callable[[bytes], Awaitable[None]]
Read = Callable[[], Awaitable[bytes]]


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
    read: Read | None = None,
    take: Take | None = None,
    timeout: float,
) -> Outcome:
    """
    Run *code* in a shell of its own.

    Args:
        connect: Starts a command in the sandbox over a new connection.
        shell: The shell.
        code: Lines of shell. No line may be a single dot.
        read: Returns what it finds on its standard input, piece by piece, and at last nothing. The code must know how
            much that is: the end may not show.
        take: Called with each piece of standard output, which is then not kept.
        timeout: Seconds it may take.

    Raises:
        StreamBroken: If the connection broke, or ended without saying how the code did, or time ran out.
        InfrastructureError: If the connection could not be made.

    """
    read = read or reader(b"")
    kept = bytearray()
    errors = bytearray()

    failures: list[Exception] = []

    async def send(connection: ExecConnection, scope: anyio.CancelScope) -> None:
        # Some servers end the whole connection when the last descriptor of standard error is closed.
        piece = os.fsencode(f"exec 7>&2\n{code}\n.\n")
        while piece:
            try:
                await connection.send(piece)
            except STREAM_ERRORS:
                return  # the receiver sees the end, and whether there is a status
            try:
                piece = await read()
            except Exception as error:  # noqa: BLE001  raised below, without the group around it
                failures.append(error)
                scope.cancel()
                return

    async def keep_alive(connection: ExecConnection) -> None:
        with suppress(*STREAM_ERRORS):
            while True:
                await anyio.sleep(KEEP_ALIVE)
                await connection.keep_alive()

    connection: ExecConnection | None = None
    status: ExecStatus | None = None
    try:
        with anyio.fail_after(timeout):
            connection = await connect([shell, "-c", BOOT, "sh"], stdin=True)
            async with anyio.create_task_group() as group:
                group.start_soon(send, connection, group.cancel_scope)
                group.start_soon(keep_alive, connection)
                while True:
                    try:
                        channel, piece = await connection.receive()
                    except STREAM_ERRORS as error:
                        status = final(connection, error)
                        break
                    if channel != STDOUT:
                        errors += piece[: ERRORS_KEPT - len(errors)]
                    elif take is not None:
                        try:
                            await take(piece)
                        except Exception as error:  # noqa: BLE001  raised below, without the group around it
                            failures.append(error)
                            break
                    else:
                        kept += piece
                group.cancel_scope.cancel()
    except TimeoutError as error:
        raise StreamBroken("silent", f"a transfer took longer than {timeout:g} s") from error
    finally:
        if connection is not None:
            await close(connection)
    if failures:
        raise failures[0]
    if status is None or status.exit_code is None:
        raise StreamBroken("stream_ended", status.message if status else "the connection of a transfer ended")
    return Outcome(exit_code=status.exit_code, stdout=bytes(kept), stderr=bytes(errors))


def reader(data: bytes) -> Read:
    """Return what gives *data* piece by piece."""
    offset = 0

    async def read() -> bytes:
        nonlocal offset
        offset += PIECE
        return data[offset - PIECE : offset]

    return read


def passing(error: InfrastructureError) -> bool:
    """Whether a transfer that failed so may be tried again."""
    return error.retryable and (isinstance(error, StreamBroken) or not hasattr(error, "stdout"))
