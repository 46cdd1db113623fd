# SPDX-License-Identifier: Apache-2.0
"""What went wrong for others with pools on a cluster, as right behaviour: group D, what fails, ends or expires."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import anyio
import pytest

from agentsandbox import SandboxPool
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.client import SandboxClient
from agentsandbox.errors import (
    ConfigurationError,
    FailureKind,
    ImagePullFailed,
    PermissionDenied,
    Phase,
    ProvisionError,
    SandboxLost,
    classify,
)
from agentsandbox.testing.cluster import FakeCluster, Image

from .cluster_clients import ECHO, client_of, eventually, made, pod_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


DRIVER = """
import sys, anyio
from agentsandbox.client import SandboxClient

async def main():
    options = {"kubeconfig": sys.argv[1], "lifetime": 2, "run_id": sys.argv[2]}
    async with SandboxClient("kubernetes", images={"host": 2}, spares=0, backend_options=options) as client:
        for _ in range(2):
            await client.acquire("host")
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_p46_nothing_outlives_its_deadline(tmp_path) -> None:
    """A driver that is killed leaves Pods with their run id, and the cluster ends them without anybody's help."""
    async with FakeCluster(images={"host": "host"}, **ECHO) as cluster:
        argv = [sys.executable, "-c", DRIVER, cluster.kubeconfig(tmp_path), "0a1b2c3d4e5f"]
        async with await anyio.open_process(argv, stdout=subprocess.PIPE, stderr=None) as driver:
            assert (await driver.stdout.receive()).startswith(b"ready")
            driver.kill()
        assert [pod["spec"]["activeDeadlineSeconds"] for pod in cluster.pods()] == [2, 2]
        assert {pod["metadata"]["labels"]["agentsandbox.dev/run-id"] for pod in cluster.pods()} == {"0a1b2c3d4e5f"}
        await eventually(lambda: all(pod["status"]["phase"] == "Failed" for pod in cluster.pods()))
        assert [pod["status"]["reason"] for pod in cluster.pods()] == ["DeadlineExceeded"] * 2
        assert [worker.container for worker in cluster.kubelet.workers.values()] == [None, None]


async def test_p46_the_deadline_of_a_pod_ends_its_command_with_that_reason(tmp_path) -> None:
    """Whoever is still in it learns why, and the episode may be tried again."""
    async with client_of(tmp_path) as (cluster, client), await client.acquire("host") as lease:
        stored = cluster.store.get(cluster.kubelet.pods, cluster.namespace, pod_of(lease))
        spec = {**stored.object["spec"], "activeDeadlineSeconds": 1}
        cluster.store.replace(stored, {**stored.object, "spec": spec})
        with pytest.raises(SandboxLost, match="longer than the specified deadline") as caught:
            await lease.exec("sleep 600", timeout=600)
        assert caught.value.reason == "deadline_exceeded"
        assert classify(caught.value, Phase.EXEC).retryable


def test_p47_the_lifetime_comes_from_the_stages() -> None:
    """A Pod outlives the sum of the time limits; settings that contradict each other are refused, naming both."""
    backend = KubernetesBackend(stages=(300, 1200, 120), user=1000)
    assert backend.options.lifetime >= 1620
    assert backend.guaranteed_life == 1620
    with pytest.raises(ConfigurationError, match=r"max_lifetime is 900 s, and the stages may take 1620 s"):
        KubernetesBackend(stages=(300, 1200, 120), max_lifetime=900)
    with pytest.raises(ConfigurationError, match=r"lifetime is 600 s, and the stages may take 1620 s"):
        KubernetesBackend(stages=(300, 1200, 120), lifetime=600)
    with pytest.raises(ConfigurationError, match=r"lifetime is 600 s, and max_lifetime 60 s"):
        KubernetesBackend(lifetime=600, max_lifetime=60)
    with pytest.raises(ConfigurationError, match="number of seconds"):
        KubernetesBackend(stages=(-1,))


async def test_p47_an_episode_longer_than_its_pod_is_refused() -> None:
    """A pool says so at its start, and a batch at its own, naming both times."""
    with pytest.raises(ConfigurationError, match=r"episode_timeout is 7200 s, and a sandbox .* lives 1800 s"):
        SandboxPool("kubernetes", images=["host"], episode_timeout=7200, backend_options={"lifetime": 3600})
    pool = SandboxPool("kubernetes", images=["host"], episode_timeout=600, backend_options={"lifetime": 3600})
    assert pool.client.backend.guaranteed_life == 1800


async def test_p47_a_pod_near_its_end_is_not_leased(tmp_path) -> None:
    """What is left of its life is less than an episode may take: another Pod is leased, and nobody notices."""
    async with client_of(tmp_path, cluster=ECHO, options={"stages": [100, 20]}) as (cluster, client):
        async with await client.acquire("host") as lease:
            assert cluster.pod(pod_of(lease))["spec"]["activeDeadlineSeconds"] == 120 + 300
        await eventually(lambda: client.statistics().ready == 1)
        before = cluster.pods()[0]["metadata"]["name"], len(made(cluster))
        for sandbox in client.backend._sandboxes.values():
            sandbox.born -= 301
        async with await client.acquire("host") as other:
            assert pod_of(other) != before[0]
        assert len(made(cluster)) == before[1] + 1


async def test_p48_a_quota_is_waited_for(tmp_path) -> None:
    """Refused three times and then not: the sandbox is there, after pauses, and no image is blamed."""
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        async with await client.acquire("host", timeout=30) as lease:
            cluster.faults.exceed_quota(times=3)
            cluster.delete_behind(pod_of(lease))
        async with await client.acquire("host", timeout=50) as lease:
            assert lease.sandbox
        assert [one.status for one in made(cluster)] == [201, 403, 403, 403, 201]


async def test_p48_what_is_not_allowed_is_asked_for_once(tmp_path) -> None:
    """A Role that lacks it, or an admission webhook that says no: an error at once, in the server's words."""
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        cluster.access.webhooks["images.example.com"] = lambda *_: "only signed images"
        with pytest.raises(PermissionDenied, match=r'"images\.example\.com" denied the request: only signed images'):
            await client.acquire("host")
        assert len(cluster.asked("POST", r"/pods$")) == 1
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client):
        cluster.access.deny("create", "pods")
        with pytest.raises(PermissionDenied, match='cannot create resource "pods"'):
            await client.acquire("host")
        assert len(cluster.asked("POST", r"/pods$")) == 1


async def test_p48_an_image_that_needs_root_fails_its_waiters_with_the_fix(tmp_path) -> None:
    """The kubelet's reason, what to do about it, one Pod, and later callers do not wait; other images are fine."""
    known = {"rooted": Image(root="host", user="root")}
    async with client_of(tmp_path, cluster=ECHO, known=known, images=["host", "rooted"]) as (cluster, client):
        for _ in range(2):
            with pytest.raises(ProvisionError, match=r"CreateContainerConfigError.*image will run as root.*user=1000"):
                await client.acquire("rooted")
        async with await client.acquire("host") as lease:
            assert lease.image == "host"
        assert len([one for one in made(cluster) if '"rooted"' in json.dumps(one.body)]) == 1


async def test_p48_the_breaker_of_an_image_opens_with_the_reason(tmp_path) -> None:
    """Pods that fail in a row for a reason that may pass: later callers fail at once, naming it."""
    known = {"bad": Image(error="no_host", present=False)}
    options = {"ready_timeout": 0.3}
    async with client_of(tmp_path, cluster=ECHO, known=known, images=["bad"], options=options) as (cluster, client):
        with pytest.raises(ProvisionError, match="no such host"):
            await client.acquire("bad")
        count = len(made(cluster))
        with pytest.raises(ProvisionError, match="no such host"):
            await client.acquire("bad", timeout=1.0)
        assert len(made(cluster)) == count == 3


async def test_p49_what_a_registry_refuses_is_told_apart(tmp_path) -> None:
    """Throttled is worth another try, not found is not, and neither harms another image."""
    known = {
        "busy": Image(error="throttled", present=False),
        "gone": Image(error="not_found", present=False),
    }
    options = {"ready_timeout": 0.3}
    images = ["host", "busy", "gone"]
    async with client_of(tmp_path, cluster=ECHO, known=known, images=images, options=options) as (cluster, client):
        for image, words, retryable in (("busy", "toomanyrequests", True), ("gone", "not found", False)):
            with pytest.raises(ImagePullFailed, match=words) as caught:
                await client.acquire(image)
            verdict = classify(caught.value, Phase.ACQUIRE)
            assert (verdict.kind, verdict.retryable) == (FailureKind.IMAGE_PULL, retryable)
        async with await client.acquire("host") as lease:
            assert lease.image == "host"
        assert len([one for one in made(cluster) if '"gone"' in json.dumps(one.body)]) == 1


async def test_p51_an_expired_watch_leads_to_a_list(tmp_path) -> None:
    """410 within the stream: the next watch goes on from a new list, and what was deleted meanwhile is noticed."""
    async with client_of(tmp_path, cluster=ECHO) as (cluster, client), await client.acquire("host") as lease:
        cluster.faults.watch("pods", kind="expire")
        stalled = cluster.faults.stall("GET", r"/pods$", times=1)
        cluster.drop_watches("pods")
        await eventually(lambda: stalled.hits)
        cluster.delete_behind(pod_of(lease))
        stalled.stalled.set()
        await eventually(lambda: lease.lost is not None)

        assert lease.lost.reason == "deleted"
        versions = [one.get("resourceVersion") for one in cluster.asked("GET", r"/pods$") if one.get("watch")]
        assert None not in versions
        assert "None" not in versions


PLUGIN = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
n = int(count.read_text() or 0) + 1 if count.exists() else 1
count.write_text(str(n))
status = {"token": f"t{n}"}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


async def test_p52_a_token_that_expires_is_renewed_once_for_everybody(tmp_path) -> None:
    """Fifty streams meet an expired token: none fails, the plugin ran twice, and later streams carry the new one."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    argv = [str(tmp_path / "plugin.py"), str(tmp_path / "count")]
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": argv}
    async with FakeCluster(images={"host": Image(command=("sleep", "infinity"))}) as cluster:
        user = {"exec": {**plugin, "interactiveMode": "Never"}}
        options = {"kubeconfig": cluster.kubeconfig(tmp_path, user=user), "exec_mode": "direct"}
        cluster.access.tokens = {"t1"}
        async with SandboxClient("kubernetes", images={"host": 1}, spares=0, backend_options=options) as client:
            async with await client.acquire("host") as lease:
                cluster.access.tokens = {"t2"}
                results = []

                async def call() -> None:
                    results.append(await lease.exec(["echo", "ok"]))

                async with anyio.create_task_group() as group:
                    for _ in range(50):
                        group.start_soon(call)
                assert [result.stdout for result in results] == [b"ok\n"] * 50
                await lease.exec(["true"])
                assert cluster.asked("GET", "/exec$")[-1].authorization == "Bearer t2"
        assert (tmp_path / "count").read_text() == "2"


async def test_p53_a_full_executor_stops_nothing(tmp_path) -> None:
    """A trainer fills the default executor with blocking calls: names are looked up and Pods made all the same."""
    async with FakeCluster(images={"host": "host"}, **ECHO) as cluster:
        cluster.kubeconfig(tmp_path)
        config = json.loads((tmp_path / "kubeconfig").read_text())
        config["clusters"][0]["cluster"]["server"] = cluster.url.replace("127.0.0.1", "localhost")
        (tmp_path / "named").write_text(json.dumps(config))
        let_go = threading.Event()
        loop = asyncio.get_running_loop()
        blocked = [loop.run_in_executor(None, let_go.wait) for _ in range(64)]
        try:
            options = {"kubeconfig": str(tmp_path / "named")}
            with anyio.fail_after(30):
                async with SandboxClient("kubernetes", images={"host": 4}, backend_options=options) as client:
                    for _ in range(4):
                        async with await client.acquire("host") as lease:
                            assert await lease.alive()
        finally:
            let_go.set()
            for call in blocked:
                await call
        assert cluster.pods() == []
