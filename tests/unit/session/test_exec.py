# SPDX-License-Identifier: Apache-2.0
"""What a command gives its caller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from agentsandbox.errors import (
    CommandNotExecutable,
    CommandNotFound,
    CommandTimeout,
    ConfigurationError,
    OutputLimitExceeded,
    SandboxLost,
    StartError,
    UserNotFound,
    WorkingDirectoryNotFound,
)
from agentsandbox.models.command import Command, ExecResult, OutputSizes, ProcessInfo
from agentsandbox.protocol import frames

pytestmark = pytest.mark.anyio
TRUE = Command(command=["true"])


async def succeed(command: Any) -> None:
    command.started()
    command.exit()


async def test_p07_exit_code_and_both_streams_reach_the_caller(connected: Any) -> None:
    """
    The result has the exit code, standard output and standard error apart, and every other figure.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"hi\n")
        await command.out(b"warn\n", frames.STDERR)
        command.exit(3, leftovers=[[12, "sleep 60"]])

    async with connected(script) as (session, _):
        result = await session.exec(Command(command="x"))

    assert result == ExecResult(
        exit_code=3,
        stdout=b"hi\n",
        stderr=b"warn\n",
        truncated=False,
        sizes=OutputSizes(stdout=3, stderr=5),
        wall_seconds=0.25,
        cpu_seconds=0.125,
        peak_memory_bytes=4096,
        leftovers=(ProcessInfo(pid=12, command="sleep 60"),),
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (Command(command="echo $HOME"), {"script": "echo $HOME", "timeout": 300.0}),
        (Command(command=["echo", "\udcff"]), {"argv": ["echo", "\udcff"], "timeout": 300.0}),
        (
            Command(command=["a"], cwd="d", env={"A": "x\ny"}, user=7, timeout=2, no_output_timeout=0.5, merge=True),
            {
                "argv": ["a"],
                "cwd": "d",
                "env": {"A": "x\ny"},
                "user": 7,
                "timeout": 2,
                "no_output_timeout": 0.5,
                "merge": True,
            },
        ),
        (Command(command=["a"], timeout=float("inf"), no_output_timeout=None), {"argv": ["a"], "timeout": None}),
    ],
    ids=["script", "argv", "everything", "no timeout"],
)
async def test_what_is_asked_for(connected: Any, command: Command, expected: dict[str, Any]) -> None:
    """
    The runner is asked for exactly what the command says.
    """
    async with connected(succeed) as (session, peer):
        await session.exec(command)

    assert {
        "cwd": None,
        "env": {},
        "user": None,
        "stdin": False,
        "merge": False,
        "no_output_timeout": None,
        "grace": 1.0,
        "window": 1024 * 1024,
        **expected,
    } == peer.commands[1].request


async def test_p02_bytes_stay_bytes(connected: Any) -> None:
    """
    Output that is not UTF-8, or is split within a character, arrives byte for byte.
    """
    text = b"\xff\x00" + "é€😀".encode()

    async def script(command: Any) -> None:
        command.started()
        await command.out(text, piece=1)
        command.exit()

    async with connected(script) as (session, _):
        result = await session.exec(TRUE)

    assert text == result.stdout
    assert "\N{REPLACEMENT CHARACTER}\0é€😀" == result.text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("not_found", CommandNotFound),
        ("not_executable", CommandNotExecutable),
        ("no_user", UserNotFound),
        ("no_cwd", WorkingDirectoryNotFound),
        ("too_large", StartError),
        ("os_error", StartError),
        ("bad_request", ConfigurationError),
    ],
)
async def test_p03_start_errors_are_typed(connected: Any, kind: str, expected: type[Exception]) -> None:
    """
    A command that cannot be started raises its own error with the runtime's words, and the sandbox is still good.
    """

    async def script(command: Any) -> None:
        if command.number == 1:
            command.failed(kind, "thing: No such thing", "thing")
        else:
            await succeed(command)

    async with connected(script) as (session, _):
        with pytest.raises(expected, match="thing: No such thing") as caught:
            await session.exec(TRUE)
        assert type(caught.value) is expected
        assert "thing" == getattr(caught.value, "subject", "thing")
        assert (await session.exec(TRUE)).ok


@pytest.mark.parametrize(("limit", "seconds"), [("total", 1.0), ("no_output", 0.5)])
async def test_p23_a_timeout_carries_what_was_printed(connected: Any, limit: str, seconds: float) -> None:
    """
    The timeout says which limit fired, how long the command ran, and what it printed; the sandbox is still good.
    """

    async def script(command: Any) -> None:
        command.started()
        if command.number == 1:
            await command.out(b"before\n")
            await command.out(b"oops\n", frames.STDERR)
            command.exit(143, limit=limit, wall=1.5)
        else:
            command.exit()

    async with connected(script) as (session, _):
        with pytest.raises(CommandTimeout) as caught:
            await session.exec(Command(command="x", timeout=1.0, no_output_timeout=0.5))
        assert (limit, seconds, 1.5, b"before\n", b"oops\n") == (
            caught.value.limit,
            caught.value.seconds,
            caught.value.elapsed,
            caught.value.stdout,
            caught.value.stderr,
        )
        assert isinstance(caught.value, TimeoutError)
        assert (await session.exec(TRUE)).ok


async def test_survivors_end_the_session(connected: Any) -> None:
    """
    A process that could not be killed makes the sandbox lost; the timeout itself is still told.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit(137, limit="total", survivors=[[66, "undead"]])

    async with connected(script) as (session, _):
        with pytest.raises(CommandTimeout):
            await session.exec(Command(command="x", timeout=1))
        assert session.lost is not None
        assert ("unkillable", "66 undead") == (session.lost.reason, session.lost.detail)
        assert not session.alive
        with pytest.raises(SandboxLost, match="unkillable"):
            await session.exec(TRUE)


@pytest.mark.parametrize("require_complete", [False, True])
async def test_p24_endless_output_is_bounded_and_counted(connected: Any, require_complete: bool) -> None:
    """
    Of 50 MiB the head and the tail are kept, the true size is told, and who needs all of it gets an error.
    """
    cap, block = 1024 * 1024, bytes(range(256)) * 1024

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"head")
        for _ in range(200):
            await command.out(block)
        await command.out(b"tail")
        command.exit()

    async with connected(script) as (session, _):
        command = Command(command="yes", output_limit=cap)
        if require_complete:
            with pytest.raises(OutputLimitExceeded) as caught:
                await session.exec(command, require_complete=True)
            assert cap == caught.value.limit
            result = caught.value.result
        else:
            result = await session.exec(command)

    assert result.truncated
    assert OutputSizes(stdout=200 * len(block) + 8) == result.sizes
    assert cap == len(result.stdout)
    assert (b"head" + block * 2)[: cap // 2] == result.stdout[: cap // 2]
    assert (block * 2 + b"tail")[-cap // 2 :] == result.stdout[cap // 2 :]


async def test_complete_output_satisfies_require_complete(connected: Any) -> None:
    """
    Output of exactly the limit is complete.
    """

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"12345")
        command.exit()

    async with connected(script) as (session, _):
        result = await session.exec(Command(command="x", output_limit=5), require_complete=True)

    assert (b"12345", False) == (result.stdout, result.truncated)


async def cat(command: Any) -> None:
    command.started()
    data = await command.read_stdin()
    await command.out(data)
    command.exit()


@pytest.mark.parametrize("size", [0, 1, 1024 * 1024, 1024 * 1024 + 1, 50 * 1024 * 1024])
async def test_stdin_arrives_whole(connected: Any, size: int) -> None:
    """
    Standard input of any size arrives byte for byte and never beyond the runner's credit.
    """
    data = (bytes(range(256)) * (size // 256 + 1))[:size]

    async with connected(cat) as (session, peer):
        result = await session.exec(Command(command="cat", output_limit=size or 1), stdin=data)
        assert peer.commands[1].request["stdin"] is True
        assert all(len(frame.payload) <= frames.MAX_DATA for frame in peer.seen if frame.type == frames.STDIN)

    assert data == result.stdout


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_stdin_of_other_bytes_types(connected: Any, kind: Any) -> None:
    """
    Anything that is bytes is taken.
    """
    async with connected(cat) as (session, _):
        assert b"abc" == (await session.exec(Command(command="cat"), stdin=kind(b"abc"))).stdout


async def test_stdin_that_is_text(connected: Any) -> None:
    """
    Text has no encoding of its own and is refused before anything runs.
    """
    async with connected(cat) as (session, peer):
        with pytest.raises(ConfigurationError, match="not str"):
            await session.exec(Command(command="cat"), stdin="abc")
        assert {} == peer.commands


async def test_stdin_piece_by_piece(connected: Any) -> None:
    """
    An asynchronous iterable is sent as it comes, large pieces under credit.
    """

    async def pieces() -> AsyncIterator[bytes]:
        for size in (0, 1, 3 * 1024 * 1024, 5):
            yield b"x" * size
            await anyio.sleep(1)

    async with connected(cat) as (session, _):
        result = await session.exec(Command(command="cat"), stdin=pieces())

    assert b"x" * (3 * 1024 * 1024 + 6) == result.stdout


async def test_stdin_that_raises(connected: Any) -> None:
    """
    When the iterable raises, the command is killed and the exception reaches the caller as it is.
    """

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        raise LookupError("no more")

    async with connected(cat) as (session, peer):
        with pytest.raises(LookupError, match="no more"):
            await session.exec(Command(command="cat"), stdin=pieces())
        assert [1] == peer.kills
        assert session.alive


async def test_stdin_that_nobody_reads(connected: Any) -> None:
    """
    A command that ends without reading its standard input ends the call, also while the iterable waits.
    """
    closed = []

    async def pieces() -> AsyncIterator[bytes]:
        try:
            yield b"a" * 5 * 1024 * 1024
            await anyio.sleep_forever()
        finally:
            closed.append(True)

    async def script(command: Any) -> None:
        command.started()
        await anyio.sleep(1)
        command.exit(4)

    async with connected(script) as (session, _):
        iterator = pieces()
        result = await session.exec(TRUE, stdin=iterator)
        await iterator.aclose()

    assert (4, [True]) == (result.exit_code, closed)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_on_output_sees_everything_in_order(connected: Any, asynchronous: bool) -> None:
    """
    The callback gets each piece with the name of its stream, and the result has it all again.
    """
    seen: list[tuple[str, bytes]] = []

    def take(name: str, data: bytes) -> None:
        seen.append((name, data))

    async def take_slowly(name: str, data: bytes) -> None:
        await anyio.sleep(0.01)
        seen.append((name, data))

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"one")
        await command.out(b"two", frames.STDERR)
        await command.out(b"three")
        command.exit()

    async with connected(script) as (session, _):
        result = await session.exec(TRUE, on_output=take_slowly if asynchronous else take)

    assert [("stdout", b"one"), ("stderr", b"two"), ("stdout", b"three")] == seen
    assert (b"onethree", b"two") == (result.stdout, result.stderr)


async def test_on_output_holds_up_its_command_only(connected: Any) -> None:
    """
    A callback that does not return stops its own command at the end of its window; others go on.
    """
    blocked, release = anyio.Event(), anyio.Event()
    got = 0

    async def take(_: str, data: bytes) -> None:
        nonlocal got
        blocked.set()
        await release.wait()
        got += len(data)

    async def script(command: Any) -> None:
        command.started()
        if command.request.get("script"):
            for _ in range(20):
                await command.out(bytes(256 * 1024))
        command.exit()

    async with connected(script) as (session, peer), anyio.create_task_group() as group:
        group.start_soon(lambda: session.exec(Command(command="yes", timeout=None), on_output=take))
        await blocked.wait()
        for _ in range(100):
            assert (await session.exec(TRUE)).ok
        assert peer.commands[1].totals[frames.STDOUT] <= 1024 * 1024
        release.set()

    assert 20 * 256 * 1024 == got


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("with_stdin", [False, True])
async def test_on_output_that_raises(connected: Any, asynchronous: bool, with_stdin: bool) -> None:
    """
    The command is killed before the callback's exception reaches the caller.
    """

    def fail(_: str, data: bytes) -> None:
        raise LookupError(data)

    async def fail_later(_: str, data: bytes) -> None:
        await anyio.sleep(1)
        raise LookupError(data)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        await anyio.sleep_forever()

    async def script(command: Any) -> None:
        command.started()
        await command.out(b"boo")
        await anyio.sleep_forever()

    async with connected(script) as (session, peer):
        with pytest.raises(LookupError, match="boo"):
            await session.exec(
                TRUE, on_output=fail_later if asynchronous else fail, stdin=pieces() if with_stdin else None
            )
        assert [1] == peer.kills
        assert session.alive


async def test_on_started_tells_the_first_moment(connected: Any) -> None:
    """
    The callback runs when the command starts, not when it ends.
    """
    moments = []

    async def script(command: Any) -> None:
        await anyio.sleep(2)
        command.started()
        await anyio.sleep(5)
        command.exit()

    async with connected(script) as (session, _):
        begin = anyio.current_time()
        await session.exec(TRUE, on_started=lambda: moments.append(anyio.current_time() - begin))

    assert [pytest.approx(2)] == moments


async def test_on_started_that_raises(connected: Any) -> None:
    """
    Its exception reaches the caller, and neither the reader nor the session suffers.
    """

    def fail() -> None:
        raise LookupError("started")

    async with connected(succeed) as (session, _):
        with pytest.raises(LookupError, match="started"):
            await session.exec(TRUE, on_started=fail)
        assert (await session.exec(TRUE)).ok


async def test_commands_run_side_by_side(connected: Any) -> None:
    """
    Each of many commands gets its own output.
    """

    async def script(command: Any) -> None:
        command.started()
        await anyio.sleep(1 / command.number)
        await command.out(command.request["script"].encode())
        command.exit(command.number % 256)

    results: dict[int, ExecResult] = {}

    async with connected(script) as (session, _):

        async def one(number: int) -> None:
            results[number] = await session.exec(Command(command=f"c{number}"))

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(one, number)

    assert {n: f"c{n}".encode() for n in range(100)} == {n: result.stdout for n, result in results.items()}


@pytest.mark.parametrize("ending", ["exits", "is cancelled"])
async def test_input_that_nobody_takes_is_closed(connected: Any, ending: str) -> None:
    """
    The caller's generator is closed before the call returns, also when the command does not take the rest of it.
    """
    closed = False

    async def script(command: Any) -> None:
        command.started()
        while command.stdin_frames == 0:
            await command.changed.wait()
        if ending == "exits":
            command.exit(4)

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal closed
        try:
            while True:
                yield b"x" * 65536
        finally:
            await anyio.sleep(0.1)
            closed = True

    async with connected(script) as (session, _):
        with anyio.move_on_after(5) as scope:
            assert (await session.exec(Command(command="x"), stdin=pieces())).exit_code == 4
        assert scope.cancelled_caught == (ending == "is cancelled")
        assert closed


async def test_commands_that_are_too_large(connected: Any) -> None:
    """
    What no frame can carry is refused on this side, by size, and the session goes on.
    """
    async with connected(succeed) as (session, _):
        with pytest.raises(ConfigurationError, match="belong into a file"):
            await session.exec(Command(command="x" * (17 * 1024 * 1024)))
        assert (await session.exec(Command(command="x" * (2 * 1024 * 1024)))).ok
