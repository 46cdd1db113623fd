# SPDX-License-Identifier: Apache-2.0
"""Files: what arrives is verified, and errors are Python's own."""

from __future__ import annotations

import errno
import hashlib
from typing import Any

import pytest

from agentsandbox.errors import (
    CommandTimeout,
    InfrastructureError,
    OutputLimitExceeded,
    ProtocolError,
    StreamBroken,
    UserNotFound,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def disk() -> dict[str, bytes]:
    """Return what the played runner has on its disk."""
    return {"a.bin": bytes(range(256)) * 14}


@pytest.fixture
def script(disk: dict[str, bytes]) -> Any:
    """Return a runner that knows how to read and write files."""

    async def play(command: Any) -> None:
        command.started()
        arguments = command.request["args"]
        path = arguments["path"]
        if command.request["builtin"] == "read":
            if path not in disk:
                error = {"errno": errno.ENOENT, "message": f"{path}: No such file or directory", "path": path}
                command.exit(1, report={"error": error})
                return
            await command.out(disk[path])
            command.exit(report={"size": len(disk[path])})
        else:
            data = await command.read_stdin()
            disk[path] = data
            command.exit(report={"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})

    return play


async def test_reading(connected: Any, script: Any, disk: dict[str, bytes]) -> None:
    """
    The whole content arrives.
    """
    disk["big"] = bytes(range(256)) * 4 * 5000
    disk["empty"] = b""

    async with connected(script) as (session, peer):
        for path in ("a.bin", "big", "empty"):
            assert disk[path] == await session.read_file(path, user="bob")
        assert {
            "builtin": "read",
            "args": {"path": "a.bin", "limit": None},
            "cwd": None,
            "env": {},
            "user": "bob",
            "stdin": False,
            "merge": False,
            "timeout": 300.0,
            "no_output_timeout": None,
            "grace": 0.0,
            "window": 1024 * 1024,
        } == peer.commands[1].request


@pytest.mark.parametrize("size", [0, 3584])
async def test_writing(connected: Any, script: Any, disk: dict[str, bytes], size: int) -> None:
    """
    The whole content arrives, with its size and hash told beforehand.
    """
    data = (bytes(range(256)) * 14)[:size]

    async with connected(script) as (session, peer):
        await session.write_file("b.bin", data, mode=0o755, user=1000)
        assert data == disk["b.bin"]
        assert {
            "path": "b.bin",
            "size": size,
            "sha256": hashlib.sha256(data).hexdigest(),
            "mode": 0o755,
            "parents": True,
        } == peer.commands[1].request["args"]
        assert (1000, True) == (peer.commands[1].request["user"], peer.commands[1].request["stdin"])


async def test_p09_a_write_that_arrives_short_raises(connected: Any, script: Any) -> None:
    """
    Standard input that was lost on the way is an infrastructure error, and the sandbox is trusted no more.
    """
    async with connected(script) as (session, peer):
        peer.discard_stdin = 1
        with pytest.raises(StreamBroken, match=r"damaged: 'a.bin' did not arrive as it was sent"):
            await session.write_file("a.bin", bytes(range(256)) * 14)
        assert session.lost is not None
        assert not session.alive


async def test_p09_a_write_that_the_runner_finds_damaged(connected: Any) -> None:
    """
    The same when the runner notices by itself.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.read_stdin()
        command.exit(1, report={"error": {"errno": errno.EIO, "message": "hash mismatch", "path": "a"}})

    async with connected(script) as (session, _):
        with pytest.raises(StreamBroken, match="hash mismatch"):
            await session.write_file("a", b"x")
        assert not session.alive


@pytest.mark.parametrize("size", [None, 5, "3584", 3584 * 2])
async def test_a_read_that_arrives_short_raises(connected: Any, size: object) -> None:
    """
    Content that does not match the reported size is not returned.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(bytes(3584))
        command.exit(report={"size": size})

    async with connected(script) as (session, _):
        with pytest.raises(StreamBroken, match="damaged: 'a' arrived with 3584 bytes"):
            await session.read_file("a")


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EACCES, PermissionError),
        (errno.EISDIR, IsADirectoryError),
        (errno.ENOTDIR, NotADirectoryError),
        (errno.ENOSPC, OSError),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", ["read_file", "write_file"])
async def test_errors_are_pythons_own(connected: Any, call: str, number: int, expected: type[OSError]) -> None:
    """
    The exception is the one that Python raises for a file of its own, with the path; the sandbox is still good.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit(1, report={"error": {"errno": number, "message": "", "path": "/x/y"}})

    async with connected(script) as (session, _):
        with pytest.raises(expected, match="'/x/y'") as caught:
            await (session.read_file("y") if call == "read_file" else session.write_file("y", b"data"))
        assert (number, "/x/y") == (caught.value.errno, caught.value.filename)
        assert type(caught.value) is expected
        assert not isinstance(caught.value, InfrastructureError)
        assert session.alive


async def test_the_path_is_told_once(connected: Any, script: Any) -> None:
    """
    The message reads as Python's does.
    """
    async with connected(script) as (session, _):
        with pytest.raises(FileNotFoundError) as caught:
            await session.read_file("nope")

    assert "[Errno 2] No such file or directory: 'nope'" == str(caught.value)


async def test_a_file_above_the_limit(connected: Any, script: Any) -> None:
    """
    A limit is kept, also against a runner that does not keep it.
    """

    async def refuse(command: Any) -> None:
        command.started()
        command.exit(1, report={"error": {"errno": errno.EFBIG, "message": "", "path": "a"}, "size": 99})

    async with connected(refuse) as (session, peer):
        with pytest.raises(OutputLimitExceeded) as caught:
            await session.read_file("a", limit=10)
        assert (10, 10) == (caught.value.limit, peer.commands[1].request["args"]["limit"])
        with pytest.raises(OSError, match="File too large"):
            await session.read_file("a")
    async with connected(script) as (session, _):
        with pytest.raises(StreamBroken, match="damaged"):
            await session.read_file("a.bin", limit=10)


async def test_a_builtin_that_dies(connected: Any) -> None:
    """
    A builtin that ends without a report, for instance killed for memory, has no result.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit(137)

    async with connected(script) as (session, _):
        with pytest.raises(StreamBroken, match="builtin_died: read of 'a' ended with exit code 137"):
            await session.read_file("a")


@pytest.mark.parametrize("report", [{"error": 5}, {"error": {}}, {"error": {"errno": "2"}}], ids=str)
async def test_a_report_that_is_none(connected: Any, report: dict[str, Any]) -> None:
    """
    A malformed report ends the session.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit(1, report=report)

    async with connected(script) as (session, _):
        with pytest.raises(ProtocolError):
            await session.read_file("a")
        assert not session.alive


async def test_a_builtin_that_takes_too_long(connected: Any) -> None:
    """
    Files have a deadline, too.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit(143, limit="total")

    async with connected(script) as (session, _):
        with pytest.raises(CommandTimeout, match="300 s"):
            await session.read_file("/dev/fifo")


async def test_a_user_that_does_not_exist(connected: Any) -> None:
    """
    Start errors are those of commands.
    """

    async def script(command: Any) -> None:
        command.failed("no_user", "bob: no such user", "bob")

    async with connected(script) as (session, _):
        with pytest.raises(UserNotFound):
            await session.read_file("a", user="bob")
