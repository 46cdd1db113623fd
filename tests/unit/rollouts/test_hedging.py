# SPDX-License-Identifier: Apache-2.0
"""Stragglers: when a second one is started, what that costs, and what it gains, in virtual time."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import anyio
import attrs
import pytest

from agentsandbox.errors import AcquireTimeout, ConfigurationError, SandboxLost
from agentsandbox.metrics.durations import Samples
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.episode import Counts, Episode, RolloutResult, Status
from agentsandbox.pool import SandboxPool
from agentsandbox.rollouts.gather import gather_rollouts
from agentsandbox.rollouts.hedging import HedgePolicy, Hedger

from ..warmpool.fake_backend import FakeBackend  # noqa: TID252 - doubles are shared within the tests
from .fakes import FakeLease, FakeSource

pytestmark = pytest.mark.anyio

POLICY = HedgePolicy(quantile=0.9, budget=0.1, min_samples=5)


def make(count: int, **options: Any) -> list[Episode]:
    """Return *count* episodes."""
    return [Episode(id=f"ep-{index}", image="host", **options) for index in range(count)]


@attrs.define(eq=False)
class Waits:
    """Gives out sandboxes, each after a time of its own: that of an episode and of how often it has asked."""

    special: dict[tuple[str, int], float] = attrs.field(factory=dict)
    errors: dict[int, Exception] = attrs.field(factory=dict)
    drawn: list[float] = attrs.field(factory=list)
    inner: FakeSource = attrs.field(factory=FakeSource)
    asked: int = 0
    times: Counter[str] = attrs.field(factory=Counter)

    async def acquire(self, image: str, *, episode: str, attempt: int) -> FakeLease:
        self.asked += 1
        self.times[episode] += 1
        number = self.times[episode]
        requested_at = anyio.current_time()
        await anyio.sleep(self.special.get((episode, number), self.drawn[self.asked] if self.drawn else 1.0))
        if episode == SLOW and number in self.errors:
            raise self.errors[number]
        lease = await self.inner.acquire(image, episode=episode, attempt=attempt)
        lease.requested_at = requested_at
        return lease


SLOW = "ep-19"


def waits(first: float, second: float = 1.0, **options: Any) -> Waits:
    """Let one of twenty episodes wait for long."""
    return Waits({(SLOW, 1): first, (SLOW, 2): second}, **options)


async def one(sandbox: FakeLease, episode: Episode) -> float:
    """Run a command."""
    await sandbox.exec("true")
    return 1.0


def tail(count: int, seed: int) -> list[float]:
    """Draw times of which one in fifty is a hundred times as long."""
    chance = random.Random(seed)
    return [chance.uniform(0.5, 1.5) * (100.0 if chance.random() < 1 / 50 else 1.0) for _ in range(count)]


# The decision.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantile": 0.0}, "quantile must be between 0 and 1"),
        ({"quantile": 1.0}, "quantile must be between 0 and 1"),
        ({"budget": -0.1}, "budget is a share from 0 to 1"),
        ({"budget": 1.5}, "budget is a share from 0 to 1"),
        ({"min_delay": -1.0}, "min_delay must be at least 0 seconds"),
        ({"min_samples": 0}, "min_samples must be at least 1"),
    ],
    ids=str,
)
def test_policies_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    """Each limit names its range."""
    with pytest.raises(ConfigurationError, match=words):
        HedgePolicy(**options)


def test_what_still_runs_counts_as_long() -> None:
    """The quick half of a batch says nothing about its stragglers: the delay is known once enough have ended."""
    samples = Samples(0.9, 3)
    for _ in range(10):
        samples.begin(0.0)
    seen = []
    for seconds in range(1, 11):
        samples.end(0.0, float(seconds))
        seen.append(samples.delay(float(seconds)))

    assert seen == [math.inf] * 8 + [9.0, 9.0]
    assert repr(samples) == "<Samples [10 ended, 0 running]>"


def test_what_has_only_just_begun_says_nothing() -> None:
    """Work that goes on all the time does not hide the delay: only what has outlasted it counts as longer."""
    samples = Samples(0.9, 3)
    for seconds in range(1, 11):
        samples.begin(0.0)
        samples.end(0.0, float(seconds))
    for _ in range(100):
        samples.begin(95.0)
    fresh = samples.delay(100.0)
    samples.begin(50.0)
    samples.begin(51.0)

    assert fresh == 9.0
    assert samples.delay(100.0) == math.inf, "two of twelve have taken longer than any"


def test_the_delay_follows_a_drift() -> None:
    """Only the latest thousand durations count."""
    samples = Samples(0.5, 1)
    for seconds in [9.0] * 1000 + [1.0] * 1000:
        samples.begin(0.0)
        samples.end(0.0, seconds)

    assert samples.delay(0.0) == 1.0


def test_what_was_given_up_is_no_sample() -> None:
    """It was neither quick nor slow."""
    samples = Samples(0.5, 1)
    samples.begin(0.0)
    samples.end(0.0, None)

    assert samples.delay(9.0) == math.inf
    assert repr(samples) == "<Samples [0 ended, 0 running]>"


def test_the_budget_grows_with_the_attempts_and_is_never_exceeded() -> None:
    """One extra for each ten attempts, whoever asks how often."""
    hedger = Hedger(POLICY)
    taken = []
    for _ in range(25):
        hedger.begin()
        taken.append(hedger.take())
        hedger.take()

    assert [index + 1 for index, got in enumerate(taken) if got] == [10, 20]
    assert hedger.extra == 2
    assert not hedger.affordable
    assert hedger.due(hedger.acquires, 0.0, 9.0) == math.inf


# The wait for a sandbox.


async def test_off_by_default() -> None:
    """Without a policy nothing is asked for twice."""
    source = waits(100.0)
    result = await gather_rollouts(source, make(20), one)

    assert source.asked == 20
    assert (result.extra_acquires, result.lost_twins) == (0, 0)


async def test_a_straggler_is_overtaken_and_the_loser_handed_back() -> None:
    """The second sandbox serves; the first, if it comes at all, goes back unused."""
    source = waits(100.0)
    result = await gather_rollouts(source, make(20), one, hedge=POLICY)

    slow = result.records[19]
    assert result.rewards == (1.0,) * 20
    assert (source.asked, result.extra_acquires) == (21, 1)
    assert result.wall_seconds == pytest.approx(2.0)
    assert slow.timings.acquire == pytest.approx(2.0)
    assert slow.ttfc.seconds == pytest.approx(2.0), "it counts from the first call"
    assert slow.ttfc.stages == pytest.approx({"queue": 2.0, "start": 0.0})
    assert source.inner.held == set()
    assert len(source.inner.leases) == 20


async def test_the_first_may_still_win() -> None:
    """The one that was asked for first comes first: the second is withdrawn."""
    source = waits(1.5, 50.0)
    result = await gather_rollouts(source, make(20), one, hedge=POLICY)

    assert result.wall_seconds == pytest.approx(1.5)
    assert result.extra_acquires == 1
    assert source.inner.held == set()
    assert result.records[19].ttfc.seconds == pytest.approx(1.5)


async def test_two_that_come_at_the_same_moment_leave_one() -> None:
    """Both are granted in the same tick: one runs, the other is handed back, never lost."""
    source = waits(2.0)
    result = await gather_rollouts(source, make(20), one, hedge=POLICY)

    used = [lease for lease in source.inner.leases if lease.commands]
    assert result.rewards == (1.0,) * 20
    assert len(used) == 20
    assert source.inner.held == set()


@pytest.mark.parametrize("failing", [{1}, {2}, {1, 2}], ids=str)
async def test_one_of_two_may_fail(failing: set[int]) -> None:
    """Only if both fail has the attempt failed, with the error of the first."""
    source = waits(3.0, 4.0, errors={n: AcquireTimeout(f"number {n}") for n in failing})
    result = await gather_rollouts(source, make(20), one, hedge=POLICY, max_attempts=1)

    record = result.records[19]
    if len(failing) == 1:
        assert record.reward == 1.0
    else:
        assert record.status is Status.RETRYABLE
        assert record.reason == "AcquireTimeout: number 1"
    assert source.inner.held == set()


async def test_cancelled_while_two_are_asked_for() -> None:
    """Whenever the batch is stopped, every sandbox goes back."""
    for moment in (0.5, 1.0, 1.5, 2.0, 2.5):
        source = waits(2.5)
        with anyio.move_on_after(moment):
            await gather_rollouts(source, make(20), one, hedge=POLICY)
        assert source.inner.held == set()


async def acquire_tail(hedge: HedgePolicy | None) -> tuple[float, RolloutResult, int]:
    """Run a thousand episodes over a heavy-tailed source; return the 99th percentile of the wait for a sandbox."""
    source = Waits(drawn=tail(5000, 7))
    result = await gather_rollouts(source, make(1000), one, parallelism=50, hedge=hedge)
    waits = [record.timings.acquire for record in result.records]
    return quantile(waits, 0.99), result, source.asked


async def test_g14_the_tail_falls_within_the_budget() -> None:
    """Heavy-tailed starts: P99 and the whole batch get many times faster for at most 5 % more sandboxes."""
    plain, alone, asked = await acquire_tail(None)
    hedged, result, more = await acquire_tail(HedgePolicy(quantile=0.95, budget=0.05))

    assert asked == 1000
    assert more - 1000 == result.extra_acquires <= 50
    assert plain > 90.0
    assert hedged < 5.0
    assert result.wall_seconds < alone.wall_seconds / 2
    assert result.counts == Counts(submitted=1000, rewarded=1000)


async def test_a_budget_of_nothing_is_never_spent() -> None:
    """Zero is zero."""
    _, result, asked = await acquire_tail(HedgePolicy(budget=0.0))

    assert (asked, result.extra_acquires) == (1000, 0)


async def test_a_pool_makes_an_extra_sandbox_for_a_straggler() -> None:
    """Over a real pool: one sandbox that takes for ever to make is overtaken by one beyond the size of its image."""

    class Slow(FakeBackend):
        async def create(self, spec: Any, name: str) -> Any:
            self.made = getattr(self, "made", 0) + 1
            await anyio.sleep(500.0 if self.made == 20 else 1.0)
            return await super().create(spec, name)

    backend = Slow()
    policy = HedgePolicy(quantile=0.9, budget=0.05, min_samples=5)
    async with SandboxPool(backend, images={"host": 20}, rollout=lone, hedge=policy, spares=0) as pool:
        result = await pool.rollout(make(20))
        assert result.rewards == (1.0,) * 20
        assert result.extra_acquires == 1
        assert result.wall_seconds < 10.0
    assert backend.made <= 21 + 20
    assert backend.alive == set()


async def lone(sandbox: Any, episode: Episode) -> float:
    """Run one command on a real lease."""
    return float((await sandbox.exec("true")).ok)


# Whole attempts.

TWINS = HedgePolicy(quantile=0.9, budget=0.1, min_samples=5, attempts=True)


async def test_a_twin_overtakes_a_straggling_attempt() -> None:
    """The first verdict wins, the other attempt is stopped and counted, its sandbox discarded; one record."""
    stopped = []

    async def solve(sandbox: FakeLease, episode: Episode) -> float:
        try:
            await sandbox.exec("work", seconds=500.0 if episode.id == SLOW and sandbox.attempt == 1 else 1.0)
        except anyio.get_cancelled_exc_class():
            stopped.append((episode.id, sandbox.attempt))
            raise
        return float(sandbox.attempt)

    source = FakeSource()
    told: list[str] = []
    result = await gather_rollouts(
        source, make(20), solve, hedge=TWINS, sink=lambda e: told.append(e.name) if e.episode == SLOW else None
    )

    record = result.records[19]
    assert result.rewards == (1.0,) * 19 + (2.0,)
    assert result.wall_seconds == pytest.approx(2.0)
    assert (record.attempts, [attempt.number for attempt in record.history]) == (2, [2])
    assert (result.lost_twins, result.extra_acquires, result.late_results) == (1, 1, 0)
    assert stopped == [(SLOW, 1)]
    assert told.count("episode.ended") == 1
    assert source.held == set()


async def test_a_loser_that_returns_all_the_same_is_late() -> None:
    """A reward of the slower twin is dropped and counted."""

    async def solve(sandbox: FakeLease, episode: Episode) -> float:
        if episode.id == SLOW and sandbox.attempt == 1:
            try:
                await anyio.sleep(500.0)
            except anyio.get_cancelled_exc_class():
                return 99.0
        await anyio.sleep(1.0)
        return 1.0

    result = await gather_rollouts(FakeSource(), make(20), solve, hedge=TWINS)

    assert result.rewards == (1.0,) * 20
    assert (result.late_results, result.lost_twins) == (1, 1)
    assert result.counts == Counts(submitted=20, rewarded=20)


@pytest.mark.parametrize("first", [1, 2])
async def test_a_twin_outlives_the_loss_of_the_other(first: int) -> None:
    """One of two loses its sandbox: the other decides, and no third is started meanwhile."""

    async def solve(sandbox: FakeLease, episode: Episode) -> float:
        if episode.id == SLOW:
            await anyio.sleep(3.0)
            if sandbox.attempt == first:
                raise SandboxLost("evicted")
            await anyio.sleep(6.0)
            return 5.0
        await anyio.sleep(1.0)
        return 1.0

    source = FakeSource()
    result = await gather_rollouts(source, make(20), solve, hedge=TWINS)

    record = result.records[19]
    assert record.reward == 5.0
    assert record.attempts == source.calls[SLOW] == 2
    assert [attempt.number for attempt in record.history] == [first, 3 - first]
    assert source.held == set()


async def test_both_lost_is_tried_again_as_one() -> None:
    """Two that both lose their sandboxes are one failure of the budget."""

    async def solve(sandbox: FakeLease, episode: Episode) -> float:
        if episode.id == SLOW and sandbox.attempt <= 2:
            await anyio.sleep(3.0)
            raise SandboxLost("evicted")
        await anyio.sleep(0.5)
        return 1.0

    result = await gather_rollouts(FakeSource(), make(20), solve, hedge=TWINS, max_attempts=2)

    assert result.records[19].reward == 1.0
    assert result.records[19].attempts == 3


async def test_a_final_failure_is_a_verdict() -> None:
    """A rollout function that raises decides as a reward would: waiting for the luckier twin would be bias."""

    async def solve(sandbox: FakeLease, episode: Episode) -> float:
        if episode.id == SLOW:
            await anyio.sleep(3.0)
            if sandbox.attempt == 1:
                raise ValueError
            await anyio.sleep(50.0)
        await anyio.sleep(1.0)
        return 1.0

    result = await gather_rollouts(FakeSource(), make(20), solve, hedge=TWINS)

    assert result.records[19].status is Status.FAILED
    assert result.lost_twins == 1
    assert result.wall_seconds < 10.0


async def test_twins_cut_the_tail_of_whole_attempts() -> None:
    """Heavy-tailed attempts: the batch gets faster, and never more than 5 % extra sandboxes are asked for."""

    async def batch(hedge: HedgePolicy | None) -> RolloutResult:
        chance = tail(5000, 11)

        async def solve(sandbox: FakeLease, episode: Episode) -> float:
            await anyio.sleep(chance.pop())
            return 1.0

        return await gather_rollouts(FakeSource(), make(1000), solve, parallelism=50, hedge=hedge)

    alone = await batch(None)
    hedged = await batch(HedgePolicy(attempts=True))

    runs = [quantile([r.timings.run for r in result.records], 0.99) for result in (alone, hedged)]
    assert hedged.extra_acquires <= 0.05 * 1000
    assert hedged.counts == Counts(submitted=1000, rewarded=1000)
    assert runs[0] > 90.0
    assert runs[1] < 3.0


async def test_cancelled_with_twins_under_way() -> None:
    """Whenever the batch is stopped, every episode has one record and every sandbox goes back."""

    async def solve(sandbox: FakeLease, episode: Episode) -> float:
        await sandbox.exec("work", seconds=9.0 if episode.id == SLOW else 1.0)
        return 1.0

    for moment in (0.5, 1.0, 1.1, 5.0):
        source, ended = FakeSource(), []
        with anyio.move_on_after(moment):
            await gather_rollouts(
                source,
                make(20),
                solve,
                hedge=TWINS,
                sink=lambda e, ended=ended: ended.append(e.episode) if e.name == "episode.ended" else None,
            )
        assert sorted(ended) == sorted(e.id for e in make(20))
        assert source.held == set()
