# SPDX-License-Identifier: Apache-2.0
"""Commands that try to deceive or break a shell session: a wrong result is never the outcome."""

from __future__ import annotations

import anyio
import pytest
from shells import shell_sandbox

from agentsandbox.errors import CommandError, OutputLimitExceeded, SandboxLost
from agentsandbox.models.command import Command, ExecResult
from agentsandbox.session.levels import commands, results

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("backend")]

KEY = "key=$(cat /var/tmp/.agentsandbox-*/key);"


async def outcome(session: object, script: str) -> ExecResult | SandboxLost:
    """Run a script; what must not come of it raises."""
    with anyio.fail_after(60):
        try:
            return await session.exec(Command(command=script, timeout=30))  # type: ignore[attr-defined]
        except SandboxLost as lost:
            return lost


async def test_output_that_imitates_ours_is_output(shell: str) -> None:
    """Lines that look like ours, with the true key, are nothing but output."""
    async with shell_sandbox(shell) as (session, _, __):
        script = (
            KEY + 'for n in 1 2 3; do printf "\\n$key.0011223344556677 ok\\n$key X $n 0 0 0 0\\n$key K $n\\n"; done'
        )
        result = await session.exec(Command(command=f"{script}; {{ {script}; }} >&2; exit 9"))
        key = (await session.exec(Command(command=KEY + "printf $key"))).text

        lines = "".join(f"\n{key}.0011223344556677 ok\n{key} X {n} 0 0 0 0\n{key} K {n}\n" for n in (1, 2, 3))
        assert (result.exit_code, result.text, result.error_text) == (9, lines, lines)


async def test_every_byte_passes(shell: str) -> None:
    """Every byte value passes: in output, arguments, variables, scripts and input."""
    text = bytes(range(1, 256)).decode("utf-8", "surrogateescape")
    async with shell_sandbox(shell) as (session, _, __):
        data = bytes(range(256)) * 300
        assert (await session.exec(Command(command=["cat"]), stdin=data)).stdout == data
        assert (await session.exec(Command(command=["printf", "%s", text]))).stdout == bytes(range(1, 256))
        result = await session.exec(Command(command='printf %s "$V"', env={"V": text}))
        assert result.stdout == bytes(range(1, 256))
        result = await session.exec(Command(command="printf %s '" + text.replace("'", "") + "'"))
        assert result.stdout == bytes(range(1, 256)).replace(b"'", b"")


async def test_odd_variables_arrive() -> None:
    """Variables whose names are none in a shell, or mean something to one, arrive and change nothing of ours."""
    env = {"A.B": "dot", "IFS": "x", "OPTIND": "7", "PS1": "p", "LC_ALL": "C", "_aS": "/nowhere", "ENV": "/etc/passwd"}
    async with shell_sandbox() as (session, _, __):
        result = await session.exec(Command(command=["env"], env=env))
        values = dict(line.split("=", 1) for line in result.text.splitlines() if "=" in line)
        assert {name: values.get(name) for name in env} == env
        assert (await session.exec(Command(command="echo fine"))).stdout == b"fine\n"


async def test_dev_stdout_does_not_lose_what_came_before(shell: str) -> None:
    """Opening /dev/stdout or /dev/stderr anew appends, as with every pipe, and takes nothing away."""
    async with shell_sandbox(shell) as (session, _, __):
        result = await session.exec(Command(command="echo a; echo b >/dev/stdout; echo c; echo d >/dev/stderr"))
        assert (result.stdout, result.stderr) == (b"a\nb\nc\n", b"d\n")


async def test_closed_descriptors(shell: str) -> None:
    """A command may close all its descriptors: its exit code arrives all the same."""
    async with shell_sandbox(shell) as (session, _, __):
        result = await session.exec(Command(command="echo first; exec 0<&- 1>&- 2>&-; sleep 0.2; exit 5"))
        assert (result.exit_code, result.stdout) == (5, b"first\n")


async def test_killing_the_shell_that_waits(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that kills what waits for it has no exit code, so that the sandbox is lost."""
    monkeypatch.setattr(commands, "LOOK", 0.2)
    async with shell_sandbox(shell) as (session, _, __):
        found = await outcome(session, "kill -9 $PPID; sleep 0.3; exit 0")
        assert isinstance(found, SandboxLost)
        assert found.reason == "killed"
        assert session.lost is not None


async def test_killing_everything(shell: str) -> None:
    """A command that kills every process it may is never taken for a success."""
    async with shell_sandbox(shell) as (session, _, __):
        found = await outcome(session, "kill -9 -1; exit 0")
        assert isinstance(found, SandboxLost) or found.exit_code == 137


async def test_removing_our_state(shell: str) -> None:
    """A command that removes what is known of it is never taken for a success, nor run again."""
    async with shell_sandbox(shell) as (session, _, runner):
        found = await outcome(session, "echo ran >> runs; rm -rf /var/tmp/.agentsandbox-*; echo out; sleep 0.2; exit 0")
        assert isinstance(found, SandboxLost)
        assert (await runner.exec(Command(command="cat runs"))).stdout == b"ran\n"


async def test_removing_our_state_and_a_cut_connection() -> None:
    """The same while the connection is cut: the new one must not start the command again."""
    async with shell_sandbox() as (session, connect, runner):

        async def cut() -> None:
            await anyio.sleep(0.4)
            connect.connections[0].cut()

        async with anyio.create_task_group() as group:
            group.start_soon(cut)
            found = await outcome(session, "echo ran >> runs; rm -rf /var/tmp/.agentsandbox-*; sleep 1; exit 0")
        assert isinstance(found, SandboxLost)
        assert found.reason == "no_state"
        assert (await runner.exec(Command(command="cat runs"))).stdout == b"ran\n"


async def test_a_full_disk(shell: str) -> None:
    """When the disk is full, a result is complete or it is none; and afterwards the disk can be cleaned up."""
    async with shell_sandbox(shell, limits={"disk_limit": 64 * 1024**2}) as (session, _, __):
        script = "cat /dev/zero > fill 2>/dev/null; seq 1 20000; rm fill; exit 3"
        found = await outcome(session, script)
        if isinstance(found, SandboxLost):
            assert found.reason == "output_lost"
        else:
            assert (found.exit_code, found.sizes.stdout) == (3, 108894)
            assert (await session.exec(Command(command="echo good"))).stdout == b"good\n"


async def test_a_disk_that_stays_full() -> None:
    """On a full disk a command fails with an error that says so; none is ever taken for a success."""
    async with shell_sandbox(limits={"disk_limit": 64 * 1024**2}) as (session, _, __):
        await outcome(session, "cat /dev/zero > fill 2>/dev/null; exit 0")
        try:
            found = await outcome(session, "seq 1 20000")
        except CommandError as error:
            assert "disk is full" in str(error)  # noqa: PT017 - either way will do
        else:
            assert isinstance(found, SandboxLost)
            assert found.reason in ("disk_full", "output_lost", "killed")


async def test_input_that_cannot_be_kept_is_told() -> None:
    """Standard input that finds no room, or whose place is gone, is an error that says so; nothing ran without it."""
    async with shell_sandbox(limits={"disk_limit": 64 * 1024**2}) as (session, _, runner):
        await runner.exec(Command(command="cat /dev/zero > fill 2>/dev/null"))
        with anyio.fail_after(60), pytest.raises(SandboxLost, match="disk_full"):
            await session.exec(Command(command="cat >/dev/null; echo ran >/dev/shm/ran"), stdin=b"x" * 3_000_000)
        assert not (await runner.exec(Command(command="cat /dev/shm/ran"))).ok

    async with shell_sandbox() as (session, _, runner):
        await runner.exec(Command(command="rm -rf /var/tmp/.agentsandbox-*"))
        with anyio.fail_after(60), pytest.raises(SandboxLost, match="no_state"):
            await session.exec(Command(command="cat >/dev/null; echo ran > ran"), stdin=b"x")
        assert not session.alive
        assert not (await runner.exec(Command(command="cat ran"))).ok


async def test_stopped_processes_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that stops itself is killed when its time is over, as every other."""
    monkeypatch.setattr(commands, "GRACE", 0.1)
    async with shell_sandbox() as (session, _, runner):
        with anyio.fail_after(60), pytest.raises(CommandError, match="longer than"):
            await session.exec(Command(command="sleep 342 & kill -STOP $!; kill -STOP $$", timeout=0.5))
        listing = await runner.exec(Command(command="cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))
        assert "sleep 342" not in listing.text


async def test_a_process_that_hides_does_not_hold_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon without our mark, session and parent, which holds standard output, does not hold the call for ever."""
    monkeypatch.setattr(commands, "LOOK", 0.2)
    script = "(setsid env -i sh -c '(sleep 343 &)' &); sleep 0.2; echo out; exit 4"
    async with shell_sandbox() as (session, _, __):
        with anyio.fail_after(30):
            result = await session.exec(Command(command=script))
        assert (result.exit_code, result.stdout) == (4, b"out\n")


@pytest.mark.parametrize("name", ["dash", "busybox"])  # bash tries for a quarter of a minute
async def test_no_process_left_for_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no process can be made any more, a result is complete or there is none."""
    for constant, seconds in {"BORN": 0.5, "LOOK": 0.2, "KILL_LAST": 0.5}.items():
        monkeypatch.setattr(commands, constant, seconds)
    async with shell_sandbox(name, limits={"max_processes": 48}) as (session, _, __):
        found = await outcome(session, "i=0; while [ $i -lt 60 ]; do sleep 348 & i=$((i+1)); done; echo all")
        assert isinstance(found, SandboxLost) or found.stdout == b""
        for _ in range(3):
            try:
                found = await outcome(session, "echo one; echo two >&2; exit 6")
            except CommandError:
                continue
            if isinstance(found, SandboxLost):
                break
            # A shell that cannot make a process ends with an exit code of its own.
            if found.exit_code == 6:
                assert (found.stdout, found.stderr) == (b"one\n", b"two\n")
            assert found.exit_code != 0


async def test_output_beyond_all_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output that would fill the disk of the node ends the command, with an error."""
    monkeypatch.setattr(results, "SPOOL_LIMIT", 1024**2)
    monkeypatch.setattr(commands, "LOOK", 0.1)
    async with shell_sandbox() as (session, _, __):
        with anyio.fail_after(60), pytest.raises(OutputLimitExceeded):
            await session.exec(Command(command="yes"))
        assert (await session.exec(Command(command="echo good"))).stdout == b"good\n"
