# SPDX-License-Identifier: Apache-2.0
"""
The pool for code that is not async: every call waits for its result.

All blocking pools of a process share one event loop in one thread, which starts with the first of them and ends with
the last. Calls may come from any number of threads.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from agentsandbox.errors import UsageError
from agentsandbox.pool import SandboxPool

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from agentsandbox.backends.base import Backend
    from agentsandbox.client import Announced, Lease
    from agentsandbox.metrics.idle import IdleReport
    from agentsandbox.models.changes import Checkpoint, Diff
    from agentsandbox.models.command import ExecResult
    from agentsandbox.models.episode import Episode, RolloutResult
    from agentsandbox.models.reset import ResetReport
    from agentsandbox.warmpool.statistics import PoolStatistics

__all__ = ["BlockingAnnounced", "BlockingLease", "BlockingPool"]

T = TypeVar("T")

STOP_GRACE = 30.0
"""How long an interrupted call is given to put its sandbox away, in seconds."""

_host = BlockingPortalProvider("asyncio")


def _after_fork() -> None:
    # The loop's thread stays behind in the parent, and so does everything that its pools hold.
    global _host  # noqa: PLW0603
    _host = BlockingPortalProvider("asyncio")


os.register_at_fork(after_in_child=_after_fork)


@attrs.define(eq=False)
class _Opened:
    """What a pool holds while it is open. Knows nothing of the pool, so that a forgotten pool can be collected."""

    host: BlockingPortalProvider
    portal: BlockingPortal
    context: AbstractContextManager[Any]
    thread: int
    pid: int

    closed: bool = False
    leases: weakref.WeakSet[Lease] = attrs.field(factory=weakref.WeakSet)

    def forget(self, lease: Lease) -> None:
        """Give back a lease that its owner dropped. The collector may call this in any thread, so it hands it on."""
        if os.getpid() != self.pid or self.closed or lease.released:
            return
        warnings.warn(f"{lease!r} was never released; use it as a context manager", ResourceWarning, stacklevel=2)
        threading.Thread(target=self.release, args=(lease,), name="agentsandbox-release").start()

    def release(self, lease: Lease) -> None:
        with contextlib.suppress(RuntimeError):  # The pool was closed in the meantime, and the lease with it.
            self.portal.call(lease.release)

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # A copy in a forked child: the sandboxes are the parent's.
        self.closed = True
        if threading.get_ident() == self.thread:
            # The collector found a forgotten pool while the loop itself was running: it cannot wait for itself.
            threading.Thread(target=self.close, name="agentsandbox-close").start()
            return
        try:
            self.context.__exit__(None, None, None)
            for lease in list(self.leases):
                self.release(lease)  # Its sandbox is gone by now; this ends the lease as well.
        finally:
            self.host.__exit__(None, None, None)


class BlockingPool:
    """
    Sandboxes for a trainer that is not async.

    It opens with its first call or as a context manager. Close it: what is forgotten is closed when it is collected or
    when the interpreter ends, and no sooner. A forked child cannot use the pools of its parent; it opens its own.

    Args:
        backend: Where sandboxes come from; see :class:`~agentsandbox.SandboxPool`.
        images: Image to how many sandboxes of it may be leased at once; names alone mean one of each.
        options: Every other option of :class:`~agentsandbox.SandboxPool`.

    Raises:
        ConfigurationError: If a setting cannot work. Nothing has been created then.

    """

    def __init__(
        self, backend: str | Backend = "local", *, images: Mapping[str, int] | Iterable[str] = (), **options: Any
    ) -> None:
        self._pool = SandboxPool(backend, images=images, **options)
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._finalizer: weakref.finalize[[], Any] | None = None
        self._closed = False

    def open(self) -> Self:
        """Start what the pool needs; do nothing if it is open."""
        self._open()
        return self

    def close(self) -> None:
        """Remove every sandbox and return when they are gone. Idempotent, and final."""
        with self._lock:
            self._closed = True
            finalizer, self._finalizer, self._opened = self._finalizer, None, None
        if finalizer is not None:
            finalizer()

    def rollout(self, batch: Sequence[Episode], **options: Any) -> RolloutResult:
        """
        Run a batch of episodes and return one record for each; see :meth:`SandboxPool.rollout`.

        The rollout function is async here, too: the episodes of a batch share the loop's thread, so it must not block.

        Args:
            batch: The episodes.
            options: ``rollout`` and the settings that differ for this batch.

        Raises:
            ConfigurationError: If the input cannot work.
            BatchFailed: If more than ``failure_threshold`` failed.

        """
        return self._run(partial(self._pool.rollout, batch, **options))

    def announce(self, batch: Iterable[Episode] | Mapping[str, int]) -> BlockingAnnounced:
        """
        Tell which batch comes next, so that its sandboxes are ready when it begins; see :meth:`SandboxPool.announce`.

        Raises:
            ConfigurationError: If it is neither a collection of episodes nor image to how many rollouts of it.

        """
        episodes = batch if isinstance(batch, Mapping) else tuple(batch)
        return BlockingAnnounced(self, self._run(partial(_now, self._pool.announce, episodes)))

    def acquire(self, image: str, **options: Any) -> BlockingLease:
        """
        Wait for a sandbox of *image*; see :meth:`SandboxClient.acquire`.

        Args:
            image: One of the pool's images.
            options: ``timeout`` in seconds, ``episode`` and ``attempt``.

        Returns:
            Its lease; use it as a context manager, or release it.

        Raises:
            AcquireTimeout: If there is none in time.

        """
        lease = self._run(partial(self._pool.acquire, image, **options))
        return BlockingLease(self, self._open(), lease)

    @contextlib.contextmanager
    def training_step(self) -> Iterator[None]:
        """Mark what is done within as work of the accelerators; see :meth:`SandboxPool.training_step`."""
        step = self._pool.training_step()
        self._run(partial(_now, step.__enter__))
        try:
            yield
        finally:
            self._run(partial(_now, partial(step.__exit__, None, None, None)))

    def idle(self) -> IdleReport:
        """Return what the accelerators have waited for so far; see :meth:`SandboxPool.idle`."""
        return self._run(partial(_now, self._pool.idle))

    def statistics(self) -> PoolStatistics:
        """Return what the pool holds at this instant; see :meth:`SandboxClient.statistics`."""
        return self._run(partial(_now, self._pool.statistics))

    def _open(self) -> _Opened:
        with self._lock:
            if self._closed:
                raise UsageError("the pool is closed; make a new one")
            if self._opened is None:
                host = _host
                portal = host.__enter__()
                try:
                    thread = portal.call(threading.get_ident)
                    context = portal.wrap_async_context_manager(self._pool)
                    context.__enter__()
                except BaseException:
                    host.__exit__(None, None, None)
                    raise
                self._opened = _Opened(host, portal, context, thread, os.getpid())
                self._finalizer = weakref.finalize(self, self._opened.close)
            if self._opened.pid != os.getpid():
                raise UsageError("this pool was opened before a fork; a child process must make its own")
            return self._opened

    def _run(self, function: Callable[[], Awaitable[T]]) -> T:
        opened = self._open()
        if threading.get_ident() == opened.thread:
            raise UsageError("a blocking call inside an async function would wait for itself; use SandboxPool there")
        finished = threading.Event()

        async def call() -> T:
            try:
                return await function()
            finally:
                finished.set()

        future = opened.portal.start_task_soon(call)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C reaches this thread only: stop the work over there, and let it put its sandbox away.
            if future.cancel() or future.cancelled():
                finished.wait(STOP_GRACE)
            raise

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._opened is not None else "not open"
        return f"<BlockingPool [{state}] of {self._pool!r}>"


class BlockingAnnounced:
    """Rollouts that were announced; see :class:`~agentsandbox.client.Announced`."""

    def __init__(self, pool: BlockingPool, announced: Announced) -> None:
        self._run = pool._run  # noqa: SLF001
        self._announced = announced

    @property
    def left(self) -> dict[str, int]:
        """Image → how many of its rollouts have no sandbox yet."""
        return self._run(partial(_now, dict, self._announced.left))

    def withdraw(self) -> None:
        """Expect the rest of them no longer. Idempotent."""
        self._run(partial(_now, self._announced.withdraw))

    def __repr__(self) -> str:
        return f"<Blocking{repr(self._announced)[1:]}"


async def _now(function: Callable[..., T], *arguments: Any) -> T:
    """Call something that does not wait, in the loop's thread."""
    return function(*arguments)


class BlockingLease:
    """
    The exclusive use of one sandbox, with methods that wait; see :class:`~agentsandbox.Lease`.

    As a context manager it gives the sandbox back at the end.
    """

    def __init__(self, pool: BlockingPool, opened: _Opened, lease: Lease) -> None:
        self._run = pool._run  # noqa: SLF001
        self._lease = lease
        self._opened = opened
        opened.leases.add(lease)
        self._finalizer = weakref.finalize(self, opened.forget, lease)
        self._finalizer.atexit = False

    @property
    def lease(self) -> Lease:
        """The lease itself: its properties may be read from any thread, its methods belong to the loop."""
        return self._lease

    @property
    def id(self) -> str:
        """The id of the lease."""
        return self._lease.id

    @property
    def image(self) -> str:
        """What its sandbox is made from."""
        return self._lease.image

    @property
    def sandbox(self) -> str:
        """The name of its sandbox."""
        return self._lease.sandbox

    def exec(self, command: str | Sequence[str], **options: Any) -> ExecResult:
        """Run a command and wait for its end; see :meth:`Lease.exec`. ``on_output`` is called in the loop's thread."""
        return self._run(partial(self._lease.exec, command, **options))

    def read_file(self, path: str, **options: Any) -> bytes:
        """Return the content of a file; see :meth:`Lease.read_file`."""
        return self._run(partial(self._lease.read_file, path, **options))

    def write_file(self, path: str, data: str | bytes, **options: Any) -> None:
        """Write a file whole or not at all; see :meth:`Lease.write_file`."""
        self._run(partial(self._lease.write_file, path, data, **options))

    def upload_dir(self, source: Path, target: str, **options: Any) -> None:
        """Copy a directory into the sandbox; see :meth:`Lease.upload_dir`."""
        self._run(partial(self._lease.upload_dir, source, target, **options))

    def download_dir(self, source: str, target: Path, **options: Any) -> None:
        """Copy a directory out of the sandbox; see :meth:`Lease.download_dir`."""
        self._run(partial(self._lease.download_dir, source, target, **options))

    def diff(self, **options: Any) -> Diff:
        """Say what changed in the sandbox; see :meth:`Lease.diff`."""
        return self._run(partial(self._lease.diff, **options))

    def checkpoint(self, store: Any = None, **options: Any) -> Checkpoint:
        """Keep what the sandbox holds; see :meth:`Lease.checkpoint`."""
        return self._run(partial(self._lease.checkpoint, store, **options))

    def restore(self, checkpoint: Checkpoint | str, store: Any = None) -> Checkpoint:
        """Make the sandbox hold what a checkpoint does; see :meth:`Lease.restore`."""
        return self._run(partial(self._lease.restore, checkpoint, store))

    def use_secrets(self, secrets: Mapping[str, str]) -> None:
        """Give credentials to every later command; see :meth:`Lease.use_secrets`."""
        self._run(partial(_now, self._lease.use_secrets, secrets))

    def place_secret(self, value: str, **options: Any) -> str:
        """Put a credential into a file of the sandbox; see :meth:`Lease.place_secret`."""
        return self._run(partial(self._lease.place_secret, value, **options))

    def alive(self) -> bool:
        """Say whether the sandbox is still the one that was granted; see :meth:`Lease.alive`."""
        return self._run(self._lease.alive)

    def reset(self) -> ResetReport:
        """Make the sandbox like new; see :meth:`Lease.reset`."""
        return self._run(self._lease.reset)

    def release(self, *, discard: bool = False) -> None:
        """Give the sandbox back; see :meth:`Lease.release`. Idempotent, and nothing to do once the pool is closed."""
        if not self._opened.closed and not self._lease.released:
            self._run(partial(self._lease.release, discard=discard))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<BlockingLease of {self._lease!r}>"
