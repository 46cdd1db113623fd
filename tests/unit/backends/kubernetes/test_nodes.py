# SPDX-License-Identifier: Apache-2.0
"""Which nodes take no more work."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.nodes import NODES, Nodes, closed, room, shut_out
from agentsandbox.errors import PermissionDenied
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


def node(*, ready="True", message="", **spec):
    """A node as the API tells of it."""
    conditions = [{"type": "DiskPressure", "status": "True"}, {"type": "Ready", "status": ready, "message": message}]
    return {"metadata": {"name": "n", "uid": "u"}, "spec": spec, "status": {"conditions": conditions}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (node(), ""),
        (node(unschedulable=True), "node n is cordoned"),
        (node(ready="False"), "node n is not ready"),
        (node(ready="Unknown", message="Kubelet stopped posting."), "node n is not ready: Kubelet stopped posting."),
        ({"metadata": {"name": "n"}}, ""),
    ],
    ids=["open", "cordoned", "not ready", "silent", "nothing known"],
)
def test_why_a_node_is_closed(given, words) -> None:
    """In words; pressure alone closes none."""
    assert closed(given) == words


@pytest.mark.parametrize(
    ("taint", "toleration", "words"),
    [
        ({"key": "gpu", "effect": "NoSchedule"}, None, "node n has the taint gpu"),
        ({"key": "gpu", "effect": "PreferNoSchedule"}, None, ""),
        ({"key": "gpu", "effect": "NoExecute"}, {"operator": "Exists"}, ""),
        (
            {"key": "gpu", "effect": "NoExecute"},
            {"operator": "Exists", "effect": "NoSchedule"},
            "node n has the taint gpu",
        ),
        ({"key": "gpu", "value": "a", "effect": "NoSchedule"}, {"key": "gpu", "value": "a"}, ""),
        ({"key": "gpu", "value": "a", "effect": "NoSchedule"}, {"key": "gpu"}, "node n has the taint gpu"),
        ({"key": "gpu", "effect": "NoSchedule"}, {"key": "cpu", "operator": "Exists"}, "node n has the taint gpu"),
    ],
)
def test_taints_shut_pods_out_that_do_not_bear_them(taint, toleration, words) -> None:
    """By key, effect and value, as a scheduler compares them; a preference shuts nobody out."""
    assert words == shut_out(node(taints=[taint]), [toleration] if toleration else [])
    assert "node n is cordoned" == shut_out(node(unschedulable=True, taints=[taint]), [{"operator": "Exists"}])


def test_room_is_what_nobody_asks_for() -> None:
    """The scarcest resource counts; Pods that are over ask for nothing, and overhead is asked for as well."""

    def pod(phase="Running", overhead="0", **requests):
        spec = {"overhead": {"cpu": overhead}, "containers": [{"resources": {"requests": requests}}, {}]}
        return {"spec": spec, "status": {"phase": phase}}

    given = {**node(), "status": {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"}}}
    small = {"cpu": "500m", "memory": "512Mi"}

    assert 8 == room(given, [], small)
    assert 5 == room(given, [pod(cpu="1", overhead="250m"), pod("Failed", cpu="3"), pod("Succeeded", cpu="3")], small)
    assert 2 == room(given, [pod(memory="7Gi")], small)
    assert 3 == room(given, [pod()] * 7, small)
    assert 0 == room(given, [pod(cpu="5")], small) == room(given, [], {"example.com/gpu": "1"})
    assert 110 == room({}, [], {})


async def eventually(predicate) -> None:
    """Wait until something is true that a watch tells."""
    with anyio.fail_after(20):
        while not predicate():
            with anyio.move_on_after(0.01):
                await anyio.sleep_forever()


async def test_nodes_are_watched(tmp_path) -> None:
    """What is cordoned, comes back, or is gone is known soon, and no more of a node is kept than that takes."""
    async with FakeCluster(process="echo-runner", nodes=2) as cluster:
        api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=8)
        nodes = Nodes(api)
        kind = cluster.kubelet.nodes
        heard: list[str] = []
        async with anyio.create_task_group() as group:
            await group.start(nodes.run)
            assert "<Nodes [2 known, 0 closed]>" == repr(nodes)
            nodes.observers.append(heard.append)
            assert nodes.closed("node1") == nodes.closed("unknown") == nodes.closed(None) == ""

            for unschedulable, words in ((True, "node node1 is cordoned"), (False, "")):
                stored = cluster.store.get(kind, "", "node1")
                spec = {"unschedulable": unschedulable}
                cluster.store.replace(stored, {**stored.object, "spec": spec})
                await eventually(lambda words=words: nodes.closed("node1") == words)
            cluster.store.remove(cluster.store.get(kind, "", "node2"))
            await eventually(lambda: nodes.closed("node2") == "node node2 is gone")
            assert all("images" not in one["status"] for one in nodes._reflector.objects.values())
            assert ["node1"] == list(nodes.known)
            assert ["node1", "node1", "node2"] == heard
            group.cancel_scope.cancel()
        await api.aclose()


async def test_nodes_may_be_out_of_bounds(tmp_path) -> None:
    """Without the permission it asks once, and every node counts as open."""
    async with FakeCluster(process="echo-runner") as cluster:
        cluster.access.deny("list", "nodes")
        api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=8)
        nodes = Nodes(api)
        await nodes.run()

        assert isinstance(nodes.refusal, PermissionDenied)
        assert (nodes.closed("node1"), repr(nodes)) == ("", "<Nodes [unknown]>")
        assert len(cluster.asked("GET", f"^{NODES}$")) == 1
        await api.aclose()
