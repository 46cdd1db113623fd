# SPDX-License-Identifier: Apache-2.0
"""The lower-level client: acquire, use, release."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import anyio
import attrs

from agentsandbox.backends.base import Backend
from agentsandbox.backends.opening import open_backend
from agentsandbox.client.announcing import Announced, count
from agentsandbox.client.checkpoints import CheckpointStore, as_store
from agentsandbox.client.lease import Lease
from agentsandbox.errors import ConfigurationError, SandboxError, UsageError
from agentsandbox.models.limits import check_count, check_number
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.warmpool.book import PoolBook
from agentsandbox.warmpool.engine import Engine
from agentsandbox.warmpool.outlook import Announcement
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.replenisher import Replenisher
from agentsandbox.warmpool.statistics import PoolStatistics

if TYPE_CHECKING:
    from agentsandbox.models.command import ExecResult
    from agentsandbox.models.episode import Episode
    from agentsandbox.models.events import EventSink
    from agentsandbox.models.reset import ResetPolicy, ResetReport
    from agentsandbox.warmpool.stragglers import StragglerPolicy

__all__ = ["SandboxClient", "listed"]

_UNSET: Any = object()


class SandboxClient(anyio.AsyncContextManagerMixin):
    """
    Keep sandboxes warm and lease them.

    Use it as an async context manager. Leaving it removes every sandbox, also when cancelled.

    Args:
        backend: Where sandboxes come from: a name (``"local"``) or a backend.
        images: Image → how many sandboxes of it may be leased at once; names alone mean 1 each. So many are kept ready;
            other images may be announced later, see :meth:`announce`.
        spares: Sandboxes of each image kept ready beyond that, so that releasing one makes nobody wait. ``None`` leaves
            it to the backend: as many again where they are cheap, none where they are not.
        burst: Sandboxes of each image that may be leased beyond its size, made only when somebody waits for one.
        max_sandboxes: Most sandboxes alive at once over all images, those being removed included. ``None`` is twice
            what the images and spares add up to, which leaves room for removal; without images there is no such sum.
        user: User that commands run as; ``None`` is the image's.
        workdir: Directory that commands start in; ``None`` is the image's.
        env: Variables on top of the image's environment. No secrets: give those to a command.
        create_rate: Most sandboxes asked for in a second; ``None`` is the backend's.
        create_timeout: How long one sandbox may take to be made, in seconds, the time to pull its image included;
            ``None`` is the backend's.
        acquire_timeout: How long :meth:`acquire` waits, in seconds; ``None`` for ever.
        reset: How used sandboxes are made like new; ``None`` takes the cheapest way that can be verified.
        stragglers: When a sandbox that is being made no longer counts as one of those to come, so that others get its
            rollouts; ``None`` is :class:`~agentsandbox.StragglerPolicy` as it comes, ``StragglerPolicy(share=0)`` is
            never.
        baseline: Whether to note what every sandbox is like before its first command, so that :meth:`Lease.diff` works
            also where no reset needs it: on the local backend.
        checkpoints: Where :meth:`Lease.checkpoint` keeps and :meth:`Lease.restore` looks when nothing is said: a
            directory, a URL, or a :class:`~agentsandbox.CheckpointStore`.
        sink: What hears of every event: a callable, or several.
        backend_options: Arguments for a backend that is given by its name.

    Raises:
        ConfigurationError: If any of it cannot work. Nothing was created.

    """

    def __init__(
        self,
        backend: str | Backend = "local",
        *,
        images: Mapping[str, int] | Iterable[str] = (),
        spares: int | None = None,
        burst: int = 0,
        max_sandboxes: int | None = None,
        user: str | int | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        create_rate: float | None = None,
        create_timeout: float | None = None,
        acquire_timeout: float | None = 300.0,
        reset: ResetPolicy | None = None,
        stragglers: StragglerPolicy | None = None,
        baseline: bool = False,
        checkpoints: CheckpointStore | str | os.PathLike[str] | None = None,
        sink: EventSink | Iterable[EventSink] = (),
        backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.images = _sizes(images, least=1 if max_sandboxes is None else 0)
        """Image → how many sandboxes of it may be leased at once, of those that were announced too."""
        self._declared = dict(self.images)
        check_count("burst", burst, least=0)
        if spares is not None:
            check_count("spares", spares, least=0)
        if max_sandboxes is not None:
            check_count("max_sandboxes", max_sandboxes)
        if create_rate is not None:
            check_number("create_rate", create_rate, unit="a second")
        for what, seconds in (("acquire_timeout", acquire_timeout), ("create_timeout", create_timeout)):
            if seconds is not None:
                check_number(what, seconds)
        self._spec = SandboxSpec(image="host", user=user, workdir=workdir, env=dict(env or {}))
        self.acquire_timeout = acquire_timeout
        """How long :meth:`acquire` waits when nothing is said, in seconds."""
        if isinstance(backend, Backend):
            if backend_options:
                raise ConfigurationError(
                    "backend_options are for a backend given by its name; this one is made already"
                )
            self.backend = backend
        else:
            self.backend = open_backend(backend, **(backend_options or {}))
        self.run_id = secrets.token_hex(4)
        """Part of the name of every sandbox of this client."""
        self._spares = spares
        self.burst = burst
        """Sandboxes of each image that may be leased beyond its size."""
        self._max_sandboxes = max_sandboxes
        self._create_rate = create_rate
        self._create_timeout = create_timeout
        self._reset = reset
        self._stragglers = stragglers
        self._baseline = baseline
        self.checkpoints = None if checkpoints is None else as_store(checkpoints)
        """Where checkpoints are kept when nothing is said."""
        self._sinks: tuple[EventSink, ...] = (sink,) if callable(sink) else tuple(sink)
        self._engine: Engine | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self, None]:
        if self._engine is not None:
            raise UsageError("a client can be entered once; make another one")
        self.backend.expect(self._cap)
        await self.backend.validate(self._specs(self.images).values())
        self._engine = engine = self._build()
        async with engine.running():
            yield self

    @property
    def _targets(self) -> dict[str, int]:
        backend, spares = self.backend, self._spares
        return {
            image: size + (backend.default_spares(size) if spares is None else spares)
            for image, size in self.images.items()
        }

    @property
    def _cap(self) -> int:
        return 2 * sum(self._targets.values()) if self._max_sandboxes is None else self._max_sandboxes

    def _build(self) -> Engine:
        backend, targets = self.backend, self._targets
        rate = backend.default_create_rate if self._create_rate is None else self._create_rate
        replenisher = Replenisher(
            targets=targets,
            cap=self._cap,
            creates_in_flight=backend.default_creates_in_flight,
            limiter=AdaptiveLimiter(rate=rate, random=backend.random, now=anyio.current_time()),
            placement=backend.placement,
        )
        leased = {image: size + self.burst for image, size in self.images.items()}
        book = PoolBook(
            images=leased,
            replenisher=replenisher,
            prefix=f"sb-{self.run_id}",
            burst=self.burst,
            stragglers=self._stragglers,
        )
        timeout = backend.default_create_timeout if self._create_timeout is None else self._create_timeout
        return Engine(
            backend,
            specs=self._specs(self.images),
            targets=targets,
            book=book,
            sinks=self._sinks,
            reset=self._reset,
            create_timeout=timeout,
            compare=self._baseline,
        )

    def _specs(self, images: Iterable[str]) -> dict[str, SandboxSpec]:
        return {image: attrs.evolve(self._spec, image=image) for image in images}

    def announce(self, batch: Iterable[Episode] | Mapping[str, int], *, begins: bool = False) -> Announced:
        """
        Tell which rollouts come next, so that sandboxes of their images are ready when they begin.

        As far as ``max_sandboxes`` and ``create_rate`` allow, sandboxes are prepared in the order of the announcement:
        after those for who waits already, before stock of the images that the client was made with. What no
        announcement needs gives way first. What is announced goes down with every lease that is granted.

        Images that the client was not made with may be leased from then on: as many at once as there are rollouts of
        the image to come, and none is kept in stock.

        Args:
            batch: The episodes in the order in which they will run, or image → how many rollouts.
            begins: Whether they begin now. They replace what was announced of their images before, as far as any was;
                :meth:`SandboxPool.rollout` says so of its batch.

        Returns:
            What was announced; to look at what is left of it, and to withdraw it.

        Raises:
            ConfigurationError: If it is neither of the two.
            UsageError: If the client is not open.

        """
        engine = self._running()
        announcement = Announcement(count(batch))
        images = [image for image in announcement.left if image not in self._declared]
        engine.announce(announcement, self._specs(images), begins=begins)
        for image in images:
            self.images[image] = max(self.images.get(image, 0), engine.ahead(image))
        return Announced(engine, announcement)

    async def acquire(
        self, image: str, *, timeout: float | None = _UNSET, episode: str | None = None, attempt: int | None = None
    ) -> Lease:
        """
        Lease a sandbox, waiting for one if need be. First come, first served.

        Args:
            image: Of which image; one that the client was made with, or that was announced.
            timeout: How long to wait, in seconds; ``None`` for ever. The client's if nothing is said.
            episode: For which episode; kept with the lease and its events.
            attempt: For which attempt of it.

        Returns:
            The lease; release it, or use it as an async context manager.

        Raises:
            ConfigurationError: If the client was not made with this image, and it was not announced.
            AcquireTimeout: If there was none in time.
            PoolClosed: If the client was closed while the call waited.
            ProvisionError: If sandboxes of this image cannot be made.
            UsageError: If the client is not open.

        """
        if image not in self.images:
            raise ConfigurationError(
                f"image {image!r} was not declared; this client has {listed(self.images)}; announce() adds others"
            )
        if timeout is _UNSET:
            timeout = self.acquire_timeout
        elif timeout is not None:
            check_number("timeout", timeout)
        engine = self._running()
        requested_at = anyio.current_time()
        try:
            tenure = await engine.acquire(image, timeout=timeout)
        except SandboxError as error:
            now = anyio.current_time()
            why = f"{type(error).__name__}: {error}"
            waited = now - requested_at
            engine.emit(
                "lease.refused",
                now,
                sandbox=None,
                episode=episode,
                attempt=attempt,
                image=image,
                error=why,
                waited=waited,
            )
            raise
        lease = Lease(
            engine, tenure, acquire_timeout=timeout, episode=episode, attempt=attempt, checkpoints=self.checkpoints
        )
        engine.emit(
            "lease.granted",
            tenure.granted_at,
            sandbox=lease.sandbox,
            episode=episode,
            attempt=attempt,
            image=image,
            start=str(lease.start),
            queue=lease.granted_at - lease.requested_at,
        )
        return lease

    async def exec(self, lease: Lease, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command in a leased sandbox: :meth:`Lease.exec`."""
        return await lease.exec(command, **options)

    async def reset(self, lease: Lease) -> ResetReport:
        """Make a leased sandbox like new: :meth:`Lease.reset`."""
        return await lease.reset()

    async def release(self, lease: Lease, *, discard: bool = False) -> None:
        """Give a leased sandbox back: :meth:`Lease.release`."""
        await lease.release(discard=discard)

    def statistics(self) -> PoolStatistics:
        """Count sandboxes by state, waiters and totals at this instant."""
        return PoolStatistics(backend=self.backend.name) if self._engine is None else self._engine.statistics()

    def _running(self) -> Engine:
        if self._engine is None:
            raise UsageError("the client is not open; use 'async with SandboxClient(...) as client'")
        return self._engine

    def __repr__(self) -> str:
        return f"<SandboxClient [{self.statistics()}]>"


def _sizes(images: Mapping[str, int] | Iterable[str], *, least: int) -> dict[str, int]:
    if isinstance(images, str):
        raise ConfigurationError(f"images is a mapping or a collection of names, not one string; use [{images!r}]")
    sizes = dict(images) if isinstance(images, Mapping) else dict.fromkeys(images, 1)
    if len(sizes) < least:
        raise ConfigurationError(
            "images is empty; name at least one, such as images={'host': 8}, or give max_sandboxes= and announce() them"
        )
    for image, size in sizes.items():
        if not isinstance(image, str) or not image:
            raise ConfigurationError(f"an image is a name such as 'host', not {image!r}")
        check_count(f"the size of image {image!r}", size)
    return sizes


def listed(images: Iterable[str]) -> str:
    """Name images, the first of them if there are many."""
    names = [repr(image) for image in images] or ["none"]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
