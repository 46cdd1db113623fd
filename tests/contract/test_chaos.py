# SPDX-License-Identifier: Apache-2.0
"""The chaos benchmark in small, and that what it checks with can find something."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentsandbox.testing.law import check_journal

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
SEED = 20


@pytest.mark.timeout(300)
def test_p54_nothing_is_lost_or_counted_twice_while_everything_is_killed(tmp_path: Path) -> None:
    """A hundred episodes, two dead drivers, and killed sandboxes, runners and streams: one right record each."""
    words = ["--episodes", 100, "--driver-kills", 2, "--seed", SEED, "--directory", tmp_path / "chaos"]
    done = subprocess.run(
        [sys.executable, CHAOS, *map(str, words)], capture_output=True, text=True, check=False, timeout=280
    )

    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert [figures[name] for name in ("seed", "episodes", "driver_kills", "left_behind")] == [SEED, 100, 2, 0]
    assert figures["attempts"] == 100 + sum(figures["failed_attempts"].values())
    assert figures["killed_sandboxes"] > 0
    assert figures["cut_streams"] > 0
    assert not (tmp_path / "chaos").exists()


HEAD = [("batch.submitted", None, None, None, 0), ("episode.submitted", "a", None, None, 0)]
START, END = ("attempt.started", "a", 1, None, 0), ("attempt.ended", "a", 1, None, 0)
REWARD = ("episode.ended", "a", 1, "rewarded", 1)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([HEAD[1]], "submitted before"),
        ([START, START], "it began before"),
        ([END], "never began"),
        ([START, END, END], "it ended before"),
        ([START, REWARD], "a reward without an attempt"),
        ([START, END, REWARD, ("attempt.started", "a", 2, None, 0)], "has ended for good"),
        ([("attempt.started", "b", 1, None, 0)], "never submitted"),
    ],
    ids=["submitted", "began", "ended", "ended-twice", "reward", "afterwards", "unknown"],
)
def test_a_journal_that_cannot_be_true_is_found_out(tmp_path: Path, events: list[tuple], words: str) -> None:
    """Each way of losing or doubling something is named."""
    path = tmp_path / "journal.db"
    assert check_journal(path) is None
    write(path, [*HEAD, *events])

    with pytest.raises(AssertionError, match=words):
        check_journal(path)


def test_a_journal_that_can_be_true_is_counted(tmp_path: Path) -> None:
    """One episode with a reward, and one that is still to come."""
    path = tmp_path / "journal.db"
    write(path, [*HEAD, ("episode.submitted", "b", None, None, 0), START, END, REWARD])

    counts = check_journal(path)

    assert (counts.submitted, counts.rewarded, counts.pending) == (2, 1, 1)


def write(path: Path, events: list[tuple]) -> None:
    """Write a journal as no driver would."""
    from agentsandbox.rollouts.journal.store import Row, Store

    store = Store.open(path, run="r", resume=False)
    rows = [
        Row(name=name, batch=1, digest=digest, attempt=attempt, status=status, final=bool(final))
        for name, digest, attempt, status, final in events
    ]
    try:
        store.append(rows, durable=False)
    finally:
        store.close()
    with closing(sqlite3.connect(path)) as reader:
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (len(events),)
