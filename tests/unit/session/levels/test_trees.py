# SPDX-License-Identifier: Apache-2.0
"""Directories out of a sandbox whose own ``tar`` packs them."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import anyio
import pytest
from shells import LocalConnection, shell_sandbox
from test_reattach import cut_after

from agentsandbox.errors import ConfigurationError, StreamBroken
from agentsandbox.models.command import Command
from agentsandbox.transport.websocket import ExecStatus

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("backend")]


def packed(**members: bytes) -> bytes:
    """Return an archive of files; ``up_`` in a name climbs."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo("./" + name.replace("up_", "../"))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


async def test_a_tar_that_lies(tmp_path: Path) -> None:
    """What an image's own tar sends is taken for what it is: harmful is refused, rubbish ends the session."""
    fake = "mkdir -p bin d; printf '#!/bin/sh\\ncat %s\\n' \"$PWD/archive\" > bin/tar; chmod +x bin/tar"
    async with shell_sandbox() as (session, connect, _):
        await session.exec(Command(command=fake, timeout=30))
        connect._env["PATH"] = "/workspace/bin:" + connect._env["PATH"]
        await session.write_file("archive", packed(f=b"x", up_escaped=b"x"))
        with pytest.raises(PermissionError, match="refused"):
            await session.download_dir("d", tmp_path / "there")
        assert session.alive

        await session.write_file("archive", packed(f=b"x" * 5000)[:3000])
        with pytest.raises(StreamBroken, match="damaged"):
            await session.download_dir("d", tmp_path / "there")
        assert not session.alive
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


async def test_an_empty_directory_goes_both_ways(tmp_path: Path, shell: str) -> None:
    """A directory without anything in it arrives, in either direction."""
    (tmp_path / "empty").mkdir()
    async with shell_sandbox(shell) as (session, _, __):
        await session.upload_dir(tmp_path / "empty", "there")
        await session.download_dir("there", tmp_path / "back")

        assert (await session.exec(Command(command="ls -A there"))).stdout == b""
    assert os.listdir(tmp_path / "back") == []


async def test_refusals_name_the_place(tmp_path: Path) -> None:
    """What cannot be copied is Python's own error with the path in it: on either side, in either direction."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "f").write_text("x")
    async with shell_sandbox() as (session, _, __):
        await session.exec(Command(command="echo x > file; mkdir locked; chmod 500 locked"))
        with pytest.raises(NotADirectoryError, match="file"):
            await session.upload_dir(tmp_path / "file", "there")
        with pytest.raises(NotADirectoryError, match="file/below"):
            await session.upload_dir(tmp_path / "full", "file/below")
        for target in ("locked", "locked/below"):
            with pytest.raises(PermissionError, match=target):
                await session.upload_dir(tmp_path / "full", target)
        with pytest.raises(NotADirectoryError, match="file"):
            await session.download_dir("file", tmp_path / "back")
        with pytest.raises(FileNotFoundError, match="nothing"):
            await session.download_dir("nothing", tmp_path / "back")
        with pytest.raises(FileExistsError):
            await session.download_dir("locked", tmp_path / "file")
        assert session.alive


async def test_a_tar_that_fails_or_is_missing(tmp_path: Path) -> None:
    """The words of a tar that fails are in the error; an image without one is told before anything is sent."""
    fake = "mkdir -p bin d; printf '#!/bin/sh\\necho no luck today >&2; exit 2\\n' > bin/tar; chmod +x bin/tar"
    async with shell_sandbox() as (session, connect, _):
        await session.exec(Command(command=fake))
        connect._env["PATH"] = "/workspace/bin:" + connect._env["PATH"]
        for copy in (session.upload_dir(tmp_path, "d"), session.download_dir("d", tmp_path / "there")):
            with pytest.raises(OSError, match="no luck today"):
                await copy
        session._control.missing.add("tar")
        for copy in (session.upload_dir(tmp_path, "d"), session.download_dir("d", tmp_path / "there")):
            with pytest.raises(ConfigurationError, match="no program 'tar'"):
                await copy
        assert session.alive


@pytest.mark.parametrize(
    ("after", "status"),
    [(0, None), (100_000, None), (100_000, ExecStatus(exit_code=0)), (100_000, ExecStatus(exit_code=1))],
    ids=["at once", "on the way", "on the way, and it succeeded", "on the way, and it failed"],
)
async def test_transfers_are_begun_anew_when_they_are_cut(
    tmp_path: Path, after: int, status: ExecStatus | None
) -> None:
    """A file or directory whose connection is lost on the way is whole in the end, however the lost attempt ended."""
    data = os.urandom(3_000_000)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "big").write_bytes(data)

    def wrap(number: int, connection: LocalConnection) -> Any:
        if number % 2:  # every first attempt; connection 0 is for requests
            cut_after(connection, after, status)
        return connection

    async with shell_sandbox() as (session, connect, _):
        connect.wrap = wrap
        with anyio.fail_after(60):
            await session.write_file("file", data)
            assert await session.read_file("file") == data
            await session.upload_dir(tmp_path / "there", "d")
            await session.download_dir("d", tmp_path / "back")

        assert len(connect.connections) == 1 + 4 * 2
    assert (tmp_path / "back" / "big").read_bytes() == data


async def test_an_attempt_that_was_cut_and_goes_on_changes_nothing(tmp_path: Path) -> None:
    """What still arrives of a transfer that was given up does not get into the one that took its place."""
    data = os.urandom(3_000_000)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "big").write_bytes(data)
    late: list[tuple[LocalConnection, bytes]] = []

    def wrap(number: int, connection: LocalConnection) -> Any:
        inner = copy.copy(connection)
        sent = 0

        async def keep(piece: bytes) -> None:
            late.append((inner, piece))
            if sum(len(one) for _, one in late) > 400_000:
                connection.cut()
                raise anyio.BrokenResourceError

        async def send_with_the_late(piece: bytes) -> None:
            nonlocal sent
            await inner.send(piece)
            sent += len(piece)
            if sent > 2_000_000 and late:
                for other, one in late:
                    await other.send(one)
                late.clear()
                await anyio.sleep(0.3)

        connection.send = keep if number % 2 else send_with_the_late  # type: ignore[method-assign]
        return connection

    async with shell_sandbox() as (session, connect, _):
        connect.wrap = wrap
        with anyio.fail_after(60):
            await session.upload_dir(tmp_path / "there", "d")
            assert not late
            result = await session.exec(Command(command="cat - d/big | sha256sum"), stdin=data)
            assert not late

    assert result.text.split()[0] == hashlib.sha256(data + data).hexdigest()
