# SPDX-License-Identifier: Apache-2.0
"""Fetching ahead on the API server double."""

from __future__ import annotations

import attrs
import pytest

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.errors import ImagePullFailed, UsageError
from agentsandbox.hydration import ImageUse, NodeFacts, plan
from agentsandbox.hydration.cluster_lanes import ClusterPuller
from agentsandbox.hydration.prepull import Hydration
from agentsandbox.models.image import ImageManifest, Layer
from agentsandbox.testing.cluster import FakeCluster, Image

pytestmark = pytest.mark.anyio

IMAGES = {f"registry.example/i{n}:1": Image(present=False) for n in range(6)}


@pytest.fixture
def anyio_backend():
    """The library under the Kubernetes API is of asyncio."""
    return "asyncio"


@pytest.fixture
async def cluster():
    async with FakeCluster(nodes=2, images=dict(IMAGES), process="echo-runner") as cluster:
        yield cluster


@pytest.fixture
async def puller(cluster, tmp_path):
    api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), namespace="rl", max_connections=8)
    puller = ClusterPuller(api)
    async with puller.running():
        yield puller
    await api.aclose()


def uses(names):
    return [ImageUse(image=ImageManifest(name=name, layers=(Layer(digest=name, size=1000),))) for name in names]


def pods(cluster):
    return [pod for pod in cluster.pods() if pod["metadata"].get("deletionTimestamp") is None]


async def test_a_plan_is_carried_out_by_one_pod_a_lane(cluster, puller):
    """Every image is on the node that the plan gives it; the Pods are few, pinned, and gone at the end."""
    made = plan(uses(IMAGES), [NodeFacts(name="node1"), NodeFacts(name="node2")], advise=False)
    arrived = []
    hydration = Hydration(made, puller, lanes=1, report=lambda node, image: arrived.append((image, node)))

    await hydration.run()

    assert made.placement == dict(arrived)
    assert "<Hydration [6 of 6 images fetched, 0 failed]>" == repr(hydration)
    posts = [request for request in cluster.requests if request.method == "POST" and request.path.endswith("/pods")]
    assert 2 == len(posts)
    assert [] == pods(cluster)


async def test_p49_what_cannot_be_had_fails_alone(cluster, puller):
    """An image that does not exist is not asked for again; the others arrive, and the lane goes on with another Pod."""
    bad = "registry.example/i1:1"
    cluster.images[bad] = attrs.evolve(IMAGES[bad], error="not_found")
    made = plan(uses(IMAGES), [NodeFacts(name="node1")], advise=False)
    hydration = Hydration(made, puller, lanes=1, pause=0.01)

    await hydration.run()

    assert [bad] == list(hydration.failed)
    assert "not found" in hydration.failed[bad]
    assert 5 == hydration.pulled
    assert [] == pods(cluster)


async def test_a_pull_says_what_the_kubelet_says(cluster, puller):
    """As an error of its own, and nothing stays on the node."""
    cluster.images["registry.example/x:1"] = Image(present=False, error="throttled")
    async with puller.lane("node1") as lane:
        with pytest.raises(ImagePullFailed, match=r"toomanyrequests|Too Many Requests"):
            await lane.pull("registry.example/x:1")
        assert "<ClusterLane on node1 [no Pod]>" == repr(lane)
        assert [] == pods(cluster)
        await lane.pull("registry.example/i0:1")
        (pod,) = pods(cluster)
        assert ("node1", "Always", 65534) == (
            pod["spec"]["nodeName"],
            pod["spec"]["restartPolicy"],
            pod["spec"]["securityContext"]["runAsUser"],
        )
    assert [] == pods(cluster)


async def test_a_puller_that_does_not_run_refuses(cluster, tmp_path):
    """It could not see what its Pods come to."""
    api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), namespace="rl", max_connections=8)
    puller = ClusterPuller(api, run_id="0123456789ab")
    with pytest.raises(UsageError, match="not running"):
        async with puller.lane("node1"):
            pass
    assert "<ClusterPuller [run 0123456789ab, stopped]>" == repr(puller)
    await api.aclose()
