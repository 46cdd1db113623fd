# SPDX-License-Identifier: Apache-2.0
"""One connection a command: results, and what becomes of a sandbox when something cannot be known or done."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from shells import LocalConnect, shell_sandbox

from agentsandbox.errors import (
    ApiUnavailable,
    CommandNotExecutable,
    CommandNotFound,
    ConfigurationError,
    OutputLimitExceeded,
    SandboxLost,
    StartError,
    StreamBroken,
)
from agentsandbox.models.command import Command, OutputSizes
from agentsandbox.session.levels import DirectSession
from agentsandbox.session.levels.direct import NO_PROGRAM
from agentsandbox.transport.websocket import ExecStatus

pytestmark = pytest.mark.anyio

RUNC = (
    "Internal error occurred: Internal error occurred: error executing command in container: "
    'failed to exec in container: failed to start exec "4cf9": OCI runtime exec failed: exec failed: '
    "unable to start container process: exec: {}: unknown"
)


def refusal(words: str) -> ExecStatus:
    """Return the status of a command that the runtime did not start."""
    return ExecStatus(exit_code=None, reason="InternalError", message=RUNC.format(words))


class Scripted:
    """A connection whose other end is a list: pieces of output, then a status or none."""

    def __init__(self, pieces: Sequence[tuple[int, bytes]], end: ExecStatus | None, protocol: str) -> None:
        self.protocol = protocol
        self.status: ExecStatus | None = None
        self.closed = False
        self.sent = b""
        self.stdin_ended = False
        self.kept_alive = 0
        self._pieces = list(pieces)
        self._end = end
        self.breaks = False

    async def receive(self) -> tuple[int, bytes]:
        await anyio.lowlevel.checkpoint()
        if self._pieces:
            if self._pieces[0][0] < 0:
                await anyio.sleep_forever()
            return self._pieces.pop(0)
        self.status = self._end
        raise anyio.BrokenResourceError if self.breaks else anyio.EndOfStream

    async def send(self, data: bytes) -> None:
        self.sent += data

    async def end_stdin(self) -> bool:
        self.stdin_ended = self.protocol.startswith("v5")
        return self.stdin_ended

    async def keep_alive(self) -> None:
        self.kept_alive += 1

    async def aclose(self) -> None:
        self.closed = True


HANG = (-1, b"")


class Server:
    """Answers each command with what the test has put in; the ping is always answered."""

    def __init__(self, protocol: str = "v5.channel.k8s.io") -> None:
        self.protocol = protocol
        self.pieces: Sequence[tuple[int, bytes]] = ()
        self.end: ExecStatus | None = ExecStatus(exit_code=0)
        self.commands: list[tuple[tuple[str, ...], bool]] = []
        self.connections: list[Scripted] = []
        self.refuse: Exception | None = None
        self.breaks = False

    async def __call__(self, command: Sequence[str], *, stdin: bool = False) -> Any:
        if list(command) == [NO_PROGRAM]:
            return Scripted([], refusal(f'"{NO_PROGRAM}": stat {NO_PROGRAM}: no such file or directory'), self.protocol)
        self.commands.append((tuple(command), stdin))
        if self.refuse is not None:
            raise self.refuse
        self.connections.append(Scripted(self.pieces, self.end, self.protocol))
        self.connections[-1].breaks = self.breaks
        return self.connections[-1]


@asynccontextmanager
async def session_with(connect: Any, **options: Any) -> AsyncIterator[DirectSession]:
    """Run a session over *connect*."""
    async with anyio.create_task_group() as group:
        session = DirectSession(connect, **options)
        await group.start(session.run)
        yield session
        await session.aclose()


async def test_p07_exit_code_and_both_streams() -> None:
    """The exit code comes from the status, and standard output and error stay apart, byte for byte."""
    server = Server()
    server.pieces = [(1, b"hi\n"), (2, b"warn\n"), (1, b"\xff\x00")]
    server.end = ExecStatus(exit_code=3, reason="NonZeroExitCode")
    async with session_with(server) as session:
        result = await session.exec(Command(command=["prog", "a b"]))
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"hi\n\xff\x00", b"warn\n")
        assert result.sizes == OutputSizes(stdout=5, stderr=5)
        assert server.commands == [(("prog", "a b"), False)]
        assert server.connections[0].closed
        assert repr(session) == "<DirectSession [ready, 0 of 1 commands running]>"


async def test_p01_no_status_is_no_success() -> None:
    """A connection that ends without a status gives an error with the partial output, and ends the session."""
    server = Server()
    server.pieces, server.end = [(1, b"partial")], None
    async with session_with(server) as session:
        with pytest.raises(StreamBroken, match="without its exit code") as caught:
            await session.exec(Command(command=["prog"]))
        assert caught.value.stdout == b"partial"
        assert not session.alive
        with pytest.raises(StreamBroken):
            await session.exec(Command(command=["prog"]))
        assert len(server.commands) == 1


async def test_p01_a_status_on_a_broken_connection_is_no_success() -> None:
    """What a connection says of its command when it breaks is not believed: output may have been lost on the way."""
    server = Server()
    server.pieces, server.breaks = [(1, b"partial")], True
    async with session_with(server) as session:
        with pytest.raises(StreamBroken, match="without its exit code") as caught:
            await session.exec(Command(command=["prog"]))
        assert caught.value.stdout == b"partial"
        assert not session.alive


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ('"prog": executable file not found in $PATH', CommandNotFound),
        ('"prog": stat prog: no such file or directory', CommandNotFound),
        ('"prog": permission denied', CommandNotExecutable),
        ('"prog": exec format error', CommandNotExecutable),
    ],
    ids=["not found", "no such file", "not executable", "format"],
)
async def test_p03_start_errors_are_typed(words: str, kind: type[StartError]) -> None:
    """What the runtime did not start is a start error with its words; the session goes on."""
    server = Server()
    server.end = refusal(words)
    async with session_with(server) as session:
        with pytest.raises(kind, match=words.split(": ")[1].replace("$", r"\$")):
            await session.exec(Command(command=["prog"]))
        assert session.alive


async def test_other_internal_errors_lose_the_sandbox() -> None:
    """A status that says nothing about the command is no start error: the outcome is unknown."""
    server = Server()
    server.end = ExecStatus(exit_code=None, reason="InternalError", message="error dialing backend: EOF")
    async with session_with(server) as session:
        with pytest.raises(SandboxLost, match="error dialing backend: EOF"):
            await session.exec(Command(command=["prog"]))
        assert not session.alive


async def test_what_needs_a_shell_is_refused() -> None:
    """Scripts, files and everything else that needs a shell are refused with the level's name; nothing is sent."""
    server = Server()
    async with session_with(server) as session:
        with pytest.raises(StartError, match="no shell"):
            await session.exec(Command(command="echo hi"))
        for options in ({"cwd": "/tmp"}, {"env": {"A": "b"}}, {"user": "root"}, {"merge": True}):
            with pytest.raises(ConfigurationError, match="'direct'"):
                await session.exec(Command(command=["prog"], **options))
        with pytest.raises(ConfigurationError, match="files are not possible at exec level 'direct'"):
            await session.read_file("f")
        with pytest.raises(ConfigurationError, match="files"):
            await session.write_file("f", b"")
        with pytest.raises(ConfigurationError, match="files"):
            await session.upload_dir(Path(), "d")
        with pytest.raises(ConfigurationError, match="files"):
            await session.download_dir("d", Path())
        with pytest.raises(ConfigurationError, match="live processes"):
            await session.open_process(Command(command=["prog"]))
        assert server.commands == []


async def test_p18_arguments_have_a_limit() -> None:
    """Arguments that do not fit into a URL are refused with the limit, before anything is sent."""
    server = Server()
    async with session_with(server) as session:
        with pytest.raises(ConfigurationError, match="2048"):
            await session.exec(Command(command=["prog", "x" * 2048]))
        assert server.commands == []
        assert (await session.exec(Command(command=["prog", "x" * 2000]))).ok


async def test_p08_stdin_is_sent_and_ended() -> None:
    """Standard input is sent whole and then ended; without any, the server is told that there is none."""
    server = Server()
    server.pieces = [(1, b"x")] * 50
    async with session_with(server) as session:
        assert (await session.exec(Command(command=["cat"]), stdin=b"hello")).ok
        assert server.commands[-1] == (("cat",), True)
        assert (server.connections[-1].sent, server.connections[-1].stdin_ended) == (b"hello", True)


async def test_what_input_raises_is_passed_on() -> None:
    """What the caller's own input raises reaches the caller as it is; pieces before it were sent."""

    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"ab"
        raise LookupError("no more")

    server = Server()
    for count in (0, 2):
        async with session_with(server) as session:
            with pytest.raises(LookupError, match="no more"):
                await session.exec(Command(command=["cat"]), stdin=pieces(count))
        assert server.connections[-1].sent == b"ab" * count


async def test_p08_stdin_that_cannot_be_ended_is_refused() -> None:
    """Where the server cannot end standard input, a command with one is refused before it starts."""
    server = Server("v4.channel.k8s.io")
    async with session_with(server) as session:
        with pytest.raises(ConfigurationError, match="v4"):
            await session.exec(Command(command=["cat"]), stdin=b"hello")
        assert server.commands == []
        assert (await session.exec(Command(command=["cat"]))).ok


@pytest.mark.parametrize("limit", ["timeout", "no_output_timeout"])
async def test_p05_a_command_that_runs_too_long_loses_the_sandbox(limit: str) -> None:
    """Nothing can kill it: the caller gets its output back, and the sandbox is given up, saying why."""
    server = Server()
    server.pieces = [(1, b"before\n"), HANG]
    async with session_with(server) as session:
        with anyio.fail_after(30), pytest.raises(SandboxLost, match="cannot be killed") as caught:
            await session.exec(Command(command=["prog"], **{limit: 0.1}))
        assert (caught.value.reason, caught.value.stdout) == ("unkillable", b"before\n")
        assert server.connections[0].closed
        assert session.lost is not None


async def test_p14_a_cancelled_command_loses_the_sandbox() -> None:
    """A command whose caller is cancelled may still run, so that the sandbox is given up."""
    server = Server()
    server.pieces = [HANG]
    async with session_with(server) as session:
        with anyio.move_on_after(0.1):
            await session.exec(Command(command=["prog"]))
        assert session.lost is not None
        assert session.lost.reason == "unkillable"
        assert server.connections[0].closed


async def test_p10_idle_timers_are_reset() -> None:
    """While a command is quiet, the connection is used now and then."""
    server = Server()
    server.pieces = [HANG]
    async with session_with(server, keep_alive=0.05) as session:
        with anyio.move_on_after(0.5):
            await session.exec(Command(command=["prog"]))
        assert server.connections[0].kept_alive >= 2


async def test_p06_an_unanswered_start_is_not_repeated() -> None:
    """A connection that fails while it is made is not tried again: the command may have started."""
    server = Server()
    server.refuse = ApiUnavailable("reset", ambiguous=True)
    async with session_with(server) as session:
        with pytest.raises(ApiUnavailable):
            await session.exec(Command(command=["prog"]))
        assert len(server.commands) == 1
        assert not session.alive


async def test_p24_output_is_capped_and_streamed() -> None:
    """Head and tail of too much output are kept, and a callback gets all of it, in order."""
    server = Server()
    server.pieces = [(1, b"%04d" % n) for n in range(100)]
    seen = b""

    async def on_output(stream: str, data: bytes) -> None:
        nonlocal seen
        assert stream == "stdout"
        seen += data

    async with session_with(server) as session:
        result = await session.exec(Command(command=["prog"], output_limit=16), on_output=on_output)
        assert seen == b"".join(b"%04d" % n for n in range(100))
        assert (result.stdout, result.truncated, result.sizes.stdout) == (b"0000000100980099", True, 400)
        with pytest.raises(OutputLimitExceeded):
            await session.exec(Command(command=["prog"], output_limit=16), require_complete=True)


async def test_callbacks_that_raise_are_passed_on() -> None:
    """What a callback raises reaches the caller."""

    async def on_output(_: str, __: bytes) -> None:
        raise LookupError("mine")

    server = Server()
    server.pieces = [(1, b"x")]
    async with session_with(server) as session:
        with pytest.raises(LookupError, match="mine"):
            await session.exec(Command(command=["prog"]), on_output=on_output)


async def test_real_processes() -> None:
    """Over real processes: exit codes, input of 5 MiB, errors of starting."""
    async with shell_sandbox() as (_, connect, runner):
        assert isinstance(connect, LocalConnect)
        async with session_with(connect) as session:
            assert (await session.exec(Command(command=["sh", "-c", "echo out; exit 9"]))).exit_code == 9
            data = b"0123456789abcdef" * (5 * 65536)
            assert (await session.exec(Command(command=["wc", "-c"]), stdin=data)).text.strip() == str(len(data))
            with pytest.raises(CommandNotFound):
                await session.exec(Command(command=["no-such-program-4711"]))
            with pytest.raises(CommandNotExecutable):
                await session.exec(Command(command=["/etc/passwd"]))
            assert session.facts["level"] == "direct"
        assert runner.alive
