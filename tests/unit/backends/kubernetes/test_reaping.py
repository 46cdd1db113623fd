# SPDX-License-Identifier: Apache-2.0
"""What is removed of a run, and what is not."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

import pytest

from agentsandbox.backends.kubernetes import owned, reaping
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.local.leftovers import started
from agentsandbox.errors import ConfigurationError, Conflict, InfrastructureError, NotFound, UsageError
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio

RUN = "0123456789ab"
OTHER = "ba9876543210"
OWN = f"asb-rl-{RUN}"


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture
def connected(tmp_path):
    """Start a cluster and connect to it."""

    @asynccontextmanager
    async def connect(**options):
        async with FakeCluster(process="echo-runner", **options) as cluster:
            api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=8)
            try:
                yield cluster, api
            finally:
                await api.aclose()

    return connect


def pod(name, run_id, **labels):
    """A Pod with the marks of a run."""
    container = {"name": "sandbox", "image": "host"}
    metadata = {"name": name, "labels": {**owned.marks(run_id), **labels}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


async def put(api, run_id=RUN, *names, namespace="rl"):
    """Create Pods; return their UIDs by name."""
    made = [await api.request("POST", f"/api/v1/namespaces/{namespace}/pods", body=pod(name, run_id)) for name in names]
    return {one["metadata"]["name"]: one["metadata"]["uid"] for one in made}


def there(cluster, namespace="rl"):
    """The names of the Pods that are there."""
    return [one.name for one in cluster.store.all(cluster.kubelet.pods, namespace)]


async def test_p46_exactly_the_pods_of_the_run_are_removed(connected) -> None:
    """By UID; those of another run stay."""
    async with connected() as (cluster, api):
        uids = await put(api, RUN, *(f"asb-{RUN}-{n}-abcdef" for n in range(3)))
        await put(api, OTHER, *(f"asb-{OTHER}-{n}-abcdef" for n in range(2)))

        removed = await reaping.reap(api, RUN)

        assert removed == [f"deleted Pod rl/asb-{RUN}-{n}-abcdef" for n in range(3)]
        assert there(cluster) == [f"asb-{OTHER}-{n}-abcdef" for n in range(2)]
        assert {one.body["preconditions"]["uid"] for one in cluster.asked("DELETE")} == set(uids.values())


@pytest.mark.parametrize("run_id", ["", "*", "0123", f"{RUN},x", RUN.upper()])
async def test_p46_without_a_run_id_nothing_is_asked(connected, run_id) -> None:
    """There is no way to say "everything"."""
    async with connected() as (cluster, api):
        with pytest.raises(ConfigurationError, match="12 hexadecimal digits"):
            await reaping.reap(api, run_id)

        assert cluster.requests == []


@pytest.mark.parametrize("name", ["mine", f"asb-{OTHER}-1-abcdef", f"asb-{RUN}"])
async def test_a_stranger_with_the_marks_of_the_run_stops_it_all(connected, name) -> None:
    """Somebody copied the labels: that is for a person to look at, and nothing is deleted until then."""
    async with connected() as (cluster, api):
        await put(api, RUN, f"asb-{RUN}-1-abcdef", name)

        with pytest.raises(UsageError, match=f"Pod rl/{name} is not as run {RUN} makes them: nothing is deleted"):
            await reaping.reap(api, RUN)

        assert cluster.asked("DELETE") == []


async def test_a_uid_that_differs_from_the_receipt_stops_it_all(connected) -> None:
    """The same name with another UID is another Pod."""
    async with connected() as (cluster, api):
        names = [f"asb-{RUN}-{n}-abcdef" for n in range(2)]
        uids = await put(api, RUN, *names)
        claim = reaping.Claim(run_id=RUN, uids={**uids, names[1]: "another"})

        with pytest.raises(UsageError, match="nothing is deleted"):
            await reaping.remove(api, "rl", claim)

        assert there(cluster) == names


async def home(api, **changes):
    """Make the namespace of the run; return its UID."""
    manifest = owned.namespace_manifest(RUN, "nonce")
    manifest["metadata"].update(changes)
    return (await owned.create(api, owned.namespace_path(), manifest))["metadata"]["uid"]


async def test_the_run_s_own_namespace_goes_too(connected) -> None:
    """Found by the run id alone, after the labels were looked at."""
    async with connected() as (_, api):
        await home(api)
        await owned.usable(api, OWN, pod("x", RUN))
        await put(api, RUN, f"asb-{RUN}-1-abcdef", namespace=OWN)

        removed = await reaping.reap(api, RUN)

        assert removed == [f"deleted Pod {OWN}/asb-{RUN}-1-abcdef", f"deleted namespace {OWN}"]
        with pytest.raises(NotFound):
            await api.request("GET", owned.namespace_path(OWN))


@pytest.mark.parametrize(
    ("changes", "claim", "message"),
    [
        ({"labels": {}}, {}, "does not have the labels"),
        ({"labels": owned.marks(OTHER)}, {}, "does not have the labels"),
        ({}, {"namespace_uid": "another"}, "and run 0123456789ab made another"),
        ({}, {"nonce": "another"}, "was not made by run"),
    ],
    ids=["labels", "run", "uid", "nonce"],
)
async def test_a_namespace_that_is_not_the_run_s_stays(connected, changes, claim, message) -> None:
    """Its name alone proves nothing."""
    async with connected() as (cluster, api):
        await home(api, **changes)

        with pytest.raises(UsageError, match=message):
            await reaping.remove(api, OWN, reaping.Claim(run_id=RUN, **claim))

        assert cluster.asked("DELETE") == []


async def test_a_namespace_with_pods_of_others_stays(connected) -> None:
    """What is the run's goes, and the rest is told of."""
    async with connected() as (cluster, api):
        await home(api)
        await owned.usable(api, OWN, pod("x", RUN))
        await put(api, RUN, f"asb-{RUN}-1-abcdef", namespace=OWN)
        await put(api, OTHER, "guest", namespace=OWN)

        removed = await reaping.remove(api, OWN, reaping.Claim(run_id=RUN))

        assert removed == [
            f"deleted Pod {OWN}/asb-{RUN}-1-abcdef", f"left namespace {OWN}: 1 Pods in it are not of this run",
        ]  # fmt: skip
        assert there(cluster, OWN) == ["guest"]


async def test_removing_twice_finds_nothing(connected) -> None:
    """What is gone is fine."""
    async with connected() as (_, api):
        await put(api, RUN, f"asb-{RUN}-1-abcdef")

        assert len(await reaping.reap(api, RUN)) == 1
        assert await reaping.reap(api, RUN) == []


async def test_one_that_resists_does_not_keep_the_others(connected, monkeypatch) -> None:
    """A finalizer that nobody removes is told of; the rest is gone."""
    monkeypatch.setattr(owned, "SETTLE", 0.3)
    async with connected() as (cluster, api):
        names = [f"asb-{RUN}-{n}-abcdef" for n in range(3)]
        await put(api, RUN, *names)
        cluster.hold_deletion(names[1])

        with pytest.raises(InfrastructureError, match=f"{names[1]} is still terminating"):
            await reaping.reap(api, RUN)

        assert there(cluster) == [names[1]]


async def test_a_server_that_is_busy_is_asked_again(connected) -> None:
    """A refusal for now is no refusal."""
    async with connected() as (cluster, api):
        await put(api, RUN, f"asb-{RUN}-1-abcdef")
        cluster.faults.answer("DELETE", r"/pods/", 429, headers={"Retry-After": "0"}, times=2)
        cluster.faults.answer("DELETE", r"/pods/", 500, times=1)

        assert len(await reaping.reap(api, RUN)) == 1
        assert there(cluster) == []


async def test_a_create_whose_answer_is_lost_is_adopted(connected) -> None:
    """It is made once, and known as ours by its nonce."""
    async with connected() as (cluster, api):
        cluster.faults.cut("POST", r"/namespaces$", after=True)

        uid = await home(api)

        found = await api.request("GET", owned.namespace_path(OWN))
        assert found["metadata"]["uid"] == uid
        assert len(cluster.asked("POST", r"/namespaces$")) == 2


async def test_what_somebody_else_made_is_not_adopted(connected) -> None:
    """The same name with another nonce is a conflict."""
    async with connected() as (_, api):
        await home(api, annotations={"agentsandbox.dev/nonce": "another"})

        with pytest.raises(Conflict):
            await home(api)


async def test_a_driver_that_runs_is_not_robbed() -> None:
    """The process that wrote the receipt is still there."""
    driver = {"pid": os.getpid(), "started": started(os.getpid())}

    with pytest.raises(UsageError, match="is still going on"):
        await reaping.remove_leftovers({"run_id": RUN, "driver": driver, "namespace": "rl"})
