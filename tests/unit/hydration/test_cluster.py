# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.cluster import node_facts, read_nodes
from agentsandbox.testing.cluster import FakeCluster, NodeSpec

GB = 1000**3


def node(**changes):
    """A node of eight processors that is well."""
    made = {
        "metadata": {"name": "n"},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "8", "memory": "16Gi", "pods": "110"},
            "capacity": {"ephemeral-storage": "100G"},
            "images": [{"names": ["a@sha256:00", "a:1"], "sizeBytes": 3 * GB}],
        },
    }
    for path, value in changes.items():
        part = made
        *above, last = path.split("__")
        for name in above:
            part = part[name]
        part[last] = value
    return made


def pod(cpu, phase="Running", **spec):
    requests = {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}
    return {"spec": {"containers": [requests], **spec}, "status": {"phase": phase}}


def test_room_is_what_is_not_taken():
    """By Pods that run, with the overhead of their runtime class, and not by those that are over."""
    there = [pod("2"), pod("1", overhead={"cpu": "1"}), pod("100", phase="Succeeded")]

    facts = node_facts(node(), there, cpu_request="500m", memory_request="1Gi")

    assert 8 == facts.room  # (8 - 2 - 1 - 1) / 0.5
    assert 14 == node_facts(node(), there, cpu_request="1m", memory_request="1Gi").room
    assert 108 == node_facts(node(), there, cpu_request="1m", memory_request="1Mi").room
    assert node_facts(node(), [pod("8")]) is None


def test_the_disk_is_the_one_that_images_are_on():
    """The kubelet's summary says how full it is; without it, what is listed is there."""
    summary = {"node": {"runtime": {"imageFs": {"capacityBytes": 500 * GB, "availableBytes": 400 * GB}}}}

    known, guessed = node_facts(node(), (), summary), node_facts(node())

    assert (500 * GB, 100 * GB) == (known.disk, known.used)
    assert (100 * GB, 3 * GB) == (guessed.disk, guessed.used)
    assert frozenset({"a@sha256:00", "a:1"}) == known.images


@pytest.mark.parametrize(
    "changes",
    [
        {"status__conditions": [{"type": "Ready", "status": "False"}]},
        {"spec__unschedulable": True},
        {"spec__taints": [{"key": "gpu", "effect": "NoSchedule"}]},
    ],
)
def test_a_node_that_takes_no_sandboxes_is_left_out(changes):
    """It is not ready, cordoned or tainted."""
    assert node_facts(node(**changes)) is None


def test_a_taint_that_only_asks_does_not_keep_sandboxes_away():
    """PreferNoSchedule is a wish."""
    assert node_facts(node(spec__taints=[{"key": "x", "effect": "PreferNoSchedule"}])) is not None


def test_p50_a_sandbox_that_asks_for_nothing_is_refused():
    """It would fit any number of times."""
    with pytest.raises(ConfigurationError, match="above 0"):
        node_facts(node(), cpu_request="0")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_nodes_of_a_cluster_are_read(anyio_backend, tmp_path):
    """Those that take sandboxes; a cluster without any is refused."""
    nodes = [NodeSpec(name="good"), NodeSpec(name="other")]
    async with FakeCluster(nodes=nodes, process="echo-runner") as cluster:
        api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), namespace="rl", max_connections=4)
        found = await read_nodes(api, unpack_rate=5e6)
        assert {("good", 5e6), ("other", 5e6)} == {(each.name, each.unpack_rate) for each in found}
        assert all(each.room > 0 for each in found)

        with pytest.raises(ConfigurationError, match="no node takes sandboxes"):
            await read_nodes(api, cpu_request="100000")
        await api.aclose()


def test_an_image_is_there_by_each_of_its_names():
    """A container runtime spells names out, and people do not."""
    names = ["docker.io/library/python:latest", "docker.io/swe/django:4", "registry.example/a:latest"]
    found = node_facts(node(status__images=[{"names": names}]))

    short = {"library/python:latest", "library/python", "docker.io/library/python", "python:latest", "python"}
    assert {*names, *short, "swe/django:4", "registry.example/a"} == found.images
