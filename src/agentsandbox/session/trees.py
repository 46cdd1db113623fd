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
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import StreamBroken
from agentsandbox.session.files import builtin, in_thread
from agentsandbox.transport.pipe import SocketStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from agentsandbox.session.calls import Calls

__all__ = ["download_dir", "upload_dir"]

TIMEOUT = 3600.0
"""Seconds that copying a directory may take."""

BLOCK = 256 * 1024
"""Bytes of a tar stream handed over at a time."""

MAX_HEADER = 1024 * 1024
"""Bytes that the name or the attributes of one member may take."""

MAX_TRAILER = 1024 * 1024
"""Bytes after the end of an archive that are still taken for padding."""

EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Members that :mod:`tarfile` reads into memory whole."""


async def upload_dir(calls: Calls, source: Path, target: str, *, user: str | int | None) -> None:
    """Copy a directory into the sandbox; see :meth:`Session.upload_dir`."""
    source = Path(source)
    if not stat.S_ISDIR((await in_thread(source.stat)).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(source))

    async def transfer(stream: SocketStream, failure: list[Exception]) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield await stream.receive()
            except anyio.EndOfStream:
                if failure:  # what came is not all, and must not be taken for it
                    raise failure[0] from None

        await builtin(calls, "unpack", target, {}, user=user, timeout=TIMEOUT, stdin=pieces())

    await _beside(lambda sock: _pack(source, sock), transfer)


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
        await _beside(lambda sock: _unpack(sock, target), transfer)
    except tarfile.FilterError as error:
        # The episode's doing: such a link is nothing that a tree outside of the sandbox can have.
        raise PermissionError(errno.EPERM, f"refused: {error}", error.tarinfo.name) from error
    except tarfile.TarError as error:
        calls.link.lose(StreamBroken("damaged", f"the archive of {source!r} is damaged: {error}"))
        raise calls.loss() from error


async def _beside(
    work: Callable[[socket.socket], None], transfer: Callable[[SocketStream, list[Exception]], Awaitable[None]]
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


def _pack(source: Path, sock: socket.socket) -> None:
    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        # Forget inodes, so that hard links become files, and members, so that memory stays bounded.
        archive.inodes.clear()  # type: ignore[attr-defined]
        archive.members.clear()  # type: ignore[attr-defined]
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isreg() or member.isdir() or member.issym() else None

    with (
        sock.makefile("wb", buffering=BLOCK) as file,
        tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK) as archive,
    ):
        archive.add(source, arcname=".", filter=plain)


class _Member(tarfile.TarInfo):
    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENSIONS and self.size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


def _unpack(sock: socket.socket, target: Path) -> None:
    links: set[str] = set()

    def safe(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        # Nothing is ever written through a link that came out of the archive, wherever it points.
        name = os.path.normpath(member.name)
        parts = name.split("/")
        if any("/".join(parts[: count + 1]) in links for count in range(len(parts))):
            raise tarfile.OutsideDestinationError(member, path)
        if member.islnk():
            raise tarfile.SpecialFileError(member)
        checked = tarfile.data_filter(member, path)
        if checked.issym():
            links.add(name)
        return checked

    target.mkdir(parents=True, exist_ok=True)
    with (
        sock.makefile("rb", buffering=BLOCK) as file,
        tarfile.open(fileobj=file, mode="r|", bufsize=BLOCK, tarinfo=_Member, errors="surrogateescape") as archive,
    ):
        for member in archive:
            archive.extract(member, target, filter=safe)
            archive.members.clear()  # type: ignore[attr-defined]
        trailer = 0
        while data := file.read(BLOCK):
            trailer += len(data)
            if trailer > MAX_TRAILER:
                raise tarfile.ReadError("data after the end of the archive")
