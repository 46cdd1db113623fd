# SPDX-License-Identifier: Apache-2.0
"""
The file: a SQLite database in WAL mode with one table that only grows. Everything in here blocks.

A transaction is in the file whole or not at all, whatever kills the driver: SQLite checks every frame of its log and
stops at the first torn one.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from agentsandbox.errors import ConfigurationError, JournalError
from agentsandbox.rollouts.journal.encoding import dump

__all__ = ["SCHEMA_VERSION", "Row", "Store", "connect_to_read", "translated"]

SCHEMA_VERSION = 1
"""Of what is written; a file of any other version is refused, unless :data:`_MIGRATIONS` knows how to lift it."""

_APPLICATION_ID = 0x61736278
"""What tells a journal from any other SQLite file."""

_MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection], None]] = {}
"""Version → what makes it the next one. There was none before the first."""

_COLUMNS = "at, run, batch, name, digest, episode, attempt, status, final, data"

_SCHEMA = (
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, run TEXT NOT NULL, batch INTEGER, name TEXT NOT NULL, digest TEXT,
        episode TEXT, attempt INTEGER, status TEXT, final INTEGER NOT NULL, data TEXT NOT NULL)""",
    "CREATE INDEX events_of_batches ON events (batch, digest, seq)",
    "CREATE INDEX events_by_name ON events (name)",
    "CREATE UNIQUE INDEX one_record ON events (batch, digest) WHERE name = 'episode.ended' AND final = 1",
    "CREATE TRIGGER no_change BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'a journal only grows'); END",
    "CREATE TRIGGER no_removal BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'a journal only grows'); END",
    f"PRAGMA application_id = {_APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

_BUSY_SECONDS = 10.0
"""How long to wait for another connection: readers never hold one up, and there is no second writer."""

_log = logging.getLogger("agentsandbox.journal")
_open_here: set[str] = set()
"""Journals that this process writes: its own lock would not keep it out."""

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Row:
    """One event, before it is written."""

    name: str
    """What happened."""
    batch: int | None = None
    """In which batch."""
    digest: str | None = None
    """To which episode, by its content."""
    episode: str | None = None
    """Its id, for people."""
    attempt: int | None = None
    """In which attempt."""
    status: str | None = None
    """How it ended, if it did."""
    final: bool = False
    """Whether that is for good: nothing ends twice."""
    data: Callable[[], Any] = dict
    """Gives the rest, as JSON knows it; called in the writer's thread."""
    run: str | None = None
    """Of which run; of the present one if nothing is said."""
    at: float = attrs.field(factory=time.time)
    """When, in seconds since the epoch."""


def _lock(path: Path) -> int:
    real = str(path.resolve())
    if real in _open_here:
        raise JournalError(f"the journal {path} is open for writing in this process already")
    place = path.with_name(path.name + "-lock")
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Of the process and not of the descriptor, so that a forked child cannot keep it after its parent's death.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise JournalError(f"the journal {path} is being written by process {holder or 'unknown'}") from None
    os.ftruncate(descriptor, 0)
    with contextlib.suppress(OSError):  # Only for people; on a full disk nobody learns the number.
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    _open_here.add(real)
    return descriptor


@attrs.define(eq=False, repr=False)
class Store:
    """A journal that this process alone writes."""

    path: Path
    connection: sqlite3.Connection
    run: str
    rescued: str | None = None
    """What was lost of a damaged file, if it was one."""
    _descriptor: int = -1
    _pid: int = attrs.field(factory=os.getpid)

    @classmethod
    def open(cls, path: Path, *, run: str, resume: bool) -> Store:
        """
        Open or make a journal for writing.

        Raises:
            ConfigurationError: If there is one, and it is not to be resumed.
            JournalError: If it cannot be used.

        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _lock(path)
        except OSError as error:
            raise JournalError(f"cannot write the journal {path}: {error}") from error
        store = None
        try:
            if not resume and path.exists() and path.stat().st_size > 0 and _has_batches(path):
                raise ConfigurationError(f"the journal {path} exists; give resume=True to go on with it")
            connection, rescued = translated(path, lambda: _open(path))
            store = cls(path=path, connection=connection, run=run, rescued=rescued, descriptor=descriptor)
        finally:
            if store is None:
                _unlock(path, descriptor)
        return store

    def append(self, rows: Iterable[Row], *, durable: bool) -> None:
        """
        Write events in one transaction.

        Args:
            rows: The events, in order.
            durable: Whether they outlive a crash of the machine, too; any that are written outlive the driver.

        """

        def write() -> None:
            # A later transaction that is synced takes the earlier ones of the log with it.
            self.connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            with _transaction(self.connection):
                self.connection.executemany(_INSERT, (self._values(row) for row in rows))

        translated(self.path, write)

    def _values(self, row: Row) -> tuple[Any, ...]:
        text = dump(row.data())
        where = (row.digest, row.episode, row.attempt, row.status, int(row.final))
        return (row.at, row.run or self.run, row.batch, row.name, *where, text)

    def close(self) -> None:
        """Close the file and let others write it. Idempotent; in a forked child nothing."""
        if os.getpid() != self._pid or self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            with contextlib.suppress(sqlite3.Error):  # A full disk: what was written stays in the log and is found.
                self.connection.close()
        finally:
            _unlock(self.path, descriptor)

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r} [{'open' if self._descriptor >= 0 else 'closed'}]>"


_INSERT = f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - nothing of a stranger's


def _unlock(path: Path, descriptor: int) -> None:
    _open_here.discard(str(path.resolve()))
    os.close(descriptor)


def translated(path: Path, action: Callable[[], T]) -> T:
    """
    Call *action*; what SQLite says becomes a :exc:`JournalError` that names the file.

    Raises:
        JournalError: If it could not be done.

    """
    try:
        return action()
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None) or 0
        if code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            message = (
                f"the journal {path} could not be written: {error} (a full disk, a quota or a limit of the file's "
                "size); what it holds stays valid: make room and resume"
            )
        else:
            message = f"the journal {path} cannot be used: {error}"
        raise JournalError(message) from error


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def _open(path: Path) -> tuple[sqlite3.Connection, str | None]:
    if not path.exists() or path.stat().st_size == 0:
        # Under its name it is whole from the first moment, for readers and for whoever comes after a kill.
        fresh = _made(path.with_name(path.name + "-new"))
        fresh.close()
        path.with_name(path.name + "-new").replace(path)
    connection = _connect(path)
    rescued = None
    try:
        try:
            check_version(path, connection, migrate=True)
            findings = [row[0] for row in connection.execute("PRAGMA quick_check(1)")]
            damage = None if findings == ["ok"] else str(findings[0])
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
            damage = str(error)
        if damage is not None:
            connection, rescued = _rescue(path, connection, damage)
        if connection.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise JournalError(f"the journal {path} is on a file system without shared memory; put it on a local one")
    except BaseException:
        connection.close()
        raise
    return connection, rescued


def _made(path: Path) -> sqlite3.Connection:
    """Make an empty journal, in place of one that was not finished."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    connection = _connect(path)
    try:
        with _transaction(connection):
            for statement in _SCHEMA:
                connection.execute(statement)
        connection.execute("PRAGMA journal_mode = WAL")
    except BaseException:
        connection.close()
        raise
    return connection


def check_version(path: Path, connection: sqlite3.Connection, *, migrate: bool) -> None:
    """
    Refuse a file that is no journal, or one of a version that is not known.

    Args:
        path: The file.
        connection: To it.
        migrate: Whether an older one is lifted, if that is known how.

    Raises:
        JournalError: Naming the version.

    """
    kind = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if kind != _APPLICATION_ID:
        raise JournalError(f"{path} is not a journal; it is left as it is")
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"the journal {path} has schema {version}, written by a newer agentsandbox; this one reads up to "
            f"{SCHEMA_VERSION}: upgrade it"
        )
    while version < SCHEMA_VERSION:
        if version not in _MIGRATIONS or not migrate:
            raise JournalError(
                f"the journal {path} has schema {version}, and this agentsandbox needs {SCHEMA_VERSION}: finish it "
                "with the version that began it"
            )
        with _transaction(connection):
            _MIGRATIONS[version](connection)
            version += 1
            connection.execute(f"PRAGMA user_version = {version}")


def _rescue(path: Path, damaged: sqlite3.Connection, why: str) -> tuple[sqlite3.Connection, str]:
    """Keep the events up to the first that cannot be read: the beginning of a history is a history."""
    place = path.with_name(path.name + "-rescued")
    fresh = _made(place)
    kept = 0
    try:
        with _transaction(fresh):
            try:
                # Otherwise SQLite does not look at a file that is shorter than it says.
                damaged.execute("PRAGMA writable_schema = ON")
                damaged.execute("PRAGMA query_only = ON")
                for row in damaged.execute(f"SELECT seq, {_COLUMNS} FROM events ORDER BY seq"):  # noqa: S608 - as above
                    fresh.execute(f"INSERT INTO events (seq, {_COLUMNS}) VALUES ({', '.join('?' * 11)})", row)  # noqa: S608
                    kept += 1
            except sqlite3.DatabaseError as error:
                why = str(error)
    finally:
        fresh.close()
    if not kept:
        place.unlink()
        raise JournalError(f"the journal {path} is damaged and nothing in it can be read: {why}; it is left as it is")
    with contextlib.suppress(sqlite3.Error):
        damaged.close()
    aside = next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}-damaged-{n}")).exists())
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.replace(aside)
    place.replace(path)
    said = f"the journal {path} was damaged ({why}): {kept} events were kept, the damaged file is {aside}"
    _log.warning(said)
    return _connect(path), said


def _has_batches(path: Path) -> bool:
    with contextlib.closing(connect_to_read(path)) as connection:
        found = connection.execute("SELECT EXISTS (SELECT 1 FROM events WHERE name = 'batch.submitted')").fetchone()
    return bool(found[0])


def connect_to_read(path: Path) -> sqlite3.Connection:
    """
    Open a journal to read it, whether somebody writes it or not.

    Raises:
        JournalError: If there is none, or it is none.

    """
    if not path.is_file():
        raise JournalError(f"there is no journal {path}")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_BUSY_SECONDS, isolation_level=None
        )
        try:
            check_version(path, connection, migrate=False)
        except BaseException:
            connection.close()
            raise
        return connection

    return translated(path, connect)
