# SPDX-License-Identifier: Apache-2.0
"""What a backend must be able to do. ``testing.conformance`` says the same as tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from agentsandbox.errors import UsageError
from agentsandbox.models.events import EventSink, discard

if TYPE_CHECKING:
    from random import Random

    from agentsandbox.models.placement import Placement
    from agentsandbox.models.sandbox import Capabilities, Identity, SandboxSpec
    from agentsandbox.session import Session

__all__ = ["Backend", "BackendSandbox", "Check"]


@attrs.frozen(kw_only=True)
class Check:
    """One thing that a backend needs, and whether it is there."""

    name: str
    """What was looked at."""
    ok: bool
    """Whether it is as needed."""
    detail: str
    """What was found."""
    fix: str = ""
    """What to do if it is not as needed."""
    required: bool = True
    """Whether nothing works without it; otherwise something is lost, and ``detail`` says what."""


class BackendSandbox(ABC):
    """One sandbox as its backend made it: ready for its first command."""

    name: str
    """Unique in its run."""
    spec: SandboxSpec
    """What it was made from."""
    identity: Identity
    """What must not change while it is leased."""
    capabilities: Capabilities
    """What it can do."""
    session: Session
    """Its runner."""
    node: str | None = None
    """Where it is, if the backend has such a notion."""

    @abstractmethod
    async def check(self) -> None:
        """
        Compare the identity with what is there now. Called around every command, so it must be cheap.

        Raises:
            SandboxLost: If it is gone or is not the same any more.

        """

    @property
    def dormant(self) -> bool:
        """Whether its session is opened only when somebody takes it, by :meth:`open`; until then it has none."""
        return False

    async def open(self) -> None:
        """
        Open the session of a dormant sandbox; there is nothing to do for any other.

        Raises:
            InfrastructureError: If that is not possible.

        """
        return

    async def vet(self) -> None:
        """
        Make sure that it is worth leasing, a moment before it is leased: :meth:`check`, and whatever else is known.

        Raises:
            SandboxLost: If it is not. Another one is taken, and nobody notices.

        """
        await self.check()


class Backend(ABC):
    """
    A source of sandboxes.

    Use it as an async context manager; leaving it removes everything that it created, also when cancelled.
    """

    name: ClassVar[str]
    """The word that users choose it by."""

    default_create_rate: float | None = None
    """Sandboxes asked for in a second when nothing is said; ``None`` for no limit."""

    default_creates_in_flight: int = 16
    """Sandboxes being made at once."""

    default_create_timeout: float = 300.0
    """Seconds that making one may take when nothing is said; a backend with a limit of its own leaves time for that."""

    random: Random | None = None
    """Where the pool's own chance comes from, so that a simulated run repeats; ``None`` for any."""

    placement: Placement | None = None
    """Which node each image belongs on, if that matters."""

    sink: EventSink = staticmethod(discard)
    """Where its events go; set by its owner before it is entered. ``sandbox.lost`` is heard by the pool at once."""

    def expect(self, sandboxes: int) -> None:  # noqa: B027 - who has nothing to prepare leaves it
        """Hear, before :meth:`validate`, how many sandboxes may be alive at once."""

    @property
    def guaranteed_life(self) -> float | None:
        """Seconds that a sandbox lives at least from its lease on; ``None`` where nothing ends it but its owner."""
        return None

    def default_spares(self, size: int) -> int:  # noqa: ARG002 - others answer by it
        """
        Say how many sandboxes to keep ready beyond those that may be leased, when nothing is said.

        Args:
            size: How many may be leased at once.

        """
        return 0

    @abstractmethod
    async def validate(self, specs: Iterable[SandboxSpec]) -> None:
        """
        Refuse what cannot work, before anything is created.

        Raises:
            ConfigurationError: Naming the value and the fix: an unknown image, a kernel too old, a missing permission.

        """

    @classmethod
    async def remove_leftovers(cls, receipt: Mapping[str, Any]) -> list[str]:
        """
        Remove what a run left behind when its driver was killed; only what is provably that run's.

        Args:
            receipt: ``run_id``, ``driver`` (its ``pid`` and ``started``), ``created`` (the data of every
                ``host.created`` event), and ``ended``: whether the run came to its end by itself.

        Returns:
            One line for each thing that was removed.

        Raises:
            UsageError: If the run is still going on.

        """
        raise UsageError(f"backend {cls.name!r} leaves nothing behind that could be removed: {receipt['run_id']}")

    def receipt(self) -> Mapping[str, Any]:
        """Return what :meth:`remove_leftovers` needs to know of this run that only its backend does, once it runs."""
        return {}

    async def examine(self) -> list[Check]:
        """Look at everything that it needs, for ``agentsandbox doctor``; nothing that it makes stays behind."""
        return []

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[None]:
        """Start what the backend needs for as long as the context lasts; on exit remove all that was created."""

    @abstractmethod
    async def create(self, spec: SandboxSpec, name: str) -> BackendSandbox:
        """
        Make a sandbox and open its session. When cancelled, nothing of it stays behind.

        Args:
            spec: From what.
            name: Unique in this run; chosen by the caller, so that it knows the sandbox before it exists.

        Raises:
            ProvisionError: If it could not be made.

        """

    def can_recycle(self, sandbox: BackendSandbox) -> bool:  # noqa: ARG002 - others answer by it
        """Whether :meth:`recycle` is likely to work for a sandbox, and faster than making another one."""
        return False

    async def recycle(self, sandbox: BackendSandbox, spec: SandboxSpec, name: str) -> BackendSandbox:
        """
        Make a used sandbox a fresh one in the same place, from the same or another spec, without trusting its contents.

        The old one is of no use from the call on. If this raises or is cancelled, destroy the old one.

        Args:
            sandbox: The old one.
            spec: From what the new one is made.
            name: Its name; it may be the old one's.

        Raises:
            ProvisionError: If it did not work.

        """
        raise UsageError(f"backend {self.name!r} cannot recycle {sandbox.name} as {name} of {spec.image!r}")

    async def suspend(self, sandbox: BackendSandbox) -> None:
        """
        End what a sandbox runs on, and keep its place. It is of no use until it is resumed.

        Raises:
            UsageError: If this backend cannot.

        """
        raise UsageError(f"backend {self.name!r} cannot suspend {sandbox!r}; backend 'agent-sandbox' can")

    async def resume(self, sandbox: BackendSandbox) -> BackendSandbox:
        """
        Make a fresh sandbox in the place of one that was suspended, and return it.

        Raises:
            UsageError: If this backend cannot.

        """
        raise UsageError(f"backend {self.name!r} cannot resume {sandbox!r}; backend 'agent-sandbox' can")

    @abstractmethod
    async def destroy(self, sandbox: BackendSandbox) -> None:
        """
        Remove a sandbox and return when it is verified gone. Idempotent; a sandbox that is gone already is fine.
        """
