# SPDX-License-Identifier: Apache-2.0
"""What becomes of a batch."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from agentsandbox.errors import (
    AcquireTimeout,
    BatchFailed,
    Blame,
    CommandTimeout,
    ConfigurationError,
    FailureKind,
    ImagePullFailed,
    InvalidTask,
    Phase,
    PoolClosed,
    SandboxLost,
)
from agentsandbox.models.episode import Counts, Episode, Graded, Status
from agentsandbox.rollouts.gather import gather_rollouts

from .fakes import FakeLease, FakeSource

if TYPE_CHECKING:
    from agentsandbox.models.events import Event

pytestmark = pytest.mark.anyio


def make(count: int, **options: Any) -> list[Episode]:
    """Return *count* episodes."""
    return [Episode(id=f"ep-{index}", image="host", **options) for index in range(count)]


async def one(lease: FakeLease, episode: Episode) -> float:
    """Run one command and give 1."""
    await lease.exec("true")
    return 1.0


async def test_rewards_come_in_input_order() -> None:
    """Rewards stand in the order of the batch, however long each episode takes."""

    async def slow_first(lease: FakeLease, episode: Episode) -> float:
        index = int(episode.id.removeprefix("ep-"))
        await lease.exec("sleep", seconds=10 - index)
        return float(index)

    source = FakeSource()
    result = await gather_rollouts(source, make(10), slow_first)

    assert result.rewards == tuple(float(index) for index in range(10))
    assert [record.episode.id for record in result.records] == [f"ep-{index}" for index in range(10)]
    assert result.counts == Counts(submitted=10, rewarded=10)
    assert result.wall_seconds == pytest.approx(10.0)
    assert source.held == set()


async def test_an_empty_batch_creates_nothing() -> None:
    """No episodes give no records, and no sandbox is asked for."""
    source = FakeSource()
    result = await gather_rollouts(source, [], one)

    assert result.records == ()
    assert result.counts == Counts()
    assert source.calls == {}


async def test_parallelism_bounds_how_many_run() -> None:
    """As many episodes run at the same time as asked for: no more, no fewer."""
    source = FakeSource()

    async def busy(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("sleep", seconds=1)
        return 1.0

    result = await gather_rollouts(source, make(10), busy, parallelism=3)

    assert source.most == 3
    assert result.wall_seconds == pytest.approx(4.0)
    assert result.valid_count == 10


async def test_an_image_without_room_lets_others_pass() -> None:
    """Episodes of a crowded image do not take the places of those that could run; none of them waits for a sandbox."""

    async def busy(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("sleep", seconds=1)
        return 1.0

    batch = [Episode(id=f"{image}-{index}", image=image) for image in ("a", "b") for index in range(4)]
    source = FakeSource()
    result = await gather_rollouts(source, batch, busy, parallelism=3, limits={"a": 1, "b": 2})

    assert result.wall_seconds == pytest.approx(4.0)
    assert result.valid_count == 8
    assert [round(record.timings.ready_at) for record in result.records] == [0, 1, 2, 3, 0, 0, 1, 1]


async def test_the_deadline_ends_waiting_for_room() -> None:
    """Episodes whose image has no room until the deadline are returned as retryable."""

    async def busy(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("sleep", seconds=60)
        return 1.0

    result = await gather_rollouts(FakeSource(), make(3), busy, limits={"host": 1}, deadline=2.0)

    assert [record.attempts for record in result.records] == [1, 0, 0]
    assert result.counts == Counts(submitted=3, retryable=3)
    assert result.wall_seconds == pytest.approx(2.0)


async def test_no_sandbox_is_given_twice() -> None:
    """Every attempt has a lease of its own, and each is given back once."""
    source = FakeSource(size=2)
    await gather_rollouts(source, make(6), one)

    assert len({lease.sandbox for lease in source.leases}) == 6
    assert all(lease.released and not lease.discarded for lease in source.leases)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        pytest.param(0.5, 0.5, id="float"),
        pytest.param(1, 1.0, id="int"),
        pytest.param(True, 1.0, id="bool"),
        pytest.param(0, 0.0, id="zero is a reward"),
        pytest.param(-3.5, -3.5, id="negative"),
        pytest.param(Graded(reward=2), 2.0, id="Graded"),
    ],
)
async def test_numbers_are_rewards(value: object, reward: float) -> None:
    """Every finite number is a reward, kept as a float."""

    async def answer(lease: FakeLease, episode: Episode) -> object:
        await lease.exec("true")
        return value

    result = await gather_rollouts(FakeSource(), make(1), answer)

    assert result.rewards == (reward,)
    assert type(result.rewards[0]) is float
    assert result.records[0].status is Status.REWARDED


@pytest.mark.parametrize(
    "value",
    [None, float("nan"), float("inf"), -float("inf"), "1.0", [1.0], 1j, Graded(reward=None), 10**400],
    ids=repr,
)
async def test_p54_what_is_no_number_is_no_reward(value: object) -> None:
    """Anything but a finite number leaves the reward absent, never 0, and is final."""

    async def answer(lease: FakeLease, episode: Episode) -> object:
        await lease.exec("true")
        return value

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert record.status is Status.FAILED
    assert record.reward is None
    assert (record.failure.kind, record.failure.phase) == (FailureKind.INVALID_REWARD, Phase.REWARD)
    assert record.attempts == 1


async def test_graded_carries_its_patch_and_info() -> None:
    """What a rollout function wants to keep stands in the record."""

    async def answer(lease: FakeLease, episode: Episode) -> Graded:
        return Graded(reward=1, patch="--- a\n+++ b\n", info={"turns": 3})

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert record.patch == "--- a\n+++ b\n"
    assert record.info == {"turns": 3}


async def test_p54_infrastructure_is_absent_and_explained() -> None:
    """A lost sandbox leaves no reward, a cause and the flag to submit the episode again; its neighbours stay."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("true")
        if episode.id == "ep-1":
            lease.lose("evicted")
            await lease.exec("true")
        return 1.0

    source = FakeSource()
    result = await gather_rollouts(source, make(3), answer)
    record = result.records[1]

    assert result.rewards == (1.0, None, 1.0)
    assert record.status is Status.RETRYABLE
    assert record.reason == "SandboxLost: evicted"
    assert (record.failure.kind, record.failure.blame) == (FailureKind.SANDBOX_LOST, Blame.SANDBOX)
    assert record.attempts == 2
    assert result.retryable == (record.episode,)
    assert result.counts == Counts(submitted=3, rewarded=2, retryable=1)
    assert [lease.discarded for lease in source.leases if lease.episode == "ep-1"] == [True, True]


async def test_p55_a_swallowed_loss_gives_no_reward() -> None:
    """A rollout function that hides the loss of its sandbox and returns a number gets no reward for it."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        lease.lose("restarted")
        try:
            await lease.exec("true")
        except SandboxLost:
            return 0.0
        return 1.0

    record = (await gather_rollouts(FakeSource(), make(1), answer, max_attempts=1)).records[0]

    assert record.reward is None
    assert record.status is Status.RETRYABLE
    assert record.failure.kind is FailureKind.SANDBOX_LOST


async def test_an_error_that_a_lost_sandbox_caused_is_infrastructure() -> None:
    """What the rollout function raises of its own because its sandbox is gone is tried again, with its error kept."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if lease.attempt == 1:
            lease.lose()
            raise ValueError("no output to parse")
        return 1.0

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert record.reward == 1.0
    assert record.history[0].failure.kind is FailureKind.SANDBOX_LOST
    assert str(record.history[0].failure.cause.__cause__) == "no output to parse"


async def test_what_the_rollout_raises_is_final() -> None:
    """A bug of the rollout function is not tried again; the exception itself is kept."""
    bug = ZeroDivisionError("division by zero")

    async def answer(lease: FakeLease, episode: Episode) -> float:
        raise bug

    source = FakeSource()
    record = (await gather_rollouts(source, make(1), answer)).records[0]

    assert record.status is Status.FAILED
    assert record.attempts == 1
    assert record.failure.cause is bug
    assert record.reason == "ZeroDivisionError: division by zero"
    assert source.leases[0].released


async def test_leaving_the_program_ends_the_episode_only() -> None:
    """``sys.exit()`` in a rollout function is a failure of its episode."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if episode.id == "ep-0":
            raise SystemExit(3)
        return 1.0

    result = await gather_rollouts(FakeSource(), make(2), answer)

    assert result.rewards == (None, 1.0)
    assert result.records[0].reason == "SystemExit: 3"


async def test_p59_an_invalid_task_has_no_reward() -> None:
    """A task that passes before it is solved is final, and its reward absent."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        raise InvalidTask("the baseline passed")

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert (record.status, record.reward) == (Status.FAILED, None)
    assert (record.failure.kind, record.failure.phase) == (FailureKind.INVALID_TASK, Phase.REWARD)


async def test_a_command_timeout_is_the_tasks_own() -> None:
    """A command over its time is the episode's doing, although the error is a ``TimeoutError``."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        raise CommandTimeout("total", 1.0, 1.0)

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert record.status is Status.FAILED
    assert record.failure.kind is FailureKind.COMMAND_TIMEOUT


@pytest.mark.parametrize(
    ("second", "status", "kind"),
    [
        pytest.param(SandboxLost("evicted"), Status.RETRYABLE, FailureKind.SANDBOX_LOST, id="infrastructure only"),
        pytest.param(ValueError("bug"), Status.FAILED, FailureKind.ROLLOUT_RAISED, id="a bug among it"),
    ],
)
async def test_groups_of_errors(second: Exception, status: Status, kind: FailureKind) -> None:
    """A task group of the rollout function is infrastructure only if every error in it is."""

    async def fail(error: Exception) -> None:
        raise error

    async def answer(lease: FakeLease, episode: Episode) -> float:
        group = ExceptionGroup("inner", [SandboxLost("evicted"), second])
        raise ExceptionGroup("outer", [group])

    record = (await gather_rollouts(FakeSource(), make(1), answer, max_attempts=1)).records[0]

    assert record.status is status
    assert record.failure.kind is kind
    assert isinstance(record.failure.cause, ExceptionGroup)


async def test_a_task_group_with_one_error_is_that_error() -> None:
    """What a task group wraps alone is judged as if it were bare."""

    async def fail() -> None:
        raise InvalidTask("the baseline passed")

    async def answer(lease: FakeLease, episode: Episode) -> float:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
        return 1.0

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert record.failure.kind is FailureKind.INVALID_TASK
    assert record.reason == "InvalidTask: the baseline passed"


async def test_a_sandbox_that_cannot_be_had_is_tried_again() -> None:
    """A failed acquire costs an attempt, is censored in the time to first command, and is tried again."""
    source = FakeSource(seconds=2.0, failures={"ep-0": [AcquireTimeout("none in time")]})
    result = await gather_rollouts(source, make(1), one)
    record = result.records[0]

    assert record.reward == 1.0
    assert record.attempts == 2
    assert record.history[0].failure.phase is Phase.ACQUIRE
    assert record.history[0].sandbox is None
    assert (result.ttfc.n, result.ttfc.censored) == (1, 1)
    assert result.samples[0].seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [
        pytest.param(ImagePullFailed("no such image", permanent=True), Status.FAILED, 1, id="no such image"),
        pytest.param(ImagePullFailed("too many requests"), Status.REWARDED, 2, id="a passing refusal"),
        pytest.param(PoolClosed("closed"), Status.RETRYABLE, 1, id="a closed pool"),
        pytest.param(RuntimeError("bug in the source"), Status.FAILED, 1, id="not ours"),
    ],
)
async def test_errors_of_acquire(error: Exception, status: Status, attempts: int) -> None:
    """Whether acquiring is tried again is what the error says of itself."""
    source = FakeSource(failures={"ep-0": [error]})
    record = (await gather_rollouts(source, make(1), one)).records[0]

    assert (record.status, record.attempts) == (status, attempts)


async def test_p56_time_to_first_command_is_measured_from_the_call() -> None:
    """TTFC is from the call of acquire to the first command; an attempt without a command is censored."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        await anyio.sleep(3)
        if episode.id == "ep-0":
            await lease.exec("true")
        return 1.0

    result = await gather_rollouts(FakeSource(seconds=2.0), make(2), answer)

    assert result.records[0].ttfc.seconds == pytest.approx(5.0)
    assert result.records[0].timings.first_command == pytest.approx(5.0)
    assert result.records[1].timings.first_command is None
    assert (result.ttfc.n, result.ttfc.censored) == (1, 1)
    assert result.ttfc.max == pytest.approx(5.0)


async def test_the_time_of_an_attempt_is_accounted_for() -> None:
    """Queueing, acquiring, running and releasing are told apart and add up."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        lease.release_seconds = 0.25
        await lease.exec("sleep", seconds=4)
        return 1.0

    result = await gather_rollouts(FakeSource(seconds=1.0), make(2), answer, parallelism=1)
    timings = result.records[1].timings

    assert timings.queued == pytest.approx(5.25)
    assert timings.acquire == pytest.approx(1.0)
    assert timings.run == pytest.approx(4.0)
    assert timings.release == pytest.approx(0.25)
    assert timings.total == pytest.approx(10.5)
    assert timings.ready_at == pytest.approx(6.25)


async def test_p57_one_lost_sandbox_costs_one_more_attempt() -> None:
    """In a group of 8, an episode that loses its sandbox once is tried again alone."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if episode.id == "ep-5" and lease.attempt == 1:
            lease.lose()
        await lease.exec("true")
        return 1.0

    source = FakeSource()
    result = await gather_rollouts(source, make(8, group="g"), answer)

    assert len(source.leases) == 9
    assert result.valid_count == 8
    assert [record.attempts for record in result.records] == [1, 1, 1, 1, 1, 2, 1, 1]
    assert result.groups["g"].complete
    assert result.records[5].history[0].sandbox != result.records[5].history[1].sandbox


async def test_p57_a_member_that_always_fails_leaves_its_group_incomplete() -> None:
    """Seven rewards stay, and the group says that it is incomplete."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if episode.id == "ep-5":
            lease.lose()
        await lease.exec("true")
        return 1.0

    result = await gather_rollouts(FakeSource(), make(8, group="g"), answer, max_attempts=2)

    assert result.valid_count == 7
    assert result.counts == Counts(submitted=8, rewarded=7, retryable=1)
    assert result.records[5].attempts == 2
    assert not result.groups["g"].complete
    assert result.groups["g"].valid_count == 7


async def test_p57_when_all_fail_there_are_no_rewards() -> None:
    """A group of which nothing is left has no rewards, and no fallback."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        lease.lose()
        return 0.0

    result = await gather_rollouts(FakeSource(), make(8, group="g"), answer)

    assert result.rewards == (None,) * 8
    assert result.valid_count == 0
    assert result.ttfc.n == 0
    assert result.ttfc.censored == 16


async def test_p58_the_deadline_returns_what_is_there() -> None:
    """15 of 16 rewards come back at the deadline; the straggler is stopped, its sandbox destroyed."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("sleep", seconds=60 if episode.id == "ep-7" else 0.1)
        return 1.0

    source = FakeSource()
    result = await gather_rollouts(source, make(16), answer, deadline=2.0)
    record = result.records[7]

    assert result.wall_seconds == pytest.approx(2.0)
    assert result.valid_count == 15
    assert (record.status, record.reward) == (Status.RETRYABLE, None)
    assert record.failure.kind == "timed_out"
    assert record.attempts == 1
    assert [lease.discarded for lease in source.leases if lease.episode == "ep-7"] == [True]
    assert source.held == set()


async def test_p58_a_late_result_is_dropped_and_counted() -> None:
    """Attempt 1 does not stop in time, attempt 2 succeeds, attempt 1 returns after all: one record, of attempt 2."""
    second = anyio.Event()

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if lease.attempt == 1:
            with anyio.CancelScope(shield=True):
                await second.wait()
            return 0.25
        await lease.exec("true")
        second.set()
        return 1.0

    source = FakeSource()
    events: list[Event] = []
    result = await gather_rollouts(
        source, make(1), answer, episode_timeout=2.0, retry_timeouts=True, sink=events.append
    )

    assert result.rewards == (1.0,)
    assert result.late_results == 1
    assert result.records[0].attempts == 2
    assert [event.data["reward"] for event in events if event.name == "attempt.late"] == [0.25]
    assert [event.name for event in events].count("episode.ended") == 1


async def test_a_result_after_being_stopped_is_late() -> None:
    """A rollout function that swallows its cancellation and returns a number has no reward."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        try:
            await lease.exec("sleep", seconds=60)
        except anyio.get_cancelled_exc_class():
            return 1.0
        return 1.0

    result = await gather_rollouts(FakeSource(), make(1), answer, episode_timeout=2.0)

    assert result.rewards == (None,)
    assert result.records[0].failure.kind is FailureKind.EPISODE_TIMEOUT
    assert result.late_results == 1


async def test_what_does_not_stop_is_left_behind() -> None:
    """With a task group for stragglers, a batch does not wait for a rollout function that ignores its cancellation."""
    go = anyio.Event()
    ended = anyio.Event()

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if episode.id == "ep-0":
            with anyio.CancelScope(shield=True):
                await go.wait()
            ended.set()
        return 1.0

    source = FakeSource()
    async with anyio.create_task_group() as stragglers:
        result = await gather_rollouts(source, make(2), answer, deadline=2.0, stragglers=stragglers)

        assert result.rewards == (None, 1.0)
        assert not ended.is_set()
        assert source.held == set()
        go.set()

    assert ended.is_set()


async def test_closing_the_stragglers_group_ends_the_episodes_as_retryable() -> None:
    """When the pool is closed under a batch, what still runs is infrastructure, not cancelled and not a bug."""
    started = anyio.Event()

    async def answer(lease: FakeLease, episode: Episode) -> float:
        started.set()
        await anyio.sleep_forever()
        return 1.0

    async with anyio.create_task_group() as pool, anyio.create_task_group() as group:

        async def close() -> None:
            await started.wait()
            pool.cancel_scope.cancel()

        async def run() -> None:
            with anyio.CancelScope(shield=True):
                results.append(await gather_rollouts(FakeSource(), make(1), answer, stragglers=pool))

        results: list[Any] = []
        group.start_soon(close)
        group.start_soon(run)

    assert results[0].records[0].failure.kind is FailureKind.POOL_CLOSED
    assert results[0].records[0].status is Status.RETRYABLE


async def test_an_episodes_own_timeout_comes_first() -> None:
    """The limit of an episode overrides that of the batch, and counts from the grant of its sandbox."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("sleep", seconds=5)
        return 1.0

    batch = [Episode(id="short", image="host", timeout=2.0), Episode(id="long", image="host", timeout=9.0)]
    result = await gather_rollouts(FakeSource(seconds=100.0), batch, answer, episode_timeout=3.0)

    assert result.rewards == (None, 1.0)
    assert result.records[0].reason == "EpisodeTimeout: the attempt took longer than 2 s"
    assert result.records[0].timings.run == pytest.approx(2.0)


async def test_what_never_started_before_the_deadline_is_retryable() -> None:
    """Episodes that wait when the deadline passes have records without attempts."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("sleep", seconds=3)
        return 1.0

    source = FakeSource()
    result = await gather_rollouts(source, make(4), answer, parallelism=1, deadline=5.0)

    assert result.rewards == (1.0, None, None, None)
    assert [record.attempts for record in result.records] == [1, 1, 0, 0]
    assert {record.failure.kind for record in result.records[1:]} == {FailureKind.EPISODE_TIMEOUT}
    assert result.counts == Counts(submitted=4, rewarded=1, retryable=3)
    assert result.records[3].reason == "EpisodeTimeout: the deadline of the batch passed before the episode started"
    assert len(source.leases) == 2


async def test_the_deadline_ends_waiting_for_a_sandbox() -> None:
    """An acquire that is not served by the deadline is given up and is censored."""
    source = FakeSource(seconds=60.0)
    result = await gather_rollouts(source, make(1), one, deadline=2.0)

    assert result.records[0].failure.phase is Phase.ACQUIRE
    assert result.records[0].status is Status.RETRYABLE
    assert result.ttfc.censored == 1
    assert result.wall_seconds == pytest.approx(2.0)


async def test_p60_too_many_failures_raise_with_every_record() -> None:
    """10 of 16 lost sandboxes are above a threshold of one half: the batch fails, and nothing is lost with it."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if int(episode.id.removeprefix("ep-")) < 10:
            lease.lose()
        await lease.exec("true")
        return 1.0

    with pytest.raises(BatchFailed, match=r"10 of 16 .*sandbox_lost: 10.*0\.5") as caught:
        await gather_rollouts(FakeSource(), make(16), answer, failure_threshold=0.5)

    assert len(caught.value.records) == 16
    assert sum(record.reward is not None for record in caught.value.records) == 6


async def test_the_threshold_itself_is_accepted_and_bugs_do_not_count() -> None:
    """Exactly the threshold passes; failures that are no infrastructure's do not count towards it."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        index = int(episode.id.removeprefix("ep-"))
        if index < 2:
            lease.lose()
        if index == 2:
            raise ValueError("bug")
        await lease.exec("true")
        return 1.0

    result = await gather_rollouts(FakeSource(), make(4), answer, failure_threshold=0.5)

    assert result.counts == Counts(submitted=4, rewarded=1, failed=1, retryable=2)


async def test_a_failed_release_never_changes_a_reward() -> None:
    """The reward was earned before the sandbox was given back; the sink hears of the trouble."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        lease.release_error = RuntimeError("cannot delete")
        await lease.exec("true")
        return 1.0

    events: list[Event] = []
    result = await gather_rollouts(FakeSource(), make(1), answer, sink=events.append)

    assert result.rewards == (1.0,)
    assert [e.data["reason"] for e in events if e.name == "release.failed"] == ["RuntimeError: cannot delete"]


async def test_a_release_that_hangs_is_not_waited_for() -> None:
    """Giving a sandbox back has a deadline of its own."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        lease.release_seconds = 10_000.0
        await lease.exec("true")
        return 1.0

    result = await gather_rollouts(FakeSource(), make(1), answer)

    assert result.rewards == (1.0,)
    assert result.wall_seconds == pytest.approx(30.0)


async def test_a_lease_that_the_rollout_gave_back_itself_is_fine() -> None:
    """A rollout function may release its sandbox before it returns the reward."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("true")
        await lease.release()
        return 1.0

    assert (await gather_rollouts(FakeSource(), make(1), answer)).rewards == (1.0,)


async def test_a_failing_sink_breaks_nothing() -> None:
    """An exception of a sink is reported once and goes no further."""

    def sink(event: Event) -> None:
        raise RuntimeError("full disk")

    assert (await gather_rollouts(FakeSource(), make(3), one, sink=sink)).valid_count == 3


async def test_the_events_tell_the_story() -> None:
    """Every attempt and every episode is told to the sink, in order."""
    events: list[Event] = []
    await gather_rollouts(FakeSource(failures={"ep-0": [AcquireTimeout("none")]}), make(1), one, sink=events.append)

    assert [(event.name, event.episode, event.attempt) for event in events] == [
        ("attempt.started", "ep-0", 1),
        ("attempt.ended", "ep-0", 1),
        ("attempt.started", "ep-0", 2),
        ("attempt.granted", "ep-0", 2),
        ("attempt.ended", "ep-0", 2),
        ("episode.ended", "ep-0", 2),
    ]
    assert events[-1].data == {"status": "rewarded", "reward": 1.0, "kind": None, "reason": None}


async def test_cancelling_a_batch_accounts_for_every_episode() -> None:
    """Everything unfinished is cancelled, every sandbox given back, and the cancellation travels on."""
    source, events = FakeSource(), []

    async def answer(lease: FakeLease, episode: Episode) -> float:
        await lease.exec("sleep", seconds=1 if episode.id == "ep-0" else 60)
        return 1.0

    with anyio.move_on_after(5) as scope:
        await gather_rollouts(source, make(4), answer, parallelism=2, sink=events.append)

    ended = {event.episode: event.data["status"] for event in events if event.name == "episode.ended"}

    assert scope.cancelled_caught
    assert ended == {"ep-0": "rewarded", "ep-1": "cancelled", "ep-2": "cancelled", "ep-3": "cancelled"}
    assert source.held == set()
    assert {lease.episode: lease.discarded for lease in source.leases} == {"ep-0": False, "ep-1": True, "ep-2": True}


@pytest.mark.parametrize("parallelism", [1, 3])
async def test_p42_cancelled_at_every_await_nothing_leaks(parallelism: int) -> None:
    """Wherever a cancellation strikes, every sandbox comes back and every episode has one record."""
    turns = 0
    finished = False
    while not finished:
        turns += 1
        source, events = FakeSource(), []

        async def run(source: FakeSource = source, events: list[Event] = events) -> None:
            nonlocal finished
            await gather_rollouts(source, make(3), one, parallelism=parallelism, sink=events.append)
            finished = True

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()

        assert source.held == set()
        ended = [event.episode for event in events if event.name == "episode.ended"]
        assert sorted(ended) in ([], ["ep-0", "ep-1", "ep-2"])
        assert len(ended) == 3 or not source.leases

    assert turns > 5


async def test_a_stray_cancellation_is_a_bug_of_the_rollout(anyio_backend_name: str) -> None:
    """A ``CancelledError`` that nobody sent is a failure of its episode and stops nothing else."""
    if anyio_backend_name == "trio":
        pytest.skip("trio's cancellation cannot be raised by hand")

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if episode.id == "ep-0":
            raise asyncio.CancelledError
        await lease.exec("sleep", seconds=2)
        return 1.0

    result = await gather_rollouts(FakeSource(), make(3), answer)

    assert result.rewards == (None, 1.0, 1.0)
    assert result.records[0].status is Status.FAILED
    assert result.records[0].failure.kind is FailureKind.ROLLOUT_RAISED


async def test_a_stray_cancellation_of_the_source_is_a_failed_acquire(anyio_backend_name: str) -> None:
    """A source that lets a ``CancelledError`` escape costs its episode, not the batch."""
    if anyio_backend_name == "trio":
        pytest.skip("trio's cancellation cannot be raised by hand")
    source = FakeSource(failures={"ep-0": [asyncio.CancelledError()]})
    result = await gather_rollouts(source, make(2), one)

    assert result.rewards == (None, 1.0)
    assert result.records[0].failure.phase is Phase.ACQUIRE


async def test_ctrl_c_in_a_rollout_stops_the_batch(anyio_backend_name: str) -> None:
    """``KeyboardInterrupt`` goes through, with every sandbox given back and every episode accounted for."""
    if anyio_backend_name == "asyncio":
        pytest.skip("asyncio turns Ctrl-C into a cancellation of the main task")
    source, events = FakeSource(), []

    async def answer(lease: FakeLease, episode: Episode) -> float:
        if episode.id == "ep-0":
            raise KeyboardInterrupt
        await lease.exec("sleep", seconds=60)
        return 1.0

    with pytest.raises(BaseExceptionGroup) as caught:
        await gather_rollouts(source, make(3), answer, sink=events.append)

    assert caught.group_contains(KeyboardInterrupt)
    assert source.held == set()
    assert [event.data["status"] for event in events if event.name == "episode.ended"] == ["cancelled"] * 3


async def test_groups_that_are_no_exceptions_are_judged_too(anyio_backend_name: str) -> None:
    """``sys.exit()`` and stray cancellations inside a task group of a rollout function are failures of its episode."""
    stray = [asyncio.CancelledError()] if anyio_backend_name == "asyncio" else []

    async def answer(lease: FakeLease, episode: Episode) -> float:
        raise BaseExceptionGroup("g", [SystemExit(1), ValueError("x"), *stray])

    async def stop(lease: FakeLease, episode: Episode) -> float:
        raise BaseExceptionGroup("g", [KeyboardInterrupt()])

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert record.status is Status.FAILED
    assert record.failure.kind is FailureKind.ROLLOUT_RAISED
    with pytest.raises(BaseExceptionGroup) as caught:
        await gather_rollouts(FakeSource(), make(1), stop)
    assert caught.group_contains(KeyboardInterrupt)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_error_without_text_is_an_error_all_the_same() -> None:
    """Not even an exception that cannot be printed breaks the batch."""

    async def answer(lease: FakeLease, episode: Episode) -> float:
        raise Unprintable

    result = await gather_rollouts(FakeSource(), make(2), answer)

    assert [record.reason for record in result.records] == ["Unprintable", "Unprintable"]


@pytest.mark.parametrize(
    ("graded", "words"),
    [
        pytest.param(Graded(reward=1.0, info=[1]), "the info of a Graded is a mapping", id="info"),
        pytest.param(Graded(reward=1.0, patch=b"x"), "the patch of a Graded is a string", id="patch"),
        pytest.param(10**5000, "returned a int, which is not finite", id="an integer too long to print"),
        pytest.param("x" * 10_000, "is not a number; convert it with float()", id="a long string"),
        pytest.param(None, "is not a number; return a number at the end", id="forgotten return"),
    ],
)
async def test_why_a_reward_is_invalid(graded: object, words: str) -> None:
    """The reason says what was returned, briefly, and what to do."""

    async def answer(lease: FakeLease, episode: Episode) -> object:
        return graded

    record = (await gather_rollouts(FakeSource(), make(1), answer)).records[0]

    assert record.failure.kind is FailureKind.INVALID_REWARD
    assert words in record.reason
    assert len(record.reason) < 200


@pytest.mark.parametrize("how", ["silent", "raises"])
async def test_a_sandbox_that_cannot_be_shown_to_be_alive_gives_no_reward(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither silence nor an error at the last look counts as alive."""

    async def alive(self: FakeLease) -> bool:
        if how == "raises":
            raise RuntimeError("connection refused")
        await anyio.sleep_forever()
        return True

    monkeypatch.setattr(FakeLease, "alive", alive)
    record = (await gather_rollouts(FakeSource(), make(1), one, max_attempts=1)).records[0]

    assert record.reward is None
    assert (
        record.reason
        == {
            "silent": "SandboxLost: died: no answer within 10 s",
            "raises": "SandboxLost: died: RuntimeError: connection refused",
        }[how]
    )


async def test_a_pool_that_has_just_closed_gives_no_reward() -> None:
    """A lease that is granted after the stragglers' group has ended is given back, and its episode is retryable."""
    async with anyio.create_task_group() as closed:
        closed.cancel_scope.cancel()
    source = FakeSource()
    record = (await gather_rollouts(source, make(1), one, stragglers=closed)).records[0]

    assert record.failure.kind is FailureKind.POOL_CLOSED
    assert source.held == set()


async def test_a_late_result_that_is_no_reward_is_not_counted() -> None:
    """What a stopped rollout function returns is late only if it could have been a reward."""

    async def answer(lease: FakeLease, episode: Episode) -> float | None:
        try:
            await lease.exec("sleep", seconds=60)
        except anyio.get_cancelled_exc_class():
            return None
        return 1.0

    result = await gather_rollouts(FakeSource(), make(1), answer, episode_timeout=2.0)

    assert result.late_results == 0


class Callable_:  # noqa: N801
    async def __call__(self, lease: FakeLease, episode: Episode) -> float:
        return 1.0

    async def method(self, lease: FakeLease, episode: Episode) -> float:
        return 1.0


async def with_option(lease: FakeLease, episode: Episode, *, reward: float) -> float:
    """Take an option."""
    return reward


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param(one, id="function"),
        pytest.param(Callable_(), id="object"),
        pytest.param(Callable_().method, id="method"),
        pytest.param(functools.partial(with_option, reward=1.0), id="partial"),
        pytest.param(functools.partial(Callable_()), id="partial of object"),
    ],
)
async def test_kinds_of_rollout_functions(rollout: Any) -> None:
    """Functions, methods, objects and partials are taken as long as they are async."""
    assert (await gather_rollouts(FakeSource(), make(1), rollout)).rewards == (1.0,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"rollout": lambda lease, episode: 1.0}, "is not async", id="sync function"),
        pytest.param({"rollout": 3}, "must be an async function", id="no function"),
        pytest.param({"rollout": Callable_}, "is not async", id="a class"),
        pytest.param({"rollout": with_option}, "reward", id="wrong parameters"),
        pytest.param({"batch": [*make(2), *make(1)]}, "'ep-0' appears twice", id="the same id twice"),
        pytest.param({"batch": ["ep-0"]}, "sequence of Episode", id="no episode"),
        pytest.param({"parallelism": 0}, "parallelism must be a whole number of at least 1, not 0", id="parallelism 0"),
        pytest.param({"parallelism": 2.5}, "parallelism must be a whole number", id="parallelism 2.5"),
        pytest.param({"parallelism": True}, "parallelism must be a whole number", id="parallelism True"),
        pytest.param({"limits": {"host": 0}}, "the limit of image 'host' must be a whole", id="limit 0"),
        pytest.param({"max_attempts": 0}, "max_attempts must be a whole number", id="no attempts"),
        pytest.param({"deadline": 0}, "deadline must be a number above 0 seconds, not 0", id="deadline 0"),
        pytest.param({"episode_timeout": -1}, "episode_timeout must be a number above 0", id="timeout below 0"),
        pytest.param({"episode_timeout": "1"}, "episode_timeout must be a number above 0", id="timeout a string"),
        pytest.param({"failure_threshold": 50}, "a share from 0 to 1, not 50", id="threshold in percent"),
        pytest.param({"output": __file__}, "must be a directory", id="output is a file"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_created(change: dict[str, Any], words: str) -> None:
    """What cannot work is refused with its name and value, and no sandbox is asked for."""
    source = FakeSource()
    options: dict[str, Any] = {"batch": make(2), "rollout": one, **change}

    with pytest.raises(ConfigurationError, match=words):
        await gather_rollouts(source, **options)

    assert source.calls == {}
