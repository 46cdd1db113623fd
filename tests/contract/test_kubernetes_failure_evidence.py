# SPDX-License-Identifier: Apache-2.0
"""Why a sandbox on a cluster was lost or could not be made: the right kind, in the cluster's own words."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.errors import (
    AcquireTimeout,
    Blame,
    FailureKind,
    ImagePullFailed,
    PermissionDenied,
    Phase,
    ProvisionError,
    SandboxLost,
    classify,
)
from agentsandbox.testing.cluster import Image, NodeSpec, Timing

from .cluster_clients import ECHO, client_of, eventually, pod_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


def overdue(cluster, name) -> None:
    """Let a Pod's time be over."""
    stored = cluster.store.get(cluster.kubelet.pods, cluster.namespace, name)
    spec = {**stored.object["spec"], "activeDeadlineSeconds": 0}
    cluster.store.replace(stored, {**stored.object, "spec": spec})


ENDS = {
    "oom_killed": (lambda cluster, pod: cluster.restart_container(pod, oom=True), "exit code 137 (OOMKilled)"),
    "died": (lambda cluster, pod: cluster.restart_container(pod, exit_code=1), "exit code 1 (Error)"),
    "completed": (lambda cluster, pod: cluster.restart_container(pod, exit_code=0), "exit code 0 (Completed)"),
    "evicted": (lambda cluster, pod: cluster.evict("rl", pod), "The node was low on resource: memory."),
    "evicted by the API": (lambda cluster, pod: cluster.evict("rl", pod, by_api=True), "Eviction API: evicting"),
    "preempted": (lambda cluster, pod: cluster.preempt(pod), "preempting to accommodate a higher priority pod"),
    "node_lost": (lambda cluster, _: cluster.lose_node("node1", evict=True), "deleting due to NoExecute taint"),
    "node_shutdown": (lambda cluster, _: cluster.shut_down_node("node1"), "imminent node shutdown"),
    "deadline_exceeded": (overdue, "longer than the specified deadline"),
    "deleted": (lambda cluster, pod: cluster.delete_behind(pod), ""),
}


@pytest.mark.parametrize("end", ENDS)
async def test_the_end_of_a_pod_is_told_as_it_was(tmp_path, end) -> None:
    """Reason and words are the Pod's; the episode may be tried again; nothing of it is graded."""
    strike, words = ENDS[end]
    cluster = {**ECHO, "nodes": 2}
    async with client_of(tmp_path, cluster=cluster, clean=False) as (found, client):
        lease = await client.acquire("host")
        assert lease.node == "node1"
        strike(found, pod_of(lease))
        await eventually(lambda: lease.lost is not None)
        with pytest.raises(SandboxLost) as caught:
            await lease.exec(["true"])

        verdict = classify(caught.value, Phase.EXEC)
        assert caught.value.reason == end.partition(" ")[0]
        assert words in caught.value.detail
        assert (verdict.kind, verdict.blame) == (FailureKind.SANDBOX_LOST, Blame.SANDBOX)
        assert (verdict.retryable, verdict.gradable) == (True, False)
        await lease.release()
        found.kubelet.frozen.clear()
        for pod in found.pods():
            found.delete_behind(pod["metadata"]["name"])


REFUSALS = {
    "image not found": ({"error": "not_found"}, ImagePullFailed, FailureKind.IMAGE_PULL, False, "not found"),
    "image forbidden": (
        {"error": "unauthorized"},
        ImagePullFailed,
        FailureKind.IMAGE_PULL,
        False,
        "authorization failed",
    ),
    "image throttled": ({"error": "throttled"}, ImagePullFailed, FailureKind.IMAGE_PULL, True, "toomanyrequests"),
    "registry away": ({"error": "no_host"}, ImagePullFailed, FailureKind.IMAGE_PULL, True, "no such host"),
    "root": ({"user": "root"}, ProvisionError, FailureKind.PROVISION, False, "image will run as root"),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_a_pod_that_does_not_get_ready_says_why(tmp_path, case) -> None:
    """The kind of the error, whether another try makes sense, and the kubelet's words."""
    image, kind, failure, retryable, words = REFUSALS[case]
    known = {"bad": Image(present="error" not in image, **image)}
    options = {"ready_timeout": 0.3}
    async with client_of(tmp_path, cluster=ECHO, known=known, images=["bad"], options=options) as (_, client):
        with pytest.raises(kind, match=words) as caught:
            await client.acquire("bad", timeout=30)
        verdict = classify(caught.value, Phase.ACQUIRE)

        assert type(caught.value) is kind
        assert (verdict.kind, verdict.retryable) == (failure, retryable)


async def test_what_is_refused_at_the_door_says_why(tmp_path) -> None:
    """Room and a quota are waited for, and named when the time is over; webhooks and Pod security are final."""
    full = {**ECHO, "nodes": [NodeSpec(name="small", cpu="100m")]}
    async with client_of(tmp_path, cluster=full, options={"ready_timeout": 0.3}) as (cluster, client):
        with pytest.raises(AcquireTimeout, match=r"Unschedulable: .*Insufficient cpu"):
            await client.acquire("host", timeout=2.0)
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        cluster.faults.exceed_quota(name="sandboxes", times=None)
        with pytest.raises(AcquireTimeout, match="exceeded quota: sandboxes"):
            await client.acquire("host", timeout=1.0)
    for refuse, words in (
        (lambda found: found.access.webhooks.update({"w": lambda *_: "unsigned"}), "denied the request: unsigned"),
        (restrict, 'violates PodSecurity "restricted:latest"'),
    ):
        async with client_of(tmp_path, cluster=ECHO, options={"run_as_root": True}) as (cluster, client):
            refuse(cluster)
            with pytest.raises(PermissionDenied, match=words) as caught:
                await client.acquire("host", timeout=10.0)
            assert not classify(caught.value, Phase.ACQUIRE).retryable


def restrict(cluster) -> None:
    """Let the namespace allow only what is restricted."""
    kind = cluster.store.resource("namespaces")
    stored = cluster.store.get(kind, "", cluster.namespace)
    labels = {**stored.object["metadata"]["labels"], "pod-security.kubernetes.io/enforce": "restricted"}
    cluster.store.replace(stored, {**stored.object, "metadata": {**stored.object["metadata"], "labels": labels}})


async def test_what_only_events_tell_is_told(tmp_path) -> None:
    """A volume that cannot be mounted shows in no status: the last warning about the Pod is in the error."""
    options = {"ready_timeout": 0.4}
    async with client_of(tmp_path, cluster=ECHO, options=options, timing=Timing(sandbox=60.0)) as (cluster, client):
        kind = cluster.kubelet.pods

        def warn(event) -> None:
            if event.type == "ADDED":
                cluster.event(event.now.object, "Warning", "FailedMount", "MountVolume.SetUp failed: no such volume")

        cluster.store.subscribe(kind, warn)
        with anyio.fail_after(60), pytest.raises(ProvisionError, match="FailedMount: MountVolume") as caught:
            await client.acquire("host", timeout=30)
        assert classify(caught.value, Phase.ACQUIRE).retryable
