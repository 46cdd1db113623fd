# SPDX-License-Identifier: Apache-2.0
"""The session and the real runner, over a real socket that breaks."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentsandbox.errors import CommandTimeout
from agentsandbox.models.command import Command
from agentsandbox.session import Session
from agentsandbox.transport.pipe import SocketStream

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024
RUNNER = """
import os, sys
from agentsandbox.protocol.runner.loop import serve
serve(None, nonce="n", base_env={"PATH": os.environ["PATH"]}, workdir=sys.argv[2], accept=int(sys.argv[1]))
"""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run in real time: the runner is a real process."""
    return str(request.param)


class Breaking(SocketStream):
    """A stream that breaks after so many bytes, in both directions together."""

    left = sys.maxsize

    def _read(self, size: int) -> bytes:
        data = super()._read(size)
        return data[: self._spend(len(data))]

    def _write(self, chunks: list[bytes | memoryview]) -> int:
        data = b"".join(chunks)
        return super()._write([data[: self._spend(len(data))]])

    def _spend(self, size: int) -> int:
        spent = min(size, self.left)
        self.left -= spent
        if not spent:
            raise ConnectionResetError
        return spent


@asynccontextmanager
async def running(workdir: Path, lives: Sequence[int] = ()) -> AsyncIterator[tuple[Session, list[Breaking]]]:
    """Start a runner that outlives its streams; the first ones break after that many bytes."""
    path = str(workdir / "s")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    streams: list[Breaking] = []

    async def connect() -> Breaking:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        streams.append(Breaking(sock))
        if len(streams) <= len(lives):
            streams[-1].left = lives[len(streams) - 1]
        return streams[-1]

    command = [sys.executable, "-c", RUNNER, str(listener.fileno()), str(workdir)]
    with subprocess.Popen(command, pass_fds=[listener.fileno()]) as process:  # noqa: ASYNC220  it returns at once
        listener.close()
        try:
            session = Session(await connect(), nonce="n", reopen=connect)
            async with anyio.create_task_group() as group:
                await group.start(session.run)
                try:
                    yield session, streams
                finally:
                    await session.aclose(shutdown=True)
        finally:
            process.terminate()


@pytest.mark.parametrize("seed", range(3))
async def test_streams_that_break_at_random(tmp_path: Path, seed: int) -> None:
    """
    Output and input arrive once and whole over streams that break again and again, and the command runs once.
    """
    chance = random.Random(seed)
    data = chance.randbytes(3 * MIB)
    lives = [chance.randrange(300_000, 1_500_000) for _ in range(8)]
    seen = bytearray()

    async with running(tmp_path, lives) as (session, streams):
        result = await session.exec(
            Command(command="echo once >> log; tee copy; echo warn >&2; exit 5", timeout=60),
            stdin=data,
            on_output=lambda name, piece: seen.extend(piece) if name == "stdout" else None,
        )
        assert (5, b"warn\n", data, data) == (result.exit_code, result.stderr, result.stdout, bytes(seen))
        assert len(streams) > 3
        assert data == await session.read_file("copy")
        assert b"once\n" == await session.read_file("log")


async def test_a_command_goes_on_without_a_stream(tmp_path: Path) -> None:
    """
    A command that is running when the stream breaks is the same one afterwards.
    """
    async with running(tmp_path) as (session, streams):
        async with await session.open_process(Command(command="read a; echo $a $$; read b; echo $b $$")) as process:
            await process.stdin.send(b"one\n")
            first = await process.stdout.receive()
            await streams[0].aclose()
            await process.stdin.send(b"two\n")
            second = await process.stdout.receive()
            assert (await process.wait()).ok
        assert 2 == len(streams)
    assert [b"one", b"two"] == [first.split()[0], second.split()[0]]
    assert first.split()[1] == second.split()[1]


async def test_64_mebibytes_both_ways_within_bounds(tmp_path: Path) -> None:
    """
    They arrive byte for byte, in the driver's memory once.
    """
    data = random.Random(1).randbytes(MIB) * 64
    digest = hashlib.sha256(data).hexdigest().encode()

    async with running(tmp_path) as (session, _):
        assert digest == (await session.exec(Command(command="sha256sum"), stdin=data)).stdout.split()[0]
        await session.exec(Command(command="cat > copy"), stdin=data)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await session.exec(Command(command="cat copy", output_limit=64 * MIB))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        assert data == result.stdout

    assert grown <= (64 + 32) * MIB


async def alive(session: Session, pid: bytes) -> bool:
    """Tell whether a process is there and no zombie."""
    return (await session.exec(Command(command=f"grep -q 'State:.[^Z]' /proc/{pid.decode()}/status"))).ok


async def test_p14_cancelling_kills_the_whole_tree(tmp_path: Path) -> None:
    """
    When the cancelled call returns, the command and what it started are dead.
    """
    async with running(tmp_path) as (session, _):
        pids = anyio.Event()
        seen: list[bytes] = []

        def take(_: str, data: bytes) -> None:
            seen.extend(data.split())
            if len(seen) == 2:
                pids.set()

        script = (
            "setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 1; done' & echo $$; trap '' TERM; wait; sleep 60"
        )
        async with anyio.create_task_group() as group:

            async def one() -> None:
                await session.exec(Command(command=script), on_output=take)

            group.start_soon(one)
            await pids.wait()
            assert [True, True] == [await alive(session, pid) for pid in seen]
            group.cancel_scope.cancel()
        assert [False, False] == [await alive(session, pid) for pid in seen]
        assert session.alive


@pytest.mark.parametrize(("options", "limit"), [({"timeout": 0.5}, "total"), ({"no_output_timeout": 0.5}, "no_output")])
async def test_p23_real_timeouts(tmp_path: Path, options: dict[str, Any], limit: str) -> None:
    """
    Both limits fire, with the output so far.
    """
    async with running(tmp_path) as (session, _):
        with pytest.raises(CommandTimeout) as caught:
            await session.exec(Command(command="echo before; sleep 60", **options))
        assert (limit, b"before\n") == (caught.value.limit, caught.value.stdout)
        assert (await session.exec(Command(command=["true"]))).ok


async def test_trees(tmp_path: Path) -> None:
    """
    A directory goes in and comes out the same.
    """
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "x").write_bytes(os.urandom(MIB))
    (source / "sub" / "x").chmod(0o700)
    (source / "link").symlink_to("sub/x")
    (source / os.fsdecode(b"\xff")).write_bytes(b"")

    async with running(tmp_path) as (session, _):
        await session.upload_dir(source, "work")
        await session.download_dir("work", tmp_path / "back")
        with pytest.raises(FileNotFoundError, match="nope"):
            await session.download_dir("nope", tmp_path / "none")
        with pytest.raises(NotADirectoryError):
            await session.download_dir("work/sub/x", tmp_path / "none")

    back = tmp_path / "back"
    assert (source / "sub" / "x").read_bytes() == (back / "sub" / "x").read_bytes()
    assert os.access(back / "sub" / "x", os.X_OK)
    assert "sub/x" == os.readlink(back / "link")
    assert {os.fsencode(path.name) for path in source.iterdir()} == {os.fsencode(path.name) for path in back.iterdir()}
