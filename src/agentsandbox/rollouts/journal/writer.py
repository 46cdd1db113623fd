# SPDX-License-Identifier: Apache-2.0
"""Group commit: whoever waits for the disk first takes everybody's events along."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import attrs

if TYPE_CHECKING:
    from agentsandbox.rollouts.journal.store import Row, Store

__all__ = ["Writer"]


@attrs.define(eq=False, repr=False)
class Writer:
    """
    Hands events to the store, one transaction at a time, in a thread that nobody else can occupy.

    There is no task behind it: of those who wait, one writes for all.
    """

    store: Store
    # A limiter of our own, so that whoever fills the default pool of threads cannot hold up the end of an episode.
    _thread: anyio.CapacityLimiter = attrs.field(factory=lambda: anyio.CapacityLimiter(1), init=False)
    _pending: list[Row] = attrs.field(factory=list, init=False)
    _durable: bool = attrs.field(default=False, init=False)
    _appended: int = attrs.field(default=0, init=False)
    _written: int = attrs.field(default=0, init=False)
    _commits: int = attrs.field(default=0, init=False)
    _turn: anyio.Event | None = attrs.field(default=None, init=False)

    def append(self, *rows: Row, durable: bool = False) -> None:
        """Put events in line. They are written by the next :meth:`flush`, in one transaction with their neighbours."""
        self._pending.extend(rows)
        self._appended += len(rows)
        self._durable |= durable

    async def flush(self) -> None:
        """
        Return when everything that was in line is written. Not to be cancelled: it takes a few milliseconds.

        Raises:
            JournalError: If it could not be written. It stays in line, for the next to try.

        """
        target = self._appended
        with anyio.CancelScope(shield=True):
            while self._written < target:
                if self._turn is not None:
                    await self._turn.wait()
                else:
                    await self._commit()

    async def _commit(self) -> None:
        self._turn = turn = anyio.Event()
        rows, durable = self._pending, self._durable
        self._pending, self._durable = [], False
        try:
            await anyio.to_thread.run_sync(partial(self.store.append, rows, durable=durable), limiter=self._thread)
        except BaseException:
            self._pending[:0] = rows
            self._durable |= durable
            raise
        else:
            self._written += len(rows)
            self._commits += 1
        finally:
            self._turn = None
            turn.set()

    async def aclose(self) -> None:
        """Write what is left and close the file, whatever comes of the former."""
        try:
            await self.flush()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.store.close, limiter=self._thread)

    def __repr__(self) -> str:
        return f"<Writer [{self._written} events in {self._commits} transactions, {len(self._pending)} waiting]>"
