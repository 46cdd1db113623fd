# SPDX-License-Identifier: Apache-2.0
"""Shell sessions whose connections are lost: every command runs once, and its result is the same."""

from __future__ import annotations

import re
from typing import Any

import anyio
import pytest
from shells import LocalConnect, LocalConnection, shell_sandbox

from agentsandbox.errors import ApiUnavailable, CommandTimeout, NotFound, SandboxLost, StartError, StreamBroken
from agentsandbox.models.command import Command
from agentsandbox.session.levels import commands, control
from agentsandbox.session.levels.scripts import PROGRAM
from agentsandbox.transport.exec import STDERR
from agentsandbox.transport.websocket import ExecStatus

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("backend")]

SCRIPT = "echo ran >> runs; seq 1 30000; echo error >&2; exit 7"
NUMBERS = b"".join(b"%d\n" % i for i in range(1, 30_001))


class Cut:
    """A connection that is cut after so many bytes, in both directions together."""

    def __init__(self, connection: LocalConnection, left: int) -> None:
        self._connection = connection
        self._left = left
        self._receive, self._send = connection.receive, connection.send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def receive(self) -> tuple[int, bytes]:
        channel, data = await self._receive()
        part = self._spend(data)
        if len(part) < len(data):
            self._connection.cut()
        if not part:
            raise anyio.BrokenResourceError
        return channel, part

    async def send(self, data: bytes) -> None:
        part = self._spend(data)
        if part:
            await self._send(part)
        if len(part) < len(data):
            self._connection.cut()
            raise anyio.BrokenResourceError

    def _spend(self, data: bytes) -> bytes:
        part = data[: self._left]
        self._left -= len(part)
        return part


def cut_after(connection: LocalConnection, left: int, status: ExecStatus | None = None) -> None:
    """Have a connection that is in use cut after so many bytes more; *status* is what is known of its command then."""

    def cut_and_tell() -> None:
        LocalConnection.cut(connection)
        connection.status = status

    connection.cut = cut_and_tell  # type: ignore[method-assign]
    cut = Cut(connection, left)
    connection.receive = cut.receive  # type: ignore[method-assign]
    connection.send = cut.send  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [0, 1, 40, 300, 500, 700, 760, 800, 900, 5_000, 60_000, 150_000, 168_000, 169_000])
async def test_p06_cut_anywhere_runs_once(after: int) -> None:
    """Wherever the connection is cut, the command runs once and its result is that of a quiet day."""
    async with shell_sandbox() as (session, connect, _):
        cut_after(connect.connections[0], after)
        with anyio.fail_after(60):
            result = await session.exec(Command(command=SCRIPT))
            again = await session.exec(Command(command="cat runs"))

        assert (result.exit_code, result.stdout, result.stderr) == (7, NUMBERS, b"error\n")
        assert again.stdout == b"ran\n"


async def test_first_connection_may_be_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is cut while it is being made is made all the same, with one directory of state."""
    monkeypatch.setattr(control, "ATTACH_WAIT", 0.01)
    size = len(PROGRAM)
    for after in (100, size - 200, size + 100, size + 200, size + 300):

        def wrap(number: int, connection: LocalConnection, after: int = after) -> Any:
            return connection if number else Cut(connection, after)

        async with shell_sandbox(wrap=wrap) as (session, connect, _):
            assert len(connect.connections) == 2, after - size
            result = await session.exec(Command(command="ls -d /var/tmp/.agentsandbox-* | wc -l"))
            assert result.text.strip() == "1"


async def test_what_a_cut_connection_says_of_its_shell_is_not_believed() -> None:
    """A shell that ends because its connection was cut does not mean that the sandbox has none."""

    def wrap(number: int, connection: LocalConnection) -> Any:
        if number == 0:
            cut_after(connection, len(PROGRAM) - 200, ExecStatus(exit_code=0))
        return connection

    async with shell_sandbox(wrap=wrap) as (session, connect, _):
        assert (await session.exec(Command(command="echo there"))).stdout == b"there\n"
        assert len(connect.connections) == 2


async def test_g04_commands_outlive_every_connection(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections cut in the middle of many commands: each ends once, with complete output."""
    monkeypatch.setattr(commands, "LOOK", 0.2)
    results: dict[int, tuple[int, bytes]] = {}

    async with shell_sandbox(shell) as (session, connect, _):

        async def one(number: int) -> None:
            script = f"echo {number} >> runs; echo first; sleep 0.7; seq {number} 2000; exit {number}"
            result = await session.exec(Command(command=script))
            results[number] = (result.exit_code, result.stdout)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(one, number)
                await anyio.sleep(0.3)
                for connection in connect.connections:
                    connection.cut()
            runs = (await session.exec(Command(command="sort -n runs"))).stdout

        assert len(connect.connections) == 2
    assert runs == b"".join(b"%d\n" % n for n in range(8))
    for number in range(8):
        lines = b"".join(b"%d\n" % i for i in range(number, 2001))
        assert results[number] == (number, b"first\n" + lines)


async def test_the_old_shell_is_ended() -> None:
    """After a connection was made again one shell serves requests: the old one cannot start anything late."""
    async with shell_sandbox() as (session, connect, _):
        old = session.facts["pid"]
        assert (await session.exec(Command(command=["ls", f"/proc/{old}"]))).ok
        connect.connections[0].cut()

        assert not (await session.exec(Command(command=["ls", f"/proc/{old}"]))).ok
        assert len(connect.connections) == 2


async def test_a_command_is_started_once_however_often_it_is_asked_for() -> None:
    """A request to start that arrives twice starts nothing the second time."""
    async with shell_sandbox() as (session, _, __):
        commands = session._commands
        call = commands.register(Command(command="echo ran >> runs"))
        await commands.start(call, "null")
        await commands.start(call, "null")
        await commands.wait(call)
        await commands.start(call, "null")

        assert (await session.exec(Command(command="sleep 0.2; cat runs"))).stdout == b"ran\n"


async def test_p05_silence_is_noticed() -> None:
    """A connection that says nothing any more is given up after its heartbeat, and another one takes over."""
    async with shell_sandbox(heartbeat=0.2, heartbeat_timeout=0.5) as (session, connect, _):
        first = connect.connections[0]
        deaf = anyio.Event()

        async def receive() -> tuple[int, bytes]:
            await deaf.wait()
            raise anyio.EndOfStream

        first.receive = receive  # type: ignore[method-assign]
        with anyio.fail_after(60):
            result = await session.exec(Command(command="sleep 0.3; echo heard"))

        assert result.stdout == b"heard\n"
        assert len(connect.connections) > 1


async def test_p10_idle_timers_are_reset() -> None:
    """A quiet connection is used now and then: by something that every proxy takes for traffic."""
    async with shell_sandbox(heartbeat=0.1) as (session, connect, _):
        with anyio.fail_after(30):
            while connect.connections[0].kept_alive < 2:  # noqa: ASYNC110 - a counter of the fake
                await anyio.sleep(0.05)
        assert session.alive


async def test_refusals_that_pass_are_tried_again() -> None:
    """While the API server is away, connecting is tried again; the command loses nothing."""
    async with shell_sandbox() as (session, connect, _):
        refused = 0

        def refuse(_: int) -> Exception | None:
            nonlocal refused
            refused += 1
            return ApiUnavailable("away") if refused <= 3 else None

        connect.refuse = refuse
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:

                async def cut() -> None:
                    await anyio.sleep(0.2)
                    connect.connections[0].cut()

                group.start_soon(cut)
                result = await session.exec(Command(command="echo one; sleep 0.5; echo two"))

        assert result.stdout == b"one\ntwo\n"
        assert refused == 4


async def test_p01_a_sandbox_that_is_gone_is_lost() -> None:
    """When nothing can be reached any more, the command gets an error: never an exit code."""
    async with shell_sandbox() as (session, connect, _):
        connect.refuse = lambda _: NotFound("no such Pod")

        async def cut() -> None:
            await anyio.sleep(0.2)
            connect.connections[0].cut()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(cut)
                with pytest.raises(StreamBroken, match="no such Pod"):
                    await session.exec(Command(command="sleep 340"))
        with pytest.raises(SandboxLost):
            await session.exec(Command(command=["true"]))
        assert not session.alive
        assert repr(session) == "<ShellSession [stream_ended, connection 1, 0 of 1 commands running]>"


async def test_time_limits_hold_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that fires while there is no connection is carried out when there is one again."""
    monkeypatch.setattr(control, "ATTACH_WAIT", 0.1)
    monkeypatch.setattr(commands, "LOOK", 0.2)
    async with shell_sandbox() as (session, connect, _):

        def refuse(_: int) -> Exception | None:
            running = session._commands._running.values()
            return ApiUnavailable("away") if any(call.limit is None for call in running) else None

        connect.refuse = refuse

        async def cut() -> None:
            await anyio.sleep(0.2)
            connect.connections[0].cut()

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(cut)
                with pytest.raises(CommandTimeout) as caught:
                    await session.exec(Command(command="echo before; sleep 341", timeout=0.5))
            alive = await session.exec(Command(command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))

        assert caught.value.stdout == b"before\n"
        assert b"sleep 341" not in alive.stdout


async def test_a_death_that_was_told_to_nobody_is_asked_for_again() -> None:
    """A command is killed and known to be dead, also when the connection is lost just before that is told."""
    async with shell_sandbox() as (session, connect, _):
        first = connect.connections[0]
        receive = first.receive

        async def cut_before_the_news() -> tuple[int, bytes]:
            channel, data = await receive()
            if channel == STDERR and b" K " in data:
                first.cut()
                raise anyio.BrokenResourceError
            return channel, data

        first.receive = cut_before_the_news  # type: ignore[method-assign]
        with anyio.fail_after(60), pytest.raises(CommandTimeout) as caught:
            await session.exec(Command(command="echo before; sleep 349", timeout=0.3))
        alive = await session.exec(Command(command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))

        assert caught.value.stdout == b"before\n"
        assert b"sleep 349" not in alive.stdout
        assert len(connect.connections) == 2


async def test_a_request_that_ends_every_shell_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends each shell that is asked for it is not asked for ever, however well all else is answered."""
    monkeypatch.setattr(control, "ATTACH_WAIT", 0.01)
    async with shell_sandbox() as (session, connect, _):

        async def ask_for_more() -> None:
            with pytest.raises(SandboxLost):
                while True:
                    await session._control.request(":")

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(ask_for_more)
                with pytest.raises(StreamBroken, match="6 times over the same request"):
                    await session._control.request("exit 3")

        assert not session.alive
        assert len(connect.connections) == 1 + control.FRUITLESS - 1


def rewrite_news_of_death(connect: LocalConnect, news: bytes) -> None:
    """Have the driver hear something else when a command was killed."""

    def wrap(_: int, connection: LocalConnection) -> LocalConnection:
        receive = connection.receive

        async def rewritten() -> tuple[int, bytes]:
            channel, data = await receive()
            return channel, re.sub(rb" K (\d+)", news, data) if channel == STDERR else data

        connection.receive = rewritten  # type: ignore[method-assign]
        return connection

    connect.wrap = wrap
    wrap(0, connect.connections[0])


async def test_a_death_that_is_never_confirmed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing ever says that a command is dead, the sandbox is given up, and the call ends."""
    for constant, seconds in {"GRACE": 0.05, "KILL_LAST": 0.05, "KILL_AGAIN": 0.05}.items():
        monkeypatch.setattr(commands, constant, seconds)
    async with shell_sandbox() as (session, connect, _):
        rewrite_news_of_death(connect, rb" ? \1")
        with anyio.fail_after(60), pytest.raises(SandboxLost, match="the death of command 1 was not confirmed"):
            await session.exec(Command(command="sleep 350", timeout=0.3))

        assert not session.alive


async def test_what_cannot_be_killed_is_named() -> None:
    """A sandbox with a process that outlives its killing is given up, and the process named."""
    async with shell_sandbox() as (session, connect, _):
        rewrite_news_of_death(connect, b" K \\1 %d" % int(session.facts["pid"]))
        with anyio.fail_after(60), pytest.raises(SandboxLost, match=r"unkillable.*sh -c"):
            await session.exec(Command(command="sleep 350", timeout=0.3))

        assert not session.alive


async def test_a_command_that_nothing_took_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that the sandbox was told of, and of which there is no trace there, did not start, and never will."""
    monkeypatch.setattr(commands, "BORN", 0.2)
    monkeypatch.setattr(commands, "LOOK", 0.1)
    async with shell_sandbox() as (session, _, __):
        running = session._commands
        call = running.register(Command(command="echo ran >> runs"))
        call.began = call.asked = anyio.current_time()
        running._wakeup.set()
        with anyio.fail_after(60):
            await running.wait(call)
        await running.start(call, "null")  # it may have been on its way all the time

        with pytest.raises(StartError, match="no process"):
            raise call.error()
        assert not (await session.exec(Command(command="sleep 0.2; cat runs"))).ok
