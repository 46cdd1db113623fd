# SPDX-License-Identifier: Apache-2.0
"""Commands with live streams."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentsandbox.errors import CommandNotFound, CommandTimeout, StreamBroken
from agentsandbox.models.command import Command, ExecResult, OutputSizes
from agentsandbox.protocol import frames

pytestmark = pytest.mark.anyio
CAT = Command(command="cat")


async def echo(command: Any) -> None:
    """Send each piece of standard input back, twice to standard output and once to standard error."""
    command.started(pid=42)
    done = 0
    while True:
        if len(command.stdin) > done:
            piece = bytes(command.stdin[done:])
            done = len(command.stdin)
            await command.out(piece * 2)
            await command.out(piece, frames.STDERR)
            command.grant()
        elif command.stdin_ended:
            break
        else:
            await command.changed.wait()
    command.exit(2)


async def test_a_conversation(connected: Any) -> None:
    """
    What is written arrives, what it answers can be read, and the end has the exit code and the true sizes.
    """
    async with connected(echo) as (session, _):
        async with await session.open_process(CAT) as process:
            assert 42 == process.pid
            assert "<Process [pid 42, <Call 1 [running, 0 + 0 bytes]>]>" == repr(process)
            for word in (b"one", b"two"):
                await process.stdin.send(word)
                assert word * 2 == await process.stdout.receive()
                assert word == await process.stderr.receive()
            assert process.running
            await process.stdin.aclose()
            await process.stdin.aclose()
            assert [] == [piece async for piece in process.stdout]
            with pytest.raises(anyio.EndOfStream):
                await process.stderr.receive()
            result = await process.wait()
            assert not process.running
        assert (
            ExecResult(
                exit_code=2,
                sizes=OutputSizes(stdout=12, stderr=6),
                wall_seconds=0.25,
                cpu_seconds=0.125,
                peak_memory_bytes=4096,
            )
            == result
        )
        assert result == await process.wait()
        with pytest.raises(anyio.BrokenResourceError):
            await process.stdin.send(b"x")


async def test_closed_input(connected: Any) -> None:
    """
    Nothing can be written after the end.
    """
    async with connected(echo) as (session, _), await session.open_process(CAT) as process:
        session_call = process._call
        session_call.pid = session_call.pid
        await process.stdin.aclose()
        with pytest.raises((anyio.ClosedResourceError, anyio.BrokenResourceError)):
            await process.stdin.send(b"x")


async def test_input_under_credit(connected: Any) -> None:
    """
    A large write waits for credit and arrives whole.
    """
    data = bytes(range(256)) * 4 * 4096

    async def script(command: Any) -> None:
        command.started()
        await anyio.sleep(5)
        command.exit(int(await command.read_stdin() != data))

    async with connected(script) as (session, _), await session.open_process(CAT) as process:
        await process.stdin.send(data)
        await process.stdin.aclose()
        assert (await process.wait()).ok


async def test_unread_output_is_bounded(connected: Any) -> None:
    """
    The command waits at the end of its window until somebody reads.
    """

    async def script(command: Any) -> None:
        command.started()
        for _ in range(100):
            await command.out(bytes(1000), piece=100)
        command.exit()

    async with connected(script) as (session, peer), await session.open_process(CAT, window=5000) as process:
        await anyio.sleep(1)
        assert 5000 == peer.commands[1].totals[frames.STDOUT]
        assert 100_000 == sum([len(piece) async for piece in process.stdout])
        assert (await process.wait()).ok


async def test_leaving_kills(connected: Any) -> None:
    """
    Leaving the context kills what still runs, and confirms it.
    """
    async with connected(echo) as (session, peer):
        async with await session.open_process(CAT) as process:
            pass
        assert [1] == peer.kills
        assert not process.running
        assert 137 == (await process.wait()).exit_code
        await process.kill()
        assert [1] == peer.kills


async def test_cancelled_while_it_starts(connected: Any) -> None:
    """
    A command whose start was not waited for is killed.
    """

    async def script(command: Any) -> None:
        await anyio.sleep(5)
        command.started()
        await anyio.sleep_forever()

    async def dies(command: Any) -> None:
        await anyio.sleep(1.5)
        command.started()
        await anyio.sleep_forever()

    async with connected(dies, dies_on_kill=False) as (session, peer):
        with anyio.move_on_after(1) as scope:
            await session.open_process(CAT)
        assert scope.cancelled_caught
        assert [1] == peer.kills
        assert session.lost is not None


async def test_what_cannot_start(connected: Any) -> None:
    """
    There is no process, but the start error.
    """

    async def script(command: Any) -> None:
        command.failed("not_found", "cat: No such file or directory", "cat")

    async with connected(script) as (session, _):
        with pytest.raises(CommandNotFound, match="cat"):
            await session.open_process(CAT)


async def test_a_timeout(connected: Any) -> None:
    """
    Its streams end, and the timeout is raised where the end is waited for.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"a")
        await anyio.sleep(1)
        command.exit(143, limit="total", wall=1.0)

    async with connected(script) as (session, _):
        async with await session.open_process(Command(command="x", timeout=1)) as process:
            assert [b"a"] == [piece async for piece in process.stdout]
            with pytest.raises(CommandTimeout, match="ran longer than 1 s"):
                await process.wait()


async def test_a_lost_stream(connected: Any) -> None:
    """
    Every call gets the loss; what had arrived can still be read.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"a")
        await command.peer.flushed()
        command.peer.stream.cut()

    async with connected(script) as (session, _):
        async with await session.open_process(CAT) as process:
            with pytest.raises(StreamBroken):
                await process.wait()
            assert b"a" == await process.stdout.receive()
            with pytest.raises(StreamBroken):
                await process.stdout.receive()
            with pytest.raises(StreamBroken):
                await process.stdin.send(b"x")
        with pytest.raises(StreamBroken):
            await session.open_process(CAT)


async def test_cancelled_reading(connected: Any) -> None:
    """
    A read that is cancelled loses nothing.
    """
    async with connected(echo) as (session, _), await session.open_process(CAT) as process:
        with anyio.move_on_after(1) as scope:
            await process.stdout.receive()
        assert scope.cancelled_caught
        await process.stdin.send(b"x")
        assert b"xx" == await process.stdout.receive()
