# SPDX-License-Identifier: Apache-2.0
"""The rules about what is left running: background children, timeouts, cancellation, live processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.errors import CommandTimeout, SandboxLost
from agentsandbox.models.command import ExecResult
from agentsandbox.testing.subject import HANG_GUARD, Need, Source, need, processes, raises, sh

if TYPE_CHECKING:
    from agentsandbox.client import Lease


async def _timed_out(lease: Lease, commands: list[tuple[str, dict[str, float]]]) -> list[CommandTimeout]:
    """Run scripts side by side whose limits fire; return their errors."""
    errors: dict[int, CommandTimeout] = {}

    async def one(number: int, script: str, limits: dict[str, Any]) -> None:
        with raises(CommandTimeout) as caught:
            await lease.exec(script, **limits)
        errors[number] = caught.value

    with anyio.fail_after(HANG_GUARD):
        async with anyio.create_task_group() as group:
            for number, (script, limits) in enumerate(commands):
                group.start_soon(one, number, script, limits)
    return [errors[number] for number in range(len(commands))]


async def check_p19_background_child_does_not_hold_the_call(source: Source, image: str) -> None:
    """A background child that holds standard output neither delays the call nor dies of it; it is reported."""
    async with await source.acquire(image) as lease:
        need(lease, Need.LEFTOVERS)
        with anyio.fail_after(HANG_GUARD):
            result = await lease.exec("echo up; sleep 321 & sleep 322 >/dev/null 2>&1 & exit 4")

        assert (result.exit_code, result.stdout) == (4, b"up\n")
        assert sorted(info.command for info in result.leftovers) == ["sleep 321", "sleep 322"]
        assert sorted(await processes(lease, "sleep 321", "sleep 322")) == ["sleep 321", "sleep 322"]


async def check_p23_timeout_keeps_the_output(source: Source, image: str) -> None:
    """A timeout is a ``TimeoutError`` with the partial output, the elapsed time and the limit that fired."""
    async with await source.acquire(image) as lease:
        need(lease, Need.KILLING)
        commands: list[tuple[str, dict[str, float]]] = [
            ("echo before; echo err >&2; sleep 335", {"timeout": 1}),
            ("echo before; sleep 335", {"timeout": 30, "no_output_timeout": 1}),
        ]
        total, silent = await _timed_out(lease, commands)

        assert (total.limit, total.seconds) == ("total", 1)
        assert (total.stdout, total.stderr) == (b"before\n", b"err\n")
        assert isinstance(total, TimeoutError)
        assert total.elapsed >= 1
        assert (silent.limit, silent.seconds, silent.stdout) == ("no_output", 1, b"before\n")
        assert await processes(lease, "sleep 335") == []


async def check_output_puts_off_the_silence_limit(source: Source, image: str) -> None:
    """``no_output_timeout`` counts from the last output, on either stream."""
    async with await source.acquire(image) as lease:
        script = "for i in 1 2 3 4 5 6 7 8; do sleep 0.1; echo $i; sleep 0.1; echo $i >&2; done"
        assert (await sh(lease, script, no_output_timeout=1.2)).stdout == b"1\n2\n3\n4\n5\n6\n7\n8\n"


async def check_p25_timeout_kills_the_whole_tree(source: Source, image: str) -> None:
    """A timeout ends every process of the command, whatever ignores TERM, has left the session or its parent."""
    async with await source.acquire(image) as lease:
        need(lease, Need.KILLING)
        commands: list[tuple[str, dict[str, float]]] = [
            ('trap "" TERM; sleep 321 & sleep 322 & wait', {"timeout": 1}),
            ("setsid sleep 323 & (setsid sh -c 'trap \"\" TERM; sleep 324; :' &) & sleep 325", {"timeout": 1}),
        ]
        await _timed_out(lease, commands)

        assert await processes(lease, *(f"sleep {number}" for number in range(321, 326))) == []


async def check_timeout_spares_other_commands(source: Source, image: str) -> None:
    """A timeout ends the processes of its own command only."""
    async with await source.acquire(image) as lease:
        need(lease, Need.KILLING)
        await lease.exec("sleep 326 >/dev/null 2>&1 &")
        with anyio.fail_after(HANG_GUARD), raises(CommandTimeout):
            await lease.exec("sleep 327", timeout=0.5)

        assert await processes(lease, "sleep 326", "sleep 327") == ["sleep 326"]


async def check_p14_cancelling_kills_the_tree(source: Source, image: str) -> None:
    """A cancelled call leaves none of the command's processes, and the sandbox is still good."""
    started = anyio.Event()

    async def on_output(_: str, __: bytes) -> None:
        started.set()

    async with await source.acquire(image) as lease:
        need(lease, Need.KILLING)
        with anyio.fail_after(HANG_GUARD):
            async with anyio.create_task_group() as group:

                async def run() -> None:
                    await lease.exec("sleep 328 & echo on; sleep 329", on_output=on_output)

                group.start_soon(run)
                await started.wait()
                group.cancel_scope.cancel()

        assert await processes(lease, "sleep 328", "sleep 329") == []
        assert (await lease.exec("echo good")).stdout == b"good\n"


async def check_killing_everything_is_no_success(source: Source, image: str) -> None:
    """A command that kills every process it may gives 137 or a lost sandbox, never exit code 0."""
    async with await source.acquire(image) as lease:
        outcome: ExecResult | SandboxLost
        try:
            with anyio.fail_after(HANG_GUARD):
                outcome = await sh(lease, "kill -s KILL -- -1; kill -s KILL $$; sleep 5; echo survived")
        except SandboxLost as lost:
            outcome = lost
        if isinstance(outcome, ExecResult):
            assert (outcome.exit_code, outcome.stdout) == (137, b"")
            assert (await sh(lease, "echo good")).stdout == b"good\n"
        else:
            with raises(SandboxLost):
                await lease.exec(["true"])


async def check_p36_zombies_are_reaped(source: Source, image: str) -> None:
    """Orphans of orphans are reaped: after 200 of them hardly a zombie is left."""
    async with await source.acquire(image) as lease:
        need(lease, Need.REAPING)
        await lease.exec("i=0; while [ $i -lt 200 ]; do sh -c '(sleep 0.01 &)'; i=$((i+1)); done; sleep 1", check=True)
        # the loop counts by reading, so that it starts no process that could itself be seen
        script = 'for f in /proc/[0-9]*/stat; do read line < "$f" && case $line in *") Z "*) n=$((n+1));; esac; done'
        count = int((await lease.exec(f"n=0; {{ {script}; }} 2>/dev/null; echo $n")).text)

        assert count <= 5


async def check_open_process_is_live(source: Source, image: str) -> None:
    """A live process can be talked to in turns; closing its input ends it, and leaving the block kills it."""
    async with await source.acquire(image) as lease:
        need(lease, Need.LIVE_PROCESSES)
        with anyio.fail_after(HANG_GUARD):
            async with await lease.open_process("while read x; do echo got $x; done; echo end; exit 6") as process:
                answers = b""
                await process.stdin.send(b"one\n")
                async for data in process.stdout:
                    answers += data
                    if answers == b"got one\n":
                        await process.stdin.send(b"two\n")
                    elif answers == b"got one\ngot two\n":
                        await process.stdin.aclose()
                result = await process.wait()
            assert (answers, result.exit_code) == (b"got one\ngot two\nend\n", 6)

            async with await lease.open_process(["sleep", "330"]) as process:
                assert len(await processes(lease, "sleep 330")) == 1
                await process.kill()
                assert (await process.wait()).exit_code in {137, 143}
            async with await lease.open_process(["sleep", "331"]):
                pass

        assert await processes(lease, "sleep 330", "sleep 331") == []
