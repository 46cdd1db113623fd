# SPDX-License-Identifier: Apache-2.0
"""What went wrong for others with exec streams, as right behaviour on a cluster: group A, the second part."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.errors import (
    ApiUnavailable,
    CommandTimeout,
    ConfigurationError,
    PermissionDenied,
    SandboxLost,
    StreamBroken,
)
from agentsandbox.testing.cluster import FakeCluster

from .cluster_clients import MODES, client_of, eventually, made, opened, pod_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


async def test_p06_what_may_have_run_is_not_run_again(tmp_path) -> None:
    """A stream that breaks after it was opened is not opened once more: the outcome is unknown, and says so."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.exec(command="count", cut=True)
        with pytest.raises(StreamBroken):
            await lease.exec(["sh", "-c", "echo x >> /tmp/count"])

        assert len([one for one in opened(cluster) if "count" in str(one.query)]) == 1


async def test_p06_a_handshake_without_an_answer_is_not_repeated(tmp_path) -> None:
    """Nobody refused it, so the command may have started: the sandbox is not trusted any more."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.cut("GET", r"/exec$")
        with pytest.raises(ApiUnavailable):
            await lease.exec(["sh", "-c", "echo x >> /tmp/count"])

        assert len([one for one in opened(cluster) if "count" in str(one.query)]) == 1
        with pytest.raises(SandboxLost, match="may have been started"):
            await lease.exec(["true"])


async def test_p10_quiet_commands_keep_their_stream(tmp_path) -> None:
    """The heartbeat resets idle timers on the way; without it the stream is lost and that is no success."""
    for heartbeat, good in ((0.2, True), (50.0, False)):
        async with client_of(tmp_path, mode="direct", options={"heartbeat": heartbeat}) as (cluster, client):
            async with await client.acquire("host") as lease:
                cluster.faults.exec(command="sleep", idle=0.8)
                command = ["sh", "-c", "sleep 1.6; echo done"]
                if good:
                    assert (await lease.exec(command)).stdout == b"done\n"
                else:
                    with pytest.raises(SandboxLost, match="without its exit code"):
                        await lease.exec(command)


async def test_p11_streams_are_not_queued_behind_a_ceiling(tmp_path) -> None:
    """150 commands at once are 150 streams at once."""
    async with client_of(tmp_path, mode="direct") as (cluster, client):
        async with await client.acquire("host") as lease, anyio.create_task_group() as group:
            for _ in range(150):
                group.start_soon(lease.exec, ["sh", "-c", "until [ -e /tmp/go ]; do sleep 0.2; done"])
            await eventually(lambda: cluster.streams.open == 150, seconds=50)
            group.start_soon(lease.exec, ["touch", "/tmp/go"])
        assert cluster.streams.peak >= 150


async def test_p11_connections_are_as_many_as_the_pool_may_need(tmp_path) -> None:
    """A large pool gets a connection for each sandbox without a word about it; what is said counts."""
    for given, size, connections in ((None, 1, 1024), (None, 2500, 2500), (7, 2500, 7)):
        options = {"max_connections": given}
        client = {"images": {"host": 1}, "max_sandboxes": size, "spares": 0}
        async with client_of(tmp_path, options=options, cluster={"process": "echo-runner"}, **client) as (_, found):
            assert found.backend._api.max_connections == connections


def test_p11_too_few_files_are_refused_before_anything_is_created(tmp_path) -> None:
    """The error names the need and the limit, and no server has heard of it."""
    code = """
import resource, sys, anyio
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.errors import ConfigurationError
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
async def main():
    try:
        async with KubernetesBackend(kubeconfig=sys.argv[1], max_connections=500).running():
            pass
    except ConfigurationError as error:
        print(error)
anyio.run(main)
"""
    config = tmp_path / "config"
    config.write_text(
        '{"apiVersion": "v1", "kind": "Config", "current-context": "c",'
        '"clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],'
        '"users": [], "contexts": [{"name": "c", "context": {"cluster": "c"}}]}'
    )
    done = subprocess.run([sys.executable, "-c", code, str(config)], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert "500 connections need 756 open files, and this process may open 128" in done.stdout


@pytest.mark.parametrize("mode", ["runner", "direct"])
async def test_p12_a_refusal_that_may_pass_is_asked_again(tmp_path, mode) -> None:
    """A kubelet that could not be dialled once: the second attempt works, and nobody notices."""
    async with client_of(tmp_path, mode=mode) as (cluster, client):
        fault = cluster.faults.exec(status=500, body="error dialing backend: EOF", times=0 if mode == "direct" else 1)
        async with await client.acquire("host") as lease:
            fault.times = 1 if mode == "direct" else 0
            assert (await lease.exec(["echo", "ok"])).stdout == b"ok\n"
        assert fault.hits == 1
        assert len(made(cluster)) == 1


@pytest.mark.parametrize(
    ("status", "error", "asked"),
    [(403, PermissionDenied, 1), (500, ApiUnavailable, 4)],
    ids=["forbidden", "never passes"],
)
async def test_p12_a_refusal_keeps_its_words_and_hides_the_command(tmp_path, status, error, asked) -> None:
    """What is forbidden is asked for once; what does not pass is given up; nothing ran, so the sandbox is good."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.exec(command="secret", status=status, body="the server's words", times=None)
        with pytest.raises(error, match="the server's words") as caught:
            await lease.exec(["echo", "secret"])

        assert "secret" not in str(caught.value)
        assert len([one for one in opened(cluster) if "secret" in str(one.query)]) == asked
        assert (await lease.exec(["echo", "ok"])).stdout == b"ok\n"


async def test_p12_a_pod_that_is_gone_is_a_lost_sandbox_at_once(tmp_path) -> None:
    """A handshake answered 404: the Pod is looked for, and its loss is the error."""
    async with client_of(tmp_path, mode="direct") as (cluster, client), await client.acquire("host") as lease:
        stall = cluster.faults.watch(kind="stall", times=None)
        cluster.drop_watches("pods")
        await eventually(lambda: stall.hits)
        cluster.delete_behind(pod_of(lease))
        with pytest.raises(SandboxLost) as caught:
            await lease.exec(["true"])

        assert caught.value.reason == "deleted"
        assert len([one for one in opened(cluster) if one.get("command") == "true"]) == 1


@pytest.mark.parametrize("verb", ["get", "create"])
async def test_p13_preflight_asks_for_both_verbs_of_exec(tmp_path, verb) -> None:
    """The one that is missing is named; no Pod was made."""
    async with FakeCluster(process="echo-runner") as cluster:
        cluster.access.deny(verb, "pods/exec")
        checks = await KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), user=1000).examine()

        (failed,) = [check for check in checks if check.required and not check.ok]
        assert f"not allowed: {verb} pods/exec" in failed.detail
        assert made(cluster) == []


async def test_p13_preflight_passes_where_both_are_allowed(tmp_path) -> None:
    """And makes no Pod either."""
    async with FakeCluster(process="echo-runner") as cluster:
        checks = await KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), user=1000).examine()

        assert [check for check in checks if check.required and not check.ok] == []
        assert made(cluster) == []


@pytest.mark.parametrize("mode", ["runner", "shell"])
async def test_p14_a_command_that_is_given_up_is_dead(tmp_path, mode) -> None:
    """After a timeout and after a cancellation no process of it is left."""
    async with client_of(tmp_path, mode=mode) as (_cluster, client), await client.acquire("host") as lease:
        with pytest.raises(CommandTimeout):
            await lease.exec("echo $$ > pid; exec sleep 300", timeout=1)
        assert (await lease.exec("kill -0 $(cat pid)")).exit_code != 0
        with anyio.move_on_after(1):
            await lease.exec("echo $$ > pid; exec sleep 300")
        assert (await lease.exec("kill -0 $(cat pid)")).exit_code != 0


async def test_p14_every_stream_is_closed_with_a_handshake(tmp_path) -> None:
    """Of 50 commands the server ends 40, and each of the 10 that are given up is closed by a close frame."""
    async with client_of(tmp_path, mode="direct", clean=False) as (cluster, client):
        lease = await client.acquire("host")
        before = cluster.streams.opened
        for _ in range(40):
            await lease.exec(["true"])
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(lease.exec, ["sleep", "300"])
            await eventually(lambda: cluster.streams.opened == before + 50)
            group.cancel_scope.cancel()
        await eventually(lambda: cluster.streams.open == 0)
        assert cluster.streams.closed_by_client == 10
        await lease.release()


@pytest.mark.parametrize("mode", MODES)
async def test_p15_a_deleted_pod_ends_its_command_at_once(tmp_path, mode) -> None:
    """The stream is silent, the watch tells of the deletion, and the command ends with it, not with its time limit."""
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
        cluster.streams.silence(cluster.pod(pod_of(lease))["metadata"]["uid"])

        async def strike() -> None:
            await anyio.sleep(0.1)
            cluster.delete_behind(pod_of(lease))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(strike)
                with pytest.raises(SandboxLost) as caught:
                    await lease.exec(["sleep", "300"], timeout=600)
        assert caught.value.reason == "deleted"


async def test_p16_there_is_no_terminal(tmp_path) -> None:
    """No stream asks for one, and the bytes are the command's."""
    for mode in MODES:
        async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
            script = "printf 'a\\n'; printf 'e\\n' >&2; test -t 1 && echo tty; true"
            result = await lease.exec(["sh", "-c", script])

            assert (result.stdout, result.stderr) == (b"a\n", b"e\n")
            assert {one.get("tty") for one in opened(cluster)} == {"false"}


async def test_p17_a_slow_consumer_loses_nothing(tmp_path) -> None:
    """The heartbeat goes on while a callback dawdles; every piece arrives."""
    beats = {"heartbeat": 0.2, "heartbeat_timeout": 5.0}
    async with client_of(tmp_path, options=beats) as (_cluster, client), await client.acquire("host") as lease:
        pieces = []

        async def slow(_stream, data) -> None:
            pieces.append(data)
            await anyio.sleep(0.1)

        script = "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.02; done"
        result = await lease.exec(script, on_output=slow)

        assert (result.exit_code, b"".join(pieces).split()) == (0, [b"%d" % n for n in range(1, 11)])


@pytest.mark.parametrize("mode", MODES)
async def test_p18_long_scripts_run_and_urls_stay_short(tmp_path, mode) -> None:
    """A megabyte of script and of argument; without a shell, where they would travel in a URL, they are refused."""
    async with client_of(tmp_path, mode=mode) as (cluster, client), await client.acquire("host") as lease:
        word = "x" * 1_000_000
        if mode == "direct":
            with pytest.raises(ConfigurationError, match="in a URL"):
                await lease.exec(["echo", word[:3000]])
        else:
            assert (await lease.exec(f"echo {word} | wc -c")).stdout.split() == [b"1000001"]
        sizes = [sum(len(value) for key, value in one.query if key == "command") for one in opened(cluster)]
        assert max(sizes) < 2048
