# SPDX-License-Identifier: Apache-2.0
"""Perform what the book decides, and tell it what came of that. Nothing polls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.errors import ResetUnverified, SandboxError
from agentsandbox.warmpool.decisions import Create, Decision, Destroy, Recycle
from agentsandbox.warmpool.making import Maker
from agentsandbox.warmpool.removing import Removals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from anyio.abc import TaskGroup

    from agentsandbox.backends.base import Backend, BackendSandbox
    from agentsandbox.models.reset import ResetReport
    from agentsandbox.models.sandbox import SandboxSpec
    from agentsandbox.reset.rungs import Resets
    from agentsandbox.warmpool.book import PoolBook

__all__ = ["Performer"]

_BEAT = 0.02
"""Seconds in which whoever released a sandbox may ask for the next one, before it is decided what it becomes."""


class Performer:
    """
    The hands of a pool: sandboxes are made, made anew and removed in tasks of one group.

    Args:
        backend: Where sandboxes come from.
        book: Who decides.
        specs: Image → from what its sandboxes are made.
        resets: How they are made like new.
        emit: Tells everybody what happened.
        grace: How long one removal may take, in seconds.
        create_timeout: How long one sandbox may take to be made, in seconds.

    """

    def __init__(
        self,
        backend: Backend,
        *,
        book: PoolBook,
        specs: Mapping[str, SandboxSpec],
        resets: Resets,
        emit: Callable[..., None],
        grace: float,
        create_timeout: float,
    ) -> None:
        self.specs = dict(specs)
        """Image → from what its sandboxes are made."""
        self.sandboxes: dict[str, BackendSandbox] = {}
        """Every sandbox that was made and is not verified gone, by name."""
        self._book = book
        book.recycles = self._recycles
        book.keeps = self._keeps
        book.node = self._node
        self._resets = resets
        self._emit = emit
        self.maker = Maker(backend, resets, timeout=create_timeout, grace=grace)
        self._removals = Removals(backend, self.sandboxes, grace=grace, removed=self._removed, resists=self._resists)
        self._unmade: list[str] = []
        self._group: TaskGroup | None = None
        self._alarm: anyio.CancelScope | None = None

    def start(self, group: TaskGroup) -> None:
        """Begin to work in a task group."""
        self._group = group
        group.start_soon(self._keep_time)
        group.start_soon(self._removals.keep_trying)
        self.perform(self._book.start(anyio.current_time()))

    def stop(self) -> None:
        """Begin nothing any more: a group that ends takes no task, and leases come back at any time."""
        self._group = None

    def close(self) -> None:
        """Have nobody granted anything any more."""
        if not self._book.closed:
            self.perform(self._book.close())

    async def sweep(self) -> None:
        """Remove everything that is still there, and tell what never came to be."""
        for name in sorted(self._unmade):  # a group cancels its tasks in any order, and a run is to be repeatable
            error = "PoolClosed: the pool was closed while it was made"
            self._emit("sandbox.failed", anyio.current_time(), sandbox=name, error=error)
        self._unmade.clear()
        await self._removals.sweep(self._book.sweep())

    def perform(self, decisions: Iterable[Decision]) -> None:
        """Begin what was decided."""
        for decision in decisions:
            if isinstance(decision, Create):
                self._begin(self._create, decision.name, decision.image)
            elif isinstance(decision, Destroy):
                self._begin(self._removals.remove, decision.name)
            elif isinstance(decision, Recycle):
                self._begin(self._recycle, decision.name, decision.image)
            elif decision.waiter.wake is not None:
                decision.waiter.wake()
        if self._alarm is not None and self._alarm.deadline != self._book.wake_at:
            self._alarm.deadline = self._book.wake_at

    def _begin(self, function: Any, *args: str | None) -> None:
        # Without a group the pool is over, and the sweep removes whatever there is.
        if self._group is not None:
            self._group.start_soon(function, *args)

    def _recycles(self, name: str) -> bool:
        return self._group is not None and self._resets.may_restart(self.sandboxes[name])

    def _node(self, name: str) -> str | None:
        return self.sandboxes[name].node

    def _keeps(self, name: str) -> bool:
        return self._group is not None and self._resets.keeps(self.sandboxes[name])

    async def _keep_time(self) -> None:
        while True:
            with anyio.CancelScope(deadline=self._book.wake_at) as self._alarm:
                await anyio.sleep_forever()
            self.perform(self._book.wake(anyio.current_time()))

    async def _create(self, name: str, image: str) -> None:
        def emit(event: str, **data: Any) -> None:
            self._emit(event, anyio.current_time(), sandbox=name, **data)

        emit("sandbox.created", image=image)
        try:
            opened = lambda: emit("sandbox.opened", image=image)  # noqa: E731
            sandbox = await self.maker.make(self.specs[image], name, opened=opened)
        except SandboxError as error:
            emit("sandbox.failed", error=f"{type(error).__name__}: {error}")
            self.perform(self._book.failed(name, error, anyio.current_time()))
        except BaseException:
            # Only the end of the pool cancels this, and then nothing must be made in its stead.
            self.close()
            self._unmade.append(name)
            self._book.failed(name, None, anyio.current_time())
            raise
        else:
            self.sandboxes[name] = sandbox
            emit("sandbox.ready", image=image, node=sandbox.node)
            self.perform(self._book.created(name, anyio.current_time()))

    async def _recycle(self, name: str, image: str | None) -> None:
        if image is None:
            await anyio.sleep(_BEAT)
            self.perform(self._book.decide(name, anyio.current_time()))
            return
        began = anyio.current_time()
        try:
            sandbox, report = await self._resets.renew(self.sandboxes[name], self.specs[image])
        except ResetUnverified as error:
            now = anyio.current_time()
            self._emit("sandbox.not_recycled", now, sandbox=name, image=image, error=str(error))
            self.perform(self._book.not_recycled(name, None, now))
        except Exception as error:  # noqa: BLE001 - whatever it was, the sandbox is removed, and another one is made
            now = anyio.current_time()
            self._emit("sandbox.not_recycled", now, sandbox=name, image=image, error=f"{type(error).__name__}: {error}")
            self.perform(self._book.not_recycled(name, error, now))
        except BaseException:
            self.close()
            raise
        else:
            self.sandboxes[name] = sandbox
            now = anyio.current_time()
            self.report(name, report, now)
            self._emit("sandbox.ready", now, sandbox=name, image=image, node=sandbox.node, recycled=now - began)
            self.perform(self._book.recycled(name, now))

    def report(self, name: str, report: ResetReport, now: float) -> None:
        """Tell of a reset."""
        self._emit(
            "sandbox.reset",
            now,
            sandbox=name,
            rung=report.rung,
            seconds=report.seconds,
            verified=report.verified,
            reason=report.reason,
            changed=len(report.changed),
            killed=len(report.killed),
            secrets=len(report.secrets),
        )

    def _removed(self, name: str) -> None:
        del self.sandboxes[name]
        self._resets.forget(name)
        now = anyio.current_time()
        self._emit("sandbox.deleted", now, sandbox=name)
        self.perform(self._book.deleted(name, now))

    def _resists(self, name: str, why: str, rounds: int) -> None:
        self._book.resists(name)
        self._emit("sandbox.stuck", anyio.current_time(), sandbox=name, error=why, rounds=rounds)

    def __repr__(self) -> str:
        return f"<Performer [{len(self.sandboxes)} sandboxes | {self.maker!r} | {self._removals!r}]>"
