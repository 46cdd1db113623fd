# SPDX-License-Identifier: Apache-2.0
"""Starting a second one of what takes too long, and taking what comes first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import attrs

from agentsandbox.rollouts.stopping import really_cancelled

if TYPE_CHECKING:
    from agentsandbox.metrics.durations import Samples
    from agentsandbox.rollouts.hedging import Hedger
    from agentsandbox.rollouts.source import RolloutLease

__all__ = ["Race", "first_lease"]

HAND_BACK_GRACE = 30.0
"""How long giving back the sandbox that came second may take, in seconds."""


@attrs.define(eq=False, repr=False)
class Race:
    """Wakes those who wait for somebody to become a straggler."""

    hedger: Hedger
    _moved: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def moved(self) -> None:
        """Let everybody look again: something ended, or the budget grew."""
        self._moved.set()
        self._moved = anyio.Event()

    async def straggles(self, samples: Samples, began: float) -> None:
        """Return when what began then has become a straggler and an extra sandbox was taken out of the budget."""
        while True:
            now = anyio.current_time()
            due = self.hedger.due(samples, began, now)
            if due <= now:
                if self.hedger.take():
                    return
                due = math.inf
            with anyio.CancelScope(deadline=due):
                await self._moved.wait()

    def __repr__(self) -> str:
        return f"<Race [{self.hedger!r}]>"


async def first_lease(race: Race, acquire: Callable[[], Awaitable[RolloutLease]]) -> tuple[RolloutLease, float]:
    """
    Wait for a sandbox, and ask for a second one when that takes too long; what comes second is handed back.

    Args:
        race: Who is a straggler.
        acquire: Asks for a sandbox.

    Returns:
        The lease that came first, and how long after the first call its own call was, in seconds.

    Raises:
        Exception: What the call raised; when there were two, what the first of them raised.

    """
    began = anyio.current_time()
    samples = race.hedger.acquires
    won: list[tuple[RolloutLease, float]] = []
    errors: dict[int, BaseException] = {}
    asked = 1

    async def ask(number: int, scope: anyio.CancelScope) -> None:
        called = anyio.current_time()
        try:
            lease = await acquire()
        except (Exception, anyio.get_cancelled_exc_class()) as error:
            if not isinstance(error, Exception) and really_cancelled():
                raise
            errors[number] = error
            if len(errors) == asked:
                scope.cancel()
            return
        if won:
            await _hand_back(lease)
        else:
            won.append((lease, called - began))
            scope.cancel()

    samples.begin(began)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, 0, group.cancel_scope)
            await race.straggles(samples, began)
            asked = 2
            group.start_soon(ask, 1, group.cancel_scope)
        if not won:
            raise errors[0]
        await anyio.lowlevel.checkpoint_if_cancelled()
    except BaseException:
        for lease, _ in won:
            await _hand_back(lease)
        raise
    finally:
        samples.end(began, anyio.current_time() - began if won else None)
        race.moved()
    return won[0]


async def _hand_back(lease: Any) -> None:
    with anyio.move_on_after(HAND_BACK_GRACE, shield=True), contextlib.suppress(Exception):
        await lease.release()  # Nothing ran in it; what cannot be given back is the pool's business.
