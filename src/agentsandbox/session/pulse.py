# SPDX-License-Identifier: Apache-2.0
"""One clock for the heartbeats of thousands of links, instead of a task with a timer for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Beating", "Pulse", "watching"]

AT_ONCE = 200
"""Links that are looked at before others have their turn in the event loop."""


class Beating(Protocol):
    """What has a heartbeat. :class:`~agentsandbox.session.link.Link` is one."""

    def beat(self, now: float) -> float:
        """Look whether the other side is silent for too long; return when to look again."""
        ...


class Pulse:
    """
    Looks at links, again and again; run :meth:`run` in a task of whoever owns it.

    Args:
        every: Seconds between two looks: how late a heartbeat may be.

    """

    def __init__(self, every: float = 1.0) -> None:
        self._every = every
        self._links: dict[Beating, None] = {}

    def add(self, link: Beating) -> None:
        """Look at a link from now on."""
        self._links[link] = None

    def remove(self, link: Beating) -> None:
        """Look at a link no longer. Idempotent."""
        self._links.pop(link, None)

    async def run(self) -> None:
        """Look at all links until cancelled."""
        while True:
            await anyio.sleep(self._every)
            for number, link in enumerate(tuple(self._links), 1):
                if link in self._links:
                    link.beat(anyio.current_time())
                if number % AT_ONCE == 0:
                    await anyio.lowlevel.checkpoint()

    def __repr__(self) -> str:
        return f"<Pulse [{len(self._links)} links, every {self._every:g} s]>"


@contextmanager
def watching(link: Beating, pulse: Pulse | None, group: TaskGroup) -> Iterator[None]:
    """Look at a link for as long as the context lasts: by a pulse, or without one by a task in *group*."""
    if pulse is None:
        group.start_soon(_watch, link)
        yield
        return
    pulse.add(link)
    try:
        yield
    finally:
        pulse.remove(link)


async def _watch(link: Beating) -> None:
    while True:
        now = anyio.current_time()
        await anyio.sleep(link.beat(now) - now)
