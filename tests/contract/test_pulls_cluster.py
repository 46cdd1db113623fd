# SPDX-License-Identifier: Apache-2.0
"""What is told of images on their way, on the cluster double, and what a report of idle accelerators makes of it."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.errors import ImagePullFailed
from agentsandbox.metrics.idle import Cause
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing.cluster import FakeCluster, Image, Timing, recording

from .cluster_clients import QUICK, eventually

pytestmark = pytest.mark.anyio

SLOW = Image(present=False, pull=0.4)
STEADY = Image(present=False, pull=10_000)


@pytest.fixture
def anyio_backend():
    """Run on the event loop that the client library needs."""
    return "asyncio"


@pytest.fixture
def backend_of(tmp_path):
    """Run a cluster and a backend on it that listens already; its events are in ``seen``."""

    @asynccontextmanager
    async def run(*, images=None, before=None, **options):
        found = {"host": "host", "slow": SLOW, "other": SLOW, "never": STEADY, **(images or {})}
        async with FakeCluster(images=found, timing=Timing(second=0.1)) as cluster:
            if before is not None:
                before(cluster)
            backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), **options)
            backend.seen = []
            backend.sink = backend.seen.append
            async with backend.running():
                await eventually(lambda: cluster.asked("GET", "/events$")[-1:] and watching(cluster, backend))
                yield cluster, backend
            assert [] == cluster.pods()

    return run


def watching(cluster, backend):
    """Whether it listens, or knows that it may not."""
    return backend._pulls.refusal or any(one.get("watch") for one in cluster.asked("GET", "/events$"))


def told(backend):
    """What was told of images."""
    return [event for event in backend.seen if event.name.startswith("image.")]


async def test_a_pull_is_told_when_it_begins_and_when_it_is_over(backend_of):
    """With the image, the Pod, its node, the sandbox, and how long it took."""
    async with backend_of() as (_cluster, backend):
        sandbox = await backend.create(SandboxSpec(image="slow"), "sb-1")
        began, over = told(backend)

        about = {"image": "slow", "node": "node1", "pod": sandbox.pod}
        assert ("image.pulling", "sb-1", about) == (began.name, began.sandbox, began.data)
        took = pytest.approx(over.at - began.at, abs=0.01)
        assert ("image.pulled", "sb-1", {**about, "seconds": took}) == (over.name, over.sandbox, over.data)
        assert over.at > began.at
        assert "<Pulls [0 under way]>" == repr(backend._pulls)


async def test_an_image_that_is_there_is_not_pulled(backend_of):
    """A kubelet says "Pulled" of it as well, and that is not told."""
    async with backend_of() as (cluster, backend):
        await backend.create(SandboxSpec(image="host"), "sb-1")
        events = cluster.store.resource("events")
        await eventually(lambda: any("already present" in str(one.object) for one in cluster.store.all(events, "rl")))
        assert [] == told(backend)


async def test_an_image_that_changes_in_place_is_told_too(backend_of):
    """The same Pod fetches another one."""
    async with backend_of() as (_cluster, backend):
        sandbox = await backend.create(SandboxSpec(image="host"), "sb-1")
        await backend.change_image(sandbox, SandboxSpec(image="slow"))
        assert [("image.pulling", "slow"), ("image.pulled", "slow")] == [
            (e.name, e.data["image"]) for e in told(backend)
        ]


async def test_a_pull_that_fails_is_over_each_time(backend_of):
    """The kubelet's words say why, and while it backs off nothing is on its way."""
    images = {"bad": Image(present=False, error="my own words")}
    async with backend_of(images=images, ready_timeout=2.0) as (_cluster, backend):
        with pytest.raises(ImagePullFailed):
            await backend.create(SandboxSpec(image="bad"), "sb-1")
        names = [event.name for event in told(backend)]

        assert ["image.pulling", "image.pulled"] * (len(names) // 2) == names
        assert len(names) >= 2
        assert "my own words" in told(backend)[1].data["error"]


async def test_a_pod_that_goes_takes_its_pull_with_it(backend_of):
    """No kubelet tells of the end of such a pull."""
    async with backend_of() as (_cluster, backend), anyio.create_task_group() as group:
        group.start_soon(backend.create, SandboxSpec(image="never"), "sb-1")
        await eventually(lambda: told(backend))
        assert "<Pulls [1 under way]>" == repr(backend._pulls)
        group.cancel_scope.cancel()
    assert ["the Pod is gone"] == [event.data["error"] for event in told(backend)[1:]]


async def test_a_pull_whose_end_is_not_told_is_over_when_the_container_runs(backend_of, monkeypatch):
    """Kubelets drop Events about a Pod that has had many."""
    monkeypatch.setattr(recording, "BURST", 1)
    async with backend_of() as (cluster, backend):
        await backend.create(SandboxSpec(image="slow"), "sb-1")
        assert ["image.pulling", "image.pulled"] == [event.name for event in told(backend)]
        assert cluster.recorder.dropped >= 1


async def test_a_pod_that_was_forgotten_counts_no_longer(backend_of):
    """What is remembered is dropped when the next pull begins, if its Pod is not among the run's any more."""
    async with backend_of() as (_cluster, backend):
        pulls = backend._pulls
        sandbox = await backend.create(SandboxSpec(image="host"), "sb-1")
        pulls._begin("uid-1", sandbox.pod, "x", "node1")
        pulls._begin("uid-1", sandbox.pod, "x", "node1")
        await backend.destroy(sandbox)
        pulls._begin("uid-2", "asb-other", "y", "node1")
        assert ["", "the Pod is gone"] == [event.data.get("error", "") for event in told(backend)]
        assert "<Pulls [0 under way]>" == repr(pulls)


async def test_pods_of_others_are_not_told_of(backend_of):
    """Whatever else happens in the namespace passes by, and nothing of it is kept."""
    async with backend_of() as (cluster, backend):
        container = {"name": "c", "image": "slow", "command": ["sleep", "60"]}
        body = {"metadata": {"name": "theirs"}, "spec": {"containers": [container], "terminationGracePeriodSeconds": 0}}
        path = "/api/v1/namespaces/rl/pods"
        await backend._api.request("POST", path, body=body)
        await eventually(lambda: cluster.pod("theirs")["status"]["phase"] == "Running")
        await backend.create(SandboxSpec(image="other"), "sb-1")

        assert {"other"} == {event.data["image"] for event in told(backend)}
        assert {} == backend._pulls._events.objects
        await backend._api.request("DELETE", f"{path}/theirs")
        await eventually(lambda: not cluster.pods("theirs"))


@pytest.mark.parametrize("kind", ["drop", "expire"])
async def test_a_watch_that_ends_goes_on_and_repeats_nothing(backend_of, kind):
    """After a broken connection, and after a version that is too old, what comes next is told once."""
    async with backend_of() as (cluster, backend):
        await backend.create(SandboxSpec(image="slow"), "sb-1")
        cluster.faults.watch("/events$", kind=kind)
        cluster.drop_watches("/events")
        await eventually(lambda: len([one for one in cluster.asked("GET", "/events$") if one.get("watch")]) >= 3)
        await backend.create(SandboxSpec(image="other"), "sb-2")
        assert ["slow", "slow", "other", "other"] == [event.data["image"] for event in told(backend)]


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_without_the_permission_it_is_said_once(backend_of, caplog, verb):
    """Everything else works; nobody asks again."""
    caplog.set_level(logging.INFO, logger="agentsandbox.kubernetes")
    before = lambda cluster: cluster.access.deny(verb, "events")  # noqa: E731
    async with backend_of(before=before) as (cluster, backend):
        await eventually(lambda: backend._pulls.refusal)
        asked = len(cluster.asked("GET", "/events$"))
        await backend.create(SandboxSpec(image="slow"), "sb-1")

        assert [] == told(backend)
        assert asked == len(cluster.asked("GET", "/events$"))
        assert "<Pulls [unknown]>" == repr(backend._pulls)
        (record,) = [one for one in caplog.records if "waiting for images" in one.message]
        assert f"cannot {verb}" in record.message
        checks = {check.name: check for check in await backend.examine()}
        assert (False, False) == (checks["permission events"].ok, checks["permission events"].required)


async def test_waiting_for_an_image_is_told_apart_in_the_idle_report(tmp_path):
    """From the beginning of a pull to its end the accelerators wait for the image, before and after for the start."""
    events = []
    async with FakeCluster(images={"slow": SLOW}, timing=Timing(second=0.1, schedule=0.2)) as cluster:
        options = {"kubeconfig": cluster.kubeconfig(tmp_path)}
        limits = {"spares": 0, "max_sandboxes": 1, "reset": QUICK}
        async with SandboxPool("kubernetes", backend_options=options, sink=events.append, **limits) as pool:
            await eventually(lambda: any(one.get("watch") for one in cluster.asked("GET", "/events$")))
            pool.announce({"slow": 1})
            result = await pool.rollout([Episode(id="e", image="slow")], rollout=solve)
            report = pool.idle()

    assert (1.0,) == result.rewards
    at = {event.name: event.at for event in events}
    waited = at["image.pulled"] - max(at["image.pulling"], at["attempt.started"])
    assert 0 < waited == pytest.approx(report.idle[Cause.HYDRATE])
    began = max(at["sandbox.created"], at["attempt.started"])
    assert at["sandbox.ready"] - began - waited == pytest.approx(report.idle[Cause.START], abs=0.01)
    assert report.wall == pytest.approx(report.busy + sum(report.idle.values()))


async def solve(sandbox, _episode):
    """One command."""
    return float((await sandbox.exec("true")).ok)
