# SPDX-License-Identifier: Apache-2.0
"""A client that also runs batches: what a trainer holds."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
import attrs

from agentsandbox.backends.local.leftovers import started
from agentsandbox.client import CheckpointStore, SandboxClient
from agentsandbox.client.checkpoints import as_store
from agentsandbox.client.pool_client import listed
from agentsandbox.errors import ConfigurationError, UsageError
from agentsandbox.metrics.idle import IdleMeter, IdleReport
from agentsandbox.models.episode import Episode, RolloutResult, check_batch
from agentsandbox.rollouts.admission import Admission
from agentsandbox.rollouts.continuing import check_restore
from agentsandbox.rollouts.gather import check_limits, gather_rollouts
from agentsandbox.rollouts.journal import Journal
from agentsandbox.rollouts.leftovers import reap
from agentsandbox.rollouts.source import check_rollout
from agentsandbox.warmpool.publishing import Publisher

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentsandbox.backends.base import Backend
    from agentsandbox.client import Announced, Lease
    from agentsandbox.models.changes import Checkpoint
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
    parallelism: int | None
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
        images: Image to how many sandboxes of it may be leased at once; names alone mean one of each. Others may be
            announced later: see :meth:`announce`.
        rollout: The async function that runs an episode; see :func:`~agentsandbox.gather_rollouts`.
        parallelism: How many episodes run at the same time; ``None`` is as many as may be leased at once when a batch
            begins.
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
        devices: Accelerators that wait while no training step runs; see :meth:`training_step`.
        ready_first: Whether an episode whose sandbox is ready goes before those whose sandbox is still on its way. The
            records stay in input order.
        sink: Takes the events of the client and of the rollouts.
        client: Options of :class:`~agentsandbox.SandboxClient`: ``spares``, ``max_sandboxes``, ``acquire_timeout``,
            ``reset``, ``baseline``, ``checkpoints``, …

    Raises:
        ConfigurationError: If a setting cannot work. Nothing has been created then.
        JournalError: On entering, if the journal cannot be used. Nothing has been created then.

    """

    def __init__(
        self,
        backend: str | Backend = "local",
        *,
        images: Mapping[str, int] | Iterable[str] = (),
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
        devices: int = 1,
        ready_first: bool = False,
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
        self._idle = IdleMeter(devices=devices)
        self._sinks: tuple[EventSink, ...] = (*((sink,) if callable(sink) else sink), self._idle)
        self.journal = journal if journal is None or isinstance(journal, Journal) else Journal(journal, resume=resume)
        """Where every step is written, if anywhere."""
        noting = () if self.journal is None else (self.journal.note,)
        self._admission = Admission() if ready_first else None
        admitting = () if self._admission is None else (self._admission,)
        self._client = SandboxClient(backend, images=images, sink=(*self._sinks, *noting, *admitting), **client)
        self._cap: int | None = client.get("max_sandboxes")
        check_life(self._client.backend, episode_timeout)
        if hedge is not None and "burst" not in client:
            self._client.burst = math.ceil(hedge.budget * self._most)
        self._settings = _Settings(
            rollout=rollout,
            parallelism=parallelism,
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
        most = self._most if self._cap is None else min(self._most, self._cap)
        return self._settings.parallelism or most

    @property
    def _most(self) -> int:
        """How many sandboxes may be leased at once; as far as is known before anything is announced."""
        return sum(self._client.images.values()) or self._cap or 1

    def announce(self, batch: Iterable[Episode] | Mapping[str, int]) -> Announced:
        """
        Tell which batch comes next, so that its sandboxes are ready when it begins; see :meth:`SandboxClient.announce`.

        Announce a batch while the one before it runs. :meth:`rollout` knows what was announced of its own batch.

        Args:
            batch: The episodes in the order in which they will run, or image to how many rollouts of it.

        Returns:
            What was announced; to look at what is left of it, and to withdraw it.

        Raises:
            ConfigurationError: If it is neither of the two.
            UsageError: If the pool is not open.

        """
        return self._client.announce(batch)

    async def rollout(
        self,
        batch: Sequence[Episode],
        *,
        rollout: RolloutFunction | None = None,
        batch_id: str | None = None,
        restore: Mapping[str, Checkpoint | str] | None = None,
        checkpoints: CheckpointStore | str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> RolloutResult:
        """
        Run a batch of episodes and return one record for each.

        Args:
            batch: The episodes, each id once, of images that the pool has.
            rollout: The async function that runs an episode; ``None`` is the pool's.
            batch_id: What the batch is called in the journal, such as ``"step-49"``; without it a resumed batch is
                recognised by its content.
            restore: Episode id → the checkpoint, or its id, that each attempt of it goes on from: its sandbox holds it
                before the rollout function is called. Its record says so.
            checkpoints: Where those are kept; ``None`` is the pool's ``checkpoints``.
            overrides: Settings of the pool that differ for this batch: ``parallelism``, ``max_attempts``,
                ``retry_timeouts``, ``deadline``, ``episode_timeout``, ``failure_threshold``, ``output``,
                ``task_faults``, ``hedge``.

        Returns:
            The records in input order, with counts and times.

        Raises:
            ConfigurationError: If the input cannot work: an unknown image, an id that appears twice, a rollout function
                that is not async.
            BatchFailed: If more than ``failure_threshold`` failed; it carries every record.
            CheckpointError: If a checkpoint to go on from is missing or damaged. Nothing has been started then.
            JournalError: If the journal cannot be written; it carries the records that were made.
            UsageError: If the pool is not open.

        """
        settings = {**attrs.asdict(self._settings, recurse=False), "parallelism": self.parallelism}
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
                    f"{listed(self._client.images)}; add it to images=, or announce() the batch"
                )
        check_life(self._client.backend, settings["episode_timeout"])
        if self._stragglers is None:
            raise UsageError("the pool is not open; use 'async with SandboxPool(...) as pool:'")
        store = None
        if restore:
            check_restore(restore, episodes)
            store = as_store(checkpoints if checkpoints is not None else self._client.checkpoints)
            for id in {one if isinstance(one, str) else one.id for one in restore.values()}:
                await store.load(id)
        self._running += 1
        announced = self._client.announce(episodes, begins=True)
        self._idle.begin_batch({episode.id: episode.image for episode in episodes}, anyio.current_time())
        try:
            return await gather_rollouts(
                self._client,
                episodes,
                function,
                limits={episode.image: self._client.images[episode.image] for episode in episodes},
                sink=self._sinks,
                stragglers=self._stragglers,
                journal=self.journal,
                admission=self._admission,
                batch_id=batch_id,
                restore=restore,
                checkpoints=store,
                **settings,
            )
        finally:
            announced.withdraw()
            self._idle.end_batch(anyio.current_time())
            self._running -= 1
            self._batches += 1

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Mark what is done within as work of the accelerators; all other time is accounted for by :meth:`idle`."""
        self._idle.begin_step(anyio.current_time())
        try:
            yield
        finally:
            self._idle.end_step(anyio.current_time())

    def idle(self) -> IdleReport:
        """Return what the accelerators have waited for so far, by cause; busy and idle add up to the wall time."""
        return self._idle.report(anyio.current_time())

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


def check_life(backend: Backend, episode_timeout: float | None) -> None:
    """Refuse episodes that their sandboxes would not outlive."""
    life = backend.guaranteed_life
    if episode_timeout is not None and life is not None and episode_timeout > life:
        raise ConfigurationError(
            f"episode_timeout is {episode_timeout:g} s, and a sandbox of backend {backend.name!r} lives {life:g} s "
            "from its lease on: give the backend longer (stages=, lifetime=)"
        )
