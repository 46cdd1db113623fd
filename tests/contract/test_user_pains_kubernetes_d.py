# SPDX-License-Identifier: Apache-2.0
"""What went wrong for others with pools on a cluster, as right behaviour: group D, making and removing Pods."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.backends.kubernetes import removal, vetting
from agentsandbox.client import SandboxClient
from agentsandbox.errors import AcquireTimeout
from agentsandbox.testing.cluster import NodeSpec

from .cluster_clients import ECHO, client_of, eventually, made, pod_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


def names(cluster):
    """The names of all Pods."""
    return [pod["metadata"]["name"] for pod in cluster.pods()]


async def test_p39_pods_that_do_not_get_ready_are_counted_and_held(tmp_path) -> None:
    """However many wait: no more Pods than allowed, none in place of one that is only slow, and the state is told."""
    cluster = {**ECHO, "nodes": [NodeSpec(name="small", cpu="100m")]}
    async with client_of(tmp_path, cluster=cluster, images={"host": 3}, max_sandboxes=2) as (found, client):
        most, refused = 0, []

        def watch(_event) -> None:
            nonlocal most
            most = max(most, len(found.pods()))

        async def wait() -> None:
            with pytest.raises(AcquireTimeout) as caught:
                await client.acquire("host", timeout=1.5)
            refused.append(str(caught.value))

        found.store.subscribe(found.kubelet.pods, watch)
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(wait)

        assert len(refused) == 20
        assert all("2 creating" in text for text in refused)
        assert (most, len(made(found))) == (2, 2)


async def test_p40_retry_after_is_a_minimum_for_every_image(tmp_path) -> None:
    """After a 429 nothing is asked for before the time is over, of no image; then all of it is made."""
    known = {"a": "host", "b": "host"}
    async with client_of(tmp_path, cluster=ECHO, known=known, images=["host", "a", "b"]) as (cluster, client):
        async with await client.acquire("host"):
            await eventually(lambda: client.statistics().ready == 2)
            before = len(made(cluster))
            cluster.faults.throttle("POST", r"/pods$", retry_after=1)
            for pod in names(cluster):
                if cluster.pod(pod)["spec"]["containers"][0]["image"] != "host":
                    cluster.delete_behind(pod)
            await eventually(lambda: client.statistics().ready == 2 and len(made(cluster)) >= before + 3)
        asked = made(cluster)[before:]
        refused = next(one for one in asked if one.status == 429)
        later = [one.at - refused.at for one in asked if one.at - refused.at > 0.2]
        assert min(later) >= 1.0
        assert [one.status for one in asked].count(201) == 2


async def test_p40_a_server_that_goes_on_throttling_is_named(tmp_path) -> None:
    """Who waits in vain is told by what; the server was asked once, as it wished."""
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        cluster.faults.throttle("POST", r"/pods$", retry_after=30, times=None)
        with pytest.raises(AcquireTimeout, match="too many requests"):
            await client.acquire("host", timeout=1.0)
        assert len(cluster.asked("POST", r"/pods$")) == 1


@pytest.mark.parametrize("after", [False, True], ids=["before it was made", "after it was made"])
async def test_p41_an_ambiguous_create_makes_one_pod(tmp_path, after) -> None:
    """Whether or not the Pod was made before the answer got lost: there is one Pod for one sandbox."""
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        async with await client.acquire("host") as lease:
            cluster.faults.cut("POST", r"/pods$", after=after)
            cluster.delete_behind(pod_of(lease))
        async with await client.acquire("host") as lease:
            assert names(cluster) == [pod_of(lease)]


async def test_p41_a_delete_never_hits_another_pod(tmp_path, monkeypatch) -> None:
    """Every delete of a Pod carries its UID; another Pod that has taken the name stays."""
    monkeypatch.setattr(removal, "PATIENCE", (0.3, 0.75, 1.5))
    async with client_of(tmp_path, cluster=ECHO, clean=False) as (cluster, client):
        lease = await client.acquire("host")
        stall = cluster.faults.watch(kind="stall", times=None)
        cluster.drop_watches("pods")
        await eventually(lambda: stall.hits)
        other = cluster.replace_pod(pod_of(lease))
        await lease.release(discard=True)
        await eventually(lambda: cluster.asked("DELETE", pod_of(lease)))

        deletes = cluster.asked("DELETE", pod_of(lease))
        assert {one.body["preconditions"]["uid"] for one in deletes} == {lease.identity.uid}
        assert cluster.pod(pod_of(lease))["metadata"]["uid"] == other["metadata"]["uid"]


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
async def test_p42_a_cancelled_acquire_leaves_nothing(tmp_path, delay) -> None:
    """Whenever it is cancelled: the next one gets a sandbox, and at the end no Pod is left."""
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        with anyio.move_on_after(delay):
            lease = await client.acquire("host")
            await lease.release()
        async with await client.acquire("host") as lease:
            assert pod_of(lease) in names(cluster)
        assert client.statistics().leased == 0


async def test_p42_a_cancelled_driver_leaves_nothing(tmp_path) -> None:
    """Interrupted while Pods are made, leased and removed: everything is gone when it has ended."""
    async with client_of(tmp_path, cluster=ECHO) as (cluster, _client):
        options = {"kubeconfig": cluster.kubeconfig(tmp_path)}
        with anyio.CancelScope() as scope:
            async with SandboxClient("kubernetes", images={"host": 8}, backend_options=options) as client:
                leases = [await client.acquire("host") for _ in range(4)]
                await leases[0].release(discard=True)
                scope.cancel()
                await anyio.sleep_forever()
        assert [name for name in names(cluster) if client.backend.run_id in name] == []


async def test_p43_a_sandbox_has_one_owner(tmp_path) -> None:
    """Of three callers on two sandboxes two get distinct Pods and one waits; another driver has Pods of its own."""
    async with client_of(tmp_path, cluster=ECHO, images={"host": 2}, max_sandboxes=2) as (cluster, client):
        options = {"kubeconfig": cluster.kubeconfig(tmp_path)}
        async with SandboxClient("kubernetes", images={"host": 1}, backend_options=options) as other:
            one, two = await client.acquire("host"), await client.acquire("host")
            with pytest.raises(AcquireTimeout):
                await client.acquire("host", timeout=0.2)
            async with await other.acquire("host") as three:
                held = {pod_of(lease) for lease in (one, two, three)}
                assert len(held) == 3
                assert other.backend.run_id in pod_of(three)
            await one.release()
            async with await client.acquire("host") as four:
                assert pod_of(four) != pod_of(two)
            await two.release()


async def test_p44_only_what_is_ready_and_will_last_is_leased(tmp_path) -> None:
    """One Pod is being deleted, one is on a cordoned node, one is fine: that one is leased."""
    cluster = {**ECHO, "nodes": 3}
    async with client_of(tmp_path, cluster=cluster, spares=2) as (found, client):
        await eventually(lambda: client.statistics().ready == 3)
        deleted, cordoned, fine = found.pods()
        cordon(found, cordoned["spec"]["nodeName"])
        found.evict(found.namespace, deleted["metadata"]["name"], by_api=True)
        await eventually(lambda: client.backend._nodes.closed(cordoned["spec"]["nodeName"]))
        async with await client.acquire("host") as lease:
            assert pod_of(lease) == fine["metadata"]["name"]


def cordon(cluster, node):
    """Let a node take no more Pods, as before it is drained."""
    stored = cluster.store.get(cluster.kubelet.nodes, "", node)
    cluster.store.replace(stored, {**stored.object, "spec": {**stored.object["spec"], "unschedulable": True}})


async def test_p44_a_cordoned_node_does_not_end_what_runs(tmp_path) -> None:
    """A lease on it goes on; afterwards its Pod is not used again, and the next one is elsewhere."""
    cluster = {**ECHO, "nodes": 2}
    async with client_of(tmp_path, cluster=cluster) as (found, client):
        async with await client.acquire("host") as lease:
            cordon(found, lease.node)
            await eventually(lambda: client.backend._nodes.closed(lease.node))
            assert await lease.alive()
        async with await client.acquire("host") as other:
            assert other.node != lease.node


async def test_p44_without_the_permission_nodes_count_as_open(tmp_path) -> None:
    """Looking at nodes takes a permission on the whole cluster, and one can do without."""
    async with client_of(tmp_path, cluster=ECHO, clean=False) as (cluster, _client):
        cluster.access.deny("list", "nodes")
        options = {"kubeconfig": cluster.kubeconfig(tmp_path)}
        async with SandboxClient("kubernetes", images={"host": 1}, backend_options=options) as client:
            await eventually(lambda: client.backend._nodes.refusal is not None)
            cordon(cluster, "node1")
            assert repr(client.backend._nodes) == "<Nodes [unknown]>"


@pytest.mark.parametrize("mode", ["runner", "direct"])
async def test_p44_what_does_not_answer_is_replaced_before_it_is_leased(tmp_path, monkeypatch, mode) -> None:
    """A sandbox that is ready on paper is asked for an answer; without one another is leased, and nobody notices."""
    monkeypatch.setattr(vetting, "PROBE_AFTER", 0.0)
    monkeypatch.setattr(vetting, "PROBE_WITHIN", 1.0)
    kind = ECHO if mode == "runner" else None
    async with client_of(tmp_path, mode=mode, spares=1, cluster=kind) as (cluster, client):
        await eventually(lambda: client.statistics().ready == 2)
        dead, _fine = cluster.pods()
        if mode == "direct":
            cluster.faults.exec(pod=dead["metadata"]["name"], status=404, body="not found", times=None)
        else:
            cluster.streams.silence(dead["metadata"]["uid"])
        for _ in range(2):
            async with await client.acquire("host") as lease:
                assert pod_of(lease) != dead["metadata"]["name"]
                assert (await lease.exec(["true"])).exit_code == 0
        assert client.backend._vetter.probes >= 2


async def test_p45_a_pod_that_never_finishes_terminating_is_reported(tmp_path, monkeypatch) -> None:
    """Orders to delete are few, it counts as stuck and as alive, and its finalizer is not touched."""
    monkeypatch.setattr(removal, "PATIENCE", (0.3, 0.75, 1.5))
    async with client_of(tmp_path, cluster=ECHO, max_sandboxes=2) as (cluster, client):
        lease = await client.acquire("host")
        cluster.hold_deletion(pod_of(lease))
        await lease.release(discard=True)
        await eventually(lambda: client.statistics().stuck == 1)

        assert len(cluster.asked("DELETE", pod_of(lease))) <= 3
        async with await client.acquire("host") as other:
            assert sorted(names(cluster)) == sorted([pod_of(lease), pod_of(other)])
            with pytest.raises(AcquireTimeout):
                await client.acquire("host", timeout=0.2)
        assert cluster.pod(pod_of(lease))["metadata"]["finalizers"] == ["example.com/never"]
        cluster.delete_behind(pod_of(lease))
        await eventually(lambda: client.statistics().stuck == 0)


async def test_p44_an_absent_api_server_says_nothing_about_a_sandbox(tmp_path, monkeypatch) -> None:
    """While nobody can tell, what was fine is leased; nothing is thrown away for want of an answer."""
    monkeypatch.setattr(vetting, "PROBE_AFTER", 0.0)
    monkeypatch.setattr(vetting, "PROBE_WITHIN", 0.5)
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        async with await client.acquire("host") as lease:
            before = pod_of(lease)
        await eventually(lambda: client.statistics().ready == 1)
        before = names(cluster)
        async with cluster.outage():
            await eventually(lambda: client.backend._reflector.stale_since is not None)
            lease = await client.acquire("host")
        assert [pod_of(lease)] == before
        await lease.release()
        assert len(made(cluster)) <= 2


async def test_p44_a_node_that_is_not_ready_is_left(tmp_path) -> None:
    """Its Pods are not ready any more; another one, elsewhere, is leased."""
    cluster = {**ECHO, "nodes": 2}
    async with client_of(tmp_path, cluster=cluster, spares=1, clean=False) as (found, client):
        await eventually(lambda: client.statistics().ready == 2)
        dead, fine = found.pods()
        found.lose_node(dead["spec"]["nodeName"])
        await eventually(lambda: client.backend._nodes.closed(dead["spec"]["nodeName"]))
        async with await client.acquire("host") as lease:
            assert lease.node == fine["spec"]["nodeName"]
        found.kubelet.frozen.clear()
        found.delete_behind(dead["metadata"]["name"])
