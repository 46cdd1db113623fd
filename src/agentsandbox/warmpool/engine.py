# SPDX-License-Identifier: Apache-2.0
"""Perform what the book decides: make and remove sandboxes, wake who waits. Nothing polls."""

from __future__ import annotations

import logging
import math
import warnings
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import attrs
from tenacity import AsyncRetrying, stop_after_attempt, wait_exponential, wait_random

from agentsandbox.errors import AcquireTimeout, ProvisionError, ResetUnverified, SandboxError, SandboxLost
from agentsandbox.models.reset import ResetPolicy, ResetReport
from agentsandbox.reset.rungs import Resets
from agentsandbox.warmpool.book import Create, Decision, Destroy, Grant, PoolBook, Recycle, Waiter
from agentsandbox.warmpool.lease import State
from agentsandbox.warmpool.publishing import Publisher
from agentsandbox.warmpool.statistics import PoolStatistics
from agentsandbox.warmpool.tenure import Tenure

if TYPE_CHECKING:
    from agentsandbox.backends.base import Backend, BackendSandbox
    from agentsandbox.models.events import Event, EventSink
    from agentsandbox.models.sandbox import SandboxSpec

__all__ = ["Engine"]

_log = logging.getLogger("agentsandbox.warmpool")

_DESTROY_ATTEMPTS = 5
_DESTROYS_AT_ONCE = 64
_ARRIVALS_BEYOND_TARGET = 3
_BEAT = 0.02
"""Seconds in which whoever released a sandbox may ask for the next one, before it is decided what it becomes."""


class Engine:
    """
    A pool at work.

    Args:
        backend: Where sandboxes come from.
        specs: Image → from what its sandboxes are made.
        targets: Image → how many of them there should be, leased ones included.
        book: Who decides.
        sinks: Where events go.
        grace: How long the removal of sandboxes may take at the end, in seconds.
        reset: How used sandboxes are made like new.

    """

    def __init__(
        self,
        backend: Backend,
        *,
        specs: Mapping[str, SandboxSpec],
        targets: Mapping[str, int],
        book: PoolBook,
        sinks: Iterable[EventSink] = (),
        grace: float = 30.0,
        reset: ResetPolicy | None = None,
    ) -> None:
        self.backend = backend
        self.granted_total = 0
        self._specs = specs
        self._targets = targets
        self._book = book
        book.recycles = self._recycles
        book.keeps = self._keeps
        self._resets = Resets(backend, reset or ResetPolicy())
        self._publisher = Publisher(sinks)
        self.emit = self._publisher.emit
        """Tell every sink that something happened."""
        self._grace = grace
        self._sandboxes: dict[str, BackendSandbox] = {}
        self._tenures: dict[str, Tenure] = {}
        self._abandoned: deque[Grant] = deque()
        self._group: anyio.abc.TaskGroup | None = None
        self._alarm: anyio.CancelScope | None = None
        self._call_soon: Any = None

    @property
    def closed(self) -> bool:
        """Whether it grants nothing any more."""
        return self._book.closed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep sandboxes warm for as long as the context lasts; on exit nothing of them is left."""
        self.backend.sink = self._hear
        native: Any = anyio.lowlevel.current_token().native_token
        self._call_soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon
        failure: BaseException | None = None
        async with self.backend.running():
            try:
                async with anyio.create_task_group() as group:
                    self._group = group
                    try:
                        group.start_soon(self._keep_time)
                        self._perform(self._book.start(anyio.current_time()))
                        yield
                    except (anyio.get_cancelled_exc_class(), GeneratorExit):
                        raise
                    except BaseException as error:  # noqa: BLE001 - raised below
                        # Raised after all groups, the backend's too, have ended: it must not arrive wrapped in them.
                        failure = error
                    finally:
                        self._close()
                        # A group that ends takes no task, and leases come back at any time: the sweep sees to them.
                        self._group = None
                        group.cancel_scope.cancel()
            finally:
                with anyio.move_on_after(self._grace, shield=True):
                    await self._sweep()
                if left := len(self._book.lives):
                    _log.warning("%d sandboxes are left to the backend to remove", left)
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None

    async def acquire(self, image: str, *, timeout: float | None) -> Tenure:
        """
        Wait for a sandbox and take it.

        Args:
            image: Of which image.
            timeout: For how long, in seconds; ``None`` for ever.

        Returns:
            The sandbox, checked a moment ago.

        Raises:
            AcquireTimeout: If none could be had in time.
            PoolClosed: If the pool was closed meanwhile.
            ProvisionError: If sandboxes of this image cannot be made.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        now = anyio.current_time()
        waiter = Waiter(image, now)
        self._perform(self._book.request(waiter, now))
        return await self._obtain(waiter, timeout)

    async def replace(self, tenure: Tenure, *, timeout: float | None) -> Tenure:
        """
        Give back a sandbox and wait for a fresh one without losing one's place.

        Args:
            tenure: What is given back. If this raises, there is nothing in its stead.
            timeout: For how long to wait, in seconds; ``None`` for ever.

        Raises:
            AcquireTimeout: If none could be had in time.
            PoolClosed: If the pool was closed meanwhile.
            ProvisionError: If sandboxes of this image cannot be made.

        """
        now = anyio.current_time()
        waiter = Waiter(tenure.image, now)
        self._forget(tenure)
        self._perform(self._book.replace(tenure.grant, waiter, now))
        return await self._obtain(waiter, timeout)

    async def reset(self, tenure: Tenure) -> ResetReport:
        """
        Make a sandbox like new in the hands of its holder, if that is the cheapest that can be done.

        Returns:
            What was done. If it is not verified, the holder must let go of the sandbox: see :meth:`replace`.

        """
        rung, reason = self._resets.next(tenure.sandbox)
        if rung != "files":
            return ResetReport(rung=rung or "replace", seconds=0.0, verified=False, reason=reason)
        report = await self._resets.files(tenure.sandbox)
        self._report(tenure.sandbox.name, report, anyio.current_time())
        return attrs.evolve(report, reason=reason) if report.verified else report

    def release(self, tenure: Tenure, *, discard: bool = False) -> None:
        """Give back a sandbox; it is removed, or becomes a fresh one, in the background."""
        if self._forget(tenure):
            discard = discard or tenure.lost is not None
            self._perform(self._book.release(tenure.grant, anyio.current_time(), discard=discard))

    def lose(self, tenure: Tenure, error: SandboxLost) -> None:
        """Note that a sandbox in somebody's hands is not to be used any more. It is removed when it is released."""
        if tenure.lost is None:
            tenure.lost = error
            now = anyio.current_time()
            self.emit("sandbox.lost", now, sandbox=tenure.sandbox.name, reason=error.reason, detail=error.detail)
            self._perform(self._book.lost(tenure.grant.name, now))

    def abandon(self, tenure: Tenure) -> None:
        """Take back what was dropped, wherever the garbage collector happens to run: later, in the event loop."""
        if self.closed:
            return
        self._abandoned.append(tenure.grant)
        try:
            self._call_soon(self._collect)
        except RuntimeError:  # the loop is over, and everything was removed when it ended
            self._abandoned.clear()
        warnings.warn(
            f"the lease of sandbox {tenure.sandbox.name} was never released; use 'async with await acquire(...)'",
            ResourceWarning,
            stacklevel=2,
        )

    def statistics(self) -> PoolStatistics:
        """Count everything at this instant."""
        counts, last = self._book.counts, self._book.replenisher.last_error
        return PoolStatistics(
            backend=self.backend.name,
            leased=counts[State.LEASED],
            ready=counts[State.READY],
            creating=counts[State.CREATING] + counts[State.HYDRATING],
            resetting=counts[State.RESETTING] + counts[State.RECYCLING],
            quarantined=counts[State.QUARANTINED],
            lost=counts[State.LOST],
            deleting=counts[State.DELETING],
            stuck=self._book.stuck,
            waiting=self._book.matcher.waiting(),
            hosts=len({sandbox.identity.uid for sandbox in self._sandboxes.values()}),
            created_total=self._book.created_total,
            failed_total=self._book.failed_total,
            deleted_total=self._book.deleted_total,
            recycled_total=self._book.recycled_total,
            granted_total=self.granted_total,
            last_error=None if last is None else f"{type(last).__name__}: {last}",
        )

    def _hear(self, event: Event) -> None:
        self._publisher.publish(event)
        if event.name != "sandbox.lost" or event.sandbox not in self._sandboxes:
            return
        if (tenure := self._tenures.get(event.sandbox)) is not None and tenure.lost is None:
            tenure.lost = SandboxLost(str(event.data.get("reason", "died")), str(event.data.get("detail", "")))
        self._perform(self._book.lost(event.sandbox, event.at))

    async def _obtain(self, waiter: Waiter, timeout: float | None) -> Tenure:
        requested_at, dead = waiter.requested_at, 0
        with anyio.CancelScope(deadline=math.inf if timeout is None else requested_at + timeout):
            while True:
                grant = await self._granted(waiter)
                sandbox = self._sandboxes[grant.name]
                tenure = Tenure(waiter.image, sandbox, grant, requested_at, anyio.current_time())
                self._tenures[grant.name] = tenure
                try:
                    await sandbox.check()
                except SandboxLost as error:
                    self.lose(tenure, error)
                    dead += 1
                    if dead > self._targets[waiter.image] + _ARRIVALS_BEYOND_TARGET:
                        self.release(tenure)
                        message = f"{dead} sandboxes of image {waiter.image!r} in a row were dead on arrival: {error}"
                        raise ProvisionError(message) from error
                    waiter = Waiter(waiter.image, requested_at)
                    self._forget(tenure)
                    self._perform(self._book.replace(grant, waiter, anyio.current_time()))
                except BaseException:
                    self._forget(tenure)
                    self._perform(self._book.give_back(grant, anyio.current_time()))
                    raise
                else:
                    self.granted_total += 1
                    return tenure
        raise AcquireTimeout(self._explain(waiter.image, timeout))

    async def _granted(self, waiter: Waiter) -> Grant:
        if waiter.grant is None and waiter.error is None:
            event = anyio.Event()
            waiter.wake = event.set
            try:
                await event.wait()
            except BaseException:
                self._perform(self._book.withdraw(waiter, anyio.current_time()))
                raise
        if waiter.error is not None:
            raise waiter.error
        assert waiter.grant is not None
        return waiter.grant

    def _explain(self, image: str, timeout: float | None) -> str:
        count, matcher = self._book.count, self._book.matcher
        creating = count(image, State.CREATING) + count(image, State.HYDRATING)
        text = (
            f"no sandbox of image {image!r} within {timeout:g} s: {matcher.places(image)} leased, "
            f"{count(image, State.READY)} ready, {creating} creating, {matcher.waiting(image)} others waiting"
        )
        last = self._book.replenisher.last_error
        return text if last is None else f"{text}; last creation error: {type(last).__name__}: {last}"

    def _forget(self, tenure: Tenure) -> bool:
        return self._tenures.pop(tenure.grant.name, None) is not None

    def _collect(self) -> None:
        while self._abandoned:
            grant = self._abandoned.popleft()
            if self._tenures.pop(grant.name, None) is not None:
                self._perform(self._book.release(grant, anyio.current_time()))

    def _perform(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Create):
                self._start(self._create, decision.name, decision.image)
            elif isinstance(decision, Destroy):
                self._start(self._destroy, decision.name)
            elif isinstance(decision, Recycle):
                self._start(self._recycle, decision.name, decision.image)
            elif decision.waiter.wake is not None:
                decision.waiter.wake()
        if self._alarm is not None and self._alarm.deadline != self._book.wake_at:
            self._alarm.deadline = self._book.wake_at

    def _recycles(self, name: str) -> bool:
        return self._group is not None and self._resets.may_restart(self._sandboxes[name])

    def _keeps(self, name: str) -> bool:
        return self._group is not None and self._resets.keeps(self._sandboxes[name])

    def _start(self, function: Any, *args: str | None) -> None:
        # Without a group the pool is over, and the sweep removes whatever there is.
        if self._group is not None:
            self._group.start_soon(function, *args)

    async def _keep_time(self) -> None:
        while True:
            with anyio.CancelScope(deadline=self._book.wake_at) as self._alarm:
                await anyio.sleep_forever()
            self._perform(self._book.wake(anyio.current_time()))

    async def _create(self, name: str, image: str) -> None:
        self.emit("sandbox.created", anyio.current_time(), sandbox=name, image=image)
        try:
            sandbox = await self.backend.create(self._specs[image], name)
            self.emit("sandbox.opened", anyio.current_time(), sandbox=name, image=image)
            await self._prepare(sandbox)
        except SandboxError as error:
            self._failed(name, error)
        except Exception as error:  # noqa: BLE001 - reported as a failed creation
            # A bug in a backend, or a full file table, must not end all episodes: those of this image learn of it.
            failure = ProvisionError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._failed(name, failure)
        except BaseException:
            # Only the end of the pool cancels this, and then nothing must be made in its stead.
            self._close()
            self._book.failed(name, None, anyio.current_time())
            raise
        else:
            self._sandboxes[name] = sandbox
            now = anyio.current_time()
            self.emit("sandbox.ready", now, sandbox=name, image=image, node=sandbox.node)
            self._perform(self._book.created(name, now))

    async def _recycle(self, name: str, image: str | None) -> None:
        if image is None:
            await anyio.sleep(_BEAT)
            self._perform(self._book.decide(name, anyio.current_time()))
            return
        began = anyio.current_time()
        try:
            sandbox, report = await self._resets.renew(self._sandboxes[name], self._specs[image])
        except ResetUnverified as error:
            now = anyio.current_time()
            self.emit("sandbox.not_recycled", now, sandbox=name, image=image, error=str(error))
            self._perform(self._book.not_recycled(name, None, now))
        except Exception as error:  # noqa: BLE001 - whatever it was, the sandbox is removed, and another one is made
            now = anyio.current_time()
            self.emit("sandbox.not_recycled", now, sandbox=name, image=image, error=f"{type(error).__name__}: {error}")
            self._perform(self._book.not_recycled(name, error, now))
        except BaseException:
            self._close()
            raise
        else:
            self._sandboxes[name] = sandbox
            now = anyio.current_time()
            self._report(name, report, now)
            self.emit("sandbox.ready", now, sandbox=name, image=image, node=sandbox.node, recycled=now - began)
            self._perform(self._book.recycled(name, now))

    async def _prepare(self, sandbox: BackendSandbox) -> None:
        try:
            await self._resets.prepare(sandbox)
        except BaseException:
            with anyio.move_on_after(self._grace, shield=True):
                await self.backend.destroy(sandbox)
            raise

    def _report(self, name: str, report: ResetReport, now: float) -> None:
        self.emit(
            "sandbox.reset",
            now,
            sandbox=name,
            rung=report.rung,
            seconds=report.seconds,
            verified=report.verified,
            reason=report.reason,
            changed=len(report.changed),
            killed=len(report.killed),
        )

    def _failed(self, name: str, error: SandboxError) -> None:
        now = anyio.current_time()
        self.emit("sandbox.failed", now, sandbox=name, error=f"{type(error).__name__}: {error}")
        self._perform(self._book.failed(name, error, now))

    async def _destroy(self, name: str) -> None:
        with anyio.move_on_after(self._grace, shield=True) as scope:
            await self._remove(name)
        if scope.cancelled_caught:
            self._resists(name, "no answer")

    async def _remove(self, name: str) -> None:
        sandbox = self._sandboxes[name]
        try:
            await self.backend.destroy(sandbox)
        except Exception:  # noqa: BLE001 - whatever it was, the sandbox may still be there
            if (last := await self._remove_again(sandbox)) is not None:
                self._resists(name, f"{type(last).__name__}: {last}")
                return
        del self._sandboxes[name]
        self._resets.forget(name)
        now = anyio.current_time()
        self.emit("sandbox.deleted", now, sandbox=name)
        self._perform(self._book.deleted(name, now))

    async def _remove_again(self, sandbox: BackendSandbox) -> Exception | None:
        wait = wait_exponential(multiplier=0.1, max=5.0) + wait_random(0.0, 0.1)
        stop = stop_after_attempt(_DESTROY_ATTEMPTS - 1)
        await anyio.sleep(0.1)
        try:
            async for attempt in AsyncRetrying(stop=stop, wait=wait, sleep=anyio.sleep, reraise=True):
                with attempt:
                    await self.backend.destroy(sandbox)
        except Exception as last:  # noqa: BLE001 - reported, counted, and tried again when the pool closes
            return last
        return None

    def _resists(self, name: str, why: str) -> None:
        self._book.resists(name)
        _log.warning("sandbox %s could not be removed (%s); it still counts as alive", name, why)
        self.emit("sandbox.stuck", anyio.current_time(), sandbox=name, error=why)

    def _close(self) -> None:
        if not self._book.closed:
            self._perform(self._book.close())

    async def _sweep(self) -> None:
        self._collect()
        # Whoever still holds something finds it gone, and may release it in peace.
        self._tenures.clear()
        slots = anyio.Semaphore(_DESTROYS_AT_ONCE)

        async def remove(name: str) -> None:
            async with slots:
                await self._remove(name)

        async with anyio.create_task_group() as group:
            for name in self._book.sweep():
                group.start_soon(remove, name)

    def __repr__(self) -> str:
        return f"<Engine [{self.statistics()}]>"
