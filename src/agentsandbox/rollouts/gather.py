# SPDX-License-Identifier: Apache-2.0
"""A batch of episodes in, one record an episode out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.errors import TASK_FAULTS, BatchFailed, ConfigurationError, EpisodeTimeout, JournalError, Phase
from agentsandbox.metrics.recorder import summarise_ttfc
from agentsandbox.models.episode import EpisodeRecord, RolloutResult, check_batch
from agentsandbox.models.limits import check_count, check_number
from agentsandbox.rollouts.accounting import Ledger
from agentsandbox.rollouts.artifacts import ArtifactStore
from agentsandbox.rollouts.attempt import AttemptRunner
from agentsandbox.rollouts.continuing import check_restore, continuing
from agentsandbox.rollouts.hedging import Hedger
from agentsandbox.rollouts.journal import Progress
from agentsandbox.rollouts.notify import tell_ended, tell_restored
from agentsandbox.rollouts.racing import Race
from agentsandbox.rollouts.source import check_rollout
from agentsandbox.rollouts.stopping import cancelled_failure
from agentsandbox.rollouts.verdict import failure_of, is_infrastructure, journal_error
from agentsandbox.warmpool.publishing import Publisher

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentsandbox.errors import Failure
    from agentsandbox.models.episode import Episode
    from agentsandbox.models.events import EventSink
    from agentsandbox.rollouts.admission import Admission
    from agentsandbox.rollouts.hedging import HedgePolicy
    from agentsandbox.rollouts.journal import BatchJournal, Journal
    from agentsandbox.rollouts.source import LeaseSource, RolloutFunction

__all__ = ["check_limits", "gather_rollouts"]


async def gather_rollouts(
    source: LeaseSource,
    batch: Sequence[Episode],
    rollout: RolloutFunction,
    *,
    parallelism: int | None = None,
    limits: Mapping[str, int] | None = None,
    max_attempts: int = 2,
    retry_timeouts: bool = False,
    deadline: float | None = None,
    episode_timeout: float | None = None,
    failure_threshold: float | None = None,
    output: Path | str | None = None,
    task_faults: Collection[str] = (),
    hedge: HedgePolicy | None = None,
    journal: Journal | None = None,
    batch_id: str | None = None,
    restore: Mapping[str, Any] | None = None,
    checkpoints: Any = None,
    sink: EventSink | Iterable[EventSink] = (),
    stragglers: TaskGroup | None = None,
    admission: Admission | None = None,
) -> RolloutResult:
    """
    Run one attempt after another until every episode of *batch* has its record.

    A reward is a number only when *rollout* returned one and the sandbox was still the one that was granted. What
    infrastructure fails is tried again on another sandbox; what the rollout function raises is final.

    Args:
        source: What grants sandboxes: a client, a pool, or anything with their ``acquire``.
        batch: The episodes, each id once.
        rollout: An async function that takes a sandbox and an episode and returns a finite number or a
            :class:`~agentsandbox.Graded`.
        parallelism: How many episodes run at the same time; all of them when nothing is said.
        limits: Image to how many episodes of it run at the same time, so that none waits for a sandbox of its image
            in the place of one that could run.
        max_attempts: How often an episode is tried when infrastructure fails it.
        retry_timeouts: Whether an attempt that took longer than its own time limit is tried again, too.
        deadline: Seconds for the whole batch. What has not ended by then is stopped and returned as retryable.
        episode_timeout: Seconds one attempt may take, from the grant of its sandbox; an episode's own ``timeout``
            comes first.
        failure_threshold: The largest share (0 to 1) of episodes without a reward through infrastructure that is
            accepted.
        output: Directory under which the artifacts, patch and command log of every attempt are saved.
        task_faults: Ways in which an episode can lose its own sandbox that are final instead of infrastructure, such as
            ``{"oom_killed"}``; see ``agentsandbox.errors.TASK_FAULTS``.
        hedge: When to ask for a second sandbox, or start a second attempt, because the first takes too long; ``None``
            is never.
        journal: Where every step is written before it is taken; open for writing.
        batch_id: What the batch is called in the journal, such as ``"step-49"``.
        restore: Episode id → the checkpoint, or its id, that each attempt of it goes on from: its sandbox holds it
            before *rollout* is called.
        checkpoints: Where those are kept; ``None`` is where the leases of *source* keep theirs.
        sink: What hears of the events ``attempt.started``, ``attempt.granted``, ``attempt.ended``, ``attempt.late``,
            ``release.failed``, ``episode.ended`` and ``episode.restored`` (taken from the journal): a callable, or
            several. A cancelled batch has its records there.
        stragglers: Task group that takes over rollout functions that do not stop when they are cancelled. Without one
            the call returns only when they have ended.
        admission: Admits episodes as their sandboxes become ready, instead of in input order; it must be a sink of
            *source*, too.

    Returns:
        One record an episode, in input order, with counts and times.

    Raises:
        ConfigurationError: If the input cannot work. Nothing has been created then.
        BatchFailed: If more than *failure_threshold* failed; it carries every record.
        JournalError: If the journal cannot be written; it carries the records that were made.

    """
    episodes = tuple(batch)
    check_batch(episodes)
    check_rollout(rollout)
    for image, limit in (limits or {}).items():
        check_count(f"the limit of image {image!r}", limit)
    check_limits(
        parallelism=parallelism,
        max_attempts=max_attempts,
        deadline=deadline,
        episode_timeout=episode_timeout,
        failure_threshold=failure_threshold,
        output=output,
        task_faults=task_faults,
    )
    if restore:
        check_restore(restore, episodes)
        rollout = continuing(rollout, restore, checkpoints)
    if not episodes:
        return RolloutResult(records=())

    submitted_at = anyio.current_time()
    over = math.inf if deadline is None else submitted_at + deadline
    publisher = Publisher((*((sink,) if callable(sink) else sink), *((admission,) if admission is not None else ())))
    book = None if journal is None else await journal.begin(episodes, batch_id=batch_id)
    ledger = Ledger(max_attempts=max_attempts, retry_timeouts=retry_timeouts, limits=limits or {})
    resumed = _submit(ledger, episodes, book)
    for record in resumed:
        tell_restored(publisher, record, submitted_at)
    hedger = None if hedge is None else Hedger(hedge)
    try:
        async with anyio.create_task_group() as workers:
            runner = AttemptRunner(
                source=source,
                rollout=rollout,
                ledger=ledger,
                publisher=publisher,
                tasks=stragglers or workers,
                store=None if output is None else ArtifactStore(Path(output)),
                submitted_at=submitted_at,
                deadline=over,
                episode_timeout=episode_timeout,
                task_faults=task_faults,
                journal=book,
                race=None if hedger is None else Race(hedger),
            )
            for _ in range(min(parallelism or len(episodes), len(episodes))):
                workers.start_soon(_work, runner, ledger, over, admission)
        rest = failure_of(EpisodeTimeout("the deadline of the batch passed before the episode started"), Phase.ACQUIRE)
        await _end(ledger, rest, publisher, book)
        if book is not None:
            await book.close()
    except BaseException as error:
        # In the cancelled task nothing but the journal is waited for, and that shields itself.
        broken = journal_error(error)
        try:
            await _end(ledger, cancelled_failure(Phase.ACQUIRE), publisher, book)
        except JournalError as unwritten:
            publisher.emit("journal.failed", anyio.current_time(), sandbox=None, reason=str(unwritten))
        if broken is not None:
            raise JournalError(str(broken), ledger.records) from error
        raise

    samples = tuple(attempt.ttfc for record in ledger.records for attempt in record.history if attempt.ttfc is not None)
    result = RolloutResult(
        records=ledger.records,
        counts=ledger.counts,
        ttfc=summarise_ttfc(samples),
        samples=samples,
        wall_seconds=anyio.current_time() - submitted_at,
        late_results=ledger.late_results,
        resumed=len(resumed),
        extra_acquires=hedger.extra if hedger is not None else 0,
        lost_twins=ledger.lost_twins,
    )
    _check_threshold(result.records, failure_threshold)
    return result


def _submit(ledger: Ledger, episodes: Sequence[Episode], book: BatchJournal | None) -> list[EpisodeRecord]:
    """Enter a batch in the books, and what an earlier driver has made of it; return the records that stand."""
    for index, episode in enumerate(episodes):
        if book is None:
            ledger.submit(episode)
        elif index in book.finished:
            ledger.restore(book.finished[index])
        else:
            before = book.progress.get(index, Progress())
            ledger.submit(episode, history=before.history, started=before.started, spent=before.spent)
    return list(ledger.records)


async def _end(ledger: Ledger, failure: Failure, publisher: Publisher, book: BatchJournal | None) -> None:
    """End what has not ended, first in the journal; whether that works or not, everybody is told."""
    places = {episode.id: index for index, episode in enumerate(book.episodes)} if book is not None else {}
    records = ledger.abandon(failure)
    try:
        if book is not None:
            for record in records:
                book.settled(places[record.episode.id], record)
            await book.flush()
    finally:
        for record in records:
            tell_ended(publisher, record, anyio.current_time())


async def _work(runner: AttemptRunner, ledger: Ledger, over: float, admission: Admission | None) -> None:
    # A failed episode goes back to the head of the queue, so the worker that saw it fail finds it there: none is needed
    # after the queue has run dry.
    while anyio.current_time() < over and ledger.waiting:
        ticket = None
        if admission is None:
            ticket = ledger.take()
        else:
            with anyio.CancelScope(deadline=over):
                ticket = await admission.take(ledger)
        if ticket is not None:
            await runner.run(ticket)
        else:
            with anyio.CancelScope(deadline=over):
                await runner.changed.wait()


def _check_threshold(records: Sequence[EpisodeRecord], threshold: float | None) -> None:
    failed = [record for record in records if is_infrastructure(record)]
    share = len(failed) / len(records)
    if threshold is None or share <= threshold:
        return
    kinds = Counter(record.failure.kind.value for record in failed if record.failure)
    causes = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
    raise BatchFailed(
        f"{len(failed)} of {len(records)} episodes have no reward through infrastructure ({causes}); "
        f"failure_threshold is {threshold:g}",
        records,
    )


def check_limits(
    *,
    parallelism: int | None,
    max_attempts: int,
    deadline: float | None,
    episode_timeout: float | None,
    failure_threshold: float | None,
    output: Path | str | None,
    task_faults: Collection[str],
) -> None:
    """
    Refuse limits that cannot work.

    Raises:
        ConfigurationError: Naming the limit, its value and what it may be.

    """
    if parallelism is not None:
        check_count("parallelism", parallelism)
    check_count("max_attempts", max_attempts)
    for what, seconds in (("deadline", deadline), ("episode_timeout", episode_timeout)):
        if seconds is not None:
            check_number(what, seconds)
    share = failure_threshold
    if share is not None and (not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1):
        raise ConfigurationError(f"failure_threshold is a share from 0 to 1, not {share!r}")
    if isinstance(task_faults, str) or not TASK_FAULTS.issuperset(task_faults):
        raise ConfigurationError(f"task_faults is a set out of {sorted(TASK_FAULTS)}, not {task_faults!r}")
    if output is not None and Path(output).exists() and not Path(output).is_dir():
        raise ConfigurationError(f"output must be a directory, and {str(output)!r} is none")
