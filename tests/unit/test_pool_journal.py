# SPDX-License-Identifier: Apache-2.0
"""A pool that keeps a journal."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from agentsandbox.errors import ConfigurationError, JournalError, SandboxLost
from agentsandbox.models.episode import Counts, Episode
from agentsandbox.models.events import Event
from agentsandbox.pool import SandboxPool
from agentsandbox.rollouts.hedging import HedgePolicy
from agentsandbox.rollouts.journal import Journal

from .warmpool.fake_backend import FakeBackend

if TYPE_CHECKING:
    from pathlib import Path

    from agentsandbox.client import Lease

pytestmark = pytest.mark.anyio


def make(count: int, **options: Any) -> list[Episode]:
    """Return *count* episodes."""
    return [Episode(id=f"ep-{index}", image="host", **options) for index in range(count)]


async def one(sandbox: Lease, episode: Episode) -> float:
    """Run one command and give 1."""
    return float((await sandbox.exec("true")).ok)


class Reaping(FakeBackend):
    """A backend that can remove what a killed driver left."""

    reaped: list[Mapping[str, Any]] = []  # noqa: RUF012 - emptied by the test

    @classmethod
    async def remove_leftovers(cls, receipt: Mapping[str, Any]) -> list[str]:
        cls.reaped.append(receipt)
        return [f"removed what {receipt['run_id']} left"]

    def receipt(self) -> Mapping[str, Any]:
        return {"namespace": "somewhere"}


async def killed(path: Path, copy: Path, backend: FakeBackend) -> str:
    """Leave at *copy* the journal of a driver that was killed in its third episode; return its run."""

    async def snap(sandbox: Lease, episode: Episode) -> float:
        if episode.id == "ep-2":
            for file in path.parent.glob(f"{path.name}*"):
                shutil.copy(file, copy.with_name(file.name.replace(path.name, copy.name)))
        return await one(sandbox, episode)

    async with SandboxPool(backend, images={"host": 1}, rollout=snap, journal=path) as pool:
        await pool.rollout(make(4))
        return pool.client.run_id


async def test_a_pool_goes_on_and_reaps_what_the_dead_driver_left(tmp_path: Path) -> None:
    """Orphans are told to every sink, the backend removes them by run, once, and the rest of the batch runs."""
    Reaping.reaped = []
    copy, told = tmp_path / "second.journal", []
    run_id = await killed(tmp_path / "first.journal", copy, Reaping())

    def sink(event: Event) -> None:
        told.append(event)

    options: dict[str, Any] = {"images": {"host": 1}, "rollout": one, "journal": copy, "resume": True, "sink": sink}
    async with SandboxPool(Reaping(), **options) as pool:
        result = await pool.rollout(make(4))
        assert repr(pool.journal).startswith(f"<Journal {str(copy)!r} [1 batches | <Writer [")
    async with SandboxPool(Reaping(), **options) as pool:
        again = await pool.rollout(make(4))

    assert (result.rewards, result.resumed) == ((1.0,) * 4, 2)
    assert (again.rewards, again.resumed) == ((1.0,) * 4, 4)
    assert [(receipt["run_id"], receipt["driver"]["pid"]) for receipt in Reaping.reaped] == [(run_id, os.getpid())]
    assert Reaping.reaped[0]["namespace"] == "somewhere"
    orphans = [event for event in told if event.name == "sandbox.orphaned"]
    assert [(event.episode, event.attempt, event.data["identity"]["restarts"]) for event in orphans] == [("ep-2", 1, 0)]
    assert [event.data["removed"] for event in told if event.name == "leftovers.removed"] == [
        [f"removed what {run_id} left"]
    ]
    assert [event.name for event in told].index("leftovers.removed") < [e.name for e in told].index("attempt.started")


async def test_what_cannot_be_reaped_stops_nobody(tmp_path: Path) -> None:
    """A backend that cannot remove the leftovers says why; it is asked again by the next driver."""
    copy, told = tmp_path / "second.journal", []
    await killed(tmp_path / "first.journal", copy, FakeBackend())
    for _ in range(2):
        async with SandboxPool(
            FakeBackend(), images=["host"], rollout=one, journal=copy, resume=True, sink=told.append
        ) as pool:
            await pool.rollout(make(4))

    failures = [event.data["reason"] for event in told if event.name == "leftovers.failed"]
    assert len(failures) == 2
    assert "leaves nothing behind that could be removed" in failures[0]


async def test_what_is_created_is_in_the_journal(tmp_path: Path) -> None:
    """Hosts are written for whoever has to remove them."""
    journal = Journal(tmp_path / "run.journal")

    class Hosts(FakeBackend):
        async def create(self, spec: Any, name: str) -> Any:
            self.sink(Event(name="host.created", at=0.0, data={"pid": 7, "started": 9}))
            return await super().create(spec, name)

    async with SandboxPool(Hosts(), images=["host"], rollout=one, journal=journal, spares=0) as pool:
        await pool.rollout(make(1))

    with sqlite3.connect(tmp_path / "run.journal") as reader:
        rows = reader.execute("SELECT data FROM events WHERE name = 'host.created'").fetchall()
    reader.close()
    assert rows[0] == ('{"pid":7,"started":9}',)


async def test_settings_that_cannot_work(tmp_path: Path) -> None:
    """Resuming needs a journal, and a journal object says itself whether it resumes."""
    with pytest.raises(ConfigurationError, match="nothing to resume without a journal"):
        SandboxPool(FakeBackend(), images=["host"], resume=True)
    with pytest.raises(ConfigurationError, match="resume is for a journal given by its path"):
        SandboxPool(FakeBackend(), images=["host"], journal=Journal(tmp_path / "x"), resume=True)


async def test_a_journal_that_is_in_use_stops_the_pool_before_anything_is_created(tmp_path: Path) -> None:
    """The second driver is refused, and has made no sandbox; its journal is untouched."""
    path, backend = tmp_path / "run.journal", FakeBackend()
    async with SandboxPool(FakeBackend(), images=["host"], rollout=one, journal=path) as pool:
        with pytest.raises(JournalError, match="open for writing in this process already"):
            async with SandboxPool(backend, images=["host"], journal=path, resume=True):
                pass
        await pool.rollout(make(2))

    assert backend.most_alive == 0
    assert Journal(path).counts() == Counts(submitted=2, rewarded=2)


async def test_a_journal_without_a_batch_may_be_begun_again(tmp_path: Path) -> None:
    """A pool that failed before its first batch leaves a file that nobody has to remove by hand."""
    path = tmp_path / "run.journal"
    for _ in range(2):
        async with SandboxPool(FakeBackend(), images=["host"], rollout=one, journal=path):
            pass

    assert Journal(path).counts() == Counts()


async def test_an_error_of_the_trainer_arrives_as_it_is(tmp_path: Path) -> None:
    """What the body of the pool raises is not wrapped, and the run is marked as ended: nothing is left behind."""
    path = tmp_path / "run.journal"
    with pytest.raises(KeyError, match="mine"):
        async with SandboxPool(FakeBackend(), images=["host"], rollout=one, journal=path) as pool:
            await pool.rollout(make(1))
            raise KeyError("mine")
    async with Journal(path, resume=True).writing() as journal:
        assert journal.leftovers == ()


async def test_p57_a_missing_member_is_tried_first_also_after_a_restart(tmp_path: Path) -> None:
    """A group of 4, one member cut off by the death of the driver: it runs before anything new."""
    copy, order = tmp_path / "second.journal", []
    path = tmp_path / "first.journal"
    batch = [Episode(id=f"ep-{index}", image="host", group=index // 4) for index in range(8)]

    async def snap(sandbox: Lease, episode: Episode) -> float:
        if episode.id == "ep-3":
            for file in path.parent.glob(f"{path.name}*"):
                shutil.copy(file, copy.with_name(file.name.replace(path.name, copy.name)))
        return await one(sandbox, episode)

    async def note(sandbox: Lease, episode: Episode) -> float:
        order.append(episode.id)
        return 1.0

    async with SandboxPool(FakeBackend(), images=["host"], rollout=snap, journal=path) as pool:
        await pool.rollout(batch)
    async with SandboxPool(FakeBackend(), images=["host"], rollout=note, journal=copy, resume=True) as pool:
        result = await pool.rollout(batch)

    assert order == ["ep-3", "ep-4", "ep-5", "ep-6", "ep-7"]
    assert all(group.complete for group in result.groups.values())


async def test_an_all_failed_group_has_no_rewards_and_says_so() -> None:
    """Nothing is made up for a group of which every member failed."""

    async def lose(sandbox: Lease, episode: Episode) -> float:
        if episode.group == 0:
            raise SandboxLost("evicted")
        return 1.0

    batch = [Episode(id=f"ep-{index}", image="host", group=index // 4) for index in range(8)]
    async with SandboxPool(FakeBackend(), images={"host": 4}, rollout=lose) as pool:
        result = await pool.rollout(batch)

    assert result.groups[0].rewards == (None,) * 4
    assert (result.groups[0].all_failed, result.groups[1].all_failed) == (True, False)
    assert (result.groups[0].complete, result.groups[1].complete) == (False, True)


async def test_the_law_holds_in_the_journal_wherever_a_batch_is_stopped(tmp_path: Path) -> None:
    """Cancelled at any moment, hedged or not: the journal adds up, and the next driver finishes every episode once."""

    async def work(sandbox: Lease, episode: Episode) -> float:
        number = int(episode.id.removeprefix("ep-"))
        await sandbox.exec("true")
        await anyio.sleep(0.002 * (number % 5))
        if number % 6 == 0 and sandbox.attempt == 1:
            raise SandboxLost("evicted")
        return float(number)

    hedge = HedgePolicy(quantile=0.5, budget=1.0, min_samples=2, min_delay=0.0, attempts=True)
    for step in range(12):
        path = tmp_path / f"{step}.journal"
        options: dict[str, Any] = {"images": {"host": 4}, "rollout": work, "hedge": hedge if step % 2 else None}
        with anyio.move_on_after(0.004 * step):
            async with SandboxPool(FakeBackend(), journal=path, **options) as pool:
                await pool.rollout(make(20))
        kept = {}
        if path.exists():
            stopped = Journal(path).counts()
            assert stopped.submitted in (0, 20)
            assert stopped.pending == 0
            kept = {record.episode.id: record for record in Journal(path).records() if record.reward is not None}
        async with SandboxPool(FakeBackend(), journal=path, resume=True, **options) as pool:
            result = await pool.rollout(make(20))

        assert result.rewards == tuple(float(number) for number in range(20))
        assert Journal(path).counts() == Counts(submitted=20, rewarded=20)
        found = {record.episode.id: record for record in Journal(path).records()}
        assert {name: found[name] for name in kept} == kept
        assert tuple(found[f"ep-{number}"].history for number in range(20)) == tuple(r.history for r in result.records)
