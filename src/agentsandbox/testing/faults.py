# SPDX-License-Identifier: Apache-2.0
"""Faults to order, at the seam between a pool and a backend."""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.base import Backend, BackendSandbox
from agentsandbox.backends.opening import backend_class
from agentsandbox.errors import SandboxLost, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from agentsandbox.models.sandbox import SandboxSpec

__all__ = ["FaultyBackend", "FaultySandbox"]


class FaultySandbox(BackendSandbox):
    """A sandbox of :class:`FaultyBackend`: a real one that can be declared lost."""

    def __init__(self, inner: BackendSandbox) -> None:
        self.inner = inner
        self.name = inner.name
        self.spec = inner.spec
        self.identity = inner.identity
        self.capabilities = inner.capabilities
        self.session = inner.session
        self.node = inner.node
        self.checks = 0
        """How often its identity was compared."""
        self._lost: tuple[int, str] | None = None

    def __repr__(self) -> str:
        state = f"lost after {self._lost[0]} checks" if self._lost else "sound"
        return f"<FaultySandbox {self.name} [{state}, {self.checks} checks]>"

    def lose(self, reason: str, after: int) -> None:
        """From the check after *after* more on, say that this sandbox is lost."""
        self._lost = (self.checks + after, reason)

    async def cut(self) -> None:
        """End the stream to its runner here and now, as if something on the way had failed."""
        with anyio.CancelScope(shield=True):
            await self.session._link._stream.aclose()  # noqa: SLF001 - nobody else has a reason to

    async def check(self) -> None:
        """Compare the identity, unless this sandbox is declared lost."""
        self.checks += 1
        if self._lost is not None and self.checks > self._lost[0]:
            raise SandboxLost(self._lost[1], "an injected fault")
        await self.inner.check()

    async def vet(self) -> None:
        """Compare the identity, and whatever else the inner backend knows before a lease."""
        await self.check()
        await self.inner.vet()


class FaultyBackend(Backend):
    """
    A real backend that fails to order, so that a trainer's own handling of failures can be tested.

    Args:
        inner: The backend that does the work.

    """

    name = "faulty"

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        # A journal knows whose sandboxes they are by it, and so does the driver that comes after.
        self.name = inner.name  # type: ignore[misc]
        self.run_id = getattr(inner, "run_id", None) or secrets.token_hex(6)
        self._create_errors: deque[BaseException] = deque()
        self._losses: deque[tuple[str, int]] = deque()
        self._alive: dict[str, FaultySandbox] = {}
        self._created = 0

    def __repr__(self) -> str:
        return (
            f"<FaultyBackend over {self._inner.name} [{self._created} created, {len(self._alive)} alive, "
            f"{len(self._create_errors)} errors and {len(self._losses)} losses to come]>"
        )

    def fail_creates(self, *errors: BaseException) -> None:
        """Raise *errors* from the next calls of ``create``, one each."""
        self._create_errors.extend(errors)

    def lose_created(self, *, reason: str = "replaced", after: int = 0, count: int = 1) -> None:
        """
        Declare the next *count* sandboxes that are created lost.

        Args:
            reason: The reason that :exc:`SandboxLost` carries.
            after: How many identity checks still succeed; two surround each command.
            count: How many sandboxes.

        """
        self._losses.extend([(reason, after)] * count)

    def lose(self, name: str, *, reason: str = "replaced", after: int = 0) -> None:
        """
        Declare a sandbox that exists lost.

        Args:
            name: Its name, as in ``lease.sandbox``.
            reason: The reason that :exc:`SandboxLost` carries.
            after: How many identity checks still succeed; two surround each command.

        Raises:
            UsageError: If there is no such sandbox.

        """
        if name not in self._alive:
            raise UsageError(f"no sandbox named {name!r} is alive")
        self._alive[name].lose(reason, after)

    async def cut(self, name: str) -> None:
        """
        End the stream to a sandbox that exists. Where its backend can attach again, nothing is lost by that.

        Args:
            name: Its name, as in ``lease.sandbox``.

        Raises:
            UsageError: If there is no such sandbox.

        """
        if name not in self._alive:
            raise UsageError(f"no sandbox named {name!r} is alive")
        await self._alive[name].cut()

    @property
    def alive(self) -> tuple[str, ...]:
        """The names of the sandboxes that exist."""
        return tuple(self._alive)

    @classmethod
    async def remove_leftovers(cls, receipt: Mapping[str, Any]) -> list[str]:
        """Remove what the inner backend of a killed driver left behind."""
        return await backend_class(str(receipt["backend"])).remove_leftovers(receipt)

    def receipt(self) -> Mapping[str, Any]:
        """Return what the inner backend needs to know of this run."""
        return self._inner.receipt()

    def default_spares(self, size: int) -> int:
        """Keep as many spares as the inner backend does."""
        return self._inner.default_spares(size)

    async def validate(self, specs: Iterable[SandboxSpec]) -> None:
        """Validate as the inner backend does."""
        await self._inner.validate(specs)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the inner backend."""
        self._inner.sink = self.sink
        async with self._inner.running():
            yield

    async def create(self, spec: SandboxSpec, name: str) -> BackendSandbox:
        """Create a sandbox, or raise the error that is due."""
        if self._create_errors:
            raise self._create_errors.popleft()
        sandbox = FaultySandbox(await self._inner.create(spec, name))
        if self._losses:
            sandbox.lose(*self._losses.popleft())
        self._alive[name] = sandbox
        self._created += 1
        return sandbox

    async def destroy(self, sandbox: BackendSandbox) -> None:
        """Destroy a sandbox, sound or lost."""
        if not isinstance(sandbox, FaultySandbox):
            raise UsageError(f"{sandbox!r} is not a sandbox of this backend")
        await self._inner.destroy(sandbox.inner)
        self._alive.pop(sandbox.name, None)
