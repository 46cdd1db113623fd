# SPDX-License-Identifier: Apache-2.0
"""A client that also runs batches: what a trainer holds."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
import attrs

from agentsandbox.backends.local.leftovers import started
from agentsandbox.client import SandboxClient
from agentsandbox.errors import ConfigurationError, UsageError
from agentsandbox.models.episode import Episode, RolloutResult, check_batch
from agentsandbox.rollouts.gather import check_limits, gather_rollouts
from agentsandbox.rollouts.journal import Journal
from agentsandbox.rollouts.leftovers import reap
from agentsandbox.rollouts.source import check_rollout
from agentsandbox.warmpool.publishing import Publisher

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentsandbox.backends.base import Backend
    from agentsandbox.client import Lease
    from agentsandbox.models.command import ExecResult
    from agentsandbox.models.events import EventSink
    from agentsandbox.models.reset import ResetReport
    from agentsandbox.rollouts.hedging import HedgePolicy
    from agentsandbox.rollouts.source import RolloutFunction
    from agentsandbox.warmpool.statistics import PoolStatistics

__all__ = ["SandboxPool"]


@attrs.frozen(kw_only=True)
class _Settings:
    rollout: RolloutFunction | None
    parallelism: int
    max_attempts: int
    retry_timeouts: bool
    deadline: float | None
    episode_timeout: float | None
    failure_threshold: float | None
    output: Path | None
    task_faults: Collection[str]
    hedge: HedgePolicy | None


class SandboxPool(anyio.AsyncContextManagerMixin):
    """
    Sandboxes kept ready for the episodes of a trainer.

    Use it as an async context manager; leaving it removes every sandbox. The settings of a rollout given here hold for
    every batch, and :meth:`rollout` overrides them for one.

    Args:
        backend: Where sandboxes come from: a name such as ``"local"``, or a backend object.
        images: Image to how many sandboxes of it may be leased at once; names alone mean one of each.
        rollout: The async function that runs an episode; see :func:`~agentsandbox.gather_rollouts`.
        parallelism: How many episodes run at the same time; ``None`` is as many as may be leased at once.
        max_attempts: How often an episode is tried when infrastructure fails it.
        retry_timeouts: Whether an attempt that took longer than its own time limit is tried again, too.
        deadline: Seconds for a whole batch; ``None`` is no limit.
        episode_timeout: Seconds one attempt may take, from the grant of its sandbox; ``None`` is no limit.
        failure_threshold: The largest share (0 to 1) of episodes without a reward through infrastructure that is
            accepted; ``None`` is any.
        output: Directory under which artifacts, patches and command logs are saved; ``None`` saves none.
        task_faults: Ways in which an episode can lose its own sandbox that are final, such as ``{"oom_killed"}``.
        hedge: When to ask for a second sandbox, or start a second attempt, because the first takes too long; ``None``
            is never.
        journal: File in which every step is written before it is taken, so that a driver that was killed can go on.
        resume: Whether to go on with a journal that exists: finished records are returned, the rest runs again, and
            what the dead driver left behind is removed.
        sink: Takes the events of the client and of the rollouts.
        client: Options of :class:`~agentsandbox.SandboxClient`: ``spares``, ``max_sandboxes``, ``acquire_timeout``, …

    Raises:
        ConfigurationError: If a setting cannot work. Nothing has been created then.
        JournalError: On entering, if the journal cannot be used. Nothing has been created then.

    """

    def __init__(
        self,
        backend: str | Backend = "local",
        *,
        images: Mapping[str, int] | Iterable[str],
        rollout: RolloutFunction | None = None,
        parallelism: int | None = None,
        max_attempts: int = 2,
        retry_timeouts: bool = False,
        deadline: float | None = None,
        episode_timeout: float | None = None,
        failure_threshold: float | None = None,
        output: Path | str | None = None,
        task_faults: Collection[str] = (),
        hedge: HedgePolicy | None = None,
        journal: Journal | Path | str | None = None,
        resume: bool = False,
        sink: EventSink | Iterable[EventSink] = (),
        **client: Any,
    ) -> None:
        check_limits(
            parallelism=parallelism,
            max_attempts=max_attempts,
            deadline=deadline,
            episode_timeout=episode_timeout,
            failure_threshold=failure_threshold,
            output=output,
            task_faults=task_faults,
        )
        if isinstance(journal, Journal) and resume:
            raise ConfigurationError("resume is for a journal given by its path; this one says itself what to do")
        if journal is None and resume:
            raise ConfigurationError("there is nothing to resume without a journal; give journal='run.journal', too")
        if rollout is not None:
            check_rollout(rollout)
        self._sinks: tuple[EventSink, ...] = (sink,) if callable(sink) else tuple(sink)
        self.journal = journal if journal is None or isinstance(journal, Journal) else Journal(journal, resume=resume)
        """Where every step is written, if anywhere."""
        noting = () if self.journal is None else (self.journal.note,)
        self._client = SandboxClient(backend, images=images, sink=(*self._sinks, *noting), **client)
        most = sum(self._client.images.values())
        cap = client.get("max_sandboxes")
        if hedge is not None and "burst" not in client:
            self._client.burst = math.ceil(hedge.budget * most)
        self._settings = _Settings(
            rollout=rollout,
            parallelism=parallelism or (most if cap is None else min(most, cap)),
            max_attempts=max_attempts,
            retry_timeouts=retry_timeouts,
            deadline=deadline,
            episode_timeout=episode_timeout,
            failure_threshold=failure_threshold,
            output=None if output is None else Path(output),
            task_faults=frozenset(task_faults),
            hedge=hedge,
        )
        self._stragglers: TaskGroup | None = None
        self._batches = 0
        self._running = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        failure: BaseException | None = None
        async with self._journal_open(), self._client, anyio.create_task_group() as stragglers:
            self._stragglers = stragglers
            try:
                if self.journal is not None:
                    await self.journal.describe(self._client.backend.receipt())
                yield self
            except (anyio.get_cancelled_exc_class(), GeneratorExit):
                raise
            except BaseException as error:  # noqa: BLE001 - raised again below
                failure = error  # after the group has ended: what the caller raises must not arrive wrapped in it
            finally:
                self._stragglers = None
                stragglers.cancel_scope.cancel()
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None

    @asynccontextmanager
    async def _journal_open(self) -> AsyncGenerator[None]:
        """Have the journal open around everything that it tells of, and put away what earlier drivers left."""
        if self.journal is None:
            yield
            return
        backend = self._client.backend
        driver = {"pid": os.getpid(), "started": started(os.getpid())}
        run_id = getattr(backend, "run_id", self._client.run_id)
        async with self.journal.writing({"run_id": run_id, "backend": backend.name, "driver": driver}):
            await reap(self.journal, backend, Publisher(self._sinks))
            yield

    @property
    def client(self) -> SandboxClient:
        """The client underneath."""
        return self._client

    @property
    def parallelism(self) -> int:
        """How many episodes of a batch run at the same time when a call says nothing else."""
        return self._settings.parallelism

    async def rollout(
        self,
        batch: Sequence[Episode],
        *,
        rollout: RolloutFunction | None = None,
        batch_id: str | None = None,
        **overrides: Any,
    ) -> RolloutResult:
        """
        Run a batch of episodes and return one record for each.

        Args:
            batch: The episodes, each id once, of images that the pool has.
            rollout: The async function that runs an episode; ``None`` is the pool's.
            batch_id: What the batch is called in the journal, such as ``"step-49"``; without it a resumed batch is
                recognised by its content.
            overrides: Settings of the pool that differ for this batch: ``parallelism``, ``max_attempts``,
                ``retry_timeouts``, ``deadline``, ``episode_timeout``, ``failure_threshold``, ``output``,
                ``task_faults``, ``hedge``.

        Returns:
            The records in input order, with counts and times.

        Raises:
            ConfigurationError: If the input cannot work: an unknown image, an id that appears twice, a rollout function
                that is not async.
            BatchFailed: If more than ``failure_threshold`` failed; it carries every record.
            JournalError: If the journal cannot be written; it carries the records that were made.
            UsageError: If the pool is not open.

        """
        settings = attrs.asdict(self._settings, recurse=False)
        unknown = set(overrides) - set(settings)
        if unknown:
            raise TypeError(f"rollout() has no setting {', '.join(sorted(unknown))}; it has {', '.join(settings)}")
        settings.update(overrides)
        function = rollout or settings.pop("rollout")
        settings.pop("rollout", None)
        if function is None:
            raise ConfigurationError("no rollout function: give one to SandboxPool(rollout=...) or to this call")
        episodes = tuple(batch)
        check_batch(episodes)
        for episode in episodes:
            if episode.image not in self._client.images:
                raise ConfigurationError(
                    f"episode {episode.id!r} needs image {episode.image!r}, and the pool has "
                    f"{', '.join(map(repr, self._client.images))}; add it to images="
                )
        if self._stragglers is None:
            raise UsageError("the pool is not open; use 'async with SandboxPool(...) as pool:'")
        self._running += 1
        try:
            return await gather_rollouts(
                self._client,
                episodes,
                function,
                limits=self._client.images,
                sink=self._sinks,
                stragglers=self._stragglers,
                journal=self.journal,
                batch_id=batch_id,
                **settings,
            )
        finally:
            self._running -= 1
            self._batches += 1

    async def acquire(self, image: str, **options: Any) -> Lease:
        """Wait for a sandbox of *image*; see :meth:`SandboxClient.acquire`."""
        return await self._client.acquire(image, **options)

    async def exec(self, lease: Lease, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command in a leased sandbox; see :meth:`Lease.exec`."""
        return await self._client.exec(lease, command, **options)

    async def reset(self, lease: Lease) -> ResetReport:
        """Make a leased sandbox like new; see :meth:`Lease.reset`."""
        return await self._client.reset(lease)

    async def release(self, lease: Lease, *, discard: bool = False) -> None:
        """Give a leased sandbox back; see :meth:`Lease.release`."""
        await self._client.release(lease, discard=discard)

    def statistics(self) -> PoolStatistics:
        """Return what the client holds at this instant; see :meth:`SandboxClient.statistics`."""
        return self._client.statistics()

    def __repr__(self) -> str:
        state = "open" if self._stragglers is not None else "closed"
        return f"<SandboxPool [{state} | {self._running} batches running, {self._batches} done | {self._client!r}]>"
