# SPDX-License-Identifier: Apache-2.0
"""What a journal says, asked of it with SQL. Everything in here blocks, and nothing writes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from agentsandbox.models.episode import Attempt, Counts, Episode, EpisodeRecord
from agentsandbox.models.sandbox import Identity
from agentsandbox.rollouts.journal.encoding import decode, load_attempt, load_record

__all__ = ["History", "Known", "Orphan", "batches", "counts", "histories", "leftovers", "orphans", "records"]

_STATES = """
SELECT status, count(*) FROM (
    SELECT status, max(seq) FROM events
    WHERE name IN ('episode.submitted', 'episode.ended', 'episode.reopened') AND (?1 IS NULL OR batch = ?1)
    GROUP BY batch, digest
) GROUP BY status
"""
"""The last word on every episode; one that was submitted or taken up again has none yet."""


@attrs.frozen(kw_only=True)
class Orphan:
    """A sandbox that an attempt held when its driver ended without giving it back."""

    run: str
    """The run of that driver."""
    sandbox: str
    """The sandbox."""
    identity: Identity
    """Its identity when it was granted."""
    node: str | None = None
    """Where it was."""
    episode: str
    """The episode."""
    attempt: int
    """The attempt."""


@attrs.frozen(kw_only=True)
class Known:
    """A batch that a journal has."""

    number: int
    """Its number in the journal, in the order of submission."""
    batch_id: str | None
    """What its submitter called it."""
    fingerprint: str
    """Its content."""
    ended: bool
    """Whether its result was returned."""


@attrs.define(kw_only=True)
class History:
    """What a journal has of one episode of one batch."""

    started: int = 0
    """The number of the last attempt that began."""
    open: dict[int, Mapping[str, Any]] = attrs.field(factory=dict)
    """Attempts that began and did not end, with the sandbox they were granted, if they were."""
    attempts: list[Attempt] = attrs.field(factory=list)
    """Those that ended."""
    record: Mapping[str, Any] | None = None
    """The record, unless the episode was taken up again since."""


def counts(connection: sqlite3.Connection, batch: int | None = None) -> Counts:
    """Count episodes by how they ended; the law is a matter of one consistent look."""
    found = {row[0]: row[1] for row in connection.execute(_STATES, (batch,))}
    return Counts(
        submitted=sum(found.values()),
        rewarded=found.get("rewarded", 0),
        failed=found.get("failed", 0),
        retryable=found.get("retryable", 0),
        cancelled=found.get("cancelled", 0),
    )


def batches(connection: sqlite3.Connection) -> list[Known]:
    """List the batches, in the order of their submission."""
    ended = {row[0] for row in connection.execute("SELECT batch FROM events WHERE name = 'batch.ended'")}
    rows = connection.execute("SELECT batch, data FROM events WHERE name = 'batch.submitted' ORDER BY seq")
    return [
        Known(number=number, ended=number in ended, batch_id=data["batch_id"], fingerprint=data["fingerprint"])
        for number, data in ((number, json.loads(text)) for number, text in rows)
    ]


def histories(connection: sqlite3.Connection, batch: int) -> dict[str, History]:
    """Read what became of each episode of a batch, by the content of the episode."""
    found: dict[str, History] = {}
    rows = connection.execute(
        "SELECT name, digest, attempt, data FROM events WHERE batch = ? AND digest IS NOT NULL ORDER BY seq", (batch,)
    )
    for name, digest, attempt, text in rows:
        history = found.setdefault(digest, History())
        if name == "attempt.started":
            history.started = max(history.started, attempt)
            history.open[attempt] = {}
        elif name == "attempt.granted":
            history.open[attempt] = json.loads(text)
        elif name == "attempt.ended":
            history.open.pop(attempt, None)
            if history.record is None:  # Otherwise it came second, and is no part of what was returned.
                history.attempts.append(load_attempt(json.loads(text)))
        elif name == "episode.ended":
            history.record = json.loads(text)
        elif name == "episode.reopened":
            history.record = None
    return found


def records(connection: sqlite3.Connection, batch: int | None = None) -> Iterator[EpisodeRecord]:
    """Read the records of the episodes that have ended, in the order of their submission, without their inputs."""
    for known in batches(connection):
        if batch is not None and known.number != batch:
            continue
        found = histories(connection, known.number)
        submitted = connection.execute(
            "SELECT digest, data FROM events WHERE batch = ? AND name = 'episode.submitted' ORDER BY seq",
            (known.number,),
        )
        for digest, text in submitted:
            history = found[digest]
            if history.record is not None:
                episode = Episode(**decode(json.loads(text)))
                yield load_record(history.record, episode, tuple(history.attempts))


def orphans(connection: sqlite3.Connection) -> list[Orphan]:
    """List the sandboxes that attempts of runs without an end were granted and never gave back."""
    rows = connection.execute(
        """
        SELECT granted.run, granted.episode, granted.attempt, granted.data FROM events AS granted
        WHERE granted.name = 'attempt.granted'
          AND granted.run NOT IN (SELECT run FROM events WHERE name IN ('run.ended', 'run.reaped'))
          AND NOT EXISTS (
            SELECT 1 FROM events AS ended WHERE ended.batch = granted.batch AND ended.digest = granted.digest
              AND ended.attempt = granted.attempt AND ended.name = 'attempt.ended')
        ORDER BY granted.seq
        """
    )
    return [
        Orphan(
            run=run,
            sandbox=data["sandbox"],
            identity=Identity(**data["identity"]),
            node=data["node"],
            episode=episode,
            attempt=attempt,
        )
        for run, episode, attempt, data in ((*row[:3], json.loads(row[3])) for row in rows)
    ]


def leftovers(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """List the receipts of runs that have not come to their end, as ``Backend.remove_leftovers`` wants them."""
    begun = connection.execute(
        """
        SELECT run, data FROM events WHERE name = 'run.started'
          AND run NOT IN (SELECT run FROM events WHERE name IN ('run.ended', 'run.reaped')) ORDER BY seq
        """
    ).fetchall()
    receipts = []
    for run, text in begun:
        more = connection.execute(
            "SELECT name, data FROM events WHERE run = ? AND name IN ('host.created', 'run.described') ORDER BY seq",
            (run,),
        )
        receipt, made = json.loads(text), []
        for name, data in more:
            if name == "host.created":
                made.append(json.loads(data))
            else:
                receipt.update(json.loads(data))
        receipts.append({**receipt, "run": run, "created": made, "ended": False})
    return receipts
