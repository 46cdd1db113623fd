# SPDX-License-Identifier: Apache-2.0
"""What went wrong for others, as right behaviour of the local backend."""

from __future__ import annotations

import os
import re

import anyio
import anyio.lowlevel
import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.testing import conformance, exec_checks, file_checks, lease_checks, process_checks

pytestmark = pytest.mark.anyio


async def hold(check: conformance.Check) -> None:
    """Run one rule of the contract."""
    async with SandboxClient("local", images={"host": 2}) as client:
        await check(client, "host")


async def test_p09_uploads_arrive_whole() -> None:
    """Files arrive byte for byte in both directions."""
    await hold(file_checks.check_p09_large_files_arrive_whole)


async def test_p14_cancelled_commands_are_killed() -> None:
    """A cancelled call leaves no process of its command."""
    await hold(process_checks.check_p14_cancelling_kills_the_tree)


async def test_p16_no_terminal_changes_the_bytes() -> None:
    """Output is byte-exact and the streams are apart."""
    await hold(exec_checks.check_p16_there_is_no_terminal)


async def test_p19_background_child_does_not_keep_the_call_open() -> None:
    """The call ends with the main process; the child is reported."""
    await hold(process_checks.check_p19_background_child_does_not_hold_the_call)


async def test_p20_signals_have_one_code_convention() -> None:
    """A killed command is 128 + n and a plain result: 137 alone never says that memory ran out."""
    async with SandboxClient("local", images={"host": 1}) as client, await client.acquire("host") as lease:
        assert (await lease.exec("kill -KILL $$")).exit_code == 137
        assert (await lease.exec("sh -c 'kill -KILL $$'; exit $?")).exit_code == 137
        assert (await lease.exec("exit 137")).exit_code == 137
        assert (await lease.exec("kill -TERM $$")).exit_code == 143
        assert await lease.alive()


async def test_p21_no_state_leaks_between_commands() -> None:
    """Each command is its own process."""
    await hold(exec_checks.check_p21_no_state_leaks_between_commands)


async def test_p22_stdin_is_at_its_end_unless_given() -> None:
    """Commands that read standard input neither block nor eat the trainer's."""
    await hold(exec_checks.check_p22_stdin_is_empty_or_delivered)


async def test_p23_timeout_keeps_the_partial_output() -> None:
    """A timeout carries output, elapsed time and the limit that fired."""
    await hold(process_checks.check_p23_timeout_keeps_the_output)


async def test_p24_endless_output_is_capped() -> None:
    """50 MiB of output under a cap of 1 MiB are counted, cut and flagged, and the driver does not grow."""
    await hold(exec_checks.check_p24_output_is_capped)


async def test_p25_timeout_kills_the_whole_tree() -> None:
    """No child of a timed-out command is left."""
    await hold(process_checks.check_p25_timeout_kills_the_whole_tree)


async def test_p36_zombies_do_not_pile_up() -> None:
    """Orphans are reaped."""
    await hold(process_checks.check_p36_zombies_are_reaped)


async def test_p37_sandboxes_share_no_files() -> None:
    """A write in one sandbox shows up neither in its siblings nor in the host, and its release harms no sibling."""
    await hold(lease_checks.check_p37_release_of_one_leaves_others_alone)


async def test_p37_image_directory_is_never_written(tmp_path: os.PathLike[str]) -> None:
    """An in-place write to a file of the image stays in its sandbox: template and siblings keep their content."""
    host = anyio.Path(tmp_path) / "marker"
    await host.write_text("orig\n")
    async with (
        SandboxClient("local", images={"host": 2}) as client,
        await client.acquire("host") as b,
    ):
        async with await client.acquire("host") as a:
            # on the host image the path may be masked or visible; either way nothing gets out
            await a.exec(f"mkdir -p {host.parent} && echo hack >> {host}")
            assert (await b.exec(["cat", str(host)])).stdout in {b"", b"orig\n"}
        assert await host.read_text() == "orig\n"
        assert (await b.exec("pwd")).exit_code == 0


async def test_p38_trainer_secrets_are_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment starts empty plus a short allow list; what is given arrives byte for byte."""
    monkeypatch.setenv("HF_TOKEN", "s1-secret")
    monkeypatch.setenv("DATABASE_URL", "s2-secret")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent.sock")
    async with SandboxClient("local", images={"host": 1}) as client, await client.acquire("host") as lease:
        text = (await lease.exec("env; cat /proc/*/environ 2>/dev/null | tr '\\000' '\\n'")).text
        names = {line.partition("=")[0] for line in text.splitlines()}

        assert "secret" not in text
        assert not names & {"HF_TOKEN", "DATABASE_URL", "SSH_AUTH_SOCK"}
        assert {"PATH", "HOME"} <= names
        value = 'x\ny "q" $(id)'
        assert (await lease.exec('printf %s "$A"', env={"A": value})).stdout == value.encode()


async def test_p43_a_sandbox_has_one_owner() -> None:
    """Of three concurrent callers on two sandboxes two get distinct ones, and the third waits for a release."""
    async with SandboxClient("local", images={"host": 2}, spares=0, max_sandboxes=2) as client:
        granted = []
        third = anyio.Event()

        async def take() -> None:
            granted.append(await client.acquire("host"))
            if len(granted) == 3:
                third.set()

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(take)
            with anyio.fail_after(30):
                while len(granted) < 2:
                    await anyio.lowlevel.checkpoint()
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert len(granted) == 2
            assert granted[0].sandbox != granted[1].sandbox
            held = granted[1].sandbox
            await granted[0].release()
            with anyio.fail_after(30):
                await third.wait()

        assert granted[2].sandbox != held
        assert (granted[2].id, granted[2].generation) != (granted[0].id, granted[0].generation)
        for lease in granted:
            await lease.release()


async def test_p56_time_to_first_command_is_monotonic_and_complete() -> None:
    """Time to first command is censored until a command starts, and then fixed."""
    await hold(lease_checks.check_p56_time_to_first_command)


def test_every_named_check_is_here() -> None:
    """Each check that is named after an entry is a test of this module."""
    entries = {
        check.__name__.split("_")[1] for check in conformance.CHECKS if re.match(r"check_p\d\d_", check.__name__)
    }

    assert entries == {entry for entry in entries if any(name.startswith(f"test_{entry}_") for name in globals())}
