# SPDX-License-Identifier: Apache-2.0
"""Which episode is admitted next: one whose sandbox is ready, so that it does not wait in the place of another one."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from agentsandbox.models.events import Event
    from agentsandbox.rollouts.accounting import Ledger, Ticket

__all__ = ["Admission"]


class Admission:
    """
    Admit episodes as their sandboxes become ready. It is an event sink: it must hear of the sandboxes and the attempts.

    An episode is still admitted in the end if nothing becomes ready for a while, so that it learns why.

    Args:
        patience: Seconds after which one is admitted all the same.

    """

    def __init__(self, patience: float = 60.0) -> None:
        self.patience = patience
        # Image → its ready sandboxes, those first that have been ready for longest.
        self._ready: dict[str, dict[str, None]] = {}
        self._images: dict[str, str] = {}
        # Attempts that were admitted and have no sandbox yet: each has a claim to one.
        self._promised: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        self._claims: dict[str, int] = {}
        # Whoever waits to be admitted, batch by batch.
        self._waiting: defaultdict[Ledger, OrderedDict[anyio.Event, None]] = defaultdict(OrderedDict)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        name = event.name
        if name == "sandbox.ready" and event.sandbox is not None:
            self._drop(event.sandbox)
            image = str(event.data["image"])
            self._images[event.sandbox] = image
            self._ready.setdefault(image, {})[event.sandbox] = None
            self._wake()
        elif event.sandbox is not None and name in _GONE:
            self._drop(event.sandbox)
        if name in ("attempt.granted", "attempt.ended") and event.episode is not None and event.attempt is not None:
            self._settle(event.episode, event.attempt)

    async def take(self, ledger: Ledger) -> Ticket | None:
        """
        Start the next attempt, when it may start.

        Returns:
            What to try, or ``None`` if nothing waits any more that may run now.

        """
        until = anyio.current_time() + self.patience
        while ledger.waiting:
            ticket = ledger.take(self._free())
            if ticket is None:
                if await self._woken(ledger, until):
                    continue
                if (ticket := ledger.take()) is None:
                    return None
            image = ticket.episode.image
            self._promised[ticket.episode.id, ticket.number].append(image)
            self._claims[image] = self._claims.get(image, 0) + 1
            if not ledger.waiting:
                for waiting in self._waiting.pop(ledger, ()):
                    waiting.set()
            return ticket
        return None

    async def _woken(self, ledger: Ledger, until: float) -> bool:
        """Wait until a sandbox becomes ready; whether one did in time."""
        woken = anyio.Event()
        self._waiting[ledger][woken] = None
        try:
            with anyio.CancelScope(deadline=until):
                await woken.wait()
        except BaseException:
            if woken.is_set():
                self._wake()  # whoever was to use it is gone
            raise
        finally:
            self._waiting[ledger].pop(woken, None)
            if not self._waiting[ledger]:
                del self._waiting[ledger]
        return woken.is_set()

    def _free(self) -> Iterator[str]:
        """Name the images that have a ready sandbox nobody has a claim to."""
        return (image for image, sandboxes in self._ready.items() if len(sandboxes) > self._claims.get(image, 0))

    def _wake(self) -> None:
        """Wake one of each batch: whichever has something to run in it takes it."""
        for waiting in self._waiting.values():
            if waiting:
                waiting.popitem(last=False)[0].set()

    def _drop(self, sandbox: str) -> None:
        image = self._images.pop(sandbox, None)
        if image is not None:
            sandboxes = self._ready[image]
            sandboxes.pop(sandbox, None)
            if not sandboxes:
                del self._ready[image]

    def _settle(self, episode: str, attempt: int) -> None:
        images = self._promised.get((episode, attempt))
        if images:
            image = images.pop()
            if not images:
                del self._promised[episode, attempt]
            self._claims[image] -= 1
            if not self._claims[image]:
                del self._claims[image]

    def __repr__(self) -> str:
        ready = sum(map(len, self._ready.values()))
        waiting = sum(map(len, self._waiting.values()))
        return f"<Admission [{ready} ready, {len(self._promised)} admitted | {waiting} waiting]>"


_GONE = frozenset({"lease.granted", "sandbox.lost", "sandbox.deleted", "sandbox.failed", "sandbox.not_recycled"})
"""After these a sandbox is not ready."""
