# SPDX-License-Identifier: Apache-2.0
"""Removing sandboxes: so many at a time, again if it fails, and now and then if it goes on failing."""

from __future__ import annotations

import heapq
import itertools
import logging
from typing import TYPE_CHECKING

import anyio
import attrs
from tenacity import AsyncRetrying, stop_after_attempt, wait_exponential, wait_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from agentsandbox.backends.base import Backend, BackendSandbox

__all__ = ["Removals"]

_log = logging.getLogger("agentsandbox.warmpool")

ATTEMPTS = 5
"""Tries in a row, before a sandbox counts as stuck."""

AT_ONCE = 64
"""Removals under way at a time; the time that one may take begins with its turn."""

AGAIN_AT_ONCE = 4
"""The same for those that are stuck."""

PAUSE = 15.0
"""Seconds until a stuck sandbox is tried again; it doubles each time."""

LONGEST_PAUSE = 300.0
"""Seconds to which it grows."""


class Removals:
    """
    Remove sandboxes, and never give one up.

    Args:
        backend: Whose they are.
        sandboxes: Every sandbox, by name.
        grace: How long one removal may take, in seconds, all its tries in a row together.
        removed: Called with the name of each one that is verified gone.
        resists: Called with the name of one that could not be removed, why, and how many rounds of tries that were.

    """

    def __init__(
        self,
        backend: Backend,
        sandboxes: Mapping[str, BackendSandbox],
        *,
        grace: float,
        removed: Callable[[str], None],
        resists: Callable[[str, str, int], None],
    ) -> None:
        self._backend = backend
        self._sandboxes = sandboxes
        self._grace = grace
        self._removed = removed
        self._resists = resists
        self._turns = anyio.Semaphore(AT_ONCE)
        self._stuck = _Agenda()
        self._under_way = 0

    @property
    def stuck(self) -> int:
        """How many wait for another try."""
        return len(self._stuck)

    async def remove(self, name: str) -> None:
        """Remove a sandbox when its turn comes; one that cannot be removed is stuck."""
        async with self._turns:
            with anyio.move_on_after(self._grace, shield=True) as scope:
                await self._remove(name)
            if scope.cancelled_caught:
                self._fail(name, "no answer", 1)

    async def keep_trying(self) -> None:
        """Try stuck ones again when their time comes, until cancelled."""
        turns = anyio.Semaphore(AGAIN_AT_ONCE)

        async def again(name: str, rounds: int) -> None:
            async with turns:
                why = "no answer"
                with anyio.move_on_after(self._grace):
                    try:
                        await self._backend.destroy(self._sandboxes[name])
                    except Exception as error:  # noqa: BLE001 - told, and tried again
                        why = f"{type(error).__name__}: {error}"
                    else:
                        self._removed(name)
                        return
                self._fail(name, why, rounds + 1)

        async with anyio.create_task_group() as group:
            while True:
                name, rounds = await self._stuck.next()
                group.start_soon(again, name, rounds)

    async def sweep(self, names: Iterable[str]) -> None:
        """Remove what is left at the end; there is no other try after this one."""

        async def remove(name: str) -> None:
            async with self._turns:
                await self._remove(name)

        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(remove, name)

    async def _remove(self, name: str) -> None:
        sandbox = self._sandboxes[name]
        self._under_way += 1
        try:
            await self._backend.destroy(sandbox)
        except Exception:  # noqa: BLE001 - whatever it was, the sandbox may still be there
            if (last := await self._remove_again(sandbox)) is not None:
                self._fail(name, f"{type(last).__name__}: {last}", 1)
                return
        finally:
            self._under_way -= 1
        self._removed(name)

    async def _remove_again(self, sandbox: BackendSandbox) -> Exception | None:
        wait = wait_exponential(multiplier=0.1, max=5.0) + wait_random(0.0, 0.1)
        await anyio.sleep(0.1)
        try:
            stop = stop_after_attempt(ATTEMPTS - 1)
            async for attempt in AsyncRetrying(stop=stop, wait=wait, sleep=anyio.sleep, reraise=True):
                with attempt:
                    await self._backend.destroy(sandbox)
        except Exception as last:  # noqa: BLE001 - reported, counted, and tried again later
            return last
        return None

    def _fail(self, name: str, why: str, rounds: int) -> None:
        pause = min(LONGEST_PAUSE, PAUSE * 2.0 ** min(rounds - 1, 10))
        self._stuck.add(anyio.current_time() + pause, name, rounds)
        if rounds == 1:
            _log.warning("sandbox %s could not be removed (%s); it still counts as alive", name, why)
        self._resists(name, why, rounds)

    def __repr__(self) -> str:
        return f"<Removals [{self._under_way} under way, {self.stuck} stuck]>"


@attrs.define(eq=False)
class _Agenda:
    """What is to be done when, soonest first."""

    _entries: list[tuple[float, int, str, int]] = attrs.field(factory=list, init=False)
    _numbers: itertools.count[int] = attrs.field(factory=itertools.count, init=False)
    _changed: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, at: float, name: str, rounds: int) -> None:
        heapq.heappush(self._entries, (at, next(self._numbers), name, rounds))
        self._changed.set()

    async def next(self) -> tuple[str, int]:
        """Wait for the time of the first entry and take it."""
        while True:
            self._changed = anyio.Event()
            due = self._entries[0][0] if self._entries else float("inf")
            with anyio.CancelScope(deadline=due) as scope:
                await self._changed.wait()
            if scope.cancelled_caught and self._entries:
                _, _, name, rounds = heapq.heappop(self._entries)
                return name, rounds
