# SPDX-License-Identifier: Apache-2.0
"""Directories in and out, through real threads and sockets."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentsandbox.errors import StreamBroken
from agentsandbox.protocol import frames

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run in real time: threads do not wait for a clock that jumps."""
    return str(request.param)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a directory with one of everything."""
    root = tmp_path / "source"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"hello\n")
    (root / "big").write_bytes(bytes(range(256)) * 4 * 3000)
    (root / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (root / "sub" / "run.sh").chmod(0o755)
    (root / "sub" / "link").symlink_to("../a.txt")
    os.link(root / "a.txt", root / "hard")
    os.mkfifo(root / "fifo")
    (root / os.fsdecode(b"n\xff")).write_bytes(b"name")
    return root


def contents(root: Path) -> dict[str, Any]:
    """Return what is below a directory."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = (path.read_bytes(), os.access(path, os.X_OK))
        else:
            found[name] = path.is_dir()
    return found


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", data: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    """Return one member of an archive."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info, data


class Disk:
    """A played runner that keeps the archive that it was given."""

    archive = b""

    async def __call__(self, command: Any) -> None:
        command.started()
        if command.request["builtin"] == "unpack":
            self.archive = await command.read_stdin()
        else:
            await command.out(self.archive)
        command.exit()


async def test_there_and_back(connected: Any, tree: Path, tmp_path: Path) -> None:
    """
    Files, modes, links, empty directories and odd names arrive; what is no file stays behind.
    """
    disk = Disk()
    async with connected(disk) as (session, peer):
        await session.upload_dir(tree, "work", user="bob")
        await session.download_dir("work", tmp_path / "new" / "target", user=7)
        requests = [peer.commands[number].request for number in (1, 2)]

    expected = contents(tree)
    assert expected.pop("fifo") is False
    assert expected == contents(tmp_path / "new" / "target")
    assert [("unpack", {"path": "work"}, "bob"), ("pack", {"path": "work"}, 7)] == [
        (request["builtin"], request["args"], request["user"]) for request in requests
    ]
    with tarfile.open(fileobj=io.BytesIO(disk.archive)) as archive:
        assert {tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE} == {info.type for info in archive}


async def test_sources_that_are_none(connected: Any, tree: Path) -> None:
    """
    Nothing is started for a source that does not exist or is a file.
    """
    async with connected(Disk()) as (session, peer):
        with pytest.raises(FileNotFoundError, match="nope"):
            await session.upload_dir(tree / "nope", "work")
        with pytest.raises(NotADirectoryError, match=r"a\.txt"):
            await session.upload_dir(tree / "a.txt", "work")
        assert {} == peer.commands


async def test_a_source_that_cannot_be_read(connected: Any, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    An error in the middle kills the other side, so that half a tree is not taken for the whole.
    """
    really = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if path == b"big":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return really(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    async with connected(Disk()) as (session, peer):
        with pytest.raises(PermissionError, match="big"):
            await session.upload_dir(tree, "work")
        assert [1] == peer.kills
        assert session.alive


async def test_a_target_that_refuses(connected: Any, tree: Path) -> None:
    """
    What the other side reports ends the call although most of the archive was not sent.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit(1, report={"error": {"errno": errno.EACCES, "message": "", "path": "/work"}})

    async with connected(script) as (session, _):
        with pytest.raises(PermissionError, match="/work"):
            await session.upload_dir(tree, "/work")


async def test_a_source_inside_that_is_none(connected: Any, tmp_path: Path) -> None:
    """
    The report of the other side counts, not the archive that it did not send.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit(1, report={"error": {"errno": errno.ENOENT, "message": "", "path": "/work"}})

    async with connected(script) as (session, _):
        with pytest.raises(FileNotFoundError, match="/work"):
            await session.download_dir("/work", tmp_path / "x")
        assert session.alive


@pytest.mark.parametrize("call", ["upload", "download"])
async def test_cancelling(connected: Any, tree: Path, tmp_path: Path, call: str) -> None:
    """
    A cancelled transfer ends its thread and the command.
    """
    begun = anyio.Event()

    async def script(command: Any) -> None:
        command.started()
        begun.set()
        await anyio.sleep_forever()

    async with connected(script) as (session, peer):
        async with anyio.create_task_group() as group:
            if call == "upload":
                group.start_soon(session.upload_dir, tree, "work")
            else:
                group.start_soon(session.download_dir, "work", tmp_path / "x")
            await begun.wait()
            group.cancel_scope.cancel()
        assert [1] == peer.kills


@pytest.mark.parametrize("call", ["upload", "download"])
async def test_losing_the_stream(connected: Any, tree: Path, tmp_path: Path, call: str) -> None:
    """
    A loss in the middle is told as such.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.peer.flushed()
        command.peer.stream.cut()

    async with connected(script) as (session, _):
        with pytest.raises(StreamBroken):
            await (session.upload_dir(tree, "work") if call == "upload" else session.download_dir("w", tmp_path / "x"))


HOSTILE = {
    "absolute name": [member("/etc/passwd", data=b"x")],
    "name that climbs": [member("a/../../escaped", data=b"x")],
    "absolute link": [member("link", tarfile.SYMTYPE, "/etc/passwd")],
    "link that climbs": [member("link", tarfile.SYMTYPE, "../../escaped")],
    "hard link": [member("f", data=b"x"), member("hard", tarfile.LNKTYPE, "f")],
    "device": [member("null", tarfile.CHRTYPE)],
    "fifo": [member("fifo", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_hostile_archives(connected: Any, tmp_path: Path, case: str) -> None:
    """
    What does not belong into a tree is refused by name, and nothing is written outside of the target.
    """
    disk = Disk()
    disk.archive = packed(*HOSTILE[case])
    target = tmp_path / "target"

    async with connected(disk) as (session, _):
        with pytest.raises(PermissionError, match="refused"):
            await session.download_dir("x", target)
        assert session.alive
    assert [target] == list(tmp_path.iterdir())


async def test_nothing_is_written_through_a_link_of_the_archive(connected: Any, tmp_path: Path) -> None:
    """
    A member below a link is an error, and a member in the place of a link replaces it.
    """
    disk = Disk()
    link = member("link", tarfile.SYMTYPE, "sub")
    async with connected(disk) as (session, _):
        disk.archive = packed(member("sub", tarfile.DIRTYPE), link, member("link/f", data=b"x"))
        with pytest.raises(OSError, match="link"):
            await session.download_dir("x", tmp_path / "below")
        disk.archive = packed(member("sub", data=b"x"), link, member("link", data=b"y"))
        await session.download_dir("x", tmp_path / "over")

    assert [] == list((tmp_path / "below" / "sub").iterdir())
    assert {"sub": b"x", "link": b"y"} == {path.name: path.read_bytes() for path in (tmp_path / "over").iterdir()}
    assert not (tmp_path / "over" / "link").is_symlink()


def header(size: int, kind: bytes) -> bytes:
    """Return the header of a member that claims a size."""
    info = tarfile.TarInfo("x")
    info.type = kind
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


DAMAGED = {
    "empty": b"",
    "noise": b"x" * 5000,
    "cut short": packed(member("a", data=b"x" * 5000))[:3000],
    "huge name": header(2**40, tarfile.GNUTYPE_LONGNAME) + b"x" * 5000,
    "huge attributes": header(2**40, tarfile.XHDTYPE) + b"x" * 5000,
    "much behind the end": packed(member("a", data=b"x")) + bytes(3 * 1024 * 1024),
}


@pytest.mark.parametrize("case", DAMAGED)
async def test_damaged_archives(connected: Any, tmp_path: Path, case: str) -> None:
    """
    An archive that is none is an infrastructure error, and the sandbox is trusted no more.
    """
    disk = Disk()
    disk.archive = DAMAGED[case]

    async with connected(disk) as (session, _):
        with pytest.raises(StreamBroken, match="damaged"):
            await session.download_dir("x", tmp_path / "target")
        assert not session.alive


async def test_a_target_that_is_a_file(connected: Any, tmp_path: Path) -> None:
    """
    An error on this side kills the other one.
    """
    disk = Disk()
    disk.archive = packed(member("a", data=bytes(5_000_000)))
    (tmp_path / "file").write_text("x")

    async with connected(disk) as (session, peer):
        with pytest.raises(FileExistsError):
            await session.download_dir("x", tmp_path / "file")
        assert session.alive
        assert peer.count(frames.START) == 1


async def test_large_files_are_hashed_beside_the_loop(connected: Any) -> None:
    """
    The hash of a large file does not hold up the loop; the content arrives all the same.
    """
    from hashlib import sha256

    data = bytes(range(256)) * 4 * 2000

    async def script(command: Any) -> None:
        command.started()
        got = await command.read_stdin()
        command.exit(report={"size": len(got), "sha256": sha256(got).hexdigest()})

    async with connected(script) as (session, peer):
        await session.write_file("big", data)
        assert data == bytes(peer.commands[1].stdin)
