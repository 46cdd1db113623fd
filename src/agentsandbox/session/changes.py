# SPDX-License-Identifier: Apache-2.0
"""What is in a sandbox and what changed in it, as its runner tells, checked line by line."""

from __future__ import annotations

import json
import os
import stat
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, BinaryIO

import anyio
import attrs

from agentsandbox.errors import ContentTooLarge, SandboxLost, StreamBroken
from agentsandbox.session.trees import beside

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from agentsandbox.session.session import Session
    from agentsandbox.transport.pipe import SocketStream

__all__ = ["Entry", "Pair", "Refused", "capture", "changes", "contents", "install"]

TIMEOUT = 3600.0
"""Seconds that looking at a sandbox, or moving what is in it, may take."""

LISTING = 512 * 1024**2
"""Bytes that the names and properties of everything in the scope may take: some two million files."""

_SLACK = 16 * 1024**2
_KINDS = {"f": stat.S_IFREG, "d": stat.S_IFDIR, "l": stat.S_IFLNK}


class Refused(Exception):
    """
    The runner could not do it.

    Args:
        reason: Its words.
        touched: Whether it had begun to change something.

    """

    def __init__(self, reason: str, *, touched: bool = False) -> None:
        super().__init__(reason)
        self.touched = touched


class _Over(Exception):
    """Nobody takes what is sent any more."""


@attrs.frozen
class Entry:
    """One name, with everything that is kept of it."""

    kind: str
    """``f``: file, ``d``: directory, ``l``: symbolic link, ``o``: another one."""
    mode: int
    """Type and permissions."""
    uid: int
    """Owner."""
    gid: int
    """Group."""
    modified: int
    """Modification time, in nanoseconds."""
    flags: int
    """Flags of ``chattr``."""
    attributes: tuple[tuple[str, str], ...]
    """Extended attributes; values in hexadecimal."""
    size: int = 0
    """Bytes of a file."""
    sha256: str = ""
    """Of its contents."""
    group: str = ""
    """The first name of a file that has several."""
    links: int = 1
    """How many names it has, in the scope or not."""
    target: str = ""
    """Where a symbolic link leads."""
    device: int = 0
    """Number of a device."""

    @classmethod
    def parse(cls, value: Any) -> Entry:
        """
        Read an entry.

        Raises:
            ValueError: If it is none.

        """
        kind, mode, uid, gid, modified, flags, attributes, *rest = value
        if any(type(number) is not int for number in (mode, uid, gid, modified, flags)):
            raise ValueError("a property that is no number")
        if _KINDS.get(kind, stat.S_IFMT(mode)) != stat.S_IFMT(mode) or (kind == "o" and mode in _KINDS.values()):
            raise ValueError(f"kind {kind!r} with mode {mode:o}")
        common = (kind, mode, uid, gid, modified, flags, tuple((str(name), str(text)) for name, text in attributes))
        if kind == "f":
            size, digest, group, links = rest
            if type(size) is not int or size < 0 or type(links) is not int or len(bytes.fromhex(digest)) != 32:
                raise ValueError("a file without size or hash")
            return cls(*common, size=size, sha256=digest, group=str(group), links=links)
        if kind == "l":
            return cls(*common, target=str(rest[0]))
        return cls(*common, device=int(rest[0]) if rest else 0)

    def plain(self) -> list[Any]:
        """Return what JSON can carry, as the runner wants it."""
        common = [self.kind, self.mode, self.uid, self.gid, self.modified, self.flags]
        common.append([list(pair) for pair in self.attributes])
        if self.kind == "f":
            return [*common, self.size, self.sha256, self.group, self.links]
        return [*common, *([self.target] if self.kind == "l" else [self.device] if self.kind == "o" else [])]


@attrs.frozen
class Pair:
    """One path before and after."""

    path: str
    """The path."""
    old: Entry | None
    """What it was."""
    new: Entry | None
    """What it is."""
    before: bytes | None = attrs.field(repr=False)
    """The old contents, if they changed."""
    after: bytes | None = attrs.field(repr=False)
    """The new contents, if they changed."""


async def changes(
    session: Session, *, manifest: str, stamps: str, limit: int, skip: Sequence[str]
) -> tuple[list[Pair], list[list[str]], tuple[str, ...]]:
    """
    Ask what is not as it was at the baseline.

    Args:
        session: The sandbox.
        manifest: The baseline's hash.
        stamps: Likewise.
        limit: Bytes of all names and contents together.
        skip: Paths that are not looked at.

    Returns:
        The changes, files with several names, and the directories that were compared.

    Raises:
        ContentTooLarge: If it is more than *limit*.
        Refused: If it could not be found out.
        SandboxLost: If the sandbox is lost, or its runner talks nonsense.

    """
    arguments = {"manifest": manifest, "stamps": stamps, "limit": limit, "skip": list(skip)}
    data, report = await _gather(session, "changes", arguments, limit + _SLACK)
    try:
        found, links, view, at = [], [], memoryview(data), 0
        while at < len(data):
            line, at = _line(data, at)
            if isinstance(line, dict):
                links = [[str(name) for name in names] for names in line["links"]]
                continue
            path, old, new, *sizes = line
            parts: list[bytes | None] = []
            for size in sizes:
                parts.append(None if size < 0 else bytes(view[at : at + size]))
                at += max(size, 0)
            if len(parts) != 2:
                raise ValueError("a change without its contents")
            entries = [None if entry is None else Entry.parse(entry) for entry in (old, new)]
            found.append(Pair(_path(path), entries[0], entries[1], *parts))
        if at != len(data):
            raise ValueError("it ends early")
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise _nonsense(session, "changes", error) from error
    return found, links, tuple(map(str, report.get("scope") or ()))


async def capture(
    session: Session, scope: Sequence[str], *, skip: Sequence[str] = (), kill: bool = False
) -> tuple[tuple[str, ...], dict[str, Entry]]:
    """
    Ask what is in some directories.

    Args:
        session: The sandbox.
        scope: The directories.
        skip: Paths that are left out.
        kill: Whether to end every process first, where that is possible.

    Returns:
        The directories that there are, without those that are in others, and everything in them by path.

    Raises:
        ContentTooLarge: If there are too many names.
        Refused: If it could not be found out.
        SandboxLost: If the sandbox is lost, or its runner talks nonsense.

    """
    arguments = {"scope": list(scope), "skip": list(skip), "kill": kill, "limit": LISTING}
    data, report = await _gather(session, "capture", arguments, LISTING + _SLACK)
    try:
        entries, at = {}, 0
        while at < len(data):
            (path, entry), at = _line(data, at)
            entries[_path(path)] = Entry.parse(entry)
        roots = tuple(str(root) for root in report["scope"])
        check_tree(roots, entries)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise _nonsense(session, "contents", error) from error
    return roots, entries


def check_tree(roots: Sequence[str], entries: dict[str, Entry]) -> None:
    """
    Make sure that everything is below one of the roots, in a directory.

    Raises:
        ValueError: If it is not.

    """
    if any(root not in entries or entries[root].kind != "d" for root in roots):
        raise ValueError("a directory of the scope is not there")
    for path in entries:
        _path(path)
        if path not in roots:
            parent = entries.get(os.path.dirname(path))  # noqa: PTH120 - of another machine
            if parent is None or parent.kind != "d":
                raise ValueError(f"{path!r} is in no directory of the scope")


async def contents(session: Session, paths: Iterable[str], work: Callable[[str, int, BinaryIO], None]) -> None:
    """
    Have files sent.

    Args:
        session: The sandbox.
        paths: Which files.
        work: Called in a thread with each file's path, its size, and what to read it from.

    Raises:
        OSError: If a file cannot be read.
        SandboxLost: If the sandbox is lost.

    """
    wanted = b"".join(json.dumps(path).encode() + b"\n" for path in paths)

    def receive(sock: socket.socket) -> None:
        with sock.makefile("rb") as source:
            while line := source.readline():
                path, size = json.loads(line)
                work(path, size, source)

    async def transfer(stream: SocketStream, failure: list[Exception]) -> None:
        async def take(_: str, data: bytes) -> None:
            try:
                await stream.send([data])
            except anyio.BrokenResourceError as error:
                raise (failure[0] if failure else error) from None

        _done(await session.builtin("contents", {}, timeout=TIMEOUT, stdin=wanted, on_output=take))

    await beside(receive, transfer)


async def install(
    session: Session,
    scope: Sequence[str],
    entries: dict[str, Entry],
    blobs: Sequence[tuple[str, int]],
    write: Callable[[str, Callable[[bytes], None]], None],
) -> int:
    """
    Make directories hold these entries and nothing else.

    Args:
        session: The sandbox.
        scope: The directories.
        entries: What they are to hold, by path.
        blobs: SHA-256 and size of the contents that have to be sent.
        write: Called in a thread with the SHA-256 of each, and what to write its bytes to.

    Returns:
        How many paths were not as they are to be.

    Raises:
        Refused: If it was not done, or not all of it.
        SandboxLost: If the sandbox is lost.

    """

    def send(sock: socket.socket) -> None:
        def put(data: bytes) -> None:
            try:
                sock.sendall(data)
            except OSError:
                raise _Over from None

        head: list[Any] = [{"scope": list(scope), "entries": len(entries), "blobs": len(blobs)}]
        head += [[path, entries[path].plain()] for path in sorted(entries)]
        try:
            put(b"".join(json.dumps(line).encode() + b"\n" for line in head))
            for digest, size in blobs:
                put(json.dumps([digest, size]).encode() + b"\n")
                write(digest, put)
        except _Over:
            pass  # the runner has answered, or is lost: either is told elsewhere

    reports = []

    async def transfer(stream: SocketStream, failure: list[Exception]) -> None:
        async def pieces() -> AsyncGenerator[bytes]:
            try:
                while True:
                    yield await stream.receive()
            except anyio.EndOfStream:
                if failure:
                    raise failure[0] from None

        async with aclosing(pieces()) as stdin:
            reports.append(await session.builtin("install", {"kill": True}, timeout=TIMEOUT, stdin=stdin))

    await beside(send, transfer)
    return int(_done(reports[0]).get("changed") or 0)


async def _gather(
    session: Session, name: str, arguments: dict[str, Any], limit: int
) -> tuple[bytearray, dict[str, Any]]:
    data = bytearray()

    def take(_: str, part: bytes) -> None:
        if len(data) + len(part) > limit:
            raise _nonsense(session, name, ValueError("more than was asked for"))
        data.extend(part)

    report = await session.builtin(name, arguments, timeout=TIMEOUT, on_output=take)
    return data, _done(report)


def _done(report: dict[str, Any]) -> dict[str, Any]:
    if "too_large" in report:
        raise ContentTooLarge(str(report["too_large"]), int(report.get("size") or 0), str(report.get("reason") or ""))
    if report.get("verified") is not True:
        raise Refused(str(report.get("reason"))[:2000], touched=report.get("touched") is True)
    return report


def _line(data: bytearray, at: int) -> tuple[Any, int]:
    end = data.index(b"\n", at)
    return json.loads(bytes(data[at:end])), end + 1


def _path(path: Any) -> str:
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise ValueError(f"{path!r:.100} is no absolute path")
    if any(part in ("", ".", "..") for part in path.split("/")[1:]):
        raise ValueError(f"{path!r:.100} leads elsewhere")
    return path


def _nonsense(session: Session, what: str, error: Exception) -> SandboxLost:
    lost = StreamBroken("damaged", f"what the runner says of its {what} is damaged: {error}")
    session.lose(lost)
    return lost
