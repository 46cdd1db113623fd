# SPDX-License-Identifier: Apache-2.0
"""A client that also runs batches: what a trainer holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
import attrs

from agentsandbox.client import SandboxClient
from agentsandbox.errors import ConfigurationError, UsageError
from agentsandbox.models.episode import Episode, RolloutResult, check_batch
from agentsandbox.rollouts.gather import check_limits, gather_rollouts
from agentsandbox.rollouts.source import check_rollout

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentsandbox.backends.base import Backend
    from agentsandbox.client import Lease
    from agentsandbox.models.command import ExecResult
    from agentsandbox.models.events import EventSink
    from agentsandbox.models.reset import ResetReport
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
        sink: Takes the events of the client and of the rollouts.
        client: Options of :class:`~agentsandbox.SandboxClient`: ``spares``, ``max_sandboxes``, ``acquire_timeout``, …

    Raises:
        ConfigurationError: If a setting cannot work. Nothing has been created then.

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
        )
        if rollout is not None:
            check_rollout(rollout)
        self._sinks: tuple[EventSink, ...] = (sink,) if callable(sink) else tuple(sink)
        self._client = SandboxClient(backend, images=images, sink=self._sinks, **client)
        most = sum(self._client.images.values())
        cap = client.get("max_sandboxes")
        self._settings = _Settings(
            rollout=rollout,
            parallelism=parallelism or (most if cap is None else min(most, cap)),
            max_attempts=max_attempts,
            retry_timeouts=retry_timeouts,
            deadline=deadline,
            episode_timeout=episode_timeout,
            failure_threshold=failure_threshold,
            output=None if output is None else Path(output),
        )
        self._stragglers: TaskGroup | None = None
        self._batches = 0
        self._running = 0

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        failure: BaseException | None = None
        async with self._client, anyio.create_task_group() as stragglers:
            self._stragglers = stragglers
            try:
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
        **overrides: Any,
    ) -> RolloutResult:
        """
        Run a batch of episodes and return one record for each.

        Args:
            batch: The episodes, each id once, of images that the pool has.
            rollout: The async function that runs an episode; ``None`` is the pool's.
            overrides: Settings of the pool that differ for this batch: ``parallelism``, ``max_attempts``,
                ``retry_timeouts``, ``deadline``, ``episode_timeout``, ``failure_threshold``, ``output``.

        Returns:
            The records in input order, with counts and times.

        Raises:
            ConfigurationError: If the input cannot work: an unknown image, an id that appears twice, a rollout function
                that is not async.
            BatchFailed: If more than ``failure_threshold`` failed; it carries every record.
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
