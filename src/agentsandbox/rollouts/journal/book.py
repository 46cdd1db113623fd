# SPDX-License-Identifier: Apache-2.0
"""The journal of a pool, over all its batches and all the drivers that it had."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from agentsandbox.errors import JournalError, UsageError
from agentsandbox.rollouts.journal import reading
from agentsandbox.rollouts.journal.batches import BatchJournal, Shelf, fingerprint, submitted, take_up
from agentsandbox.rollouts.journal.encoding import digest, encode
from agentsandbox.rollouts.journal.store import Row, Store, connect_to_read, translated
from agentsandbox.rollouts.journal.writer import Writer

if TYPE_CHECKING:
    import sqlite3

    from agentsandbox.models.episode import Counts, Episode, EpisodeRecord
    from agentsandbox.models.events import Event
    from agentsandbox.rollouts.journal.batches import Progress
    from agentsandbox.rollouts.journal.reading import Orphan

__all__ = ["Journal"]


class Journal:
    """
    A file that knows what every batch has come to.

    Each step of an attempt is written before it is taken, and the end of an episode is on disk before its record is
    returned. A driver that was killed at any moment starts again with *resume*: finished records are returned as they
    were, and the rest runs again. One driver writes a journal; any number of others may read it meanwhile with
    :meth:`counts` and :meth:`records`, which block and need nothing to be open.

    Args:
        path: The file: a SQLite database in WAL mode, with two companions beside it while it is written. Not on a
            network file system.
        resume: Whether to go on with a file that exists; otherwise one that exists is refused.
        retry: Whether episodes that ended retryable are tried again when their batch is resumed.

    """

    def __init__(self, path: Path | str, *, resume: bool = False, retry: bool = False) -> None:
        self.path = Path(path)
        self.resume = resume
        self.retry = retry
        self.orphans: tuple[Orphan, ...] = ()
        """Sandboxes that earlier drivers held when they were killed, as of the opening."""
        self.leftovers: tuple[Mapping[str, Any], ...] = ()
        """Receipts of earlier runs that have not come to their end, as of the opening."""
        self.rescued: str | None = None
        """What was lost of a damaged file, if it was one."""
        self._writer: Writer | None = None
        self._shelf = Shelf([])
        self._batches = 0

    @asynccontextmanager
    async def writing(self, receipt: Mapping[str, Any] | None = None) -> AsyncGenerator[Journal]:
        """
        Open the file for writing, for as long as the context lasts.

        Args:
            receipt: What tells this run from others, and by which its leftovers can be removed: ``run_id``, ``backend``
                and ``driver``, as ``Backend.remove_leftovers`` wants it.

        Raises:
            ConfigurationError: If the file exists and is not to be resumed.
            JournalError: If it cannot be used, or another process writes it.
            UsageError: If it is open already.

        """
        if self._writer is not None:
            raise UsageError(f"the journal {self.path} is open already")
        run = secrets.token_hex(8)

        def open_() -> Store:
            store = Store.open(self.path, run=run, resume=self.resume)
            try:
                translated(self.path, lambda: self._look(store.connection))
            except BaseException:
                store.close()
                raise
            return store

        with anyio.CancelScope(shield=True):
            store = await anyio.to_thread.run_sync(open_, limiter=anyio.CapacityLimiter(1))
        self.rescued = store.rescued
        self._writer = writer = Writer(store)
        try:
            content = dict(receipt or {})
            writer.append(Row(name="run.started", data=lambda: encode(content)))
            await writer.flush()
            yield self
        except BaseException:
            with suppress(JournalError):  # What ended the run says more than what could not be written about it.
                await self._close(writer)
            raise
        await self._close(writer)

    async def _close(self, writer: Writer) -> None:
        self._writer = None
        writer.append(Row(name="run.ended"), durable=True)
        await writer.aclose()

    def _look(self, connection: sqlite3.Connection) -> None:
        known = reading.batches(connection)
        self._shelf = Shelf(known)
        self._batches = max((batch.number for batch in known), default=0)
        self.orphans = tuple(reading.orphans(connection))
        self.leftovers = tuple(reading.leftovers(connection))

    async def begin(self, episodes: Sequence[Episode], *, batch_id: str | None = None) -> BatchJournal:
        """
        Take up a batch: write that it was submitted, or find what an earlier driver has made of it.

        Args:
            episodes: The batch.
            batch_id: What it is called, such as ``"step-49"``. Without it a batch is recognised by its content.

        Raises:
            ConfigurationError: If an episode cannot be recognised after a restart.
            JournalError: If it cannot be written.

        """
        self._open()
        thread = anyio.CapacityLimiter(1)
        digests = await anyio.to_thread.run_sync(lambda: [digest(episode) for episode in episodes], limiter=thread)
        writer = self._open()
        known = self._shelf.take(fingerprint(digests), batch_id)
        if known is None:
            self._batches += 1
            number = self._batches
            finished: dict[int, EpisodeRecord] = {}
            progress: dict[int, Progress] = {}
            rows = submitted(episodes, digests, number, batch_id)
        else:
            number = known.number
            histories = await anyio.to_thread.run_sync(self._histories, number, limiter=thread)
            finished, progress, rows = take_up(episodes, digests, number, histories, retry=self.retry)
            rows.insert(0, Row(name="batch.resumed", batch=number))
        writer.append(*rows)
        await writer.flush()
        return BatchJournal(
            writer=writer, number=number, episodes=episodes, digests=digests, finished=finished, progress=progress
        )

    def _histories(self, number: int) -> dict[str, reading.History]:
        with self._reading() as connection:
            return reading.histories(connection, number)

    def note(self, event: Event) -> None:
        """Take an event of the pool: what was created is written, so that it can be removed when this driver is not."""
        if event.name == "host.created" and self._writer is not None:
            self._writer.append(Row(name="host.created", data=lambda: encode(dict(event.data))))

    async def describe(self, receipt: Mapping[str, Any]) -> None:
        """Write what is known of the run only now that its backend runs, for whoever has to remove its leftovers."""
        if receipt:
            content = dict(receipt)
            writer = self._open()
            writer.append(Row(name="run.described", data=lambda: encode(content)))
            await writer.flush()

    async def reaped(self, receipt: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Write that what an earlier run left behind was removed."""
        run, said = receipt["run"], list(lines)
        writer = self._open()
        writer.append(Row(name="run.reaped", run=run, data=lambda: {"removed": said}))
        await writer.flush()

    def counts(self, batch: int | None = None) -> Counts:
        """
        Count episodes by how they ended, at this instant. What has not ended is ``pending``.

        Args:
            batch: Of which batch, counted from 1; of all of them when nothing is said.

        Raises:
            JournalError: If there is no such file, or it is no journal.

        """
        with self._reading() as connection:
            return reading.counts(connection, batch)

    def records(self, batch: int | None = None) -> tuple[EpisodeRecord, ...]:
        """
        Read the records of all episodes that have ended, in the order of their submission.

        They are as they were returned, except that their episodes have no ``inputs``: those are not in the journal.

        Args:
            batch: Of which batch, counted from 1; of all of them when nothing is said.

        Raises:
            JournalError: If there is no such file, or it is no journal.

        """
        with self._reading() as connection:
            return tuple(reading.records(connection, batch))

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with closing(connect_to_read(self.path)) as connection:
            translated(self.path, lambda: connection.execute("BEGIN"))
            yield connection

    def _open(self) -> Writer:
        if self._writer is None:
            raise UsageError(f"the journal {self.path} is not open; its pool opens it")
        return self._writer

    def __repr__(self) -> str:
        state = "closed" if self._writer is None else repr(self._writer)
        return f"<Journal {str(self.path)!r} [{self._batches} batches | {state}]>"
