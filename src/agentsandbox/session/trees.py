# SPDX-License-Identifier: Apache-2.0
"""
Whole directories into and out of a sandbox, as tar streams.

Archives are made and unpacked in a thread that is tied to the transfer by a socket pair: closing our end wakes the
thread whatever it waits for, so that it always ends before the call does.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import StreamBroken
from agentsandbox.protocol import archives
from agentsandbox.session.files import builtin, in_thread
from agentsandbox.transport.pipe import SocketStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from agentsandbox.session.calls import Calls

__all__ = ["MODES", "TIMEOUT", "beside", "directory", "download_dir", "upload_dir"]

TIMEOUT = 3600.0
"""Seconds that copying a directory may take."""

MODES = 0o755
"""Permissions that what comes out of a sandbox may have: nothing runs as its owner, and nobody else writes to it."""


async def upload_dir(calls: Calls, source: Path, target: str, *, user: str | int | None) -> None:
    """Copy a directory into the sandbox; see :meth:`Session.upload_dir`."""
    source = await directory(source)

    async def transfer(stream: SocketStream, failure: list[Exception]) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield await stream.receive()
            except anyio.EndOfStream:
                if failure:  # what came is not all, and must not be taken for it
                    raise failure[0] from None

        await builtin(calls, "unpack", target, {}, user=user, timeout=TIMEOUT, stdin=pieces())

    await beside(lambda sock: archives.pack(os.fsencode(source), sock.fileno()), transfer)


async def download_dir(calls: Calls, source: str, target: Path, *, user: str | int | None) -> None:
    """Copy a directory out of the sandbox; see :meth:`Session.download_dir`."""
    target = Path(target)

    async def transfer(stream: SocketStream, failure: list[Exception]) -> None:
        async def take(_: str, data: bytes) -> None:
            try:
                await stream.send([data])
            except anyio.BrokenResourceError as error:
                raise (failure[0] if failure else error) from None

        await builtin(calls, "pack", source, {}, user=user, timeout=TIMEOUT, on_output=take)

    try:
        await beside(lambda sock: archives.unpack(os.fsencode(target), sock.fileno(), modes=MODES), transfer)
    except archives.Refused as error:
        # The episode's doing: such a link is nothing that a tree outside of the sandbox can have.
        raise PermissionError(errno.EPERM, f"refused: {error}", source) from error
    except archives.Malformed as error:
        calls.link.lose(StreamBroken("damaged", f"the archive of {source!r} is damaged: {error}"))
        raise calls.loss() from error


async def directory(path: Path) -> Path:
    """Return a path that is to be copied, which must be a directory on this side."""
    path = Path(path)
    if not stat.S_ISDIR((await in_thread(path.stat)).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return path


async def beside(
    work: Callable[[socket.socket], object], transfer: Callable[[SocketStream, list[Exception]], Awaitable[None]]
) -> None:
    """
    Run *work* in a thread with one end of a socket pair and *transfer* here with the other.

    Whatever *work* raises is in the list that *transfer* gets, before the socket shows its end.
    """
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    failure: list[Exception] = []
    raised: list[Exception] = []

    def run() -> None:
        with theirs:
            try:
                work(theirs)
            except Exception as error:  # noqa: BLE001  raised below, in the caller's task
                failure.append(error)

    with theirs:
        async with anyio.create_task_group() as group:
            group.start_soon(in_thread, run)
            try:
                await transfer(stream, failure)
            except Exception as error:  # noqa: BLE001  raised below, without the group around it
                raised.append(error)
                group.cancel_scope.cancel()  # a thread that has not begun need not; one that has is waited for
            finally:
                await stream.aclose()
    for first in (*raised, *failure):
        raise first
