# SPDX-License-Identifier: Apache-2.0
"""One batch in the journal: what it holds of it already, and what is added."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.errors import Blame, Failure, FailureKind, Phase
from agentsandbox.models.episode import Attempt, EpisodeRecord, Status
from agentsandbox.models.sandbox import Identity
from agentsandbox.rollouts.journal.encoding import encode, load_record, store_attempt, store_record
from agentsandbox.rollouts.journal.store import Row

if TYPE_CHECKING:
    from agentsandbox.models.episode import Episode
    from agentsandbox.rollouts.accounting import Ticket
    from agentsandbox.rollouts.journal.reading import History, Known
    from agentsandbox.rollouts.journal.writer import Writer
    from agentsandbox.rollouts.source import RolloutLease

__all__ = ["BatchJournal", "Progress", "Shelf", "fingerprint", "submitted", "take_up"]

_STOPPED = frozenset({FailureKind.CANCELLED, FailureKind.POOL_CLOSED})
"""How an episode ends that its driver stopped: not by anything of its own, so it runs again after a restart."""


def fingerprint(digests: Sequence[str]) -> str:
    """Name the content of a batch, whatever its order."""
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


@attrs.frozen(kw_only=True)
class Progress:
    """How far an episode had come when its driver ended."""

    started: int = 0
    """The number of its last attempt."""
    spent: int = 0
    """How many of its attempts count against the most it may have: all that their driver outlived."""
    history: tuple[Attempt, ...] = ()
    """Its attempts; those that the driver did not outlive have a failure that says so."""


@attrs.define(eq=False, repr=False)
class Shelf:
    """
    Which earlier batch a submitted one continues. Pure.

    A batch is recognised by what its submitter called it, or else by its content. Equal batches without a name are told
    apart by their order: a driver that starts again from a checkpoint submits the end of the same sequence once more.
    So the first one it submits is the *last* of its equals, and the later ones come after that; what comes from before
    is never given for a new one. Batches that had not ended are found whatever the order.
    """

    known: list[Known]
    _position: int = attrs.field(default=0, init=False)
    _taken: set[int] = attrs.field(factory=set, init=False)

    def take(self, content: str, batch_id: str | None) -> Known | None:
        """Return the batch that is to be continued, if there is one."""
        equal = [
            batch
            for batch in self.known
            if batch.number not in self._taken
            and (batch.batch_id == batch_id if batch_id is not None else not batch.batch_id)
            and (batch_id is not None or batch.fingerprint == content)
        ]
        if batch_id is None:
            later = [batch for batch in equal if batch.number > self._position or not batch.ended]
            # From the checkpoint on in order; where that is, only the first batch can tell.
            equal = later[-1:] if self._position == 0 else later[:1]
        if not equal:
            return None
        found = equal[-1]
        self._taken.add(found.number)
        if batch_id is None:
            self._position = max(self._position, found.number)
        return found

    def __repr__(self) -> str:
        return f"<Shelf [{len(self._taken)} of {len(self.known)} batches taken up]>"


@attrs.define(eq=False, repr=False, kw_only=True)
class BatchJournal:
    """Writes down one batch, each event before what it announces."""

    writer: Writer
    number: int
    """Of the batch in its journal."""
    episodes: Sequence[Episode]
    digests: Sequence[str]
    finished: Mapping[int, EpisodeRecord] = attrs.field(factory=dict)
    """Place in the batch → the record that an earlier driver has made."""
    progress: Mapping[int, Progress] = attrs.field(factory=dict)
    """Place in the batch → how far an earlier driver had come."""

    async def started(self, ticket: Ticket) -> None:
        """Write that an attempt is about to ask for a sandbox."""
        self._append("attempt.started", ticket.index, ticket.number)
        await self.writer.flush()

    async def granted(self, ticket: Ticket, lease: RolloutLease) -> None:
        """Write which sandbox an attempt has, before anything runs in it."""
        data = {"sandbox": lease.sandbox, "node": lease.node, "identity": attrs.asdict(lease.identity)}
        self._append("attempt.granted", ticket.index, ticket.number, data=lambda: data)
        await self.writer.flush()

    def ended(self, index: int, attempt: Attempt) -> None:
        """Put the end of an attempt in line."""
        self._append("attempt.ended", index, attempt.number, data=lambda: store_attempt(attempt))

    def settled(self, index: int, record: EpisodeRecord) -> None:
        """Put the end of an episode in line."""
        row = self._row(
            "episode.ended",
            index,
            record.attempts or None,
            status=record.status.value,
            final=record.status in (Status.REWARDED, Status.FAILED),
            data=lambda: {
                **store_record(record),
                "stopped": record.failure is not None and record.failure.kind in _STOPPED,
            },
        )
        self.writer.append(row, durable=True)

    def late(self, ticket: Ticket, reward: float) -> None:
        """Put a result in line that came after its attempt was given up."""
        self._append("attempt.late", ticket.index, ticket.number, data=lambda: {"reward": encode(reward)})

    async def flush(self) -> None:
        """Return when all of it is written."""
        await self.writer.flush()

    async def close(self) -> None:
        """Write that the result of the batch is about to be returned."""
        self.writer.append(Row(name="batch.ended", batch=self.number), durable=True)
        await self.writer.flush()

    def _append(self, name: str, index: int, attempt: int | None, **options: Any) -> None:
        self.writer.append(self._row(name, index, attempt, **options))

    def _row(self, name: str, index: int, attempt: int | None, **options: Any) -> Row:
        key, episode = self.digests[index], self.episodes[index].id
        return Row(name=name, batch=self.number, digest=key, episode=episode, attempt=attempt, **options)

    def __repr__(self) -> str:
        return f"<BatchJournal {self.number} [{len(self.finished)} of {len(self.episodes)} finished before]>"


def submitted(episodes: Sequence[Episode], digests: Sequence[str], number: int, batch_id: str | None) -> list[Row]:
    """Say that a batch was submitted; inputs are not kept: they may be large, and their owner has them."""
    content = fingerprint(digests)
    head = Row(name="batch.submitted", batch=number, data=lambda: {"batch_id": batch_id, "fingerprint": content})
    return [head, *(_submission(episode, key, number) for episode, key in zip(episodes, digests, strict=True))]


def _submission(episode: Episode, key: str, number: int) -> Row:
    def data() -> Any:
        fields = {"id": episode.id, "image": episode.image, "group": episode.group, "timeout": episode.timeout}
        return encode({**fields, "artifacts": episode.artifacts})

    return Row(name="episode.submitted", batch=number, digest=key, episode=episode.id, data=data)


def take_up(
    episodes: Sequence[Episode],
    digests: Sequence[str],
    number: int,
    histories: Mapping[str, History],
    *,
    retry: bool,
) -> tuple[dict[int, EpisodeRecord], dict[int, Progress], list[Row]]:
    """
    Decide what of an earlier batch stands, and what runs again.

    Args:
        episodes: The batch as it is submitted now.
        digests: Their contents.
        number: Of the batch in the journal.
        histories: What the journal has of it.
        retry: Whether an episode that ended retryable is tried again.

    Returns:
        The records that stand, how far the others had come, and what to write about that.

    """
    finished: dict[int, EpisodeRecord] = {}
    progress: dict[int, Progress] = {}
    rows: list[Row] = []
    for index, (episode, key) in enumerate(zip(episodes, digests, strict=True)):
        history = histories.get(key)
        if history is None:
            rows.append(_submission(episode, key, number))
            continue
        record, again = history.record, False
        if record is not None:
            again = record["stopped"] or (retry and record["status"] == Status.RETRYABLE)
            if not again:
                finished[index] = load_record(record, episode, tuple(history.attempts))
                continue
            rows.append(Row(name="episode.reopened", batch=number, digest=key, episode=episode.id))
        cut = [_interrupted(attempt, data) for attempt, data in sorted(history.open.items())]
        for attempt in cut:
            ended = Row(name="attempt.ended", batch=number, digest=key, episode=episode.id, attempt=attempt.number)
            rows.append(attrs.evolve(ended, data=partial(store_attempt, attempt)))
        attempts = (*history.attempts, *cut)
        spent = sum(a.failure is not None and a.failure.kind not in _NOT_SPENT for a in attempts)
        progress[index] = Progress(started=history.started, spent=0 if again else spent, history=attempts)
    return finished, progress, rows


_NOT_SPENT = _STOPPED | {FailureKind.INTERRUPTED}


def _interrupted(number: int, granted: Mapping[str, Any]) -> Attempt:
    return Attempt(
        number=number,
        sandbox=granted.get("sandbox"),
        node=granted.get("node"),
        identity=Identity(**granted["identity"]) if granted else None,
        failure=Failure(
            kind=FailureKind.INTERRUPTED,
            phase=Phase.EXEC if granted else Phase.ACQUIRE,
            blame=Blame.CALLER,
            retryable=True,
            message="the driver ended while the attempt was under way",
        ),
    )
