# SPDX-License-Identifier: Apache-2.0
"""Limits that hold under any load, on the cluster double: counted by the server, from its own log of requests."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.client import SandboxClient
from agentsandbox.errors import AcquireTimeout
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.testing.cluster import FakeCluster, Image, NodeSpec, Timing
from agentsandbox.transport.websocket import TLS_BUFFER

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture
def opened(tmp_path):
    """A client of a cluster whose Pods are echo runners; afterwards no Pod may be left."""

    @asynccontextmanager
    async def run(*, image=None, faults=lambda cluster: None, **options):
        nodes = [NodeSpec(name=f"node{number}") for number in range(8)]
        images = {"host": image or "host", "other": image or "host"}
        timing = Timing(second=0.05)
        async with FakeCluster(
            nodes=nodes, images=images, process="echo-runner", events=False, timing=timing
        ) as cluster:
            faults(cluster)
            backend = {"kubeconfig": cluster.kubeconfig(tmp_path), "requests": {"cpu": "1m", "memory": "1Mi"}}
            options = {"reset": ResetPolicy(rungs=("replace",)), **options}
            async with SandboxClient("kubernetes", backend_options=backend, **options) as client:
                yield cluster, client
            cluster.faults.clear()
            assert [] == cluster.pods()

    return run


def creates(cluster):
    """When Pods were asked for, dry runs left out."""
    return [one.at for one in cluster.asked("POST", r"/pods$") if one.get("dryRun") is None]


async def take(client, image, leases, *, timeout=120.0):
    """Lease one and keep it."""
    leases.append(await client.acquire(image, timeout=timeout))


async def test_p39_two_hundred_acquires_at_once_make_two_hundred_pods_at_the_configured_rate(opened):
    """Not a Pod too many, not a create before its time: with 100 a second and as many at once, the n-th is due then."""
    rate, count = 100.0, 200
    began = anyio.current_time()
    options = {"images": {"host": count}, "spares": 0, "max_sandboxes": count, "create_rate": rate}
    async with opened(**options) as (cluster, client):
        leases = []
        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(take, client, "host", leases)

        assert count == len({lease.identity.uid for lease in leases})
        times = creates(cluster)
        assert count == len(times) == len(cluster.pods())
        assert [True] * 10 == [(await lease.exec("true")).ok for lease in leases[::20]]
        for number, at in enumerate(times):
            assert at >= began + (number + 1 - rate) / rate - 0.001
        for lease in leases:
            await lease.release(discard=True)


async def test_p39_a_burst_of_acquires_beyond_the_limit_makes_no_pod_beyond_it(opened):
    """Sixty ask for twenty places: never more than twenty Pods, and every lease is of a fresh one."""
    options = {"images": {"host": 20}, "spares": 0, "max_sandboxes": 20, "create_rate": 500.0}
    async with opened(**options) as (cluster, client):
        alive, pods, seen = [], [], set()

        async def use():
            async with await client.acquire("host", timeout=120) as lease:
                seen.add(lease.identity.uid)
                assert (await lease.exec("true")).ok
                alive.append(client.statistics().alive)
                pods.append(len(cluster.pods()))

        async with anyio.create_task_group() as group:
            for _ in range(60):
                group.start_soon(use)
        assert 60 == len(seen) == client.statistics().granted_total
        assert max(alive) <= 20
        assert max(pods) <= 20


async def test_an_overcommit_is_impossible(opened):
    """Lists are slow, watches expire, no Pod becomes ready, and everybody asks again: creates stay at the target."""

    def slow(cluster):
        cluster.faults.delay("GET", r"/pods$", 0.4, times=None)
        cluster.faults.watch(kind="expire", events=3, times=None)

    never = Image(present=False, pull=10_000)
    async with opened(image=never, faults=slow, images={"host": 6}, spares=2, create_rate=500.0) as (cluster, client):

        async def ask():
            for _ in range(3):
                with pytest.raises(AcquireTimeout, match="0 ready, 8 creating"):
                    await client.acquire("host", timeout=1.0)

        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(ask)
        assert (0, 8) == (client.statistics().ready, client.statistics().creating)
        assert 8 == len(creates(cluster))
        assert 8 == len(cluster.pods())
        lists = [one for one in cluster.asked("GET", r"/pods$") if one.get("watch") is None]
        assert len(lists) > 1


async def test_an_overcommit_by_announcement_is_impossible(opened):
    """Hundreds of rollouts of two images are announced again and again: creates stay at what may be alive."""
    never = Image(present=False, pull=10_000)
    async with opened(image=never, max_sandboxes=10, create_rate=500.0) as (cluster, client):
        for _ in range(20):
            announced = client.announce({"host": 100, "other": 300})
            await anyio.sleep(0.05)
            announced.withdraw()
            client.announce({"other": 50})
        with anyio.fail_after(30):
            while len(creates(cluster)) < 10:  # noqa: ASYNC110 - the server tells nobody
                await anyio.sleep(0.05)
        await anyio.sleep(0.5)

        assert (10, 10) == (client.statistics().creating, len(creates(cluster)))
        assert 1000 == client.statistics().announced


async def test_a_stream_over_tls_keeps_little_memory_and_loses_nothing(tmp_path):
    """The event loop sets 256 KiB aside to read from each; an eighth of that does for output of any size."""
    output = bytes(range(256)) * 1000
    images = {"images": {"host": 1}, "spares": 0, "reset": ResetPolicy(rungs=("replace",))}
    async with FakeCluster(
        process="echo-runner", answer=lambda _request: (0, output), tls=True, timing=Timing(second=0.05)
    ) as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path))
        async with SandboxClient(backend, **images) as client, await client.acquire("host") as lease:
            (sandbox,) = backend._sandboxes.values()
            socket = sandbox.session._link._stream._socket._socket
            protocol = socket._response.connection.transport._ssl_protocol

            assert TLS_BUFFER == protocol.max_size == len(protocol._ssl_buffer)
            assert output == (await lease.exec("true")).stdout
            assert TLS_BUFFER == len(protocol._ssl_buffer)
