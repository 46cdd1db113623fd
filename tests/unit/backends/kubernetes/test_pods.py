# SPDX-License-Identifier: Apache-2.0
"""Sandboxes in Pods, on the cluster double: what happens when the control plane or the Pods misbehave."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes import backend as backend_module
from agentsandbox.backends.kubernetes import removal as removal_module
from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    ImagePullFailed,
    InfrastructureError,
    PermissionDenied,
    ProvisionError,
    QuotaExceeded,
    SandboxLost,
    Throttled,
    Unschedulable,
    UsageError,
)
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import ExecLevel, SandboxSpec
from agentsandbox.testing.cluster import FakeCluster, Image, Timing

pytestmark = pytest.mark.anyio

HOST = SandboxSpec(image="host")


@pytest.fixture
def anyio_backend():
    """Run on the event loop that the client library needs."""
    return "asyncio"


@pytest.fixture
def cluster_of(tmp_path):
    """Run a cluster and a backend on it; afterwards no Pod may be left."""

    @asynccontextmanager
    async def run(*, images=None, options=None, clean=True, **cluster_options):
        found = {"host": "host", **(images or {})}
        async with FakeCluster(images=found, timing=Timing(second=0.1, observe=0.5), **cluster_options) as cluster:
            backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), **(options or {}))
            backend.seen = []
            backend.sink = backend.seen.append
            async with backend.running():
                yield cluster, backend
            if clean:
                assert [] == cluster.pods()

    return run


async def sh(sandbox, script, **more):
    """Run a script in a sandbox."""
    return await sandbox.session.exec(Command(command=script, **more))


async def lost(sandbox):
    """Wait until a sandbox is lost."""
    with anyio.fail_after(10):
        while sandbox.loss is None:  # noqa: ASYNC110 - told by the watch
            await anyio.sleep(0.01)
    return sandbox.loss.reason


# Making.


async def test_a_pod_is_made_and_says_what_it_is(cluster_of):
    """A sandbox has the identity of its Pod, runs commands, and its spec holds no secret."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(SandboxSpec(image="host", env={"A": "b"}), "sb-1")
        (pod,) = cluster.pods()

        assert (pod["metadata"]["uid"], 0) == (sandbox.identity.uid, sandbox.identity.restarts)
        assert pod["status"]["containerStatuses"][0]["containerID"] == sandbox.identity.instance
        assert ExecLevel.RUNNER is sandbox.capabilities.exec_level
        assert ("restart", "replace") == sandbox.capabilities.rungs
        assert b"b\n" == (await sh(sandbox, "echo $A")).stdout
        assert sandbox.nonce not in str(pod)
        assert "sb-1" == pod["metadata"]["annotations"]["agentsandbox.dev/sandbox"]
        assert len(str(pod["spec"]["containers"][0]["command"])) < 4096
        assert repr(sandbox) == f"<KubernetesSandbox sb-1 in {sandbox.pod} [host, ready]>"
        assert repr(backend) == f"<KubernetesBackend [run {backend.run_id}, running, 1 Pods]>"


async def test_the_command_line_of_a_stream_is_short(cluster_of):
    """Whatever a user runs, the URL of a stream holds less than 2 KiB of command line."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        await sh(sandbox, "true " + "x" * 500_000)
        commands = [
            sum(len(value) for name, value in request.query if name == "command")
            for request in cluster.asked("", r"/exec$")
        ]
        assert len(commands) == 1
        assert max(commands) < 2048


@pytest.mark.parametrize("after", [False, True], ids=["before it was made", "after it was made"])
async def test_a_create_without_an_answer_makes_one_pod(cluster_of, after):
    """If the connection breaks under a create, the Pod is adopted if it is there, and made if it is not."""
    async with cluster_of() as (cluster, backend):
        await backend.create(HOST, "sb-0")  # so that the rule has been asked about
        cluster.faults.cut("POST", r"/pods$", after=after)
        sandbox = await backend.create(HOST, "sb-1")

        assert 2 == len(cluster.pods())
        assert b"ok\n" == (await sh(sandbox, "echo ok")).stdout


async def test_a_pod_of_the_same_name_that_is_not_ours_is_not_adopted(cluster_of):
    """A Pod that has the name and not the mark of a lost create is left alone, and so is the error."""
    async with cluster_of(clean=False) as (cluster, backend):
        await backend.create(HOST, "sb-0")
        cluster.faults.answer("POST", r"/pods$", 409, reason="AlreadyExists", message="pods exists")
        with pytest.raises(InfrastructureError, match="exists"):
            await backend.create(HOST, "sb-1")
        assert 1 == len(cluster.pods())


@pytest.mark.parametrize(
    ("image", "error", "words"),
    [
        (Image(error="not_found", present=False), ImagePullFailed, "not found"),
        (Image(error="unauthorized", present=False), ImagePullFailed, "authoriz|denied"),
    ],
    ids=["not found", "unauthorized"],
)
async def test_an_image_that_cannot_be_had(cluster_of, image, error, words):
    """Each failure to pull an image is of that kind, in the kubelet's words, and nothing stays behind."""
    async with cluster_of(images={"bad": image}, options={"ready_timeout": 5.0}) as (cluster, backend):
        with pytest.raises(error, match=words) as caught:
            await backend.create(SandboxSpec(image="bad"), "sb-1")
        assert caught.value.retryable is False
        assert [] == cluster.pods()


async def test_what_the_api_server_refuses(cluster_of):
    """Quota, permission, throttling and an absent server are told apart; nothing stays behind."""
    async with cluster_of() as (cluster, backend):
        await backend.create(HOST, "sb-0")
        cluster.faults.exceed_quota()
        with pytest.raises(QuotaExceeded, match="exceeded quota"):
            await backend.create(HOST, "sb-1")
        cluster.faults.answer("POST", r"/pods$", 403, reason="Forbidden", message="admission webhook says no")
        with pytest.raises(PermissionDenied, match="webhook says no"):
            await backend.create(HOST, "sb-2")
        cluster.faults.throttle("POST", r"/pods$", retry_after=7)
        with pytest.raises(Throttled) as caught:
            await backend.create(HOST, "sb-3")
        assert caught.value.retry_after == 7
        assert 1 == len(cluster.pods())


async def test_a_pod_without_a_node(cluster_of):
    """A Pod that fits nowhere is unschedulable, in the scheduler's words."""
    options = {"ready_timeout": 0.5, "requests": {"cpu": "100000"}, "limits": {"cpu": "100000"}}
    async with cluster_of(options=options) as (cluster, backend):
        with pytest.raises(Unschedulable, match="nsufficient cpu"):
            await backend.create(HOST, "sb-1")
        assert [] == cluster.pods()


async def test_a_cancelled_create_leaves_nothing(cluster_of):
    """Whenever it is cancelled, no Pod stays behind."""
    async with cluster_of() as (cluster, backend):
        for delay in (0.0, 0.01, 0.05, 0.1, 0.2):
            made = None
            with anyio.move_on_after(delay):
                made = await backend.create(HOST, "sb-1")
            if made is not None:
                await backend.destroy(made)
            assert [] == cluster.pods()
        assert {} == backend._sandboxes


async def test_what_an_unfinished_create_made_is_gone_at_the_end(cluster_of):
    """A Pod that appears after its create was given up is removed when the run ends."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        del backend._sandboxes[sandbox.pod]
        assert 1 == len(cluster.pods())


# Being lost.


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (lambda cluster, pod: cluster.delete_behind(pod), "deleted"),
        (lambda cluster, pod: cluster.evict(cluster.namespace, pod, message="low on memory"), "evicted"),
        (lambda cluster, pod: cluster.preempt(pod), "preempted"),
        (lambda cluster, pod: cluster.replace_pod(pod), "deleted"),
        (lambda cluster, pod: cluster.shut_down_node("node1"), "node_shutdown"),
        (lambda cluster, pod: cluster.restart_container(pod, oom=True), "oom_killed"),
        (lambda cluster, pod: cluster.restart_container(pod), "died"),
    ],
    ids=["deleted", "evicted", "preempted", "replaced", "node shut down", "out of memory", "died"],
)
async def test_p15_whatever_happens_to_a_pod_ends_its_command_with_the_reason(cluster_of, what, reason):
    """A running command ends at once with the cluster's reason, the sandbox is lost, and the pool hears of it."""
    async with cluster_of(clean=reason not in ("deleted", "node_shutdown")) as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        started = anyio.Event()

        async def strike():
            await started.wait()
            what(cluster, sandbox.pod)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(strike)
                with pytest.raises(SandboxLost) as caught:
                    await sandbox.session.exec(Command(command="sleep 60", timeout=60), on_started=started.set)
        assert await lost(sandbox) == reason
        assert caught.value.reason in (reason, "stream_ended")
        with pytest.raises(SandboxLost, match=reason):
            await sandbox.check()
        (event,) = [event for event in backend.seen if event.name == "sandbox.lost"]
        assert ("sb-1", reason) == (event.sandbox, event.data["reason"])


async def test_check_makes_no_call(cluster_of):
    """Looking at the identity around every command costs the API server nothing."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        before = len(cluster.requests)
        for _ in range(100):
            await sandbox.check()
        assert before == len(cluster.requests)


# Attaching again.


async def test_p06_a_command_survives_an_outage_and_runs_once(cluster_of):
    """While there is no API server commands run on; afterwards each has finished once, with all of its output."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        done = []

        async def run(number):
            result = await sh(
                sandbox, f"echo {number} >> log; for i in 1 2 3 4 5 6 7 8 9; do echo {number} $i; sleep 0.1; done"
            )
            assert [b"%d %d" % (number, i) for i in range(1, 10)] == result.stdout.splitlines()
            done.append(number)

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(run, number)
            await anyio.sleep(0.2)
            async with cluster.outage():
                await anyio.sleep(0.5)
        assert set(range(8)) == set(done)
        log = (await sh(sandbox, "cat log")).stdout.split()
        assert list(range(8)) == sorted(map(int, log))
        assert backend._attacher.opened == 2
        await sandbox.check()


async def test_a_pod_that_was_replaced_during_an_outage_is_not_attached_to(cluster_of):
    """When the stream is gone and another Pod has the name, the sandbox is lost, not continued."""
    async with cluster_of(clean=False) as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        cluster.drop_watches()
        cluster.replace_pod(sandbox.pod)
        assert await lost(sandbox) in ("replaced", "deleted")
        assert backend._attacher.opened == 1


# Going.


async def test_destroy_is_done_when_the_pod_is_gone(cluster_of):
    """A sandbox is removed by its UID, and a second time is fine."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        await backend.destroy(sandbox)

        assert [] == cluster.pods()
        (request,) = cluster.asked("DELETE", sandbox.pod)
        assert request.body["preconditions"]["uid"] == sandbox.uid
        await backend.destroy(sandbox)
        assert 1 == len(cluster.asked("DELETE", sandbox.pod))
        assert [] == [event for event in backend.seen if event.name == "sandbox.lost"]


async def test_p60_a_delete_that_fails_is_tried_again(cluster_of):
    """After a server error the delete is repeated; a Pod that is gone already is success."""
    async with cluster_of() as (cluster, backend):
        one, two = await backend.create(HOST, "sb-1"), await backend.create(HOST, "sb-2")
        cluster.faults.answer("DELETE", one.pod, 500)
        await backend.destroy(one)
        assert 2 == len(cluster.asked("DELETE", one.pod))
        cluster.delete_behind(two.pod)
        await backend.destroy(two)
        assert [] == cluster.pods()


async def test_a_pod_of_the_same_name_is_never_deleted(cluster_of):
    """Where another Pod has taken the name, it stays."""
    async with cluster_of(clean=False) as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        other = cluster.replace_pod(sandbox.pod)
        await backend.destroy(sandbox)
        assert other["metadata"]["uid"] == cluster.pod(sandbox.pod)["metadata"]["uid"]


async def test_p45_a_pod_that_goes_on_terminating_is_reported(cluster_of, monkeypatch):
    """Orders to delete are few, the Pod counts as stuck, and its finalizer is not touched."""
    monkeypatch.setattr(removal_module, "PATIENCE", (0.2, 0.2, 0.2))
    async with cluster_of(clean=False) as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        cluster.hold_deletion(sandbox.pod)
        with pytest.raises(InfrastructureError, match="still there"):
            await backend.destroy(sandbox)

        assert 3 == len(cluster.asked("DELETE", sandbox.pod))
        assert {sandbox.uid: sandbox.pod} == backend._remover.stuck
        assert cluster.pod(sandbox.pod)["metadata"]["finalizers"]
        assert "1 stuck" in repr(backend._remover)
        monkeypatch.setattr(removal_module, "SETTLE", 0.3)


async def test_the_end_of_a_run_needs_no_second_permission(cluster_of):
    """Where deleting collections is not allowed, Pods are deleted one by one."""
    async with cluster_of() as (cluster, backend):
        for number in range(3):
            await backend.create(HOST, f"sb-{number}")
        cluster.faults.answer("DELETE", r"/pods$", 403, reason="Forbidden", times=None)


# In place.


async def test_a_restart_gives_a_fresh_sandbox_in_the_same_pod(cluster_of):
    """The new container has another identity; the old session is over; the Pod is the same."""
    async with cluster_of() as (cluster, backend):
        old = await backend.create(HOST, "sb-1")
        await sh(old, "echo x > planted; echo x > /dev/shm/planted")
        assert backend.can_recycle(old)

        new = await backend.restart(old)

        assert old.uid == new.uid
        assert old.identity.restarts + 1 == new.identity.restarts
        assert old.identity.instance != new.identity.instance
        assert b"" == (await sh(new, "cat planted /dev/shm/planted 2>/dev/null")).stdout
        with pytest.raises(SandboxLost):
            await sh(old, "true")
        await new.check()
        await backend.destroy(old)  # is not the Pod's sandbox any more
        assert 1 == len(cluster.pods())
        assert [] == [event for event in backend.seen if event.name == "sandbox.lost"]


async def test_an_image_changes_in_place(cluster_of):
    """One Pod serves one image after the other; no Pod is made for it."""
    async with cluster_of(images={"b": Image(env={"WHO": "b"})}) as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        for number in range(4):
            image = ("b", "host")[number % 2]
            sandbox = await backend.change_image(sandbox, SandboxSpec(image=image))
            assert (b"b\n" if image == "b" else b"\n") == (await sh(sandbox, "echo $WHO")).stdout
            assert image == sandbox.state.image
        made = [request for request in cluster.asked("POST", r"/pods$") if request.get("dryRun") is None]
        assert 1 == len(made)


def with_record(backend, sandbox):
    """Have the watch know of a container that ended and was not removed."""
    ended = {"exitCode": 42, "reason": "Error", "containerID": "containerd://0"}
    backend._reflector.get(sandbox.uid)["status"]["containerStatuses"][0]["lastState"] = {"terminated": ended}


async def test_a_record_of_an_ended_container_is_cleared_before_the_image_changes(cluster_of):
    """With one the kubelet could back off, so the container is made anew once more; else it is not."""
    async with cluster_of(images={"b": Image(env={"WHO": "b"})}) as (_cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        with_record(backend, sandbox)
        for image, restarts in (("b", 2), ("host", 3)):
            sandbox = await backend.change_image(sandbox, SandboxSpec(image=image))
            assert (image, restarts) == (sandbox.state.image, sandbox.identity.restarts)
        with_record(backend, sandbox)
        sandbox = await backend.restart(sandbox)
        assert 4 == sandbox.identity.restarts
        await sandbox.check()


async def test_a_change_that_fails_half_way_leaves_nothing(cluster_of):
    """If the container was made anew and the image is not there, the sandbox that was asked for can be removed."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        with_record(backend, sandbox)
        with pytest.raises(ProvisionError):
            await backend.change_image(sandbox, SandboxSpec(image="nothing"))
        await backend.destroy(sandbox)
        assert [] == cluster.pods()
        assert {} == backend._sandboxes


async def test_a_server_without_the_rule_recycles_nothing(cluster_of):
    """An older server is asked once, by a dry run; its Pods are replaced instead."""
    async with cluster_of(version=(1, 33)) as (cluster, backend):
        for number in range(2):
            sandbox = await backend.create(HOST, f"sb-{number}")
        assert not backend.can_recycle(sandbox)
        assert ("replace",) == sandbox.capabilities.rungs
        assert 1 == len([request for request in cluster.asked("POST", r"/pods$") if request.get("dryRun")])


async def test_what_outlives_a_container_forbids_recycling(cluster_of):
    """A Pod with a writable volume is not used again: what an episode wrote there would stay."""
    volumes = {"volumes": [{"name": "v", "emptyDir": {}}], "volume_mounts": [{"name": "v", "mountPath": "/v"}]}
    async with cluster_of(options=volumes) as (_cluster, backend):
        assert not backend.can_recycle(await backend.create(HOST, "sb-1"))


async def test_a_lost_sandbox_is_not_recycled(cluster_of):
    """What is gone cannot become anything else, and that is an error and not a hang."""
    async with cluster_of() as (cluster, backend):
        sandbox = await backend.create(HOST, "sb-1")
        cluster.delete_behind(sandbox.pod)
        await lost(sandbox)
        assert not backend.can_recycle(sandbox)
        with pytest.raises(ProvisionError, match="of no use"):
            await backend.restart(sandbox)


# Options.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exec_mode": "magic"}, "exec_mode is one of"),
        ({"streams": "cold"}, "streams"),
        ({"ready_timeout": 0}, "above 0 seconds"),
        ({"max_connections": 0}, "at least 1"),
        ({"run_id": "x"}, "12 hexadecimal digits"),
        ({"cpu": "1"}, "no option cpu"),
        ({"user": 0}, "run_as_root"),
    ],
)
def test_options_that_make_no_sense(options, words):
    """Each is refused before a cluster hears of it, with the reason."""
    with pytest.raises(ConfigurationError, match=words):
        KubernetesBackend(**options)


async def test_a_backend_that_does_not_run_makes_nothing():
    """Use outside of its context is an error of use."""
    with pytest.raises(UsageError, match="not running"):
        await KubernetesBackend().create(HOST, "sb-1")


async def test_no_server_is_an_error_of_the_control_plane(tmp_path, monkeypatch):
    """A cluster that is not there is named when the backend starts."""
    monkeypatch.setattr(backend_module, "START_LIMIT", 0.3)
    async with FakeCluster(images={}) as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path))
    with pytest.raises(ApiUnavailable, match="cannot connect"):
        async with backend.running():
            raise AssertionError("it started")


def test_importing_the_backend_imports_no_client():
    """Neither the package nor the backend's class costs the client's import."""
    code = (
        "import sys, agentsandbox\n"
        "from agentsandbox.backends.kubernetes import KubernetesBackend\n"
        "assert not {'kubernetes_asyncio', 'aiohttp'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
