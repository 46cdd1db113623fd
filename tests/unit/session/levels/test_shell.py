# SPDX-License-Identifier: Apache-2.0
"""What a shell session says of itself, and its rules beyond the contract of backends."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from shells import shell_sandbox
from test_direct import Scripted, refusal

from agentsandbox.errors import (
    CommandNotExecutable,
    CommandNotFound,
    CommandTimeout,
    ConfigurationError,
    SandboxLost,
    StartError,
    StreamBroken,
    UserNotFound,
)
from agentsandbox.models.command import Command
from agentsandbox.session.levels import ShellSession
from agentsandbox.session.levels.call import Record
from agentsandbox.session.levels.scripts import BOOT

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("backend")]


async def test_facts_and_repr(shell: str) -> None:
    """A session says what its sandbox is like, and its state in one line."""
    async with shell_sandbox(shell) as (session, _, __):
        facts = session.facts
        assert (facts["level"], facts["python"], facts["users"], facts["missing"]) == ("shell", None, False, [])
        assert facts["workdir"] == "/workspace"
        assert facts["uid"] == os.getuid() or facts["uid"] == 1000
        assert repr(session) == "<ShellSession [attached, connection 1, 0 of 0 commands running]>"
        assert await session.ping() >= 0
        await session.exec(Command(command=["true"]))
        assert repr(session) == "<ShellSession [attached, connection 1, 0 of 1 commands running]>"


async def test_state_is_private_and_goes_away() -> None:
    """The directory with our state is nobody else's to read, and closing the session removes it."""
    async with shell_sandbox() as (session, _, runner):
        state = session.facts["state"]
        listing = await runner.exec(Command(command=f"stat -c %a {state}"))
        assert listing.text.strip() == "700"
        await session.aclose()
        assert not (await runner.exec(Command(command=["ls", state]))).ok
        with pytest.raises(StreamBroken, match="closed"):
            await session.exec(Command(command=["true"]))


async def test_remains_of_commands_are_removed() -> None:
    """Many commands do not fill the disk: their remains are removed now and then, large output at once."""
    async with shell_sandbox() as (session, _, runner):
        for _ in range(40):
            await session.exec(Command(command="echo hi"))
        await session.exec(Command(command="yes | head -c 20000000", output_limit=1024))
        state = session.facts["state"]
        files = (await runner.exec(Command(command=f"ls {state} | wc -l; cat {state}/* | wc -c"))).text.split()
        assert int(files[0]) < 16 * 8
        assert int(files[1]) < 100_000


async def test_p18_nothing_of_the_user_is_in_the_argument_vector() -> None:
    """What the server sees of a command is always the same few bytes."""
    async with shell_sandbox() as (session, connect, _):
        seen: list[Sequence[str]] = []
        inner = type(connect).__call__

        async def spy(command: Sequence[str], *, stdin: bool = False) -> Any:
            seen.append(command)
            return await inner(connect, command, stdin=stdin)

        session._control.connect = spy
        await session.exec(Command(command="cat >/dev/null; : " + "x" * 300_000), stdin=b"y" * 3_000_000)
        await session.write_file("name" * 50, b"z" * 3_000_000)
        assert seen
        assert all(list(command) == ["sh", "-c", BOOT, "sh"] for command in seen)
        assert sum(map(len, ["sh", "-c", BOOT, "sh"])) < 200


async def test_p08_input_does_not_need_an_end(shell: str) -> None:
    """Input of every size arrives whole over connections that cannot end it."""
    async with shell_sandbox(shell) as (session, connect, _):

        def wrap(_: int, connection: Any) -> Any:
            async def cannot() -> bool:
                raise AssertionError("standard input was to be ended")

            connection.end_stdin = cannot
            return connection

        connect.wrap = wrap
        for size in (0, 1, 4095, 4096, 4097, 1024 * 1024, 5_000_001):
            data = os.urandom(size)
            result = await session.exec(Command(command=["sha256sum"]), stdin=data)
            assert result.text.split()[0] == hashlib.sha256(data).hexdigest(), size


async def test_p09_data_that_got_lost_on_the_way_is_noticed() -> None:
    """A file whose contents do not arrive is never reported as written."""
    async with shell_sandbox() as (session, connect, _):

        def wrap(_: int, connection: Any) -> Any:
            send, sent = connection.send, 0

            async def lossy(data: bytes) -> None:
                nonlocal sent
                sent += 1
                await send(data if sent != 2 else bytes(len(data)))

            connection.send = lossy
            return connection

        connect.wrap = wrap
        with pytest.raises(SandboxLost, match="did not arrive"):
            await session.write_file("f", os.urandom(3_000_000))
        assert not session.alive


async def test_start_errors_are_told_apart(shell: str) -> None:
    """What cannot start is told apart, also a script without its interpreter; a program's own 127 is a result."""
    async with shell_sandbox(shell) as (session, _, __):
        await session.exec(Command(command="printf '#!/no/such/thing\\n' > bad; echo x > plain; chmod +x bad; mkdir d"))
        for argv, kind in [
            (["./bad"], CommandNotFound),
            (["./nothing"], CommandNotFound),
            (["bad"], CommandNotFound),
            (["./plain"], CommandNotExecutable),
            (["./d"], CommandNotExecutable),
            (["plain/below"], CommandNotFound),
            (["cd", "/"], CommandNotFound),
            ([""], CommandNotExecutable),
        ]:
            with pytest.raises(StartError) as caught:
                await session.exec(Command(command=argv))
            assert type(caught.value) is kind, argv
        for code in (126, 127):
            assert (await session.exec(Command(command=["sh", "-c", f"exit {code}"]))).exit_code == code
            assert (await session.exec(Command(command=f"exit {code}"))).exit_code == code
        assert (await session.exec(Command(command=["true"], env={"PATH": "/nowhere:/bin:/usr/bin"}))).ok


async def test_other_users_are_refused_where_there_are_none() -> None:
    """Where commands cannot run as somebody else, that is said; one's own name is no somebody else."""
    async with shell_sandbox() as (session, _, __):
        with pytest.raises(UserNotFound, match="one user only"):
            await session.exec(Command(command="id", user="daemon"))
        with pytest.raises(ConfigurationError, match="'shell'"):
            await session.read_file("f", user="daemon")
        uid = session.facts["uid"]
        assert (await session.exec(Command(command="id -u", user=uid))).text.strip() == str(uid)


async def test_the_working_directory_can_be_another_one() -> None:
    """With ``workdir=`` commands start there, and relative paths begin there."""
    async with shell_sandbox(workdir="/tmp") as (session, _, __):
        await session.write_file("sub/f", b"x")
        assert (await session.exec(Command(command="pwd; cat sub/f"))).stdout == b"/tmp\nx"
        assert (await session.exec(Command(command=["pwd"], cwd="sub"))).stdout == b"/tmp/sub\n"


async def test_slow_callbacks_lose_nothing() -> None:
    """A callback that is slow gets all output, and the command does not wait for it."""
    seen: list[bytes] = []

    async def on_output(_: str, data: bytes) -> None:
        seen.append(data)
        await anyio.sleep(0.05)

    async with shell_sandbox() as (session, _, __):
        result = await session.exec(Command(command="seq 1 300000"), on_output=on_output)
        assert b"".join(seen) == result.stdout
        assert result.stdout == b"".join(b"%d\n" % n for n in range(1, 300_001))


async def test_what_callbacks_raise_is_passed_on_and_the_command_killed() -> None:
    """A callback, a start callback or an input that raises ends the command, and its exception reaches the caller."""

    async def on_output(_: str, __: bytes) -> None:
        raise LookupError("output")

    def on_started() -> None:
        raise LookupError("started")

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x"
        raise LookupError("input")

    async with shell_sandbox() as (session, _, runner):
        for options in ({"on_output": on_output}, {"on_started": on_started}, {"stdin": pieces()}):
            with anyio.fail_after(30), pytest.raises(LookupError):
                await session.exec(Command(command="echo x; sleep 344"), **options)
        listing = await runner.exec(Command(command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))
        assert "sleep 344" not in listing.text
        assert (await session.exec(Command(command="echo good"))).stdout == b"good\n"


async def test_leftovers_are_named(shell: str) -> None:
    """Processes that outlive their command are named, in whatever session they are."""
    async with shell_sandbox(shell) as (session, _, __):
        result = await session.exec(Command(command="sleep 345 >/dev/null 2>&1 & setsid sleep 346 & sleep 0.1; echo x"))
        assert sorted(process.command for process in result.leftovers) == ["sleep 345", "sleep 346"]
        assert result.stdout == b"x\n"


async def test_live_processes_that_do_not_start() -> None:
    """A live process that cannot start is a start error, as every command; the sandbox is still good."""
    async with shell_sandbox() as (session, _, __):
        with anyio.fail_after(30):
            with pytest.raises(CommandNotFound, match="no-such-program"):
                await session.open_process(Command(command=["no-such-program"]))
            async with await session.open_process(Command(command=["cat"])) as process:
                await process.stdin.send(b"x")
                await process.stdin.aclose()
                await process.stdin.aclose()
                with pytest.raises(anyio.ClosedResourceError):
                    await process.stdin.send(b"y")
                assert [data async for data in process.stdout] == [b"x"]
                assert (await process.wait(), process.running) == (await process.wait(), False)
            await process.aclose()


async def test_a_generator_of_input_is_closed_when_the_command_has_ended() -> None:
    """What gives input is closed when the command ends before it has taken everything."""
    closed = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal closed
        try:
            while True:
                yield bytes(1024 * 1024)
        finally:
            await anyio.lowlevel.checkpoint()
            closed += 1

    async with shell_sandbox() as (session, _, __):
        assert (await session.exec(Command(command=["head", "-c", "1"]), stdin=pieces())).stdout == b"\0"
        assert (await session.exec(Command(command=["true"]), stdin=pieces())).ok
    assert closed == 2


async def test_input_that_nobody_takes() -> None:
    """Input waits when the process does not read it, and is refused when it has ended."""
    async with shell_sandbox() as (session, _, __):
        with anyio.fail_after(30):
            async with await session.open_process(Command(command="sleep 0.7")) as process:
                with pytest.raises(anyio.BrokenResourceError):
                    for _ in range(1000):
                        await process.stdin.send(bytes(1024 * 1024))
                assert (await process.wait()).exit_code == 0


async def test_what_makes_no_sense_is_refused() -> None:
    """Input that is no bytes, and names that no file can have, are refused before anything is asked for."""
    async with shell_sandbox() as (session, _, __):
        with pytest.raises(ConfigurationError, match="not str"):
            await session.exec(Command(command=["cat"]), stdin="text")
        with pytest.raises(ValueError, match="null byte"):
            await session.read_file("a\0b")
        assert session._commands.count == 0


async def test_reprs_show_the_state() -> None:
    """Each part of a session shows its state in one line."""
    async with shell_sandbox() as (session, _, __):
        commands = session._commands
        call = commands.register(Command(command="sleep 351"))
        assert repr(call) == "<Call 1 [starting]>"
        assert repr(commands) == "<Commands [1 running of 1]>"
        assert repr(commands.control) == "<Control [attached, connection 1, 0 requests waiting]>"
        assert repr(commands.store) == f"<Store {session.facts['state']}>"
        await commands.start(call, "null")
        while call.pid is None:
            await call.changed.wait()
        assert repr(call) == "<Call 1 [running]>"
        await commands.kill(call)
        assert repr(call) == "<Call 1 [ended]>"
        commands.release(call)
    assert repr(commands.control) == "<Control [closed, connection 1, 0 requests waiting]>"


async def test_p23_limits_of_a_live_process() -> None:
    """A time limit holds for a live process too, whether anybody reads it or not."""
    async with shell_sandbox() as (session, _, __):
        with anyio.fail_after(30):
            async with await session.open_process(Command(command="echo x; sleep 347", timeout=0.5)) as process:
                with pytest.raises(CommandTimeout):
                    await process.wait()
                assert not process.running


async def test_a_sandbox_without_a_shell_is_told() -> None:
    """A session is not made where there is no shell; the runtime's words say so."""

    async def connect(command: Sequence[str], *, stdin: bool = False) -> Any:
        return Scripted([], refusal(f'"{command[0]}": executable file not found in $PATH'), "v5.channel.k8s.io")

    session = ShellSession(connect)
    with anyio.fail_after(30), pytest.raises(SandboxLost, match="executable file not found") as caught:
        await session.run()
    assert caught.value.reason == "no_shell"


async def test_files_and_directories_of_odd_names(tmp_path: Path, shell: str) -> None:
    """Names that no shell likes are written, read and copied like any other."""
    names = ["-n", "a\nb", "it's", "$(id)", "\udcff\udc80", " ", "é✨"]
    (tmp_path / "there").mkdir()
    async with shell_sandbox(shell) as (session, _, __):
        for name in names:
            await session.write_file(f"d/{name}", name.encode("utf-8", "surrogateescape"))
            assert await session.read_file(f"d/{name}") == name.encode("utf-8", "surrogateescape")
        await session.download_dir("d", tmp_path / "here")
        assert sorted(os.listdir(tmp_path / "here")) == sorted(names)
        await session.upload_dir(tmp_path / "here", "again")
        for name in names:
            assert await session.read_file(f"again/{name}") == name.encode("utf-8", "surrogateescape")


async def test_hard_links_and_hostile_archives(tmp_path: Path) -> None:
    """Hard links come out as files; links that leave the directory are refused, and nothing is written."""
    async with shell_sandbox() as (session, _, __):
        await session.exec(Command(command="mkdir d e; echo x > d/a; ln d/a d/b; mkfifo d/p; ln -s /etc/passwd e/out"))
        await session.download_dir("d", tmp_path / "d")
        assert sorted(os.listdir(tmp_path / "d")) == ["a", "b"]
        assert (tmp_path / "d" / "b").read_bytes() == b"x\n"
        with pytest.raises(PermissionError, match="refused"):
            await session.download_dir("e", tmp_path / "e")
        assert os.listdir(tmp_path / "e") == []


def test_records_are_parsed_with_distrust() -> None:
    """What is no record of ours is none."""
    assert Record.parse(["3", "150", "7", "0", "12", "13"]) == Record(
        code=3, wall=1.5, cpu=0.07, cut=False, leftovers=(12, 13)
    )
    for words in ([], ["0"], ["x", "1", "1", "0"], ["256", "1", "1", "0"], ["0", "-1", "1", "0"], ["1", "1", "1"]):
        assert Record.parse(words) is None
