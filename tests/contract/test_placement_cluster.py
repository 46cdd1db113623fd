# SPDX-License-Identifier: Apache-2.0
"""A plan that is followed on the cluster double: where sandboxes are, what is fetched, and nodes that go."""

from __future__ import annotations

import itertools
import json
from contextlib import asynccontextmanager

import attrs
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.agent_sandbox import AgentSandboxBackend
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import ImageUse, NodeFacts, plan
from agentsandbox.models.image import ImageManifest, Layer
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing.cluster import FakeCluster, Image, NodeSpec, Timing

from .cluster_clients import QUICK, eventually, made, pod_of

pytestmark = pytest.mark.anyio

NORTH, SOUTH = NodeSpec(name="north"), NodeSpec(name="south")
PLACES = {"a": "north", "b": "north", "c": "south", "d": "south"}
AWAY = Image(present=False)


@pytest.fixture
def anyio_backend():
    """Run on the event loop that the client library needs."""
    return "asyncio"


@pytest.fixture
def placed(tmp_path):
    """Run a pool that follows a plan; afterwards no Pod may be left."""

    @asynccontextmanager
    async def run(
        *,
        nodes=(NORTH, SOUTH),
        placement=PLACES,
        options=None,
        cluster=None,
        images=None,
        declared=(),
        before=None,
        **pool,
    ):
        images = {**dict.fromkeys((*PLACES, "x"), AWAY), **(images or {})}
        timing = Timing(second=0.1)
        async with FakeCluster(nodes=nodes, images=images, timing=timing, **(cluster or {})) as double:
            if before is not None:
                before(double)
            given = {"kubeconfig": double.kubeconfig(tmp_path), "placement": placement, **(options or {})}
            events = []
            pool = {"images": declared, "spares": 0, "reset": QUICK, "sink": events.append, **pool}
            async with SandboxPool("kubernetes", backend_options=given, **pool) as found:
                yield double, found, events
            assert [] == double.pods()

    return run


def nodes_of(cluster):
    """Node → its Pods."""
    found = {}
    for pod in cluster.pods():
        found.setdefault(pod["spec"].get("nodeName"), []).append(pod["metadata"]["name"])
    return found


def named(events, name):
    """The data of the events of a name."""
    return [event.data for event in events if event.name == name]


def alter(cluster, name, **spec):
    """Change a node."""
    stored = cluster.store.get(cluster.kubelet.nodes, "", name)
    cluster.store.replace(stored, {**stored.object, "spec": {**stored.object["spec"], **spec}})


def remove(cluster, name):
    """Take a node out of the cluster, and with it its Pods."""
    cluster.store.remove(cluster.store.get(cluster.kubelet.nodes, "", name))
    for pod in nodes_of(cluster).get(name, ()):
        cluster.delete_behind(pod)


async def where(lease, cluster):
    """Return the node of a lease, after a command in it."""
    assert (await lease.exec("true")).ok
    return cluster.pod(pod_of(lease))["spec"]["nodeName"]


async def test_each_sandbox_is_on_the_node_of_its_image(placed):
    """Forty rollouts of four images: whatever is made, or changed into in place, is where the plan has its image."""
    seen = []

    async def rollout(sandbox, episode):
        seen.append((episode.image, await where(sandbox, cluster)))
        return 1.0

    async with placed(max_sandboxes=4, parallelism=4) as (cluster, pool, events):
        batch = [Episode(id=f"{image}-{n}", image=image) for n in range(10) for image in PLACES]
        pool.announce(batch)
        result = await pool.rollout(batch, rollout=rollout)

        assert 40 == result.counts.rewarded
        assert set(PLACES.items()) == set(seen)
        ready = [event for event in events if event.name == "sandbox.ready"]
        assert set(PLACES.items()) == {(e.data["image"], e.data["node"]) for e in ready}
        became = {}
        for event in ready:
            became.setdefault(event.sandbox, []).append(event.data["image"])
        changes = [pair for images in became.values() for pair in itertools.pairwise(images) if pair[0] != pair[1]]
        assert changes
        assert all(PLACES[old] == PLACES[new] for old, new in changes)
        assert {(node, image) for image, node in PLACES.items()} == set(cluster.kubelet.fetched)
        assert [] == named(events, "node.closed")


async def test_every_image_is_fetched_once_on_its_node(placed):
    """With room for one Pod on each node, two Pods are made, which change their image in place: four pulls."""

    async def rollout(sandbox, _episode):
        await where(sandbox, cluster)
        return 1.0

    small = [attrs.evolve(node, pods=1) for node in (NORTH, SOUTH)]
    async with placed(nodes=small, max_sandboxes=2, parallelism=2) as (cluster, pool, _events):
        batch = [Episode(id=f"{image}-{n}", image=image) for n in range(3) for image in PLACES]
        pool.announce(batch)
        await pool.rollout(batch, rollout=rollout)

        assert {(node, image): 1 for image, node in PLACES.items()} == cluster.kubelet.fetched
        assert 2 == len(made(cluster))


async def test_a_plan_as_the_command_writes_it_can_be_followed(placed):
    """What is under "placement" in the JSON of a plan is the option as it is."""
    facts = [NodeFacts(name=name, room=2) for name in ("north", "south")]
    uses = [
        ImageUse(
            image=ImageManifest(name=image, layers=(Layer(digest=image, size=10**9),)),
            rollouts=2,
            seconds=1.0,
        )
        for image in PLACES
    ]
    written = json.loads(json.dumps(attrs.asdict(plan(uses, facts))))
    assert {"north", "south"} == set(written["placement"].values())

    async def rollout(sandbox, episode):
        assert written["placement"][episode.image] == await where(sandbox, cluster)
        return 1.0

    async with placed(placement=written["placement"], max_sandboxes=4) as (cluster, pool, _events):
        pool.announce(dict.fromkeys(PLACES, 1))
        result = await pool.rollout([Episode(id=image, image=image) for image in PLACES], rollout=rollout)
        assert 4 == result.counts.rewarded


async def test_room_that_others_take_is_not_planned_with(placed):
    """Where Pods of all namespaces may be listed, no more are made than a node has left."""

    def occupy(cluster):
        container = {"name": "c", "image": "x", "command": ["sleep", "600"], "resources": {"requests": {"cpu": "3"}}}
        spec = {"nodeName": "north", "restartPolicy": "Never", "containers": [container]}
        status = {"phase": "Running", "qosClass": "Burstable"}
        cluster.create("pods", {"metadata": {"name": "theirs", "namespace": "default"}, "spec": spec, "status": status})

    nodes = [attrs.evolve(NORTH, cpu="4"), SOUTH]
    options = {"requests": {"cpu": "500m", "memory": "1Mi"}}
    async with placed(nodes=nodes, options=options, before=occupy, declared={"a": 4, "c": 4}) as (
        _cluster,
        pool,
        _events,
    ):
        room = pool._client.backend.placement.room

        assert (2, 2000) == (room["north"], room["south"])


async def test_pods_of_others_that_may_not_be_listed_take_nothing(placed):
    """Without the permission the nodes count as empty, and the rest is the same."""
    before = lambda cluster: cluster.faults.answer("GET", r"^/api/v1/pods$", 403, reason="Forbidden")  # noqa: E731
    nodes = [attrs.evolve(NORTH, cpu="4"), SOUTH]
    options = {"requests": {"cpu": "500m", "memory": "1Mi"}}
    async with placed(nodes=nodes, options=options, before=before, declared={"a": 1}) as (_cluster, pool, _events):
        assert 8 == pool._client.backend.placement.room["north"]


async def test_claims_follow_a_plan_too(tmp_path):
    """The template of an image requires its node; when that is gone there is another template, which does not."""
    images = dict.fromkeys("ac", AWAY)
    async with FakeCluster(
        nodes=[NORTH, SOUTH], images=images, agent_sandbox=True, timing=Timing(second=0.1)
    ) as cluster:
        backend = AgentSandboxBackend(kubeconfig=cluster.kubeconfig(tmp_path), placement=PLACES)
        async with backend.running():
            made = [await backend.create(SandboxSpec(image=image), f"sb-{image}") for image in "ac"]
            assert ["north", "south"] == [sandbox.node for sandbox in made]
            alter(cluster, "north", unschedulable=True)
            await eventually(lambda: backend._pins.node("a") is None)
            assert "south" == (await backend.create(SandboxSpec(image="a"), "sb-3")).node
            assert "<Pins [4 images on 2 nodes, 1 closed]>" == repr(backend._pins)


async def test_what_has_no_place_may_be_anywhere(placed):
    """An image that the plan does not name goes where the scheduler wants it, with nothing said about nodes."""
    async with placed(declared={"x": 1}) as (cluster, pool, _events):
        async with await pool.acquire("x") as lease:
            await where(lease, cluster)
        (pod,) = made(cluster)
        assert "affinity" not in pod.body["spec"]


async def test_a_node_that_is_cordoned_hands_its_images_on(placed):
    """They may be anywhere from then on, in place too, and are on their node again when it is back; told once each."""
    async with placed(declared={"a": 2, "c": 1}, max_sandboxes=4) as (cluster, pool, events):
        async with await pool.acquire("a") as lease:
            assert "north" == await where(lease, cluster)
        alter(cluster, "north", unschedulable=True)
        await eventually(lambda: named(events, "node.closed"))
        async with await pool.acquire("a") as lease:
            assert "south" == await where(lease, cluster)

        closed = {"node": "north", "reason": "node north is cordoned", "images": 2}
        assert [closed] == named(events, "node.closed")
        alter(cluster, "north", unschedulable=False)
        await eventually(lambda: named(events, "node.opened"))
        assert [{"node": "north", "images": 2}] == named(events, "node.opened")
        async with await pool.acquire("a") as first, await pool.acquire("a") as second:
            await first.release(discard=True)
            await second.release(discard=True)
        await eventually(lambda: "north" in nodes_of(cluster))
        assert [] == named(events, "sandbox.failed")


async def test_a_used_sandbox_takes_over_from_a_node_that_is_gone(placed):
    """Its images are changed into in place on the other node: no Pod is made for that."""
    async with placed(declared={"c": 1}, max_sandboxes=1) as (cluster, pool, events):
        remove(cluster, "north")
        await eventually(lambda: named(events, "node.closed"))
        pool.announce({"a": 1})
        async with await pool.acquire("c") as lease:
            await where(lease, cluster)
        async with await pool.acquire("a") as lease:
            assert "south" == await where(lease, cluster)
        assert 1 == len(made(cluster))
        assert "node north is gone" == named(events, "node.closed")[0]["reason"]


async def test_a_pod_that_waits_for_a_node_that_goes_is_made_elsewhere(placed):
    """It was pinned to a full node: as soon as that is gone it is given up, and nobody hears of a failure."""
    full = [attrs.evolve(NORTH, pods=0), SOUTH]
    async with placed(nodes=full, declared={"a": 1}) as (cluster, pool, events):

        def waits():
            (pod,) = cluster.pods() or [{"status": {}}]
            return "Too many pods" in str(pod["status"])

        await eventually(waits)
        remove(cluster, "north")
        async with await pool.acquire("a", timeout=30) as lease:
            assert "south" == await where(lease, cluster)
        assert [] == named(events, "sandbox.failed")
        assert 2 == len(made(cluster))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"unschedulable": True}, "node north is cordoned"),
        ({"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]}, "node north has the taint gpu"),
    ],
    ids=["cordoned", "tainted"],
)
async def test_a_node_that_takes_nothing_at_the_beginning(placed, spec, words):
    """Its images go elsewhere, and that is told."""
    before = lambda cluster: alter(cluster, "north", **spec)  # noqa: E731
    async with placed(before=before, declared={"a": 1}) as (cluster, pool, events):
        async with await pool.acquire("a") as lease:
            assert "south" == await where(lease, cluster)
        assert [words] == [data["reason"] for data in named(events, "node.closed")]


async def test_a_taint_that_is_tolerated_closes_nothing(placed):
    """Pods that may be on a node are made there."""
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    bearing = {"tolerations": [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]}
    before = lambda cluster: alter(cluster, "north", taints=[taint])  # noqa: E731
    async with placed(before=before, options=bearing, declared={"a": 1}) as (cluster, pool, events):
        async with await pool.acquire("a") as lease:
            assert "north" == await where(lease, cluster)
        assert [] == named(events, "node.closed")


async def test_a_name_that_no_node_has_is_refused_before_anything_is_made(tmp_path):
    """The error says which image, which name, and which nodes there are."""
    async with FakeCluster(nodes=[NORTH, SOUTH]) as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), placement={"host": "nroth"})
        with pytest.raises(ConfigurationError, match="'host' is placed on 'nroth', and there is north, south"):
            async with backend.running():
                raise AssertionError("it started")
        assert [] == made(cluster)
        assert "<Pins [1 images on 1 nodes]>" == repr(backend._pins)


async def test_nodes_that_may_not_be_read_are_an_error_with_the_fix(tmp_path):
    """Without that permission nobody could tell that a node is gone, so a plan is not followed."""
    async with FakeCluster(nodes=[NORTH]) as cluster:
        cluster.access.deny("list", "nodes")
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), placement={"host": "north"})
        with pytest.raises(ConfigurationError, match="permission to list and watch nodes"):
            async with backend.running():
                raise AssertionError("it started")
        (check,) = [one for one in await backend.examine() if one.name == "permission nodes"]
        assert (False, True) == (check.ok, check.required)
        assert "add list on nodes to the ClusterRole" in check.fix


@pytest.mark.parametrize("placement", [["a"], {"a": None}, {"": "north"}], ids=["list", "no node", "no image"])
def test_a_placement_that_is_none(placement):
    """What is not a mapping of names to names is refused at once."""
    with pytest.raises(ConfigurationError, match="placement is a mapping of images to nodes"):
        KubernetesBackend(placement=placement)


async def test_jails_of_an_image_are_on_its_node(placed):
    """One Pod serves several sandboxes, and is where its image is placed; the room counts sandboxes."""
    options = {"jail": True, "slots": 2, "run_as_root": True}
    images = dict.fromkeys("ac", Image(user="0", present=False))
    async with placed(options=options, images=images, declared={"a": 2, "c": 2}, reset=ResetPolicy()) as (
        cluster,
        pool,
        _events,
    ):
        async with await pool.acquire("a") as north, await pool.acquire("c") as south:
            assert ("north", "south") == (await where(north, cluster), await where(south, cluster))
        assert 0 == pool._client.backend.placement.room["north"] % 2


def test_the_affinity_of_a_user_holds_as_well():
    """The node is added to each of the terms, of which one has to hold; without any it is the only one."""
    zone = {"key": "zone", "operator": "In", "values": ["z"]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = {"nodeAffinity": {required: {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}}, "podAffinity": {}}
    here = {"key": "metadata.name", "operator": "In", "values": ["north"]}
    for given, terms in (
        (affinity, [{"matchExpressions": [zone], "matchFields": [here]}]),
        (None, [{"matchFields": [here]}]),
    ):
        backend = KubernetesBackend(affinity=given, placement={"a": "north"})
        found = backend.manifest(SandboxSpec(image="a"))["spec"]["affinity"]
        assert {**(given or {}), "nodeAffinity": {required: {"nodeSelectorTerms": terms}}} == found
        assert given == backend.manifest(SandboxSpec(image="b"))["spec"].get("affinity")
