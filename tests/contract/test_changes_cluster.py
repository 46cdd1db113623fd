# SPDX-License-Identifier: Apache-2.0
"""Diffs, checkpoints and credentials in Pods, on the API server double."""

from __future__ import annotations

import pytest

from agentsandbox import SandboxClient
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.errors import UsageError
from agentsandbox.testing.cluster import FakeCluster

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SECRET = "sk-s3cr3t-9f8e7d6c5b4a"


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


async def test_another_pod_goes_on_and_the_api_server_sees_no_secret(tmp_path):
    """A diff against a Pod's baseline, a checkpoint, another Pod; credentials are in no request and no object."""
    events = []
    async with FakeCluster() as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), user=1000)
        options = {"images": {"host": 2}, "spares": 0, "checkpoints": tmp_path / "store", "sink": events.append}
        async with SandboxClient(backend, **options) as client:
            async with await client.acquire("host") as first, await client.acquire("host") as second:
                lines = "mkdir -p /tmp/w && cd /tmp/w && echo 'one' > f && printf '\\0' > b && printf $TOKEN | rev > t"
                await first.exec(lines, secrets={"TOKEN": SECRET}, check=True)
                path = await first.place_secret(SECRET)
                diff = await first.diff(root="/tmp/w")
                made = await first.checkpoint()
                await second.exec("mkdir -p /tmp/w/f; setsid sleep 60 &", check=True)
                await second.restore(made.id)
                found = await second.exec("cat /tmp/w/f; ls /dev/shm; pgrep -x sleep")
                report = await first.reset()

        told = [repr(one) for one in cluster.requests]
        objects = [one.raw().decode() for kind in cluster.store.resources.values() for one in cluster.store.all(kind)]

    assert {b"a/b", b"a/f", b"a/t"} == {line.split()[2] for line in diff.patch.split(b"\n") if line[:4] == b"diff"}
    assert not [change for change in diff.changes if change.path == path]
    assert "one\n" == found.text
    assert ("files", True, (path,)) == (report.rung, report.verified, report.secrets)
    assert len(told) > 10
    assert SECRET not in "".join(told) + "".join(objects) + repr(events)


async def test_a_pod_without_a_runner_has_no_secrets(tmp_path):
    """They would stand in the request for the command, which API servers log."""
    async with FakeCluster() as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), user=1000, exec_mode="shell")
        async with SandboxClient(backend, images={"host": 1}, spares=0) as client:
            async with await client.acquire("host") as lease:
                with pytest.raises(UsageError, match=r"^a secret needs a runner .* at level 'shell'$"):
                    await lease.exec("true", secrets={"TOKEN": SECRET})
                with pytest.raises(UsageError, match=r"^a diff needs a runner"):
                    await lease.diff()
        assert SECRET not in repr(cluster.requests)
