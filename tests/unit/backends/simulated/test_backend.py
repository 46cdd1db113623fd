# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import anyio
import attrs
import pytest

from agentsandbox import Episode, SandboxClient, SandboxPool
from agentsandbox.backends.opening import open_backend
from agentsandbox.backends.simulated import ClusterModel, Faults, SimulatedBackend, StartModel
from agentsandbox.errors import (
    CommandTimeout,
    ConfigurationError,
    OutputLimitExceeded,
    ProvisionError,
    SandboxLost,
    UsageError,
)
from agentsandbox.models.command import Command
from agentsandbox.models.image import ImageManifest, Layer
from agentsandbox.models.sandbox import SandboxSpec

pytestmark = pytest.mark.anyio

EXACT = {
    name: StartModel(median=seconds, p95=seconds, floor=seconds, fails=0.0)
    for name, seconds in (("start", 3.0), ("change", 1.0), ("restart", 1.0), ("stop", 2.0))
}
MODEL = ClusterModel(
    nodes=2,
    pods_per_node=2,
    api_latency=0.0,
    api_writes=1e6,
    scheduler_rate=1e6,
    round_trip=0.25,
    pulls_at_once=1,
    unpack_rate=100e6,
    pull_overhead=0.0,
    disk_used=0,
    writable_layer=0,
    **EXACT,
)
"""Everything takes a whole number of seconds, or next to nothing."""

IMAGES = [ImageManifest(name=name, layers=(Layer(digest=name, size=1000, unpacked=500_000_000),)) for name in "abcd"]
SPECS = {image.name: SandboxSpec(image=image.name) for image in IMAGES}


def backend(**options):
    return SimulatedBackend(**{"model": MODEL, "images": IMAGES, **options})


async def test_a_pod_takes_its_pull_and_its_start():
    """Five seconds to fetch, three to start; the second one of the image on that node only starts."""
    made = backend(placement={"a": "node-01"})
    async with made.running():
        first = await made.create(SPECS["a"], "one")
        assert 8.0 == pytest.approx(anyio.current_time(), abs=1e-3)

        await made.create(SPECS["a"], "two")
        assert 11.0 == pytest.approx(anyio.current_time(), abs=1e-3)

        assert "node-01" == first.node
        assert "<SimulatedBackend [2 nodes, 2 Pods, 2 made]>" == repr(made)
        assert (2, 2) == (made.pods_created, made.pods_peak)


async def test_changing_an_image_in_place_makes_no_pod():
    """The new image is fetched where the Pod is, the old one may go, and the identity is another one."""
    made = backend()
    async with made.running():
        old = await made.create(SPECS["a"], "one")
        began = anyio.current_time()
        fresh = await made.recycle(old, SPECS["b"], "one")

        assert 6.0 == pytest.approx(anyio.current_time() - began, abs=1e-3)
        assert (old.identity.uid, 1) == (fresh.identity.uid, fresh.identity.restarts)
        assert old.identity.instance != fresh.identity.instance
        assert old.node == fresh.node
        assert 1 == made.pods_created
        with pytest.raises(SandboxLost, match="restarted"):
            await old.check()
        await fresh.check()
        with pytest.raises(UsageError, match="is gone"):
            await made.recycle(old, SPECS["a"], "one")


async def test_a_restart_in_place_takes_a_second():
    """The image is there."""
    made = backend()
    async with made.running():
        old = await made.create(SPECS["a"], "one")
        began = anyio.current_time()
        assert made.can_recycle(old)
        await made.recycle(old, SPECS["a"], "one")

        assert 1.0 == pytest.approx(anyio.current_time() - began)
        assert not made.can_recycle(old)
        assert not backend(reuse=False).can_recycle(old)


async def test_a_pod_without_room_waits_for_some():
    """Four fit; the fifth is bound when one is gone, where it must go."""
    made = backend(placement={"b": "node-00"})
    async with made.running(), anyio.create_task_group() as group:
        there = [await made.create(SPECS["a"], f"{n}") for n in range(4)]
        ready = {}

        async def create(image, name):
            ready[name] = (await made.create(SPECS[image], name)).node

        group.start_soon(create, "b", "placed")
        group.start_soon(create, "c", "anywhere")
        await anyio.sleep(100)
        assert {} == ready

        await made.destroy(next(sandbox for sandbox in there if sandbox.node == "node-01"))
        await anyio.sleep(20)
        assert {"anywhere": "node-01"} == ready

        await made.destroy(next(sandbox for sandbox in there if sandbox.node == "node-00"))
        await anyio.sleep(20)
        assert {"anywhere": "node-01", "placed": "node-00"} == ready


async def test_a_cancelled_creation_leaves_nothing():
    """Wherever it is cancelled: while the image is fetched, while it starts, and while it waits for room."""
    made = backend()
    async with made.running():
        for seconds in (2.0, 5.0, 1.0):
            with anyio.move_on_after(seconds) as scope:
                await made.create(SPECS["a"], f"cancelled after {seconds}")
            assert scope.cancelled_caught
        assert [0, 0] == [node.pods for node in made.nodes.values()]

        for number in range(4):
            await made.create(SPECS["a"], f"{number}")
        with anyio.move_on_after(5.0):
            await made.create(SPECS["a"], "waiting")
        assert 4 == sum(node.pods for node in made.nodes.values())


async def test_destroying_takes_its_time_and_is_idempotent():
    """Two seconds; a second call finds nothing to do."""
    made = backend()
    async with made.running():
        sandbox = await made.create(SPECS["a"], "one")
        began = anyio.current_time()
        await made.destroy(sandbox)
        assert 2.0 == pytest.approx(anyio.current_time() - began)
        await made.destroy(sandbox)
        assert 2.0 == pytest.approx(anyio.current_time() - began)
        with pytest.raises(SandboxLost, match="deleted"):
            await sandbox.session.ping()


async def test_commands_take_virtual_time():
    """Sleeping takes as long as it says; other commands are over at once; exit codes are theirs."""
    made = backend()
    async with made.running():
        session = (await made.create(SPECS["a"], "one")).session
        began, started = anyio.current_time(), []
        result = await session.exec(
            Command(command=["sleep", "30"]), on_started=lambda: started.append(anyio.current_time() - began)
        )

        assert (0, 30.0) == (result.exit_code, result.wall_seconds)
        assert [0.25] == pytest.approx(started)
        assert 30.25 == pytest.approx(anyio.current_time() - began)
        assert 1 == (await session.exec(Command(command="false"))).exit_code
        assert 3 == (await session.exec(Command(command="exit 3"))).exit_code
        assert 0 == (await session.exec(Command(command="make test"))).exit_code
        with pytest.raises(CommandTimeout):
            await session.exec(Command(command="sleep 30", timeout=10.0))


async def test_files_are_kept_in_memory(tmp_path):
    """What was written is read; what was not is not there."""
    made = backend()
    async with made.running():
        session = (await made.create(SPECS["a"], "one")).session
        await session.write_file("a", b"text")
        await session.upload_dir(tmp_path, "d")
        await session.download_dir("d", tmp_path)

        assert b"text" == await session.read_file("a")
        assert 0.25 == await session.ping()
        assert session.alive
        assert "<SimulatedSession [attached, 0 running]>" == repr(session)
        with pytest.raises(FileNotFoundError):
            await session.read_file("b")
        with pytest.raises(OutputLimitExceeded):
            await session.read_file("a", limit=1)
        with pytest.raises(UsageError, match="no processes"):
            await session.open_process(Command(command="cat"))


async def test_a_lost_sandbox_ends_its_command():
    """Whoever waits for a command is told at once, and so is the pool."""
    events = []
    made = backend(model=attrs.evolve(MODEL, faults=Faults(losses_per_hour=3600.0)))
    made.sink = events.append
    async with made.running():
        sandbox = await made.create(SPECS["a"], "one")
        with pytest.raises(SandboxLost, match="evicted"):
            await sandbox.session.exec(Command(command="sleep 3000", timeout=None))

        assert ["host.created", "sandbox.lost"] == [event.name for event in events]
        assert not made.can_recycle(sandbox)


async def test_registries_and_starts_fail_as_often_as_they_are_told():
    """What fails leaves nothing behind."""
    for faults, message in ((Faults(failed_pulls=1.0), "registry"), (Faults(failed_starts=1.0), "did not start")):
        made = backend(model=attrs.evolve(MODEL, faults=faults))
        async with made.running():
            with pytest.raises(ProvisionError, match=message):
                await made.create(SPECS["a"], "one")
            assert [0, 0] == [node.pods for node in made.nodes.values()]


async def test_a_lane_fetches_ahead_of_the_sandboxes():
    """A Pod of its own holds a place, and what it has fetched costs a sandbox nothing."""
    made = backend(placement={"a": "node-00", "b": "node-00"}, reserved=1)
    async with made.running():
        async with made.lane("node-00") as lane:
            await lane.pull("a")
            assert 5.0 == pytest.approx(anyio.current_time(), abs=1e-3)
            assert 1 == made.nodes["node-00"].pods
        assert 0 == made.nodes["node-00"].pods
        await made.create(SPECS["a"], "one")

        assert 8.0 == pytest.approx(anyio.current_time(), abs=1e-3)
        assert {"node-00": 1, "node-01": 1} == made.placement.room


async def test_what_cannot_be_is_refused():
    """A node that is not there, a disk that is too small, a sandbox of somebody else."""
    with pytest.raises(ConfigurationError, match="placed on 'node-07'"):
        backend(placement={"a": "node-07"})
    with pytest.raises(ConfigurationError, match="hydrated on 'node-07'"):
        backend(hydrated={"node-07": ["a"]})
    with pytest.raises(ConfigurationError, match="no space left"):
        backend(model=attrs.evolve(MODEL, disk=1_000), hydrated={"node-00": ["a"]})
    with pytest.raises(UsageError, match="is not of this backend"):
        await backend().destroy(object())


async def test_it_is_found_by_its_name():
    """With its options; whatever image it is asked for exists."""
    made = open_backend("simulated", seed=7)

    await made.validate([SandboxSpec(image="anything")])
    assert "10 nodes of 256 sandboxes each" == (await made.examine())[0].detail
    assert made.manifest("anything") is made.manifest("anything")


async def rollout(sandbox, episode):
    await sandbox.exec("sleep 30")
    return 1.0


async def test_the_real_pool_runs_on_it():
    """Two hundred rollouts of fifty images in sandboxes that change their image: one Pod for each place."""
    images = [
        ImageManifest(name=f"i{n}", layers=(Layer(digest=f"i{n}", size=1000, unpacked=50_000_000),)) for n in range(50)
    ]
    model = attrs.evolve(MODEL, pods_per_node=20)
    batch = [Episode(id=f"{image.name}/{n}", image=image.name) for image in images for n in range(4)]
    made = SimulatedBackend(model=model, images=images)
    async with SandboxPool(made, max_sandboxes=40, parallelism=40, acquire_timeout=None, rollout=rollout) as pool:
        pool.announce(batch)
        result = await pool.rollout(batch)

    assert (200, 0) == (result.counts.rewarded, result.ttfc.censored)
    assert 40 == made.pods_created
    assert [0, 0] == [node.pods for node in made.nodes.values()]


async def test_losses_become_retries_and_never_rewards_of_another_sandbox():
    """With a sandbox lost every two minutes of its life, every episode still gets its reward, on another attempt."""
    model = attrs.evolve(MODEL, pods_per_node=10, faults=Faults(losses_per_hour=30.0))
    batch = [Episode(id=f"{n}", image="a") for n in range(60)]
    async with SandboxPool(
        SimulatedBackend(model=model, images=IMAGES, seed=1), images={"a": 20}, spares=0, max_attempts=20
    ) as pool:
        result = await pool.rollout(batch, rollout=rollout)

    lost = [attempt for record in result.records for attempt in record.history if attempt.failure is not None]
    assert 60 == result.counts.rewarded
    assert {"sandbox_lost"} == {attempt.failure.kind.value for attempt in lost}
    assert all(attempt.reward is None for attempt in lost)


async def test_a_control_plane_that_refuses_slows_the_pool_down():
    """With 429 answered, the pool pauses and tries again, until everything is there."""
    model = attrs.evolve(MODEL, pods_per_node=10, api_writes=10.0, api_patience=1.0)
    made = SimulatedBackend(model=model, images=IMAGES)
    async with SandboxClient(made, images={"a": 20}, spares=0, create_rate=1000.0, acquire_timeout=None) as client:
        leases = [await client.acquire("a") for _ in range(20)]
        statistics = client.statistics()

    assert 20 == len({lease.sandbox for lease in leases})
    assert made.api.refused > 0
    assert statistics.failed_total == made.api.refused


async def test_a_pool_may_admit_what_is_ready_first():
    """With the option, nobody waits for a sandbox once it has been admitted; without it, many do."""
    images = [
        ImageManifest(name=f"i{n}", layers=(Layer(digest=f"i{n}", size=1000, unpacked=300_000_000),)) for n in range(20)
    ]
    batch = [Episode(id=f"{image.name}/{n}", image=image.name) for image in images for n in range(2)]
    waited = []
    for ready_first in (True, False):
        async with SandboxPool(
            SimulatedBackend(model=attrs.evolve(MODEL, pods_per_node=5), images=images),
            max_sandboxes=10,
            parallelism=10,
            acquire_timeout=None,
            ready_first=ready_first,
        ) as pool:
            pool.announce(batch)
            result = await pool.rollout(batch, rollout=rollout)
        assert 40 == result.counts.rewarded
        assert [episode.id for episode in batch] == [record.episode.id for record in result.records]
        waited.append(result.ttfc.mean)

    assert 0.25 == pytest.approx(waited[0], abs=1e-3)
    assert waited[1] > 1.0
