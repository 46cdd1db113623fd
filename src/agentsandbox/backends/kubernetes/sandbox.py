# SPDX-License-Identifier: Apache-2.0
"""One Pod as one sandbox, and the fence around it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.base import BackendSandbox
from agentsandbox.backends.kubernetes.conditions import PodState, lost
from agentsandbox.backends.kubernetes.manifests import CONTAINER
from agentsandbox.backends.kubernetes.watch import Change, ChangeType
from agentsandbox.errors import ProvisionError, SandboxLost
from agentsandbox.models.events import Event, EventSink

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.vetting import Vetter
    from agentsandbox.backends.kubernetes.watch import Reflector
    from agentsandbox.models.sandbox import Identity, SandboxSpec

__all__ = ["KubernetesSandbox"]

CLOSE = 5.0
"""Seconds that closing a session may take that did not come about."""


class KubernetesSandbox(BackendSandbox):
    """
    A sandbox in a Pod.

    Args:
        spec: What it is made from.
        name: Its name in the run.
        pod: The name of its Pod.
        nonce: What its runner wants to see.
        sink: Where to tell that it is lost.

    """

    identity: Identity

    def __init__(self, spec: SandboxSpec, name: str, pod: str, nonce: str, sink: Callable[[], EventSink]) -> None:
        self.spec = spec
        self.name = name
        self.pod = pod
        """The name of its Pod."""
        self.nonce = nonce
        """What its runner wants to see."""
        self.uid = ""
        """The Pod's UID; empty before the API server has answered."""
        self.node = None
        self.container = CONTAINER
        """Which container of the Pod it is."""
        self.ours = True
        """Whether its first process is ours; else a runner is started beside what the image starts."""
        self.unwanted = False
        """Whether its end is what somebody wants."""
        self.loss: SandboxLost | None = None
        """What the cluster said about its end."""
        self.state: PodState | None = None
        """Its Pod when it was last found ready."""
        self.ready_at = 0.0
        """When that was, in seconds on the driver's monotonic clock."""
        self.born = 0.0
        """When its Pod was made, likewise."""
        self.proved_at = 0.0
        """When it last gave an answer that was asked for, likewise."""
        self.vetter: Vetter | None = None
        """Who takes a last look at it before it is leased."""
        self.shared = False
        """Whether it is no sandbox itself, but a place for several, which tell of their losses."""
        self.on_lost: Callable[[SandboxLost], None] = lambda _error: None
        """Called once when it is lost: what its Pod serves besides is lost with it."""
        self._reach: Callable[[], Awaitable[None]] | None = None
        self._sink = sink
        self._unsubscribe: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        state = "making" if self.state is None else self.loss.reason if self.loss else "ready"
        state = "unwanted" if self.unwanted else state
        return f"<KubernetesSandbox {self.name} in {self.pod} [{self.spec.image}, {state}]>"

    async def check(self) -> None:
        """
        Make sure that it is still the same, by what the watch has told; no call is made.

        Raises:
            SandboxLost: If it is not.

        """
        if self.loss is not None:
            raise _again(self.loss)
        if not self.dormant and not self.session.alive:
            raise _again(self.session.lost or SandboxLost("died", "its session was closed"))

    async def vet(self) -> None:
        """
        Make sure that it is worth leasing: ready, on a node that takes work, with enough of its life left, and alive.

        Raises:
            SandboxLost: If it is not.

        """
        await self.check()
        if self.vetter is not None:
            await self.vetter.vet(self)
            await self.check()

    def leave_closed(self, reach: Callable[[], Awaitable[None]]) -> None:
        """Have no session until :meth:`open`, which then uses *reach* to get one."""
        self._reach = reach

    @property
    def dormant(self) -> bool:
        """Whether it has no session until somebody takes it."""
        return self._reach is not None

    async def open(self) -> None:
        """
        Get the session that it was left without.

        Raises:
            InfrastructureError: If there is no way to the Pod. Nobody has used it; it may be tried again.

        """
        if self._reach is None:
            return
        try:
            await self._reach()
        except BaseException:
            if self.opened:
                with anyio.move_on_after(CLOSE, shield=True):
                    await self.session.aclose()
                del self.session
            raise
        self._reach = None

    @property
    def opened(self) -> bool:
        """Whether it has a session."""
        return hasattr(self, "session")

    def guard(self, reflector: Reflector, state: PodState) -> None:
        """Take an identity, and from now on compare everything that is told about the Pod with it."""
        self.unguard()
        self.state, self.identity, self.node = state, state.identity, state.node
        self.ready_at = self.proved_at = anyio.current_time()
        self.loss = None
        self._unsubscribe = reflector.subscribe(self._changed, uid=self.uid)
        self.compare(reflector.get(self.uid), reflector.gone(self.uid))

    async def abandon(self) -> None:
        """Let go of it: whatever happens to its Pod from now on is no loss."""
        self.unwanted = True
        self.unguard()
        if self.opened:
            await self.session.aclose()

    def still_there(self) -> None:
        """Refuse a Pod that was lost while it was made."""
        if self.loss is not None:
            raise ProvisionError(f"Pod {self.pod} {self.loss}")

    def unguard(self) -> None:
        """Compare no longer."""
        self._unsubscribe()
        self._unsubscribe = lambda: None

    def compare(self, pod: dict[str, Any] | None, last: dict[str, Any] | None = None) -> SandboxLost | None:
        """Compare what is there with what was leased; a difference is the end."""
        error = lost(pod, self.identity, last=last)
        if error is not None:
            self.lose(error)
        return error

    def lose(self, error: SandboxLost) -> None:
        """Give it up: who waits for a command in it is told so at once."""
        if self.unwanted or self.loss is not None:
            return
        self.loss = error
        self.on_lost(error)
        if self.opened:
            self.session.lose(error)
        if (self.opened or self.dormant) and not self.shared:
            data = {"reason": error.reason, "detail": error.detail, "pod": self.pod, "node": self.node}
            self._sink()(Event(name="sandbox.lost", at=anyio.current_time(), sandbox=self.name, data=data))

    def _changed(self, change: Change) -> None:
        if change.type is ChangeType.DELETED:
            self.compare(None, change.object)
        else:
            self.compare(change.object)


def _again(error: SandboxLost) -> SandboxLost:
    return type(error)(error.reason, error.detail)
