# SPDX-License-Identifier: Apache-2.0
"""A lost stream is replaced, and nothing is lost or done twice."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentsandbox.errors import ApiUnavailable, ProtocolError, SandboxLost, StreamBroken
from agentsandbox.models.command import Command
from agentsandbox.protocol import frames
from agentsandbox.session.retrying import REATTACH_ATTEMPTS

pytestmark = pytest.mark.anyio
STDIN = bytes(range(256)) * 8 * 1024  # two megabytes, so that credit is needed
TRUE = Command(command=["true"])


async def cat(command: Any) -> None:
    command.started()
    data = await command.read_stdin()
    await command.out(b"warn\n" * 20_000, frames.STDERR)
    await command.out(data)
    command.exit(3)


async def traffic(connected: Any) -> tuple[int, int]:
    """Return how many bytes go there and back without a fault."""
    async with connected(cat, resumable=True) as (session, peer):
        await session.exec(Command(command="cat"), stdin=STDIN)
        theirs, ours = peer.streams[0]
        return theirs.sent, ours.sent


@pytest.mark.parametrize("side", ["driver", "runner"])
async def test_cut_anywhere(connected: Any, side: str) -> None:
    """
    Wherever the stream breaks, both ways, everything arrives once and whole, and the command runs once.
    """
    total = (await traffic(connected))[side == "runner"]
    handshake = 200
    positions = [
        *range(handshake, handshake + 60),
        *range(handshake + 60, total, total // 40),
        *range(total - 5, total),
    ]

    for position in positions:
        async with connected(cat, resumable=True) as (session, peer):
            peer.streams[0][side == "runner"].cut_after(position)
            result = await session.exec(Command(command="cat"), stdin=STDIN)
            assert (3, STDIN, b"warn\n" * 20_000) == (result.exit_code, result.stdout, result.stderr), position
            assert [1] == list(peer.commands)
            assert STDIN == bytes(peer.commands[1].stdin)
            assert 1 == peer.count(frames.START)


@pytest.mark.parametrize("every", [300_000, 700_000])
async def test_cut_again_and_again(connected: Any, every: int) -> None:
    """
    Streams that all break after a while still carry everything, as long as each carries something.
    """
    data = STDIN * 2
    async with connected(cat, resumable=True) as (session, peer):
        opened = peer.open

        def open_bad() -> Any:
            stream = opened()
            for end in peer.streams[-1]:
                end.cut_after(every + 1000)
            return stream

        peer.open = open_bad
        for end in peer.streams[0]:
            end.cut_after(every)
        seen = bytearray()
        result = await session.exec(
            Command(command="cat"),
            stdin=data,
            on_output=lambda name, piece: seen.extend(piece) if name == "stdout" else None,
        )
        assert (3, data, data) == (result.exit_code, result.stdout, bytes(seen))
        assert len(peer.streams) > 2
        assert f"stream {len(peer.streams)}" in repr(session)
        assert 1 == peer.count(frames.START)


async def test_streams_that_carry_nothing(connected: Any) -> None:
    """
    Streams that can be attached and break before one frame has passed are not tried for ever.
    """
    async with connected(cat, resumable=True) as (session, peer):
        opened = peer.open

        def open_bad() -> Any:
            stream = opened()
            for end in peer.streams[-1]:
                end.cut_after(5000)
            return stream

        peer.open = open_bad
        peer.streams[0][0].cut_after(300)
        with pytest.raises(StreamBroken, match="stream_ended"):
            await session.exec(Command(command="cat"), stdin=STDIN)
        assert REATTACH_ATTEMPTS < len(peer.streams) <= REATTACH_ATTEMPTS + 3


async def test_idle_streams_may_break_as_often_as_they_like(connected: Any) -> None:
    """
    A path that drops idle streams costs a new stream each time, and nothing else.
    """
    async with connected(cat, resumable=True) as (session, peer):
        for _ in range(3 * REATTACH_ATTEMPTS):
            await anyio.sleep(60)
            peer.stream.cut()
        await anyio.sleep(60)
        assert b"hi" == (await session.exec(Command(command="cat"), stdin=b"hi")).stdout


async def test_p06_a_command_is_never_run_twice(connected: Any) -> None:
    """
    A stream that breaks before the start is acknowledged does not start the command again.
    """

    async def script(command: Any) -> None:
        command.peer.stream.cut()  # before anything of it was heard
        await anyio.sleep(5)
        command.started()
        command.exit(9)

    async with connected(script, resumable=True) as (session, peer):
        assert 9 == (await session.exec(TRUE)).exit_code
        assert (1, 2) == (peer.count(frames.START), len(peer.streams))


async def test_silence_is_replaced_too(connected: Any) -> None:
    """
    A stream that only goes silent is given up after its heartbeat, and the command goes on over the next one.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.peer.flushed()
        command.peer.stream.stall()
        await anyio.sleep(100)
        command.exit(6)

    async with connected(script, resumable=True) as (session, peer):
        assert 6 == (await session.exec(TRUE)).exit_code
        assert 2 == len(peer.streams)


async def test_commands_may_start_while_nothing_is_attached(connected: Any) -> None:
    """
    What is asked for in the meantime waits for the next stream, pings included.
    """

    async def succeed(command: Any) -> None:
        command.started()
        command.exit()

    async with connected(succeed, resumable=True) as (session, peer):
        peer.stream.cut()
        await anyio.sleep(0)
        async with anyio.create_task_group() as group:
            group.start_soon(session.ping)
            assert (await session.exec(TRUE)).ok
        assert 2 == len(peer.streams)


async def test_a_lost_stream_is_no_reason_to_be_overdue(connected: Any) -> None:
    """
    A command whose time is over while nothing is attached is given its time to report afterwards.
    """

    async def script(command: Any) -> None:
        command.started()
        command.peer.stream.cut()
        command.exit(143, limit="total")

    async with connected(script, resumable=True, heartbeat_timeout=1000) as (session, _):
        reopen = session._link._reopen

        async def late() -> Any:
            await anyio.sleep(60)
            return await reopen()

        session._link._reopen = late
        with pytest.raises(TimeoutError, match="ran longer than 1 s"):
            await session.exec(Command(command="x", timeout=1))


@pytest.mark.parametrize(
    ("error", "tries", "expected", "message"),
    [
        (OSError("no route"), REATTACH_ATTEMPTS, StreamBroken, "not attached again: no route"),
        (ApiUnavailable("503"), REATTACH_ATTEMPTS, StreamBroken, "not attached again: 503"),
        (anyio.BrokenResourceError(), REATTACH_ATTEMPTS, StreamBroken, "not attached again: BrokenResourceError"),
        (SandboxLost("evicted", "disk pressure"), 1, SandboxLost, "evicted: disk pressure"),
        (LookupError("a mistake"), 1, StreamBroken, "not attached again: a mistake"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_when_no_stream_can_be_had(
    connected: Any, error: Exception, tries: int, expected: type[Exception], message: str
) -> None:
    """
    It is tried a bounded number of times, only once if that is useless, and the caller gets its partial output.
    """
    count = 0

    async def reopen() -> Any:
        nonlocal count
        count += 1
        raise error

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"before\n")
        await command.peer.flushed()
        command.peer.stream.cut()

    async with connected(script, resumable=True) as (session, _):
        session._link._reopen = reopen
        with pytest.raises(expected, match=message) as caught:
            await session.exec(TRUE)
        assert (tries, b"before\n") == (count, caught.value.stdout)  # type: ignore[attr-defined]
        assert type(caught.value) is expected


async def test_a_stream_that_does_not_answer_is_tried_again(connected: Any) -> None:
    """
    A new stream that breaks within the handshake is closed and replaced like any other.
    """

    async def script(command: Any) -> None:
        command.started()
        command.peer.stream.cut()
        command.exit(8)

    async with connected(script, resumable=True) as (session, peer):
        opened = peer.open

        def open_bad() -> Any:
            stream = opened()
            if len(peer.streams) < 4:
                peer.stream.cut_after(10)
            return stream

        peer.open = open_bad
        assert 8 == (await session.exec(TRUE)).exit_code
        assert 4 == len(peer.streams)
        assert ["closed"] * 3 == [repr(theirs).split("[")[1].split(",")[0] for theirs, _ in peer.streams[:3]]


@pytest.mark.parametrize(
    ("change", "expected", "message"),
    [
        (lambda welcome: {**welcome, "facts": {"pid": 1, "boot_id": "other"}}, SandboxLost, "replaced"),
        (lambda welcome: {**welcome, "received": 99}, ProtocolError, "claims 99 frames"),
    ],
    ids=["facts", "count"],
)
async def test_another_runner_at_the_other_end(
    connected: Any, change: Any, expected: type[Exception], message: str
) -> None:
    """
    Whoever answers now is not who answered before: the sandbox is lost, and nothing is sent to the newcomer.
    """

    async def script(command: Any) -> None:
        command.peer.welcome = lambda welcome: (frames.WELCOME, change(welcome))
        command.peer.stream.cut()
        await anyio.sleep_forever()

    async with connected(script, resumable=True) as (session, peer):
        with pytest.raises(expected, match=message):
            await session.exec(TRUE)
        assert 1 == peer.count(frames.START)
        assert 2 == len(peer.streams)


async def test_closing_while_attaching(connected: Any) -> None:
    """
    A session can be closed at any time.
    """

    async def script(command: Any) -> None:
        command.peer.stream.cut()

    async with connected(script, resumable=True) as (session, _):

        async def never() -> Any:
            await anyio.sleep_forever()

        session._link._reopen = never
        async with anyio.create_task_group() as group:

            async def one() -> None:
                with pytest.raises(StreamBroken, match="closed"):
                    await session.exec(TRUE)

            group.start_soon(one)
            await anyio.sleep(1)
            assert "attaching" in repr(session._link)
            await session.aclose()
            assert "closed" in repr(session._link)
