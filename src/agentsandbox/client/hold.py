# SPDX-License-Identifier: Apache-2.0
"""The part of a lease that is about having a sandbox: until it is made like new, lost or given back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.client.fence import fenced
from agentsandbox.client.redaction import Redactor
from agentsandbox.errors import (
    InfrastructureError,
    PoolClosed,
    ResetFailed,
    SandboxLost,
    StreamBroken,
    UsageError,
)

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    from agentsandbox.client.command_log import CommandEntry
    from agentsandbox.models.reset import ResetReport
    from agentsandbox.models.sandbox import Capabilities, Identity
    from agentsandbox.models.timing import StartKind
    from agentsandbox.warmpool.engine import Engine
    from agentsandbox.warmpool.tenure import Tenure

__all__ = ["LeaseHold"]


class LeaseHold:
    """Which sandbox a lease has, and whether it may still be used. Not to be used by itself: see :class:`Lease`."""

    def __init__(
        self,
        engine: Engine,
        tenure: Tenure,
        *,
        acquire_timeout: float | None = None,
        episode: str | None = None,
        attempt: int | None = None,
    ) -> None:
        self._engine = engine
        self._tenure: Tenure | None = tenure
        self._acquire_timeout = acquire_timeout
        self._resetting = False
        self._death: SandboxLost | None = None
        self._ended_at: float | None = None
        self._redactor = Redactor()
        # Credentials that its commands have, and files with some: both are gone with what it has now.
        self._given: dict[str, str] = {}
        self._placed: set[str] = set()
        self.episode = episode
        """The episode it was acquired for."""
        self.attempt = attempt
        """The attempt it was acquired for."""
        self.id = f"{tenure.grant.name}.{tenure.grant.generation}"
        """Unique in its run."""
        self.image = tenure.image
        """The image that was asked for."""
        self.start: StartKind = tenure.start
        """How its sandbox was come by."""
        self.reused = tenure.grant.reused
        """Whether its first sandbox had been used before, also when it was waited for."""
        self.requested_at = tenure.requested_at
        """When it was asked for, in seconds on the driver's monotonic clock."""
        self.granted_at = tenure.granted_at
        """When it was granted."""
        self.generation = 1
        """Counts the sandboxes it had: 1 until the first reset."""
        self._adopt(tenure)

    def _adopt(self, tenure: Tenure) -> None:
        self._tenure = tenure
        self.sandbox: str = tenure.sandbox.name
        """The sandbox's name."""
        self.identity: Identity = tenure.sandbox.identity
        """Its identity when it was granted."""
        self.capabilities: Capabilities = tenure.sandbox.capabilities
        """What it can do."""
        self.node: str | None = tenure.sandbox.node
        """Where it is, if the backend has such a notion."""
        self._finalizer = weakref.finalize(self, self._engine.abandon, tenure)
        self._finalizer.atexit = False

    @property
    def released(self) -> bool:
        """Whether it was given back."""
        return self._ended_at is not None

    @property
    def lost(self) -> SandboxLost | None:
        """Why its sandbox is not to be used any more, if so."""
        return self._death or (self._tenure.lost if self._tenure is not None else None)

    def redact(self, value: Any) -> Any:
        """Return text, bytes, or what a container holds, without the credentials that this lease was ever given."""
        return self._redactor.value(value)

    async def alive(self) -> bool:
        """
        Ask the sandbox whether it still is the one it was, and answers.

        A sandbox that is another one is lost from then on; one that only does not answer in time may answer later.
        """
        if self._tenure is None or self.lost is not None:
            return False
        tenure, answered = self._tenure, True
        try:
            async with self._fence(tenure):
                try:
                    await tenure.sandbox.session.ping()
                except StreamBroken:
                    answered = False
        except (InfrastructureError, UsageError):
            return False
        return answered

    async def reset(self) -> ResetReport:
        """
        Make the sandbox like new, or get a new one, without giving up the lease.

        Returns:
            What was done.

        Raises:
            ResetFailed: If nothing worked. The lease is dead from then on.
            SandboxLost: If it was dead before.
            UsageError: If it was released, or is being reset.

        """
        tenure = self._current()
        began = anyio.current_time()
        placed, self._placed = self._placed, set()
        self._given = {}
        self._resetting = True
        self.generation += 1
        self._finalizer.detach()
        self._tenure = None
        report: ResetReport | None = None
        try:
            report = await self._engine.reset(tenure)
        except BaseException:
            self._death = SandboxLost("deleted", "its reset did not come to its end")
            raise
        finally:
            if report is None or (self.released and report.verified):
                self._resetting = False
                self._engine.release(tenure, discard=True)
        if report.verified:
            self._resetting = False
            if self.released:
                raise UsageError("the lease was released while it was reset")
            self._adopt(tenure)
            self._emit("lease.reset", rung=report.rung, seconds=report.seconds)
            return report
        try:
            tenure = await self._engine.replace(tenure, timeout=self._acquire_timeout)
        except BaseException as error:
            self._death = SandboxLost("deleted", "its reset did not come to its end")
            if isinstance(error, InfrastructureError) and not isinstance(error, PoolClosed):
                raise ResetFailed(f"no fresh sandbox of {self.image!r} could be had: {error}") from error
            raise
        finally:
            self._resetting = False
        if self.released:
            self._engine.release(tenure)
            raise UsageError("the lease was released while it was reset")
        self._adopt(tenure)
        seconds = anyio.current_time() - began
        # The holder has another sandbox, whichever way the old one goes.
        rung = "jail" if report.rung == "jail" else "replace"
        self._emit("lease.reset", rung=rung, seconds=seconds)
        return attrs.evolve(report, rung=rung, seconds=seconds, verified=True, secrets=tuple(sorted(placed)))

    async def release(self, *, discard: bool = False) -> None:
        """
        Give the sandbox back. What ran in it is killed. Releasing again does nothing.

        Args:
            discard: Whether the sandbox must not be used again even if it could be reset.

        """
        if self.released:
            return
        self._ended_at = anyio.current_time()
        self._finalizer.detach()
        tenure, self._tenure = self._tenure, None
        self._given = {}
        if tenure is not None:
            self._death = tenure.lost
            self._engine.release(tenure, discard=discard)
        self._emit("lease.released", discard=discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release(discard=kind is not None)

    def _current(self) -> Tenure:
        if self.released:
            raise UsageError(f"lease {self.id} was released; acquire another one")
        if self._resetting:
            raise UsageError(f"lease {self.id} is being reset")
        if self._death is not None:
            raise _again(self._death)
        if self._engine.closed:
            raise UsageError(f"lease {self.id} is of a client that was closed")
        assert self._tenure is not None
        if self._tenure.lost is not None:
            raise _again(self._tenure.lost)
        return self._tenure

    def _fence(
        self, tenure: Tenure, entry: CommandEntry | None = None, *, ends: bool = True
    ) -> AbstractAsyncContextManager[None]:
        held, clean = lambda: self._tenure is tenure, self._redactor.error
        return fenced(self._engine, tenure, held, entry, ends=ends, clean=clean)

    def _emit(self, name: str, **data: Any) -> None:
        self._engine.emit(
            name,
            anyio.current_time(),
            sandbox=self.sandbox,
            episode=self.episode,
            attempt=self.attempt,
            **self.redact(data),
        )


def _again(loss: SandboxLost) -> SandboxLost:
    return type(loss)(loss.reason, loss.detail)
