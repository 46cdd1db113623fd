# SPDX-License-Identifier: Apache-2.0
"""
Time that passes only when everybody waits: an hour of timeouts tested in a millisecond.

For asyncio give pytest's ``anyio_backend`` as ``("asyncio", {"loop_factory": VirtualTimeLoop})``; for trio use
``trio.testing.MockClock(autojump_threshold=0)``. Not for real sockets, threads or processes: the clock would jump while
they work.
"""

from __future__ import annotations

import asyncio
import selectors

__all__ = ["VirtualTimeLoop"]


class _JumpingSelector(selectors.DefaultSelector):
    """Where a selector would wait for time to pass, move the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """
    An event loop whose clock jumps to the next timer as soon as nothing else is to be done.

    Raises:
        RuntimeError: From the loop, if everything waits for something that no timer will end.

    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds; 0 at the start."""
        return self._jumping.now
