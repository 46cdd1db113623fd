# SPDX-License-Identifier: Apache-2.0
"""What is kept of a cluster."""

from __future__ import annotations

import pytest

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.evidence import cluster_facts, events_text, shown
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture
async def connected(tmp_path):
    """A cluster, and a connection to it."""
    async with FakeCluster(process="echo-runner") as cluster:
        api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=8)
        yield cluster, api
        await api.aclose()


def about(cluster, name):
    """Something that Events can be about."""
    return {"kind": "Pod", "metadata": {"name": name, "namespace": "rl", "uid": f"uid-{name}"}}


async def test_events_are_lines_in_order_of_time(connected) -> None:
    """A line has when, what kind, why, about what, from whom, how often and the message."""
    cluster, api = connected
    cluster.event(about(cluster, "one"), "Warning", "Failed", "it\nbroke")
    cluster.create(
        "events",
        {
            "metadata": {"name": "old", "namespace": "rl"},
            "involvedObject": {"kind": "Pod", "name": "two"},
            "eventTime": "2020-01-01T00:00:00.000000Z",
            "series": {"count": 7, "lastObservedTime": "2020-01-02T00:00:00.000000Z"},
            "reason": "Scheduled",
            "type": "Normal",
            "reportingComponent": "scheduler",
        },
    )

    first, second = (await events_text(api, "rl")).splitlines()

    assert first == "2020-01-02T00:00:00.000000Z  Normal  Scheduled  pod/two  scheduler  x7  "
    assert second.endswith("  Warning  Failed  pod/one  kubelet  x1  it broke")


async def test_events_of_others_are_left_out(connected) -> None:
    """In a namespace that is shared, only what is about our own Pods is ours."""
    cluster, api = connected
    for name in ("mine", "yours"):
        cluster.event(about(cluster, name), "Normal", "Started", "")

    assert "pod/mine" in await events_text(api, "rl", {"mine"})
    assert "pod/yours" not in await events_text(api, "rl", {"mine"})


async def test_events_that_may_not_be_listed_are_no_failure(connected) -> None:
    """The file says so instead."""
    cluster, api = connected
    cluster.access.deny("list", "events")

    assert (await events_text(api, "rl")).startswith("# events may not be listed: ")


async def test_facts_are_of_server_nodes_and_images(connected) -> None:
    """Without the right to list nodes they say so."""
    cluster, api = connected

    facts = await cluster_facts(api, ["host"])
    cluster.access.deny("list", "nodes")
    fewer = await cluster_facts(api, ["host"])

    assert [node["name"] for node in facts["nodes"]] == ["node1"]
    assert facts["server"].startswith("v1.36")
    assert abs(facts["clock_offset_seconds"]) < 5
    assert set(facts["images"]["host"]) == {"nodes", "bytes"}
    assert fewer["nodes"] == "may not be listed"


async def test_a_pod_is_kept_without_noise() -> None:
    """Long words of a command are counted, managed fields left out, and the original is not touched."""
    pod = {
        "metadata": {"name": "x", "managedFields": [{}]},
        "spec": {"containers": [{"command": ["sh", "-c", "x" * 1000]}]},
    }

    kept = shown(pod)

    assert kept == {"metadata": {"name": "x"}, "spec": {"containers": [{"command": ["sh", "-c", "<1000 bytes>"]}]}}
    assert "managedFields" in pod["metadata"]
