# SPDX-License-Identifier: Apache-2.0
"""One attempt from the call of ``acquire()`` to the return of its sandbox."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import anyio.lowlevel
import attrs

from agentsandbox.errors import (
    EpisodeTimeout,
    Failure,
    FailureKind,
    Phase,
    PoolClosed,
    RewardError,
    SandboxLost,
)
from agentsandbox.models.episode import Attempt, Graded
from agentsandbox.rollouts.accounting import Ledger, Outcome, Ticket
from agentsandbox.rollouts.draft import Call, Draft
from agentsandbox.rollouts.notify import tell_ended
from agentsandbox.rollouts.racing import Race, first_lease
from agentsandbox.rollouts.stopping import cancelled_failure, really_cancelled
from agentsandbox.rollouts.verdict import failure_of, reward_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from agentsandbox.rollouts.artifacts import ArtifactStore
    from agentsandbox.rollouts.journal import BatchJournal
    from agentsandbox.rollouts.source import LeaseSource, RolloutFunction, RolloutLease
    from agentsandbox.warmpool.publishing import Publisher

__all__ = ["AttemptRunner"]

STOP_GRACE = 5.0
"""How long a rollout function may take to stop once it is cancelled, in seconds; then it is left behind."""

RELEASE_GRACE = 30.0
"""How long giving back a sandbox may hold up an attempt, in seconds; the pool goes on with it afterwards."""

FENCE_TIMEOUT = 10.0
"""How long a sandbox may take to show that it is still the one that was granted, in seconds."""


@attrs.define(eq=False, repr=False, kw_only=True)
class AttemptRunner:
    """Runs the attempts of one batch and enters them in its books."""

    source: LeaseSource
    rollout: RolloutFunction
    ledger: Ledger
    publisher: Publisher
    tasks: anyio.abc.TaskGroup
    store: ArtifactStore | None = None
    submitted_at: float
    deadline: float = math.inf
    episode_timeout: float | None = None
    task_faults: Collection[str] = ()
    journal: BatchJournal | None = None
    race: Race | None = None
    changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    """Set, and made anew, whenever an attempt has ended."""
    _left_behind: int = attrs.field(default=0, init=False)

    async def run(self, ticket: Ticket) -> None:
        """
        Try once, or twice at once if the attempt takes too long and attempts are hedged.

        Whatever happens, what was tried is in the books and its sandbox is given back when this returns.
        """
        race = self.race
        if race is not None:
            race.hedger.begin()
            race.moved()
        if race is None or not race.hedger.policy.attempts:
            await self._try(ticket)
            return
        over, granted = anyio.Event(), anyio.Event()
        scopes = {ticket.number: anyio.CancelScope()}

        async def contend(contender: Ticket) -> None:
            with scopes[contender.number]:
                await self._try(contender, granted)
            # Whoever comes to a verdict takes the other one off the books; then there is nothing left to wait for.
            for number, scope in scopes.items():
                if number != contender.number and not self.ledger.runs(attrs.evolve(contender, number=number)):
                    scope.cancel()
            if not any(self.ledger.runs(attrs.evolve(contender, number=number)) for number in scopes):
                over.set()

        async def watch() -> None:
            await granted.wait()
            began = anyio.current_time()
            samples = race.hedger.runs
            samples.begin(began)
            try:
                await race.straggles(samples, began)
                twin = self.ledger.twin(ticket)
                if twin is None:
                    race.hedger.extra -= 1
                    return
                scopes[twin.number] = anyio.CancelScope()
                group.start_soon(contend, twin)
                await over.wait()
            finally:
                samples.end(began, anyio.current_time() - began if over.is_set() else None)
                race.moved()

        async with anyio.create_task_group() as group:
            group.start_soon(contend, ticket)
            async with anyio.create_task_group() as watchers:
                watchers.start_soon(watch)
                await over.wait()
                watchers.cancel_scope.cancel()

    async def _try(self, ticket: Ticket, granted: anyio.Event | None = None) -> None:
        if self.journal is not None:
            await self.journal.started(ticket)
        draft = Draft(ticket, self.submitted_at, anyio.current_time())
        call = Call()
        self._tell("attempt.started", draft)
        try:
            outcome = await self._run(draft, call, granted)
        except anyio.get_cancelled_exc_class():
            # Without a journal nothing is awaited here: the books are right before the cancellation travels on.
            phase = Phase.EXEC if draft.lease is not None else Phase.ACQUIRE
            await self._enter(draft, call, Outcome(attempt=self._attempt(draft, failure=cancelled_failure(phase))))
            raise
        await self._enter(draft, call, outcome)

    async def _run(self, draft: Draft, call: Call, granted: anyio.Event | None) -> Outcome:
        failure = await self._acquire(draft)
        if failure is not None or draft.lease is None:
            return Outcome(attempt=self._attempt(draft, failure=failure))
        graded: Graded | None = None
        failure = None
        info: Mapping[str, Any] = {}
        artifacts: Mapping[str, Any] = {}
        finished = False
        try:
            if self.journal is not None:
                await self.journal.granted(draft.ticket, draft.lease)
            if granted is not None:
                granted.set()
            self._start(draft, call)
            failure = await self._watch(draft, call)
            if failure is not None:
                await self._stop(call)
            else:
                if not call.returned and call.error is None:
                    # It was cancelled from above; if so were we, this is where we learn of it.
                    await anyio.lowlevel.checkpoint()
                graded, failure = self._judge(call)
                graded = _without_secrets(draft.lease, graded)
                if failure is None or not failure.retryable:
                    lost = await self._fence(draft.lease, call)
                    if lost is not None:
                        graded, failure = None, lost
            if self.store is not None:
                saved = await self.store.save(
                    draft.lease,
                    draft.ticket.episode,
                    draft.ticket.number,
                    patch=graded.patch if graded else None,
                    files=failure is None or failure.kind not in _SANDBOX_GONE,
                )
                artifacts = saved.paths
                if saved.missing:
                    info = {"artifacts_missing": dict(saved.missing)}
            finished = True
        finally:
            await self._stop(call)
            if draft.ended_at is None:
                draft.ended_at = anyio.current_time()
            await self._release(draft, discard=not finished or (failure is not None and failure.retryable))
        if graded is None:
            return Outcome(attempt=self._attempt(draft, failure=failure), info=info, artifacts=artifacts)
        return Outcome(
            attempt=self._attempt(draft, reward=graded.reward),
            patch=graded.patch,
            info={**graded.info, **info},
            artifacts=artifacts,
        )

    async def _acquire(self, draft: Draft) -> Failure | None:
        failure: Failure | None = None
        with anyio.CancelScope(deadline=self.deadline):
            try:
                if self.race is None:
                    draft.lease = await self._ask(draft.ticket)
                else:
                    draft.lease, draft.lag = await first_lease(self.race, lambda: self._ask(draft.ticket))
            except anyio.get_cancelled_exc_class() as error:
                if really_cancelled():
                    raise
                failure = self._verdict(error, Phase.ACQUIRE)
            except Exception as error:  # noqa: BLE001 - every error has a verdict, and every episode a record
                failure = self._verdict(error, Phase.ACQUIRE)
        if draft.lease is not None:
            draft.granted_at = anyio.current_time()
            self._tell("attempt.granted", draft)
        elif failure is None:
            text = "the deadline of the batch passed while the episode waited for a sandbox"
            failure = failure_of(EpisodeTimeout(text), Phase.ACQUIRE)
        return failure

    async def _ask(self, ticket: Ticket) -> RolloutLease:
        episode = ticket.episode
        lease: RolloutLease = await self.source.acquire(episode.image, episode=episode.id, attempt=ticket.number)
        return lease

    def _start(self, draft: Draft, call: Call) -> None:
        if self.tasks.cancel_scope.cancel_called:  # the pool is being closed, and its group may have ended already
            call.done.set()
        else:
            self.tasks.start_soon(self._call, draft, call)

    async def _call(self, draft: Draft, call: Call) -> None:
        try:
            with call.scope:
                call.value = await self.rollout(draft.lease, draft.ticket.episode)
                call.returned = True
        except anyio.get_cancelled_exc_class() as error:
            if really_cancelled():
                raise
            call.error = error
        except (Exception, SystemExit) as error:  # noqa: BLE001 - sys.exit() ends the episode, not the trainer
            call.error = error
        except BaseExceptionGroup as group:
            stopping = group.split((Exception, SystemExit))[1]
            if stopping is not None and (really_cancelled() or stopping.split(anyio.get_cancelled_exc_class())[1]):
                raise
            call.error = group
        finally:
            call.done.set()
            self._left_behind -= call.left_behind
            if call.entered:
                self._late(draft.ticket, call)

    async def _watch(self, draft: Draft, call: Call) -> Failure | None:
        """Wait for the rollout function, and stop it when its time is over."""
        seconds = draft.ticket.episode.timeout or self.episode_timeout
        own = math.inf if seconds is None else (draft.granted_at or 0.0) + seconds
        with anyio.CancelScope(deadline=min(own, self.deadline)):
            await call.done.wait()
        draft.ended_at = anyio.current_time()
        if call.done.is_set():
            return None
        text = f"the attempt took longer than {seconds:g} s" if own <= self.deadline else _OVER
        return failure_of(EpisodeTimeout(text), Phase.EXEC)

    async def _stop(self, call: Call) -> None:
        """Make sure that the rollout function no longer runs, or that nothing it returns counts."""
        if call.done.is_set() or call.left_behind:
            return
        call.stopped = True
        call.scope.cancel()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + STOP_GRACE):
            await call.done.wait()
        if not call.done.is_set():
            call.left_behind = True
            self._left_behind += 1

    def _judge(self, call: Call) -> tuple[Graded | None, Failure | None]:
        if call.returned:
            try:
                return reward_of(call.value), None
            except RewardError as error:
                return None, failure_of(error, Phase.REWARD)
        if call.error is None:
            # Only the task group above us can have stopped the call: the pool is being closed.
            return None, failure_of(PoolClosed("the pool was closed while the episode ran"), Phase.EXEC)
        return None, self._verdict(call.error, Phase.EXEC)

    async def _fence(self, lease: RolloutLease, call: Call) -> Failure | None:
        """
        Ask once more whether all of this happened in the sandbox that was granted.

        A rollout function may have swallowed the loss of its sandbox and returned a number all the same, or have raised
        something of its own because of it.
        """
        if lease.lost is None and lease.released:
            return None  # Given back by the rollout function itself; every command of it was fenced.
        error = lease.lost
        if error is None:
            detail = f"no answer within {FENCE_TIMEOUT:g} s"
            with anyio.move_on_after(FENCE_TIMEOUT):
                try:
                    if await lease.alive():
                        return None
                    detail = "it is not the one that was granted, or does not answer"
                except Exception as problem:  # noqa: BLE001 - what cannot be shown to be alive is not
                    detail = f"{type(problem).__name__}: {problem}"
            error = lease.lost or SandboxLost("died", detail)
        if call.error is not None:
            error = type(error)(error.reason, error.detail)
            error.__cause__ = call.error
        return self._verdict(error, Phase.EXEC)

    def _verdict(self, error: BaseException, phase: Phase) -> Failure:
        return failure_of(error, phase, task_faults=self.task_faults)

    async def _release(self, draft: Draft, *, discard: bool) -> None:
        if draft.lease is None:
            return
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + RELEASE_GRACE) as scope:
            try:
                await draft.lease.release(discard=discard)
            except Exception as error:  # noqa: BLE001
                # The reward was earned before; what cannot be given back is the pool's business.
                self._tell("release.failed", draft, reason=f"{type(error).__name__}: {error}")
        if scope.cancelled_caught:
            self._tell("release.failed", draft, reason=f"not given back within {RELEASE_GRACE:g} s")
        draft.released_at = anyio.current_time()

    def _attempt(self, draft: Draft, *, reward: float | None = None, failure: Failure | None = None) -> Attempt:
        return draft.attempt(anyio.current_time(), reward=reward, failure=failure)

    async def _enter(self, draft: Draft, call: Call, outcome: Outcome) -> None:
        now, attempt = anyio.current_time(), outcome.attempt
        record = self.ledger.end(draft.ticket, outcome, may_retry=now < self.deadline)
        if self.journal is not None:
            self.journal.ended(draft.ticket.index, attempt)
            if record is not None:
                self.journal.settled(draft.ticket.index, record)
        self.changed.set()
        self.changed = anyio.Event()
        call.entered = True
        if call.stopped:
            self._late(draft.ticket, call)
        if self.journal is not None:
            await self.journal.flush()
        failure = attempt.failure
        self._tell(
            "attempt.ended",
            draft,
            reward=attempt.reward,
            kind=failure.kind.value if failure else None,
            reason=failure.message if failure else None,
        )
        if record is not None:
            tell_ended(self.publisher, record, now)

    def _late(self, ticket: Ticket, call: Call) -> None:
        if not call.returned:
            return
        try:
            reward = reward_of(call.value).reward
        except RewardError:
            return
        self.ledger.end(ticket, Outcome(attempt=Attempt(number=ticket.number, reward=reward)))
        if self.journal is not None:
            self.journal.late(ticket, reward)
        now, episode = anyio.current_time(), ticket.episode.id
        self.publisher.emit("attempt.late", now, sandbox=None, episode=episode, attempt=ticket.number, reward=reward)

    def _tell(self, name: str, draft: Draft, **data: Any) -> None:
        self.publisher.emit(
            name,
            anyio.current_time(),
            sandbox=draft.lease.sandbox if draft.lease is not None else None,
            episode=draft.ticket.episode.id,
            attempt=draft.ticket.number,
            **data,
        )

    def __repr__(self) -> str:
        return f"<AttemptRunner [{self.ledger!r} | {self._left_behind} left behind]>"


def _without_secrets(lease: RolloutLease, graded: Graded | None) -> Graded | None:
    """Take out of what is kept whatever credentials the sandbox was given."""
    redact = getattr(lease, "redact", None)
    if graded is None or redact is None:
        return graded
    return attrs.evolve(graded, patch=redact(graded.patch), info=redact(graded.info))


_OVER = "the deadline of the batch passed while the episode ran"
_SANDBOX_GONE = frozenset({FailureKind.SANDBOX_LOST, FailureKind.STREAM_BROKEN, FailureKind.EPISODE_TIMEOUT})
