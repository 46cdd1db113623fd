# SPDX-License-Identifier: Apache-2.0
"""A pool at work: sandboxes for those who ask, from those that are kept ready."""

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

from agentsandbox.errors import AcquireTimeout, ProvisionError, SandboxLost
from agentsandbox.models.reset import ResetPolicy, ResetReport
from agentsandbox.reset.rungs import Resets
from agentsandbox.warmpool.decisions import Waiter
from agentsandbox.warmpool.lease import State
from agentsandbox.warmpool.performing import Performer
from agentsandbox.warmpool.publishing import Publisher
from agentsandbox.warmpool.statistics import PoolStatistics
from agentsandbox.warmpool.tenure import Tenure

if TYPE_CHECKING:
    from agentsandbox.backends.base import Backend
    from agentsandbox.models.events import Event, EventSink
    from agentsandbox.models.sandbox import SandboxSpec
    from agentsandbox.warmpool.book import PoolBook
    from agentsandbox.warmpool.decisions import Grant
    from agentsandbox.warmpool.outlook import Announcement

__all__ = ["Engine"]

_log = logging.getLogger("agentsandbox.warmpool")

_ARRIVALS_BEYOND_TARGET = 3


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
        create_timeout: How long one sandbox may take to be made, in seconds.
        compare: Whether every sandbox gets a baseline, so that what changed in it can be told.

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
        create_timeout: float = 300.0,
        compare: bool = False,
    ) -> None:
        self.backend = backend
        self.granted_total = 0
        self._targets = targets
        self._book = book
        self._resets = Resets(backend, reset or ResetPolicy(), compare=compare)
        self.resets = self._resets
        """What is known of the sandboxes as they were before their first command."""
        self._publisher = Publisher(sinks)
        self.emit = self._publisher.emit
        """Tell every sink that something happened."""
        self._grace = grace
        self._performer = Performer(
            backend,
            book=book,
            specs=specs,
            resets=self._resets,
            emit=self.emit,
            grace=grace,
            create_timeout=create_timeout,
        )
        self._perform = self._performer.perform
        self._sandboxes = self._performer.sandboxes
        self._tenures: dict[str, Tenure] = {}
        self._abandoned: deque[Grant] = deque()
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
                    try:
                        self._performer.start(group)
                        yield
                    except (anyio.get_cancelled_exc_class(), GeneratorExit):
                        raise
                    except BaseException as error:  # noqa: BLE001 - raised below
                        # Raised after all groups, the backend's too, have ended: it must not arrive wrapped in them.
                        failure = error
                    finally:
                        self._performer.close()
                        self._performer.stop()
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
        self._performer.report(tenure.sandbox.name, report, anyio.current_time())
        return attrs.evolve(report, reason=reason) if report.verified else report

    def announce(self, announcement: Announcement, specs: Mapping[str, SandboxSpec], *, begins: bool = False) -> None:
        """
        Have sandboxes ready for rollouts that are to come.

        Args:
            announcement: What is to come.
            specs: From what sandboxes of its images are made.
            begins: Whether these rollouts begin now, and were announced before as far as any were.

        """
        for image, spec in specs.items():
            self._performer.specs.setdefault(image, spec)
        self._perform(self._book.announce(announcement, anyio.current_time(), begins=begins))

    def ahead(self, image: str) -> int:
        """How many rollouts of an image are to come."""
        return self._book.outlook.ahead(image)

    def retract(self, announcement: Announcement) -> None:
        """Count on the rest of an announcement no longer."""
        self._perform(self._book.retract(announcement, anyio.current_time()))

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
            announced=self._book.outlook.total,
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
        if event.name == "sandbox.stuck" and event.sandbox in self._sandboxes:
            self._book.resists(event.sandbox)
        if event.name in ("node.closed", "node.opened"):
            replenisher = self._book.replenisher
            (replenisher.close if event.name == "node.closed" else replenisher.open)(str(event.data["node"]))
            self._perform(self._book.wake(event.at))
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
                    await sandbox.vet()
                    await self._performer.maker.open(sandbox)
                except SandboxLost as error:
                    self.lose(tenure, error)
                    dead += 1
                    if dead > self._targets.get(waiter.image, 0) + _ARRIVALS_BEYOND_TARGET:
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

    async def _sweep(self) -> None:
        self._collect()
        # Whoever still holds something finds it gone, and may release it in peace.
        self._tenures.clear()
        await self._performer.sweep()

    def __repr__(self) -> str:
        return f"<Engine [{self.statistics()}]>"
