# SPDX-License-Identifier: Apache-2.0
"""A client that also runs batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from agentsandbox.errors import AcquireTimeout, BatchFailed, ConfigurationError, FailureKind, SandboxLost, UsageError
from agentsandbox.metrics import EventCounter
from agentsandbox.models.episode import Counts, Episode, Status
from agentsandbox.pool import SandboxPool

from .warmpool.fake_backend import FakeBackend

if TYPE_CHECKING:
    from pathlib import Path

    from agentsandbox.client import Lease
    from agentsandbox.models.events import Event

pytestmark = pytest.mark.anyio


async def one(sandbox: Lease, episode: Episode) -> float:
    """Run one command and give 1."""
    return float((await sandbox.exec("true")).ok)


def make(count: int, **options: Any) -> list[Episode]:
    """Return *count* episodes."""
    return [Episode(id=f"ep-{index}", image="host", **options) for index in range(count)]


async def test_a_batch_runs_and_every_sandbox_is_removed() -> None:
    """Rewards come back in order, each from a sandbox of its own, and nothing stays behind."""
    backend = FakeBackend()
    async with SandboxPool(backend, images={"host": 3}, rollout=one) as pool:
        result = await pool.rollout(make(7))

    assert result.rewards == (1.0,) * 7
    assert result.counts == Counts(submitted=7, rewarded=7)
    assert len({record.last.sandbox for record in result.records}) == 7
    assert result.ttfc.n == 7
    assert backend.alive == set()


@pytest.mark.parametrize(
    ("options", "parallelism"),
    [
        pytest.param({"images": {"host": 3, "other": 2}}, 5, id="what may be leased at once"),
        pytest.param({"images": ["host", "other"]}, 2, id="one of each name"),
        pytest.param({"images": {"host": 8}, "max_sandboxes": 4}, 4, id="capped by max_sandboxes"),
        pytest.param({"images": {"host": 8}, "parallelism": 2}, 2, id="as said"),
    ],
)
async def test_parallelism(options: dict[str, Any], parallelism: int) -> None:
    """As many episodes run at the same time as sandboxes may be leased, unless something else is said."""
    assert SandboxPool(FakeBackend(), **options).parallelism == parallelism


async def test_a_call_overrides_the_settings_of_the_pool() -> None:
    """What a call says holds for its batch only."""

    async def lost(sandbox: Lease, episode: Episode) -> float:
        backend.sandboxes[sandbox.sandbox].dead = SandboxLost("evicted")
        return (await sandbox.exec("true")).exit_code

    backend = FakeBackend()
    async with SandboxPool(backend, images={"host": 2}, rollout=lost, max_attempts=3) as pool:
        several = await pool.rollout(make(1))
        single = await pool.rollout(make(1), max_attempts=1)
        other = await pool.rollout(make(1), rollout=one)

    assert [result.records[0].attempts for result in (several, single, other)] == [3, 1, 1]
    assert several.records[0].failure.kind is FailureKind.SANDBOX_LOST
    assert other.rewards == (1.0,)


async def test_p57_a_lost_sandbox_is_replaced_for_one_episode_only() -> None:
    """In a group of 8, one episode loses its sandbox once: 9 grants, 8 rewards."""
    backend = FakeBackend()

    async def solve(sandbox: Lease, episode: Episode) -> float:
        if episode.id == "ep-5" and sandbox.attempt == 1:
            backend.sandboxes[sandbox.sandbox].dead = SandboxLost("evicted", "node pressure")
        return float((await sandbox.exec("true")).ok)

    async with SandboxPool(backend, images={"host": 8}, rollout=solve) as pool:
        result = await pool.rollout(make(8, group=0))
        granted = pool.statistics().granted_total

    assert granted == 9
    assert result.valid_count == 8
    assert [record.attempts for record in result.records] == [1, 1, 1, 1, 1, 2, 1, 1]
    assert result.records[5].history[0].failure.message == "SandboxLost: evicted: node pressure"
    assert result.groups[0].complete


async def test_p55_a_swallowed_loss_names_the_true_reason() -> None:
    """A rollout function that hides the loss gets no reward; the record has the reason of the loss."""
    backend = FakeBackend()

    async def solve(sandbox: Lease, episode: Episode) -> float:
        backend.sandboxes[sandbox.sandbox].dead = SandboxLost("oom_killed", "container of 64 MiB")
        try:
            await sandbox.exec("true")
        except SandboxLost:
            return 1.0
        return 0.0

    async with SandboxPool(backend, images={"host": 1}, rollout=solve, max_attempts=1) as pool:
        record = (await pool.rollout(make(1))).records[0]

    assert record.reward is None
    assert record.status is Status.RETRYABLE
    assert record.reason == "SandboxLost: oom_killed: container of 64 MiB"


async def test_p43_a_sandbox_is_never_granted_twice() -> None:
    """Two sandboxes, three acquires: two distinct ones, and the third waits for a release."""
    async with SandboxPool(FakeBackend(), images={"host": 2}, spares=0) as pool:
        first, second = await pool.acquire("host"), await pool.acquire("host")
        with pytest.raises(AcquireTimeout):
            await pool.acquire("host", timeout=0.05)
        assert first.sandbox != second.sandbox
        await pool.release(first)
        async with await pool.acquire("host") as third:
            assert third.sandbox not in {first.sandbox, second.sandbox}
        await second.release()


async def test_the_lower_level_is_there_too() -> None:
    """A pool is a client as well: acquire, exec, reset, release, statistics."""
    async with SandboxPool(FakeBackend(), images={"host": 1}) as pool:
        lease = await pool.acquire("host", episode="mine", attempt=4)
        before = lease.sandbox
        assert (await pool.exec(lease, "true")).exit_code == 0
        await pool.reset(lease)
        assert lease.sandbox != before
        assert pool.statistics().leased == 1
        await pool.release(lease, discard=True)
        assert pool.statistics().leased == 0
        assert (lease.episode, lease.attempt) == ("mine", 4)
        assert pool.client.images == {"host": 1}


async def test_every_sink_hears_of_rollout_and_client() -> None:
    """Events of the attempts and of the sandboxes reach every sink, also past one that fails."""

    def broken(event: Event) -> None:
        raise RuntimeError("full disk")

    counter = EventCounter()
    async with SandboxPool(FakeBackend(), images={"host": 2}, rollout=one, sink=[broken, counter]) as pool:
        await pool.rollout(make(3))

    assert {name: counter[name] for name in ("episode.ended", "attempt.started", "lease.granted")} == {
        "episode.ended": 3,
        "attempt.started": 3,
        "lease.granted": 3,
    }


async def test_output_keeps_the_command_log(tmp_path: Path) -> None:
    """With an output directory, the command log of every attempt is saved and its place is in the record."""
    async with SandboxPool(FakeBackend(), images={"host": 1}, rollout=one, output=tmp_path / "out") as pool:
        record = (await pool.rollout(make(1))).records[0]

    path = tmp_path / "out" / "ep-0" / "attempt-1" / "commands.jsonl"
    assert record.artifacts == {"commands.jsonl": path}
    assert '"true"' in path.read_text()


async def test_too_many_failures_raise() -> None:
    """The threshold of the pool holds for every batch."""

    async def lost(sandbox: Lease, episode: Episode) -> float:
        backend.sandboxes[sandbox.sandbox].dead = SandboxLost("evicted")
        return (await sandbox.exec("true")).exit_code

    backend = FakeBackend()
    async with SandboxPool(backend, images={"host": 2}, rollout=lost, failure_threshold=0.5) as pool:
        with pytest.raises(BatchFailed) as caught:
            await pool.rollout(make(4))

    assert [record.reward for record in caught.value.records] == [None] * 4


async def test_the_pool_shows_its_state() -> None:
    """The repr tells whether it is open, how many batches it ran, and what the client holds."""
    pool = SandboxPool(FakeBackend(), images={"host": 1}, rollout=one)
    assert repr(pool).startswith("<SandboxPool [closed | 0 batches running, 0 done | <SandboxClient [fake | ")
    async with pool:
        await pool.rollout(make(1))
        assert repr(pool).startswith("<SandboxPool [open | 0 batches running, 1 done | <SandboxClient [fake | ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"images": {}}, "images is empty", id="no images"),
        pytest.param({"parallelism": 0}, "parallelism must be", id="parallelism 0"),
        pytest.param({"rollout": lambda sandbox, episode: 1.0}, "not async", id="sync rollout"),
        pytest.param({"deadline": -1}, "deadline must be a number above 0", id="deadline below 0"),
        pytest.param({"failure_threshold": 2}, "share from 0 to 1", id="threshold"),
        pytest.param({"max_sandboxes": 0}, "max_sandboxes must be", id="an option of the client"),
    ],
)
async def test_bad_settings_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    """A pool that cannot work is not even made."""
    with pytest.raises(ConfigurationError, match=words):
        SandboxPool(FakeBackend(), **{"images": {"host": 1}, **options})


async def test_bad_batches_are_refused_before_anything_is_granted() -> None:
    """An unknown image, a missing rollout function, a wrong setting: clear errors, and no lease."""
    async with SandboxPool(FakeBackend(), images={"host": 1}) as pool:
        with pytest.raises(ConfigurationError, match="no rollout function"):
            await pool.rollout(make(1))
        with pytest.raises(ConfigurationError, match="'ep' needs image 'other', and the pool has 'host'"):
            await pool.rollout([Episode(id="ep", image="other")], rollout=one)
        with pytest.raises(TypeError, match="no setting retries"):
            await pool.rollout(make(1), rollout=one, retries=3)
        assert (await pool.rollout([], rollout=one)).records == ()
        assert pool.statistics().granted_total == 0


async def test_a_pool_that_is_not_open_runs_nothing() -> None:
    """Before and after its context, a pool says that it is not open."""
    pool = SandboxPool(FakeBackend(), images={"host": 1}, rollout=one)
    with pytest.raises(UsageError, match="not open"):
        await pool.rollout(make(1))
    async with pool:
        pass
    with pytest.raises(UsageError, match="not open"):
        await pool.rollout(make(1))
