# SPDX-License-Identifier: Apache-2.0
"""What went wrong for others with exec streams, as right behaviour on a cluster: group A, first part."""

from __future__ import annotations

import hashlib
import os

import anyio
import pytest

from agentsandbox.errors import (
    CommandNotFound,
    ConfigurationError,
    FailureKind,
    InfrastructureError,
    OutputLimitExceeded,
    Phase,
    SandboxLost,
    StreamBroken,
    classify,
)
from agentsandbox.session import retrying

from .cluster_clients import MODES, client_of, pod_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


async def test_p01_a_stream_without_a_status_is_never_a_result(tmp_path) -> None:
    """At any byte: without a status the outcome is unknown, the error has what had arrived, and no exit code."""
    for after, kept in ((0, b""), (3, b"hel"), (6, b"hello\n")):
        async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
            cluster.faults.exec(command="^echo", cut=True, after_bytes=after)
            with pytest.raises(StreamBroken) as caught:
                await lease.exec(["echo", "hello"])

            assert caught.value.stdout == kept
            verdict = classify(caught.value, Phase.EXEC)
            assert (verdict.kind, verdict.retryable, verdict.gradable) == (FailureKind.STREAM_BROKEN, True, False)
            assert "exit_code" not in lease.commands[0]


@pytest.mark.parametrize("mode", ["runner", "shell"])
async def test_p01_a_cut_stream_is_attached_again_and_the_result_is_whole(tmp_path, mode) -> None:
    """Where commands outlive their stream, losing it costs nothing: exit code and output are complete, run once."""
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
        script = "echo start; echo x >> count; until [ -e go ]; do sleep 0.02; done; seq 5000; cat count; exit 7"
        begun, result = anyio.Event(), None

        async def run() -> None:
            nonlocal result
            result = await lease.exec(script, on_output=lambda *_: begun.set())

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await begun.wait()
            assert cluster.streams.cut(pod_of(lease)) >= 1
            await lease.write_file("go", b"")

        lines = [b"start", *(b"%d" % n for n in range(1, 5001)), b"x"]
        assert (result.exit_code, result.stdout.splitlines()) == (7, lines)


@pytest.mark.parametrize("mode", MODES)
async def test_p02_bytes_stay_bytes_wherever_messages_are_cut(tmp_path, mode) -> None:
    """Each byte in a message of its own: the bytes are the truth, and text replaces what is no UTF-8."""
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.exec(frame=1, times=None)
        cluster.streams.cut()
        word = ["printf", r"\303\251\377\360\237\230\200\n"]
        result = await lease.exec(word)

        assert result.stdout == "é".encode() + b"\xff" + "😀\n".encode()
        assert result.text == "é\ufffd😀\n"


@pytest.mark.parametrize("mode", MODES)
async def test_p03_what_cannot_start_is_a_start_error(tmp_path, mode) -> None:
    """Nothing ran: a typed error in the runtime's words, no exit code, and the sandbox still works."""
    async with client_of(tmp_path, mode=mode) as (_cluster, client), await client.acquire("host") as lease:
        with pytest.raises(CommandNotFound, match="no-such-command") as caught:
            await lease.exec(["no-such-command", "x"])

        verdict = classify(caught.value, Phase.EXEC)
        assert (verdict.kind, verdict.retryable) == (FailureKind.COMMAND, False)
        assert "exit_code" not in lease.commands[0]
        assert (await lease.exec(["echo", "ok"])).stdout == b"ok\n"


async def test_p04_a_large_message_is_read_and_too_large_a_one_is_an_error(tmp_path) -> None:
    """8 MiB in one message are counted and cut to the limit; 20 MiB are the end of that stream, and typed."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.exec(command="^head", frame=-1, times=None)
        result = await lease.exec(["head", "-c", str(8 << 20), "/dev/zero"], output_limit=1 << 16)

        assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, 1 << 16)
        assert result.sizes.stdout == 8 << 20
        with pytest.raises(OutputLimitExceeded):
            await lease.exec(["head", "-c", str(8 << 20), "/dev/zero"], output_limit=1 << 16, require_complete=True)
        with pytest.raises(StreamBroken):
            await lease.exec(["head", "-c", str(20 << 20), "/dev/zero"])


async def test_p05_a_silent_stream_ends_by_the_deadline_of_its_command(tmp_path) -> None:
    """Without a shell the sandbox is given up with the partial output, because the command cannot be killed."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.exec(command="^echo", silent=True, after_bytes=3)
        with pytest.raises(SandboxLost, match="ran longer than") as caught:
            await lease.exec(["echo", "hello"], timeout=0.3)

        assert (caught.value.reason, caught.value.stdout) == ("unkillable", b"hel")
        assert not await lease.alive()


async def test_p05_silence_is_noticed_by_the_heartbeat(tmp_path, monkeypatch) -> None:
    """A node that falls silent under a command: it ends long before its own time limit, and the sandbox with it."""
    monkeypatch.setattr(retrying, "REATTACH_ATTEMPTS", 1)
    beats = {"heartbeat": 0.3, "heartbeat_timeout": 2.0}
    async with client_of(tmp_path, options=beats, clean=False) as (cluster, client):
        lease = await client.acquire("host")
        begun = anyio.Event()

        async def strike() -> None:
            await begun.wait()
            cluster.lose_node("node1")

        async with anyio.create_task_group() as group:
            group.start_soon(strike)
            with pytest.raises(SandboxLost) as caught:
                await lease.exec("echo before; sleep 600", timeout=600, on_output=lambda *_: begun.set())

        assert caught.value.stdout == b"before\n"
        assert not await lease.alive()
        await lease.release()
        cluster.kubelet.frozen.clear()
        cluster.delete_behind(pod_of(lease))


@pytest.mark.parametrize("mode", MODES)
async def test_p07_exit_code_and_both_streams_reach_the_caller(tmp_path, mode) -> None:
    """Also when the status comes in two messages: the exit code is the command's, and the streams are apart."""
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.exec(split_status=40, times=None)
        script = "echo hi; echo warn >&2; exit 3"
        command = ["sh", "-c", script] if mode == "direct" else script
        result = await lease.exec(command)

        assert (result.exit_code, result.stdout, result.stderr) == (3, b"hi\n", b"warn\n")


async def test_p08_stdin_is_sent_and_ended(tmp_path) -> None:
    """With v5 the server sees the bytes and then the end, and nothing else."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        cluster.streams.received = []
        assert (await lease.exec(["cat"], stdin=b"hello")).stdout == b"hello"

        assert cluster.streams.received == [b"\0hello", b"\xff\0"]


@pytest.mark.parametrize("mode", ["runner", "shell"])
async def test_p08_stdin_ends_also_where_the_server_cannot_end_it(tmp_path, mode) -> None:
    """With v4 no end is ever sent; the command gets its input and its end from within the sandbox."""
    async with client_of(tmp_path, mode=mode) as (cluster, client):
        cluster.faults.protocols = ("v4.channel.k8s.io",)
        cluster.streams.received = []
        async with await client.acquire("host") as lease:
            assert (await lease.exec(["cat"], stdin=b"hello")).stdout == b"hello"
            assert (await lease.exec(["wc", "-c"], stdin=b"\xff\0" * 150_000)).stdout.split() == [b"300000"]

        assert lease.capabilities.facts["protocol"] == "v4.channel.k8s.io"
        assert [message[:1] for message in cluster.streams.received if message[:1] == b"\xff"] == []


async def test_p08_stdin_that_cannot_be_ended_is_refused(tmp_path) -> None:
    """Without a shell and with v4 there is no way: a clear error, before the command runs."""
    async with client_of(tmp_path, mode="direct") as (cluster, client):
        cluster.faults.protocols = ("v4.channel.k8s.io",)
        async with await client.acquire("host") as lease:
            with pytest.raises(ConfigurationError, match="protocol v4"):
                await lease.exec(["cat"], stdin=b"hello")
            assert (await lease.exec(["echo", "ok"])).stdout == b"ok\n"


@pytest.mark.parametrize("mode", ["runner", "shell"])
async def test_p09_an_upload_arrives_whole_or_raises(tmp_path, mode) -> None:
    """Input that gets lost on the way never becomes a short file: what is there is complete, or the write failed."""
    data = os.urandom(3584)
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
        await lease.write_file("a.bin", data)
        digest = (await lease.exec(["sha256sum", "a.bin"])).text.split()[0]
        assert digest == hashlib.sha256(data).hexdigest()

        cluster.faults.exec(discard_stdin=1, times=None)
        cluster.streams.cut()
        with anyio.move_on_after(1.5):
            with pytest.raises((SandboxLost, InfrastructureError)):
                await lease.write_file("b.bin", data)
        cluster.faults.clear()
        if await lease.alive():
            found = (await lease.exec("cat b.bin 2>/dev/null")).stdout
            assert found in (b"", data)
