# SPDX-License-Identifier: Apache-2.0
"""What went wrong for others with commands, as right behaviour on a cluster: group B, at every exec level."""

from __future__ import annotations

import resource

import anyio
import pytest

from agentsandbox.backends.kubernetes import removal
from agentsandbox.client import SandboxClient
from agentsandbox.errors import (
    Blame,
    CommandTimeout,
    ConfigurationError,
    FailureKind,
    OutputLimitExceeded,
    Phase,
    SandboxLost,
    StartError,
    classify,
)
from agentsandbox.testing import exec_checks, process_checks
from agentsandbox.testing.cluster import FakeCluster
from agentsandbox.testing.conformance import NotApplicable

from .cluster_clients import KEPT, MODES, QUICK, client_of, opened, pod_of

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="module")
async def cluster(anyio_backend):
    """One cluster for the whole module."""
    async with FakeCluster(images={"host": KEPT}) as found:
        yield found


@pytest.fixture(scope="module", params=MODES)
async def source(request, cluster, tmp_path_factory):
    """A client at each exec level."""
    options = {"kubeconfig": cluster.kubeconfig(tmp_path_factory.mktemp("config")), "exec_mode": request.param}
    async with SandboxClient("kubernetes", images={"host": 2}, backend_options=options, reset=QUICK) as client:
        yield client


async def hold(check, source) -> None:
    """Run one rule of the contract; what a level cannot do is refused with that very reason."""
    try:
        await check(source, "host")
    except NotApplicable as reason:
        pytest.skip(str(reason))
    except (StartError, ConfigurationError) as refusal:
        if "exec level 'direct'" not in str(refusal):
            raise


def scripted(source, script):
    """A script as a command of that level."""
    return ["sh", "-c", script] if level(source) == "direct" else script


def level(source):
    """Its exec level."""
    return source.backend._exec_mode


async def test_p19_background_child_does_not_keep_the_call_open(source) -> None:
    """The call ends with the main process; the child is reported."""
    await hold(process_checks.check_p19_background_child_does_not_hold_the_call, source)


async def test_p19_a_background_child_dies_at_reset(tmp_path) -> None:
    """What the call left running is gone with the next reset."""
    async with client_of(tmp_path) as (_cluster, client), await client.acquire("host") as lease:
        result = await lease.exec("sleep 321 & echo $!")
        assert [one.command for one in result.leftovers] == ["sleep 321"]
        await lease.reset()
        assert (await lease.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).text.count("sleep 321") == 0


async def test_p20_signals_have_one_code_convention(source) -> None:
    """A killed command is 128 + n and a plain result at every level: 137 alone never says that memory ran out."""
    async with await source.acquire("host") as lease:
        for script, code in (("kill -KILL $$", 137), ("exit 137", 137), ("kill -TERM $$", 143)):
            result = await lease.exec(["sh", "-c", script])
            assert (script, result.exit_code) == (script, code)
        assert await lease.alive()


@pytest.mark.parametrize("mode", MODES)
async def test_p20_out_of_memory_is_told_by_the_pod(tmp_path, mode) -> None:
    """A container that dies of its memory limit under a command: the Pod's own evidence, at every level."""
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:

        async def strike() -> None:
            await anyio.sleep(0.2)
            cluster.restart_container(pod_of(lease), oom=True)

        async with anyio.create_task_group() as group:
            group.start_soon(strike)
            with pytest.raises(SandboxLost) as caught:
                await lease.exec(["sleep", "300"], timeout=600)

        assert caught.value.reason == "oom_killed"
        verdict = classify(caught.value, Phase.EXEC)
        assert (verdict.kind, verdict.retryable) == (FailureKind.SANDBOX_LOST, True)
        verdict = classify(caught.value, Phase.EXEC, task_faults={"oom_killed"})
        assert (verdict.blame, verdict.retryable) == (Blame.TASK, False)


@pytest.mark.parametrize("mode", MODES)
async def test_p20_the_end_of_a_container_is_not_the_end_of_a_command(tmp_path, monkeypatch, mode) -> None:
    """The server says 137 for both, and the watch may tell late: what was killed with its container has no result."""
    monkeypatch.setattr(removal, "PATIENCE", (0.3, 0.75, 1.5))
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.watch(kind="stall", times=None)
        cluster.drop_watches("pods")

        async def strike() -> None:
            await anyio.sleep(0.2)
            cluster.restart_container(pod_of(lease))

        async with anyio.create_task_group() as group:
            group.start_soon(strike)
            with pytest.raises(SandboxLost) as caught:
                await lease.exec(["sleep", "300"], timeout=600)

        assert caught.value.reason in ("died", "stream_ended")
        assert lease.lost is not None


async def test_p21_no_state_leaks_between_commands(source) -> None:
    """Each command is a process of its own."""
    await hold(exec_checks.check_p21_no_state_leaks_between_commands, source)


async def test_p22_stdin_is_at_its_end_unless_given(source) -> None:
    """Commands that read standard input neither block nor eat the trainer's."""
    await hold(exec_checks.check_p22_stdin_is_empty_or_delivered, source)


async def test_p22_streams_without_input_ask_for_none(tmp_path) -> None:
    """At the level of one stream a command, the request says so; and given input is really delivered."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        script = "cat; echo rc=$?; read x; echo r=$?"
        assert (await lease.exec(["sh", "-c", script])).stdout == b"rc=0\nr=1\n"
        assert opened(cluster)[-1].get("stdin") == "false"
        assert (await lease.exec(["wc", "-c"], stdin=b"abc")).stdout.split() == [b"3"]
        assert opened(cluster)[-1].get("stdin") == "true"


async def test_p23_timeout_keeps_the_partial_output(source) -> None:
    """The error has what was printed, and which limit fired; without a shell the sandbox goes with it."""
    for limits, limit in (({"timeout": 1.0}, "total"), ({"timeout": 60.0, "no_output_timeout": 1.0}, "no_output")):
        async with await source.acquire("host") as lease:
            with pytest.raises((CommandTimeout, SandboxLost)) as caught:
                await lease.exec(scripted(source, "echo before; exec sleep 60"), **limits)

            assert caught.value.stdout == b"before\n"
            if level(source) == "direct":
                assert (type(caught.value), caught.value.reason) == (SandboxLost, "unkillable")
                assert ("no output for" in str(caught.value)) == (limit == "no_output")
            else:
                assert (type(caught.value), caught.value.limit) == (CommandTimeout, limit)
                assert await lease.alive()


async def test_p24_endless_output_is_capped(source) -> None:
    """50 MiB under a cap of 1 MiB: counted, cut, flagged, and the driver does not grow; or an error if asked for."""
    async with await source.acquire("host") as lease:
        command = ["head", "-c", "52428800", "/dev/zero"]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = await lease.exec(command, output_limit=1 << 20)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

        assert (result.exit_code, result.truncated, result.sizes.stdout) == (0, True, 52_428_800)
        assert len(result.stdout) <= 1 << 20
        assert grown < 32 * 1024  # KiB; the double is in this process, too
        with pytest.raises(OutputLimitExceeded):
            await lease.exec(command, output_limit=1 << 20, require_complete=True)


async def test_p25_timeout_kills_the_whole_tree(source) -> None:
    """No child of a timed-out command is left; without a shell, the sandbox is given up instead."""
    async with await source.acquire("host") as lease:
        script = "trap '' TERM; sleep 321 & sleep 322 & wait"
        with pytest.raises((CommandTimeout, SandboxLost)) as caught:
            await lease.exec(["sh", "-c", script], timeout=1.0)
        if level(source) == "direct":
            assert caught.value.reason == "unkillable"
            return
        left = (await lease.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).text
        assert "sleep 321" not in left
        assert "sleep 322" not in left
