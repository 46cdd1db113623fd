# SPDX-License-Identifier: Apache-2.0
"""
The books of one batch: what was submitted, what is under way, what came of it.

Pure: no clock, no loop. The law ``submitted = rewarded + failed + retryable + cancelled + pending`` holds after every
call, and every episode gets exactly one record.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from agentsandbox.errors import Failure, FailureKind, UsageError
from agentsandbox.models.episode import Attempt, Counts, Episode, EpisodeRecord, Status

__all__ = ["Ledger", "Outcome", "Ticket"]

_NEVER_AGAIN = frozenset({FailureKind.CANCELLED, FailureKind.POOL_CLOSED})
"""Kinds that trying again within the same batch cannot cure, whatever a later batch may do."""


@attrs.frozen(kw_only=True)
class Ticket:
    """The right to try one episode once."""

    index: int
    """Its place in the batch."""
    episode: Episode
    """The episode."""
    number: int
    """The attempt, counted from 1."""


@attrs.frozen(kw_only=True)
class Outcome:
    """What an attempt leaves behind for the record of its episode."""

    attempt: Attempt
    """The attempt, with either a reward or a failure."""
    patch: str | None = None
    """What it changed, if the rollout function said so."""
    info: Mapping[str, Any] = attrs.field(factory=dict)
    """What is kept beside the reward."""
    artifacts: Mapping[str, Path] = attrs.field(factory=dict)
    """Where its files were saved."""

    def __attrs_post_init__(self) -> None:
        if (self.attempt.reward is None) == (self.attempt.failure is None):
            raise UsageError("an attempt ends with a reward or with a failure: one of the two, and never both")


@attrs.define(eq=False)
class _Entry:
    episode: Episode
    started: int = 0
    spent: int = 0
    running: set[int] = attrs.field(factory=set)
    history: list[Attempt] = attrs.field(factory=list)
    record: EpisodeRecord | None = None


@attrs.define(eq=False, repr=False)
class Ledger:
    """
    Who is tried next, who is tried again, and how each episode ended.

    Args:
        max_attempts: How often an episode is tried when infrastructure fails it.
        retry_timeouts: Whether an attempt that ran into its own time limit is tried again, too.
        limits: Image to how many attempts of it may run at once; an image that is not named has no limit.

    """

    max_attempts: int = 2
    retry_timeouts: bool = False
    limits: Mapping[str, int] = attrs.field(factory=dict)
    late_results: int = attrs.field(default=0, init=False)
    lost_twins: int = attrs.field(default=0, init=False)
    """Attempts that were given up because the other one of their episode was faster."""
    _entries: list[_Entry] = attrs.field(factory=list, init=False)
    # One queue an image, and a heap of (never tried, place in the batch, image) over the heads of those that have room.
    # Entries of the heap may be outdated; whatever makes a head or gives room puts a good one there.
    _queues: dict[str, deque[int]] = attrs.field(factory=dict, init=False)
    _heads: list[tuple[bool, int, str]] = attrs.field(factory=list, init=False)
    _busy: Counter[str] = attrs.field(factory=Counter, init=False)
    _queued: int = attrs.field(default=0, init=False)
    _ended: dict[Status, int] = attrs.field(factory=lambda: dict.fromkeys(Status, 0), init=False)
    _running: int = attrs.field(default=0, init=False)

    def submit(self, episode: Episode, *, history: Sequence[Attempt] = (), started: int = 0, spent: int = 0) -> None:
        """
        Enter *episode* at the end of the queue.

        Args:
            episode: The episode.
            history: Attempts that it had under an earlier driver.
            started: The number of the last of them.
            spent: How many of them count against *max_attempts*.

        """
        self._queues.setdefault(episode.image, deque()).append(len(self._entries))
        self._entries.append(_Entry(episode, started=started, spent=spent, history=list(history)))
        self._queued += 1
        self._offer(episode.image)

    def restore(self, record: EpisodeRecord) -> None:
        """Enter an episode that has its record already."""
        entry = _Entry(record.episode, started=record.attempts, history=list(record.history), record=record)
        self._queues.setdefault(record.episode.image, deque())
        self._entries.append(entry)
        self._ended[record.status] += 1

    def take(self, images: Iterable[str] | None = None) -> Ticket | None:
        """
        Start the next attempt: an episode to be tried again comes before one that never started.

        A group is of use only when it is complete, so its missing member goes first. An episode whose image has no room
        lets others pass: it would only wait for a sandbox in their place.

        Args:
            images: Only of these images, the first of them that has something waiting; of any if not given.

        Returns:
            What to try, or ``None`` if nothing waits that may run now.

        """
        if images is not None:
            image = next((image for image in images if self._queues.get(image) and self._has_room(image)), None)
            # Its entry in the heap is outdated from now on.
            return None if image is None else self._begin(image)
        while self._heads:
            _, index, image = heapq.heappop(self._heads)
            queue = self._queues[image]
            if not queue or queue[0] != index or not self._has_room(image):
                continue
            return self._begin(image)
        return None

    def twin(self, ticket: Ticket) -> Ticket | None:
        """
        Start a second attempt beside one that runs; the first of them that comes to a verdict decides.

        Returns:
            The second attempt, or ``None`` if the first is over or has a twin already.

        """
        running = self._entries[ticket.index].running
        if running != {ticket.number}:
            return None
        return self._start(ticket.index)

    def runs(self, ticket: Ticket) -> bool:
        """Whether what comes of an attempt still counts."""
        return ticket.number in self._entries[ticket.index].running

    def end(self, ticket: Ticket, outcome: Outcome, *, may_retry: bool = True) -> EpisodeRecord | None:
        """
        Enter what came of an attempt.

        The result of an attempt that has been given up already is dropped, and counted if it was a reward.

        Args:
            ticket: The attempt.
            outcome: What came of it.
            may_retry: Whether there is time to try again.

        Returns:
            The record if the episode has ended with this attempt, otherwise ``None``.

        """
        entry = self._entries[ticket.index]
        if ticket.number not in entry.running:
            self.late_results += outcome.attempt.reward is not None
            return None
        image = ticket.episode.image
        self._stop(entry, ticket.number)
        entry.history.append(outcome.attempt)
        failure = outcome.attempt.failure
        if entry.running and failure is not None and failure.retryable:
            self._offer(image)
            return None  # Its twin may still come to a verdict, and needs no third.
        self.lost_twins += len(entry.running)
        for number in tuple(entry.running):
            self._stop(entry, number)
        again = failure is not None and may_retry and self._again(entry, failure)
        if again:
            self._queues[image].appendleft(ticket.index)
            self._queued += 1
        self._offer(image)
        return None if again else self._settle(entry, failure, outcome)

    def abandon(self, failure: Failure) -> tuple[EpisodeRecord, ...]:
        """
        End every episode that has not ended, without a reward; what its attempts still return is late.

        Args:
            failure: Why: the deadline of the batch, or its cancellation.

        Returns:
            Their records, in input order.

        """
        self._queues.clear()
        self._heads.clear()
        self._busy.clear()
        self._queued = self._running = 0
        records = []
        for entry in self._entries:
            if entry.record is None:
                entry.running.clear()
                # What waits for its next attempt has a reason of its own, and a better one than the clock.
                last = entry.history[-1].failure if entry.history else None
                stopped = failure.kind is FailureKind.CANCELLED or last is None or last.kind is FailureKind.INTERRUPTED
                records.append(self._settle(entry, failure if stopped else last, None))
        return tuple(records)

    @property
    def waiting(self) -> bool:
        """Whether an episode waits for an attempt, be there room for it or not."""
        return self._queued > 0

    @property
    def counts(self) -> Counts:
        """The conservation law in figures, true at every instant."""
        return Counts(
            submitted=len(self._entries),
            rewarded=self._ended[Status.REWARDED],
            failed=self._ended[Status.FAILED],
            retryable=self._ended[Status.RETRYABLE],
            cancelled=self._ended[Status.CANCELLED],
        )

    @property
    def records(self) -> tuple[EpisodeRecord, ...]:
        """The records of the episodes that have ended, in input order."""
        return tuple(entry.record for entry in self._entries if entry.record is not None)

    def _begin(self, image: str) -> Ticket:
        index = self._queues[image].popleft()
        self._queued -= 1
        self._entries[index].spent += 1
        ticket = self._start(index)
        self._offer(image)
        return ticket

    def _start(self, index: int) -> Ticket:
        entry = self._entries[index]
        self._running += 1
        self._busy[entry.episode.image] += 1
        entry.started += 1
        entry.running.add(entry.started)
        return Ticket(index=index, episode=entry.episode, number=entry.started)

    def _stop(self, entry: _Entry, number: int) -> None:
        entry.running.discard(number)
        self._running -= 1
        self._busy[entry.episode.image] -= 1

    def _has_room(self, image: str) -> bool:
        limit = self.limits.get(image)
        return limit is None or self._busy[image] < limit

    def _offer(self, image: str) -> None:
        queue = self._queues[image]
        if queue and self._has_room(image):
            heapq.heappush(self._heads, (self._entries[queue[0]].started == 0, queue[0], image))

    def _again(self, entry: _Entry, failure: Failure) -> bool:
        if not failure.retryable or failure.kind in _NEVER_AGAIN or entry.spent >= self.max_attempts:
            return False
        return self.retry_timeouts or failure.kind is not FailureKind.EPISODE_TIMEOUT

    def _settle(self, entry: _Entry, failure: Failure | None, outcome: Outcome | None) -> EpisodeRecord:
        if failure is None:
            status = Status.REWARDED
        elif failure.kind is FailureKind.CANCELLED:
            status = Status.CANCELLED
        else:
            status = Status.RETRYABLE if failure.retryable else Status.FAILED
        kept = outcome or Outcome(attempt=Attempt(number=entry.started, failure=failure))
        entry.record = EpisodeRecord(
            episode=entry.episode,
            status=status,
            reward=kept.attempt.reward,
            failure=failure,
            attempts=entry.started,
            history=tuple(entry.history),
            patch=kept.patch,
            info=kept.info,
            artifacts=kept.artifacts,
        )
        self._ended[status] += 1
        return entry.record

    def __repr__(self) -> str:
        c = self.counts
        return (
            f"<Ledger [{c.submitted} submitted: {c.rewarded} rewarded, {c.failed} failed, {c.retryable} retryable, "
            f"{c.cancelled} cancelled | {self._running} running, {self._queued} queued]>"
        )
