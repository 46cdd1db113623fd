# SPDX-License-Identifier: Apache-2.0
"""The books of a batch."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentsandbox.errors import (
    Blame,
    EpisodeTimeout,
    Failure,
    FailureKind,
    Phase,
    PoolClosed,
    SandboxLost,
    UsageError,
    classify,
)
from agentsandbox.models.episode import Attempt, Counts, Episode, Status
from agentsandbox.rollouts.accounting import Ledger, Outcome, Ticket

LOST = classify(SandboxLost("evicted"), Phase.EXEC)
TIMED_OUT = classify(EpisodeTimeout("too long"), Phase.EXEC)
CLOSED = classify(PoolClosed("closed"), Phase.ACQUIRE)
RAISED = classify(ValueError("bug"), Phase.EXEC)
CANCELLED = Failure(
    kind=FailureKind.CANCELLED, phase=Phase.EXEC, blame=Blame.CALLER, retryable=True, message="the batch was cancelled"
)


def ledger_of(count: int, **options: object) -> Ledger:
    """Return a ledger with *count* episodes."""
    ledger = Ledger(**options)
    for index in range(count):
        ledger.submit(Episode(id=f"ep-{index}", image="host"))
    return ledger


def rewarded(ticket: Ticket, reward: float = 1.0) -> Outcome:
    """Return a good end of an attempt."""
    return Outcome(attempt=Attempt(number=ticket.number, reward=reward))


def failed(ticket: Ticket, failure: Failure = LOST) -> Outcome:
    """Return a bad end of an attempt."""
    return Outcome(attempt=Attempt(number=ticket.number, failure=failure))


def test_a_reward_settles_the_episode() -> None:
    """An attempt with a reward ends its episode at once."""
    ledger = ledger_of(1)
    record = ledger.end(
        ledger.take(), rewarded(Ticket(index=0, episode=Episode(id="ep-0", image="host"), number=1), 0.5)
    )

    assert record.status is Status.REWARDED
    assert record.reward == 0.5
    assert record.attempts == 1
    assert ledger.take() is None
    assert ledger.counts == Counts(submitted=1, rewarded=1)


def test_a_retried_episode_comes_before_new_ones() -> None:
    """A member that a group misses is tried again before anything that never started."""
    ledger = ledger_of(3)
    first = ledger.take()

    assert ledger.end(first, failed(first)) is None

    again = ledger.take()

    assert (again.episode.id, again.number) == ("ep-0", 2)
    assert ledger.take().episode.id == "ep-1"


def test_an_image_without_room_lets_others_pass() -> None:
    """What could only wait does not go first, and goes as soon as there is room."""
    ledger = Ledger(limits={"small": 1})
    for name, image in (("s0", "small"), ("s1", "small"), ("h0", "host")):
        ledger.submit(Episode(id=name, image=image))
    first, second = ledger.take(), ledger.take()

    assert [first.episode.id, second.episode.id] == ["s0", "h0"]
    assert ledger.take() is None
    assert ledger.waiting

    ledger.end(first, rewarded(first))

    assert ledger.take().episode.id == "s1"
    assert not ledger.waiting


def test_the_budget_of_attempts_is_kept() -> None:
    """The last attempt of the budget is final, and its failure is the record's."""
    ledger = ledger_of(1, max_attempts=3)
    record = None
    for number in (1, 2, 3):
        ticket = ledger.take()
        assert ticket.number == number
        record = ledger.end(ticket, failed(ticket))

    assert record.status is Status.RETRYABLE
    assert record.failure == LOST
    assert [attempt.number for attempt in record.history] == [1, 2, 3]
    assert record.reward is None


@pytest.mark.parametrize(
    ("failure", "options", "may_retry", "status"),
    [
        pytest.param(RAISED, {}, True, Status.FAILED, id="the rollout raised"),
        pytest.param(TIMED_OUT, {}, True, Status.RETRYABLE, id="timeout"),
        pytest.param(TIMED_OUT, {"retry_timeouts": True}, True, None, id="timeout, to be retried"),
        pytest.param(CLOSED, {}, True, Status.RETRYABLE, id="a closed pool stays closed"),
        pytest.param(LOST, {}, True, None, id="lost"),
        pytest.param(LOST, {}, False, Status.RETRYABLE, id="lost, and no time left"),
        pytest.param(CANCELLED, {}, True, Status.CANCELLED, id="cancelled"),
    ],
)
def test_what_is_tried_again(failure: Failure, options: dict, may_retry: bool, status: Status | None) -> None:
    """Only infrastructure is tried again, within the budget and while there is time."""
    ledger = ledger_of(1, **options)
    ticket = ledger.take()
    record = ledger.end(ticket, failed(ticket, failure), may_retry=may_retry)

    assert status == (record.status if record else None)
    assert (ledger.take() is None) == (status is not None)


def test_p58_a_late_result_is_dropped_and_counted() -> None:
    """Attempt 1 times out, attempt 2 succeeds: what attempt 1 returns after all changes nothing."""
    ledger = ledger_of(1, retry_timeouts=True)
    first = ledger.take()
    ledger.end(first, failed(first, TIMED_OUT))
    second = ledger.take()
    ledger.end(second, rewarded(second, 1.0))

    assert ledger.end(first, rewarded(first, 0.25)) is None
    assert ledger.late_results == 1
    assert [record.reward for record in ledger.records] == [1.0]
    assert ledger.records[0].attempts == 2


def test_a_late_result_of_an_attempt_whose_successor_runs_is_dropped() -> None:
    """While attempt 2 runs, a result of attempt 1 is not its result."""
    ledger = ledger_of(1, retry_timeouts=True)
    first = ledger.take()
    ledger.end(first, failed(first, TIMED_OUT))
    second = ledger.take()

    assert ledger.end(first, rewarded(first)) is None
    assert ledger.counts.pending == 1
    assert ledger.end(second, rewarded(second, 0.5)).reward == 0.5


def test_a_late_failure_is_no_result() -> None:
    """Only rewards are counted as late: a superseded attempt is expected to fail."""
    ledger = ledger_of(1)
    first = ledger.take()
    ledger.end(first, failed(first, TIMED_OUT))
    ledger.end(first, failed(first, RAISED))

    assert ledger.late_results == 0


def test_abandoning_ends_everything_else() -> None:
    """Running and waiting episodes get a record each; what their attempts return is late."""
    ledger = ledger_of(3)
    done, running = ledger.take(), ledger.take()
    ledger.end(done, rewarded(done))
    records = ledger.abandon(CANCELLED)

    assert [record.episode.id for record in records] == ["ep-1", "ep-2"]
    assert ledger.counts == Counts(submitted=3, rewarded=1, cancelled=2)
    assert [record.attempts for record in ledger.records] == [1, 1, 0]
    assert ledger.end(running, rewarded(running)) is None
    assert ledger.late_results == 1
    assert ledger.abandon(CANCELLED) == ()


def test_an_episode_between_two_attempts_keeps_its_own_reason() -> None:
    """When the deadline finds an episode waiting for its next attempt, the record names what failed the last one."""
    ledger = ledger_of(1)
    ticket = ledger.take()
    ledger.end(ticket, failed(ticket, LOST))

    assert [record.failure for record in ledger.abandon(TIMED_OUT)] == [LOST]


def test_the_books_show_themselves() -> None:
    """The repr tells the whole state in one line."""
    ledger = ledger_of(4)
    first, second = ledger.take(), ledger.take()
    ledger.end(first, rewarded(first))
    ledger.end(second, failed(second, RAISED))
    ledger.take()

    assert repr(ledger) == (
        "<Ledger [4 submitted: 1 rewarded, 1 failed, 0 retryable, 0 cancelled | 1 running, 1 queued]>"
    )


@pytest.mark.parametrize(("reward", "failure"), [(None, None), (1.0, LOST)], ids=["neither", "both"])
def test_an_attempt_has_a_reward_or_a_failure(reward: float | None, failure: Failure | None) -> None:
    """Neither and both are refused."""
    with pytest.raises(UsageError, match="one of the two"):
        Outcome(attempt=Attempt(number=1, reward=reward, failure=failure))


class Books(RuleBasedStateMachine):
    """Whatever happens in whatever order, the law holds and every episode has exactly one record."""

    @initialize(attempts=st.integers(1, 4), retry=st.booleans(), limit=st.integers(1, 3))
    def begin(self, attempts: int, retry: bool, limit: int) -> None:
        self.ledger = Ledger(max_attempts=attempts, retry_timeouts=retry, limits={"a": limit, "b": 1})
        self.queued: dict[str, str] = {}
        self.submitted = 0
        self.running: list[Ticket] = []
        self.over: list[Ticket] = []
        self.rewards: dict[str, float] = {}
        self.final: dict[str, object] = {}
        self.late = 0

    @rule(image=st.sampled_from(["a", "b", "host"]))
    def submit(self, image: str) -> None:
        self.ledger.submit(Episode(id=str(self.submitted), image=image))
        self.queued[str(self.submitted)] = image
        self.submitted += 1

    @rule()
    def take(self) -> None:
        busy = Counter(ticket.episode.image for ticket in self.running)
        possible = {name for name, image in self.queued.items() if busy[image] < self.ledger.limits.get(image, 10**9)}
        tried = {ticket.episode.id for ticket in self.over}
        ticket = self.ledger.take()
        assert (ticket is not None) == bool(possible)
        if ticket is not None:
            again = possible & tried
            assert ticket.episode.id == min(again or possible, key=int) or ticket.episode.id in again
            del self.queued[ticket.episode.id]
            assert ticket.number <= self.ledger.max_attempts
            assert ticket.episode.id not in {other.episode.id for other in self.running}
            self.running.append(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), reward=st.floats(0, 1))
    def succeed(self, data: st.DataObject, reward: float) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        self.over.append(ticket)
        record = self.ledger.end(ticket, rewarded(ticket, reward))
        assert record.reward == reward
        self.rewards[ticket.episode.id] = reward

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failure=st.sampled_from([LOST, TIMED_OUT, RAISED, CLOSED, CANCELLED]), time=st.booleans())
    def fail(self, data: st.DataObject, failure: Failure, time: bool) -> None:
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        self.over.append(ticket)
        record = self.ledger.end(ticket, failed(ticket, failure), may_retry=time)
        assert record is None or record.reward is None
        if record is None:
            self.queued[ticket.episode.id] = ticket.episode.image

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.over))
        self.late += 1
        assert self.ledger.end(ticket, rewarded(ticket, 99.0)) is None

    @rule(failure=st.sampled_from([TIMED_OUT, CANCELLED]))
    def abandon(self, failure: Failure) -> None:
        self.ledger.abandon(failure)
        self.over += self.running
        self.running.clear()
        self.queued.clear()
        assert self.ledger.counts.pending == 0

    @invariant()
    def law(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts, records = self.ledger.counts, self.ledger.records
        assert counts.submitted == self.submitted
        assert self.ledger.waiting == bool(self.queued)
        assert len(records) == counts.rewarded + counts.failed + counts.retryable + counts.cancelled
        assert counts.pending == counts.submitted - len(records) >= len(self.running)
        assert len({record.episode.id for record in records}) == len(records)
        for record in records:
            assert (record.reward is not None) == (record.status is Status.REWARDED)
            assert record == self.final.setdefault(record.episode.id, record)
            assert record.attempts == len(record.history) or record.status is not Status.REWARDED
        assert {r.episode.id: r.reward for r in records if r.reward is not None} == self.rewards
        assert self.ledger.late_results == self.late


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
