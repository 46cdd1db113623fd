# SPDX-License-Identifier: Apache-2.0
"""What happens when the stream, the runner or the caller goes away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from agentsandbox.errors import CommandTimeout, ProtocolError, SandboxLost, StreamBroken
from agentsandbox.models.command import Command
from agentsandbox.protocol import frames
from agentsandbox.protocol.connection import Connection
from agentsandbox.protocol.frames import AMOUNT, dump, encode
from agentsandbox.session import Session
from agentsandbox.session.link import Link
from agentsandbox.session.pulse import Pulse
from agentsandbox.transport.memory import memory_pair

pytestmark = pytest.mark.anyio
TRUE = Command(command=["true"])


async def succeed(command: Any) -> None:
    command.started()
    command.exit()


async def hang(command: Any) -> None:
    command.started()
    await command.out(b"before\n")
    await command.out(b"oops\n", frames.STDERR)
    await anyio.sleep_forever()


@pytest.mark.parametrize("ending", ["end", "break", "close"])
async def test_p01_a_stream_that_ends_without_exit_is_no_result(connected: Any, ending: str) -> None:
    """
    The outcome is unknown: an error with the partial output, for every command, and no further commands.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"before\n")
        await command.out(b"oops\n", frames.STDERR)
        await anyio.sleep(1)
        if ending == "end":
            await command.peer.stream.aclose()
        elif ending == "break":
            command.peer.stream.cut()
        else:
            await command.peer.streams[0][0].aclose()

    async with connected(script) as (session, peer):
        with pytest.raises(StreamBroken, match="stream_ended") as caught:
            await session.exec(TRUE)
        assert (b"before\n", b"oops\n") == (caught.value.stdout, caught.value.stderr)
        assert not session.alive
        assert "<Session [stream_ended, stream 1, 0 of 1 commands running]>" == repr(session)
        with pytest.raises(StreamBroken, match="stream_ended"):
            await session.exec(TRUE)
        with pytest.raises(StreamBroken, match="stream_ended"):
            await session.ping()
        assert 1 == peer.count(frames.START)


async def test_the_last_words_of_a_runner_count(connected: Any) -> None:
    """
    When writing fails first, what the runner had sent before is still read.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"last words")
        command.exit(5)
        await command.peer.flushed()
        await command.peer.stream.aclose()

    async with connected(script) as (session, peer):
        peer.stream.stall()
        async with anyio.create_task_group() as group:
            results = []

            async def one() -> None:
                results.append(await session.exec(TRUE))

            group.start_soon(one)
            await anyio.sleep(1)
            session._link.send(frames.PING, 0, b"x")  # fails: nobody is there any more
            await anyio.sleep(0.5)
            peer.stream.resume()

    assert [(5, b"last words")] == [(result.exit_code, result.stdout) for result in results]


@asynccontextmanager
async def shared_clock(shared: bool) -> AsyncIterator[dict[str, Any]]:
    """Give the option that has a session's heartbeat kept by a clock for many, or by a task of its own."""
    if not shared:
        yield {}
        return
    pulse = Pulse()
    async with anyio.create_task_group() as group:
        group.start_soon(pulse.run)
        yield {"pulse": pulse}
        group.cancel_scope.cancel()
    assert repr(pulse) == "<Pulse [0 links, every 1 s]>"


@pytest.mark.parametrize("shared", [False, True], ids=["its own clock", "a shared clock"])
async def test_p05_silence_is_noticed(connected: Any, shared: bool) -> None:
    """
    A stream that goes silent ends in an error with the partial output after heartbeat and timeout, not never.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"before\n")
        await command.peer.flushed()
        await anyio.sleep(1)
        command.peer.stream.stall()

    async with (
        shared_clock(shared) as clock,
        connected(script, heartbeat=10, heartbeat_timeout=20, **clock) as (session, _),
    ):
        begin = anyio.current_time()
        with pytest.raises(StreamBroken, match="no answer to a heartbeat within 20 s") as caught:
            await session.exec(Command(command="x", timeout=None))
        assert pytest.approx(30, abs=2) == anyio.current_time() - begin
        assert b"before\n" == caught.value.stdout
        assert not session.alive


@pytest.mark.parametrize("shared", [False, True], ids=["its own clock", "a shared clock"])
async def test_p10_quiet_commands_keep_their_stream(connected: Any, shared: bool) -> None:
    """
    While a command says nothing, the heartbeat is heard on the path in every interval.
    """

    async def script(command: Any) -> None:
        command.started()
        await anyio.sleep(600)
        command.exit()

    async with shared_clock(shared) as clock, connected(script, heartbeat=15, **clock) as (session, peer):
        assert (await session.exec(Command(command="x", timeout=None))).ok
        assert 39 <= peer.count(frames.PING) <= 40


async def test_p17_a_slow_consumer_does_not_stop_the_heartbeat(connected: Any) -> None:
    """
    All 100 pieces arrive although the callback is much slower than the heartbeat allows for.
    """
    pieces = []

    async def script(command: Any) -> None:
        command.started()
        for number in range(100):
            await command.out(b"%03d\n" % number)
            await anyio.sleep(0.05)
        command.exit()

    async def take(_: str, data: bytes) -> None:
        await anyio.sleep(0.5 * len(data) / 4)
        pieces.append(data)

    async with connected(script, heartbeat=1, heartbeat_timeout=1) as (session, peer):
        result = await session.exec(Command(command="x", timeout=6), on_output=take)
        assert peer.count(frames.PING) > 20

    assert b"".join(b"%03d\n" % number for number in range(100)) == b"".join(pieces) == result.stdout


async def test_a_command_without_an_end(connected: Any) -> None:
    """
    A runner that answers pings but never ends a command is not waited for beyond timeout, grace and ten seconds.
    """
    async with connected(hang) as (session, peer):
        begin = anyio.current_time()
        with pytest.raises(StreamBroken, match="overdue") as caught:
            await session.exec(Command(command="x", timeout=5))
        assert pytest.approx(5 + 1 + 10) == anyio.current_time() - begin
        assert b"before\n" == caught.value.stdout
        assert peer.count(frames.PING) >= 1
        assert not session.alive


async def test_a_late_start_is_not_the_commands_fault(connected: Any) -> None:
    """
    The time limit counts from the start, however late that was.
    """

    async def script(command: Any) -> None:
        await anyio.sleep(10)
        command.started()
        await anyio.sleep(10)
        command.exit()

    async with connected(script) as (session, _):
        assert (await session.exec(Command(command="x", timeout=5))).ok


async def test_waiting_for_the_consumer_is_not_the_commands_fault(connected: Any) -> None:
    """
    A callback that takes longer than the command may run does not make its end overdue.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"x")
        await anyio.sleep(30)
        command.exit()

    async def take(_: str, data: bytes) -> None:
        await anyio.sleep(25)

    async with connected(script) as (session, _):
        assert (await session.exec(Command(command="x", timeout=1), on_output=take)).ok


async def test_p14_cancelled_commands_are_killed(connected: Any) -> None:
    """
    Of 50 commands 10 are cancelled: exactly those are killed, each before its call returns, and 40 end well.
    """
    ended: dict[int, str] = {}

    async def script(command: Any) -> None:
        command.started()
        if command.request["script"] == "hang":
            await anyio.sleep_forever()
        await anyio.sleep(5)
        command.exit()

    async with connected(script) as (session, peer):

        async def one(number: int) -> None:
            with anyio.move_on_after(1 if number % 5 == 0 else None) as scope:
                result = await session.exec(Command(command="hang" if number % 5 == 0 else "work"))
                ended[number] = f"exit {result.exit_code}"
            if scope.cancelled_caught:
                ended[number] = "cancelled"
                assert len(peer.kills) >= sum(value == "cancelled" for value in ended.values())

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(one, number)
        hanging = {number for number, command in peer.commands.items() if command.request["script"] == "hang"}
        assert session.alive

    assert {n: "cancelled" if n % 5 == 0 else "exit 0" for n in range(50)} == ended
    assert (10, hanging) == (len(peer.kills), set(peer.kills))


async def test_cancelled_before_it_began(connected: Any) -> None:
    """
    A call in a scope that is cancelled already starts nothing.
    """
    async with connected(succeed) as (session, peer):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await session.exec(TRUE)
        assert scope.cancelled_caught
        await session.ping()
        assert 0 == peer.count(frames.START)


async def test_cancelled_with_its_output_held_up(connected: Any) -> None:
    """
    A kill is confirmed although nobody took the command's output.
    """

    async def script(command: Any) -> None:
        command.started()
        for _ in range(40):
            await command.out(bytes(256 * 1024))
        command.exit(137, limit="killed")

    async with connected(script, dies_on_kill=False) as (session, peer):
        with anyio.move_on_after(1):
            await session.exec(TRUE, on_output=lambda _, data: anyio.sleep_forever())
        assert [1] == peer.kills
        assert session.alive


async def test_a_kill_that_is_not_confirmed(connected: Any) -> None:
    """
    After five seconds the sandbox counts as lost; the cancellation goes on.
    """
    async with connected(hang, dies_on_kill=False) as (session, peer):
        begin = anyio.current_time()
        with anyio.move_on_after(1) as scope:
            await session.exec(TRUE)
        assert scope.cancelled_caught
        assert pytest.approx(1 + 5) == anyio.current_time() - begin
        assert session.lost is not None
        assert "unkillable" == session.lost.reason
        assert [1] == peer.kills


async def test_cancelled_while_the_session_is_lost(connected: Any) -> None:
    """
    A loss during the kill ends the wait for its confirmation.
    """
    async with connected(hang, dies_on_kill=False) as (session, peer):
        begin = anyio.current_time()
        with anyio.move_on_after(1):
            await session.exec(TRUE)
            raise AssertionError
        peer.stream.cut()
        assert anyio.current_time() - begin <= 6


async def stray(command: Any) -> None:
    kind, number, payload = BREACHES[command.request["script"]]
    if not command.request["script"].startswith("early"):
        command.started()
    command.peer.send(kind, command.number if number is None else number, payload)


EXIT = {"code": 0, "wall": 1.0, "stdout": 0, "stderr": 0}
BREACHES: dict[str, tuple[int, int | None, bytes]] = {
    "unknown type": (99, None, b""),
    "unknown command": (frames.STDOUT, 5, b"x"),
    "command 0": (frames.STDOUT, 0, b"x"),
    "credit for an unknown command": (frames.CREDIT, 5, AMOUNT.pack(1)),
    "start of an unknown command": (frames.STARTED, 5, dump({"pid": 1})),
    "started twice": (frames.STARTED, None, dump({"pid": 1})),
    "failed after start": (frames.FAILED, None, dump({"kind": "not_found"})),
    "second welcome": (frames.WELCOME, 0, b"{}"),
    "output beyond credit": (frames.STDERR, None, bytes(frames.MAX_DATA)),
    "wrong totals": (frames.EXIT, None, dump({**EXIT, "stdout": 1})),
    "early exit": (frames.EXIT, None, dump(EXIT)),
    "early without pid": (frames.STARTED, None, dump({})),
    "early with pid 0": (frames.STARTED, None, dump({"pid": 0})),
    "early with pid true": (frames.STARTED, None, dump({"pid": True})),
    "early and unknown kind": (frames.FAILED, None, dump({"kind": "boredom"})),
    "early and no kind": (frames.FAILED, None, dump({"kind": []})),
    "early and no text": (frames.FAILED, None, dump({"kind": "not_found", "message": 5})),
    "no json": (frames.EXIT, None, b"[]"),
    "code 256": (frames.EXIT, None, dump({**EXIT, "code": 256})),
    "code -1": (frames.EXIT, None, dump({**EXIT, "code": -1})),
    "code true": (frames.EXIT, None, dump({**EXIT, "code": True})),
    "no code": (frames.EXIT, None, dump({"stdout": 0, "stderr": 0})),
    "limit of another kind": (frames.EXIT, None, dump({**EXIT, "limit": "patience"})),
    "limit that is a list": (frames.EXIT, None, dump({**EXIT, "limit": []})),
    "report that is a list": (frames.EXIT, None, dump({**EXIT, "report": []})),
    "endless wall": (frames.EXIT, None, b'{"code":0,"stdout":0,"stderr":0,"wall":1e999}'),
    "negative wall": (frames.EXIT, None, dump({**EXIT, "wall": -1})),
    "wall that is text": (frames.EXIT, None, dump({**EXIT, "wall": "1"})),
    "memory that is a float": (frames.EXIT, None, dump({**EXIT, "memory": 1.5})),
    "leftovers that are a number": (frames.EXIT, None, dump({**EXIT, "leftovers": 5})),
    "leftovers of another shape": (frames.EXIT, None, dump({**EXIT, "leftovers": [[1, "a", 2]]})),
    "leftovers of other types": (frames.EXIT, None, dump({**EXIT, "leftovers": [["a", 1]]})),
}


@pytest.mark.parametrize("breach", BREACHES)
async def test_a_runner_that_breaks_the_protocol(connected: Any, breach: str) -> None:
    """
    A frame that does not fit ends the session with an infrastructure error, and never gives a result.
    """
    if breach == "output beyond credit":

        async def script(command: Any) -> None:
            command.started()
            for _ in range(9):
                command.peer.send(frames.STDERR, command.number, bytes(frames.MAX_DATA))
    else:
        script = stray  # type: ignore[assignment]

    async with connected(script) as (session, _):
        with pytest.raises(ProtocolError):
            await session.exec(Command(command=breach), on_output=lambda _, data: anyio.sleep(1))
        assert session.lost is not None
        assert "protocol" == session.lost.reason
        with pytest.raises(ProtocolError):
            await session.exec(TRUE)


async def test_credit_may_come_late(connected: Any) -> None:
    """
    Credit for a command that has just ended is no breach, and empty output is none either.
    """

    async def script(command: Any) -> None:
        command.started()
        command.peer.send(frames.STDOUT, command.number, b"")
        command.exit()
        command.peer.send(frames.CREDIT, command.number, AMOUNT.pack(1))

    async with connected(script) as (session, _):
        assert (await session.exec(TRUE)).ok
        await session.ping()
        assert session.alive


async def test_pings_of_the_runner_are_answered(connected: Any) -> None:
    """
    The runner may ask as well.
    """

    async def script(command: Any) -> None:
        command.peer.send(frames.PING, 0, b"hello")
        await anyio.sleep(1)
        assert 1 == command.peer.count(frames.PONG)
        await succeed(command)

    async with connected(script) as (session, _):
        assert (await session.exec(TRUE)).ok


async def test_a_runner_that_asks_without_listening() -> None:
    """
    Answers that nobody reads do not pile up without end.
    """
    ours, theirs = memory_pair(capacity=2000)
    session = Session(ours, nonce="n")
    runner = Connection(frames.TO_RUNNER)
    runner.send(frames.WELCOME, 0, dump({"version": 1, "received": 0, "facts": {}}))
    async with anyio.create_task_group() as group:
        await theirs.send(runner.data_to_send())
        await group.start(session.run)
        with pytest.raises(anyio.BrokenResourceError):
            while True:
                runner.send(frames.PING, 0, bytes(64))
                await theirs.send(runner.data_to_send())
        assert session.lost is not None
        assert ("protocol", "the runner sends without reading") == (session.lost.reason, session.lost.detail)


@pytest.mark.parametrize(
    ("kind", "welcome", "expected", "message"),
    [
        (frames.REFUSED, {"reason": "wrong nonce"}, SandboxLost, "refused: wrong nonce"),
        (frames.WELCOME, {"version": 2, "received": 0, "facts": {}}, ProtocolError, "no welcome of version 1"),
        (frames.WELCOME, {"version": 1, "received": 0}, ProtocolError, "no facts"),
        (frames.WELCOME, {"version": 1, "received": 1, "facts": {}}, ProtocolError, "claims 1 frames"),
        (frames.WELCOME, {"version": 1, "received": "0", "facts": {}}, ProtocolError, "counts '0' frames"),
        (frames.PONG, {}, ProtocolError, "no welcome"),
    ],
    ids=["refused", "version", "facts", "count", "text count", "other frame"],
)
async def test_a_handshake_that_fails(
    connected: Any, kind: int, welcome: dict[str, Any], expected: type[Exception], message: str
) -> None:
    """
    Whoever starts the session gets the reason, and the task group around it goes on.
    """
    async with connected(succeed, attach=False) as (session, peer):
        peer.welcome = lambda _: (kind, welcome)
        async with anyio.create_task_group() as group:
            with pytest.raises(expected, match=message):
                await group.start(session.run)
            await anyio.sleep(1)
        assert not session.alive
        with pytest.raises(expected, match=message):
            await session.exec(TRUE)


async def test_a_handshake_without_an_answer() -> None:
    """
    A stream that stays silent, or ends, is given up in time.
    """
    ours, theirs = memory_pair()
    session = Session(ours, nonce="n", heartbeat_timeout=7)
    begin = anyio.current_time()
    async with anyio.create_task_group() as group:
        with pytest.raises(StreamBroken, match="did not answer"):
            await group.start(session.run)
    assert pytest.approx(7) == anyio.current_time() - begin

    ours, theirs = memory_pair()
    await theirs.aclose()
    session = Session(ours, nonce="n")
    async with anyio.create_task_group() as group:
        with pytest.raises(StreamBroken, match="did not answer"):
            await group.start(session.run)
    assert pytest.approx(7) == anyio.current_time() - begin


async def test_refused_later(connected: Any) -> None:
    """
    A runner that turns the session away while it runs is lost.
    """

    async def script(command: Any) -> None:
        command.started()
        command.peer.send(frames.REFUSED, 0, dump({"reason": "another driver came"}))

    async with connected(script, resumable=True) as (session, peer):
        with pytest.raises(SandboxLost, match="refused: another driver came"):
            await session.exec(TRUE)
        assert 1 == len(peer.streams)


async def test_ping(connected: Any) -> None:
    """
    A ping tells how long the answer took.
    """

    async def script(command: Any) -> None:
        command.started()

    async with connected(script) as (session, peer):
        assert 0 == await session.ping()
        peer.answers_pings = False
        with pytest.raises(StreamBroken, match="silent: no answer to a ping within 2 s"):
            await session.ping(2)
        assert session.alive
        async with anyio.create_task_group() as group:

            async def lose() -> None:
                await anyio.sleep(1)
                peer.stream.cut()

            group.start_soon(lose)
            with pytest.raises(StreamBroken, match="stream_ended"):
                await session.ping()


async def test_whatever_a_frame_provokes_ends_the_session_only() -> None:
    """
    An error that nobody thought of is a breach of the protocol by that runner, with the error kept as its cause.
    """
    ours, theirs = memory_pair()

    def deliver(frame: frames.Frame) -> None:
        raise LookupError("unthought of")

    link = Link(
        ours,
        nonce="n",
        reopen=None,
        heartbeat=15,
        heartbeat_timeout=30,
        deliver=deliver,
        on_lost=lambda: None,
    )
    assert "<Link [new, stream 0, 0 bytes unacknowledged]>" == repr(link)
    runner = Connection(frames.TO_RUNNER)
    runner.send(frames.WELCOME, 0, dump({"version": 1, "received": 0, "facts": {}}))
    runner.attach(0)
    async with anyio.create_task_group() as group:
        await theirs.send(runner.data_to_send())
        await group.start(link.run)
        assert "<Link [attached, stream 1, 0 bytes unacknowledged]>" == repr(link)
        await theirs.send([encode(frames.STDOUT, 1, b"x") + b"x"])
    assert link.lost is not None
    assert "<Link [protocol, stream 1, 0 bytes unacknowledged]>" == repr(link)
    assert isinstance(link.loss(), ProtocolError)
    assert "LookupError: unthought of" == str(link.violation)


async def test_given_up_by_whoever_knows(connected: Any) -> None:
    """
    Who has seen that the sandbox is gone can say so: whoever waits is told at once, with the partial output.
    """
    async with connected(hang) as (session, _), anyio.create_task_group() as group:
        errors = []

        async def one() -> None:
            with pytest.raises(SandboxLost, match="evicted: disk") as caught:
                await session.exec(TRUE)
            errors.append((type(caught.value), caught.value.stdout))

        group.start_soon(one)
        await anyio.sleep(1)
        assert "<Calls [1 running of 1]>" == repr(session._calls)
        session.lose(SandboxLost("evicted", "disk"))
        await anyio.wait_all_tasks_blocked()
        assert [(SandboxLost, b"before\n")] == errors
        session.lose(SandboxLost("deleted"))
        assert "evicted" == session.lost.reason


async def test_closing(connected: Any) -> None:
    """
    Closing tells every waiting call, can be repeated, and leaves nothing running.
    """
    async with connected(hang) as (session, peer):
        errors = []

        async def one() -> None:
            with pytest.raises(StreamBroken, match="closed") as caught:
                await session.exec(TRUE)
            errors.append(caught.value.stdout)

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            await anyio.sleep(1)
            await session.aclose()
            await session.aclose()
        assert [b"before\n"] == errors
        assert 0 == peer.count(frames.SHUTDOWN)
        with pytest.raises(StreamBroken, match="closed"):
            await session.exec(TRUE)


async def test_closing_with_shutdown(connected: Any) -> None:
    """
    The runner hears of it, even if it does not end by itself, and nobody attaches again.
    """
    async with connected(succeed, resumable=True) as (session, peer):
        begin = anyio.current_time()
        await session.aclose(shutdown=True)
        assert 1 == peer.count(frames.SHUTDOWN)
        assert 1 == len(peer.streams)
        assert anyio.current_time() - begin <= 1
        await session.aclose(shutdown=True)
        assert 1 == peer.count(frames.SHUTDOWN)


async def test_closing_what_never_ran() -> None:
    """
    A session that was not started is closed with its stream, and cannot be started afterwards.
    """
    ours, theirs = memory_pair()
    session = Session(ours, nonce="n")
    assert "<Session [detached, stream 0, 0 of 0 commands running]>" == repr(session)
    assert not session.alive
    await session.aclose()

    with pytest.raises(anyio.EndOfStream):
        await theirs.receive()
    async with anyio.create_task_group() as group:
        with pytest.raises(StreamBroken, match="closed"):
            await group.start(session.run)


async def test_cancelled_from_outside(connected: Any) -> None:
    """
    When the task group of the session is cancelled, every call ends at once and the stream is closed.
    """
    async with connected(hang, attach=False) as (session, peer):
        async with anyio.create_task_group() as group:
            await group.start(session.run)
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as calls:

                    async def one() -> None:
                        with pytest.raises(StreamBroken, match="closed"):
                            await session.exec(TRUE)

                    calls.start_soon(one)
                    await anyio.sleep(1)
                    group.cancel_scope.cancel()
        assert not session.alive
        assert "closed" in repr(peer.streams[0][0])


async def test_a_timeout_and_a_loss_are_told_apart(connected: Any) -> None:
    """
    Only a timeout that the runner has confirmed is a timeout.
    """

    async def script(command: Any) -> None:
        command.started()
        await anyio.sleep(1)
        await command.peer.stream.aclose()

    async with connected(script) as (session, _):
        with pytest.raises(StreamBroken) as caught:
            await session.exec(Command(command="x", timeout=1))
        assert not isinstance(caught.value, (CommandTimeout, TimeoutError))
