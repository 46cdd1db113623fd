# SPDX-License-Identifier: Apache-2.0
"""The books with twins, and with what an earlier driver has done, under any sequence of events."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentsandbox.errors import Blame, EpisodeTimeout, Failure, FailureKind, Phase, SandboxLost, classify
from agentsandbox.models.episode import Attempt, Counts, Episode, EpisodeRecord, Status
from agentsandbox.rollouts.accounting import Ledger, Outcome, Ticket

LOST = classify(SandboxLost("evicted"), Phase.EXEC)
RAISED = classify(ValueError("bug"), Phase.EXEC)
LATE = classify(EpisodeTimeout("the deadline passed"), Phase.ACQUIRE)
CUT = Failure(
    kind=FailureKind.INTERRUPTED, phase=Phase.EXEC, blame=Blame.CALLER, retryable=True, message="the driver ended"
)


def rewarded(ticket: Ticket, reward: float = 1.0) -> Outcome:
    """Return a good end of an attempt."""
    return Outcome(attempt=Attempt(number=ticket.number, reward=reward))


def failed(ticket: Ticket, failure: Failure = LOST) -> Outcome:
    """Return a bad end of an attempt."""
    return Outcome(attempt=Attempt(number=ticket.number, failure=failure))


def test_what_an_earlier_driver_did_goes_on() -> None:
    """Attempt numbers and history go on; only what counts against the limit has been spent."""
    ledger = Ledger(max_attempts=2)
    episode = Episode(id="a", image="host")
    before = (Attempt(number=1, failure=LOST), Attempt(number=2, failure=CUT))
    ledger.submit(episode, history=before, started=2, spent=1)
    ticket = ledger.take()
    record = ledger.end(ticket, failed(ticket))

    assert ticket.number == 3
    assert (record.status, record.attempts) == (Status.RETRYABLE, 3)
    assert record.history == (*before, Attempt(number=3, failure=LOST))


def test_what_was_begun_comes_first() -> None:
    """An episode that an earlier driver had begun is taken before one that never started."""
    ledger = Ledger()
    ledger.submit(Episode(id="new", image="host"))
    ledger.submit(Episode(id="begun", image="other"), history=(Attempt(number=1, failure=CUT),), started=1)

    assert [ledger.take().episode.id for _ in range(2)] == ["begun", "new"]


def test_a_restored_record_is_counted_and_never_run() -> None:
    """A record of an earlier driver stands as it is."""
    ledger = Ledger()
    record = EpisodeRecord(episode=Episode(id="a", image="host"), status=Status.REWARDED, reward=1.0, attempts=1)
    ledger.restore(record)

    assert ledger.take() is None
    assert not ledger.waiting
    assert ledger.records == (record,)
    assert ledger.counts == Counts(submitted=1, rewarded=1)
    assert ledger.abandon(LATE) == ()


def test_the_deadline_is_the_reason_of_what_was_only_interrupted() -> None:
    """That a driver was killed is no reason of its own when the time of the next one runs out."""
    ledger = Ledger()
    ledger.submit(Episode(id="a", image="host"), history=(Attempt(number=1, failure=CUT),), started=1)

    assert ledger.abandon(LATE)[0].failure == LATE


class Twins(RuleBasedStateMachine):
    """Whoever comes first decides, once; the law holds; nothing runs twice beyond its twin."""

    @initialize(attempts=st.integers(1, 3))
    def begin(self, attempts: int) -> None:
        self.ledger = Ledger(max_attempts=attempts)
        self.count = 0
        self.running: dict[str, list[Ticket]] = {}
        self.over: list[Ticket] = []
        self.verdicts: dict[str, object] = {}
        self.late = self.lost = 0

    @rule(cut=st.integers(0, 3), lost=st.integers(0, 2), done=st.booleans())
    def submit(self, cut: int, lost: int, done: bool) -> None:
        episode = Episode(id=str(self.count), image="host")
        self.count += 1
        history = tuple(Attempt(number=n + 1, failure=CUT if n < cut else LOST) for n in range(cut + lost))
        if done and history:
            record = EpisodeRecord(
                episode=episode, status=Status.RETRYABLE, failure=LOST, attempts=len(history), history=history
            )
            self.ledger.restore(record)
            self.verdicts[episode.id] = LOST
        else:
            self.ledger.submit(episode, history=history, started=len(history), spent=lost)

    @rule()
    def take(self) -> None:
        ticket = self.ledger.take()
        if ticket is not None:
            assert ticket.episode.id not in self.verdicts
            assert not self.running.get(ticket.episode.id)
            self.running[ticket.episode.id] = [ticket]

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def twin(self, data: st.DataObject) -> None:
        tickets = data.draw(st.sampled_from([tickets for tickets in self.running.values() if tickets]))
        twin = self.ledger.twin(tickets[0])
        assert (twin is not None) == (len(tickets) == 1)
        if twin is not None:
            assert twin.number > tickets[0].number
            tickets.append(twin)

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), outcome=st.sampled_from([None, LOST, RAISED]))
    def end(self, data: st.DataObject, outcome: Failure | None) -> None:
        tickets = data.draw(st.sampled_from([tickets for tickets in self.running.values() if tickets]))
        ticket = data.draw(st.sampled_from(tickets))
        tickets.remove(ticket)
        self.over.append(ticket)
        record = self.ledger.end(ticket, rewarded(ticket) if outcome is None else failed(ticket, outcome))
        if outcome is not LOST:
            assert record is not None
            assert record.history[-1].number == ticket.number
            self.lost += len(tickets)
            self.over += tickets
            tickets.clear()
        elif tickets:
            assert record is None
        if record is not None:
            assert ticket.episode.id not in self.verdicts
            self.verdicts[ticket.episode.id] = outcome

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def arrive_late(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.over))
        assert not self.ledger.runs(ticket)
        assert self.ledger.twin(ticket) is None or self.fail_twin(ticket)
        self.late += 1
        assert self.ledger.end(ticket, rewarded(ticket, 99.0)) is None

    def fail_twin(self, ticket: Ticket) -> bool:
        raise AssertionError(f"an attempt that is over got a twin: {ticket}")

    @rule()
    def abandon(self) -> None:
        for record in self.ledger.abandon(LATE):
            self.verdicts[record.episode.id] = record.failure
        for tickets in self.running.values():
            self.over += tickets
            tickets.clear()

    @invariant()
    def law(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts, records = self.ledger.counts, self.ledger.records
        assert counts.submitted == self.count
        assert {record.episode.id for record in records} == set(self.verdicts)
        assert counts.pending == self.count - len(records)
        assert (self.ledger.late_results, self.ledger.lost_twins) == (self.late, self.lost)
        for record in records:
            assert (record.reward is not None) == (self.verdicts[record.episode.id] is None)
            assert record.reward != 99.0
            assert len({attempt.number for attempt in record.history}) == len(record.history)
        for tickets in self.running.values():
            assert all(self.ledger.runs(ticket) for ticket in tickets)
        running = sum(map(len, self.running.values()))
        assert f"{running} running" in repr(self.ledger)


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
