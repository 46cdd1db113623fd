# SPDX-License-Identifier: Apache-2.0
"""Streams that are opened when a sandbox is first leased, on the cluster double."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.errors import AcquireTimeout, ConfigurationError, SandboxLost
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import ExecLevel, SandboxSpec
from agentsandbox.testing.cluster import FakeCluster, Timing

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Run on the event loop that the client library needs."""
    return "asyncio"


@pytest.fixture
def lazy(tmp_path):
    """A client of a cluster of its own, whose sandboxes are ready; afterwards no Pod may be left."""

    @asynccontextmanager
    async def run(*, size=2, options=None, **client_options):
        async with FakeCluster(timing=Timing(second=0.1)) as cluster:
            backend = {"kubeconfig": cluster.kubeconfig(tmp_path), "streams": "lazy", **(options or {})}
            client_options = {"images": {"host": size}, "spares": 0, **client_options}
            async with SandboxClient("kubernetes", backend_options=backend, **client_options) as client:
                await ready(client, size)
                yield cluster, client
            assert [] == cluster.pods()

    return run


async def ready(client, count):
    """Wait until so many sandboxes wait for somebody."""
    with anyio.fail_after(20):
        while client.statistics().ready < count:  # noqa: ASYNC110 - told by the watch
            await anyio.sleep(0.01)


def streams(cluster):
    """How many streams were asked for."""
    return len(cluster.asked("", r"/exec$"))


async def test_no_stream_is_opened_before_somebody_takes_the_sandbox(lazy):
    """Two warm Pods cost no stream; a lease opens its own, and has its baseline before the first command."""
    async with lazy(reset=ResetPolicy(rungs=("files", "replace"))) as (cluster, client):
        assert 0 == streams(cluster)
        async with await client.acquire("host") as lease:
            assert 1 == streams(cluster)
            assert ExecLevel.RUNNER is lease.capabilities.exec_level
            assert ("files", "replace") == tuple(rung for rung in lease.capabilities.rungs if rung != "restart")
            assert b"hello\n" == (await lease.exec("echo hello; touch left")).stdout
            assert "files" == (await lease.reset()).rung
            assert 1 == streams(cluster)


async def test_a_sandbox_that_is_lost_while_nobody_has_it_is_replaced(lazy):
    """The watch tells of it, stream or not; nobody is given a dead sandbox."""
    async with lazy(size=1) as (cluster, client):
        (pod,) = cluster.pods()
        cluster.delete_behind(pod["metadata"]["name"])
        with anyio.fail_after(10):
            while client.statistics().created_total < 2:  # noqa: ASYNC110 - told by the watch
                await anyio.sleep(0.01)
        assert 0 == streams(cluster)
        async with await client.acquire("host", timeout=20) as lease:
            assert (await lease.exec("true")).ok


async def test_one_that_cannot_be_reached_is_replaced(lazy):
    """Its stream is refused for good: the lease is of another one, and the first one's Pod is gone."""
    async with lazy(size=1) as (cluster, client):
        (pod,) = cluster.pods()
        name = pod["metadata"]["name"]
        cluster.faults.exec(pod=name, status=500, body="no", times=None)
        async with await client.acquire("host", timeout=60) as lease:
            assert (await lease.exec("true")).ok
            assert name != lease.capabilities.facts["pod"]
        assert 2 == client.statistics().created_total


async def test_whoever_gives_up_while_it_is_opened_costs_nobody_anything(lazy):
    """The acquire times out in the middle of opening; the sandbox is still good for the next one."""
    async with lazy(size=1) as (cluster, client):
        fault = cluster.faults.stall("GET", r"/exec$")
        with pytest.raises(AcquireTimeout):
            await client.acquire("host", timeout=0.5)
        fault.stalled.set()
        async with await client.acquire("host", timeout=20) as lease:
            assert (await lease.exec("true")).ok
        assert 1 == client.statistics().created_total


async def test_lower_exec_levels_open_late_too(lazy):
    """A sandbox that is reached through a shell has no connection before it is leased."""
    async with lazy(size=1, options={"exec_mode": "shell"}) as (cluster, client):
        assert 0 == streams(cluster)
        async with await client.acquire("host", timeout=20) as lease:
            assert ExecLevel.SHELL is lease.capabilities.exec_level
            assert b"x\n" == (await lease.exec("echo x")).stdout


async def test_a_used_one_serves_again_in_place(lazy):
    """After its first lease a Pod is like any other: it becomes a fresh sandbox, with an open stream."""
    async with lazy(size=1, reset=ResetPolicy(rungs=("restart", "replace"))) as (_, client):
        async with await client.acquire("host") as lease:
            first = lease.identity
        await ready(client, 1)
        async with await client.acquire("host") as lease:
            assert (first.uid, True) == (lease.identity.uid, lease.reused)
            assert first != lease.identity
        assert 1 == client.statistics().created_total


async def test_a_sandbox_says_whether_it_has_a_session(tmp_path):
    """Dormant until it is opened; opening twice is no news; a lost one stays lost."""
    from agentsandbox.backends.kubernetes import KubernetesBackend

    async with FakeCluster(timing=Timing(second=0.1)) as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), streams="lazy")
        async with backend.running():
            sandbox = await backend.create(SandboxSpec(image="host"), "sb-1")
            assert (True, False) == (sandbox.dormant, sandbox.opened)
            assert not backend.can_recycle(sandbox)
            await sandbox.vet()
            await sandbox.open()
            await sandbox.open()
            assert (False, True) == (sandbox.dormant, sandbox.opened)
            assert 1 == streams(cluster)

            other = await backend.create(SandboxSpec(image="host"), "sb-2")
            cluster.delete_behind(other.pod)
            with anyio.fail_after(10):
                while other.loss is None:  # noqa: ASYNC110 - told by the watch
                    await anyio.sleep(0.01)
            with pytest.raises(SandboxLost):
                await other.vet()
            await backend.destroy(other)


def test_what_streams_cannot_be_is_refused():
    """Two words are known, and jails need their stream at once."""
    from agentsandbox.backends.kubernetes import KubernetesBackend

    with pytest.raises(ConfigurationError, match='streams is "warm" or "lazy", not \'cold\''):
        KubernetesBackend(streams="cold")
    with pytest.raises(ConfigurationError, match='streams="lazy" is for Pods of one sandbox'):
        KubernetesBackend(streams="lazy", jail=True, run_as_root=True)
