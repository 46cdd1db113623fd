# SPDX-License-Identifier: Apache-2.0
"""Hold a journal to the law, as a stranger who reads it: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from agentsandbox.rollouts.journal import Journal

if TYPE_CHECKING:
    import os

    from agentsandbox.models.episode import Counts

__all__ = ["check_journal"]


def check_journal(path: str | os.PathLike[str]) -> Counts | None:
    """
    Read a journal, at any moment and whoever writes it, and check that its events can be true.

    An episode is submitted once, an attempt begins once and ends at most once, nothing begins after the end of its
    episode for good, no reward is without an attempt that ended, and ``submitted = rewarded + failed + retryable +
    cancelled + pending``.

    Args:
        path: Where it is.

    Returns:
        What it counts at present; ``None`` if there is no journal yet.

    Raises:
        AssertionError: If the law does not hold, naming the event.

    """
    place = Path(path)
    if not place.exists():
        return None
    counts = Journal(place).counts()
    with closing(sqlite3.connect(f"{place.resolve().as_uri()}?mode=ro", uri=True)) as reader:
        rows = reader.execute(
            "SELECT seq, name, batch, digest, attempt, status, final FROM events WHERE digest IS NOT NULL ORDER BY seq"
        ).fetchall()
    submitted, begun, ended, over = set(), set(), set(), set()
    for seq, name, batch, digest, attempt, status, final in rows:
        episode, where = (batch, digest), f"event {seq}, {name} of attempt {attempt}"
        if name == "episode.submitted":
            assert episode not in submitted, f"{where}: it was submitted before"
            submitted.add(episode)
        elif name == "attempt.started":
            assert episode in submitted, f"{where}: its episode was never submitted"
            assert episode not in over, f"{where}: its episode has ended for good"
            assert (*episode, attempt) not in begun, f"{where}: it began before"
            begun.add((*episode, attempt))
        elif name == "attempt.granted":
            assert (*episode, attempt) in begun, f"{where}: it never began"
        elif name == "attempt.ended":
            assert (*episode, attempt) in begun, f"{where}: it never began"
            assert (*episode, attempt) not in ended, f"{where}: it ended before"
            ended.add((*episode, attempt))
        elif name == "episode.ended":
            assert episode in submitted, f"{where}: its episode was never submitted"
            assert episode not in over, f"{where}: its episode has ended for good"
            assert status != "rewarded" or (*episode, attempt) in ended, f"{where}: a reward without an attempt"
            if final:
                over.add(episode)
    assert counts.submitted <= len(submitted), f"{counts} of {len(submitted)} episodes"  # they were counted first
    settled = counts.rewarded + counts.failed + counts.retryable + counts.cancelled
    assert counts.pending == counts.submitted - settled >= 0, f"the books do not balance: {counts}"
    return counts
