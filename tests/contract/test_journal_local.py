# SPDX-License-Identifier: Apache-2.0
"""A driver that is killed at any moment, and goes on: real sandboxes, real kills."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentsandbox.backends.local.leftovers import started
from agentsandbox.models.episode import Counts
from agentsandbox.rollouts.journal import Journal
from agentsandbox.testing.law import check_journal

EPISODES = 60
KILLS = 3
GUARD = 240.0
"""Seconds after which a driver is known to hang."""

SOLVER = """
from agentsandbox import Graded, SandboxLost

async def solve(sandbox, episode):
    number = episode.inputs["number"]
    if number % 7 == 0 and sandbox.attempt == 1:
        await sandbox.exec("true")
        raise SandboxLost("evicted", "for the test")
    await sandbox.write_file("number", str(number))
    result = await sandbox.exec("sleep 0.05; cat number; echo; ls | wc -l")
    read, files = result.stdout.decode().split()
    return Graded(reward=float(read) if files == "1" else -1.0, info={"number": (number,)})
"""


def start(directory: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a driver in a process group of its own."""
    with (directory / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "agentsandbox.cli", "run", *words],
            cwd=directory,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def check(path: Path) -> Counts | None:
    """Hold the journal to the law; in this run, nothing may end without a reward."""
    counts = check_journal(path)
    if counts is not None:
        assert counts.submitted in (0, EPISODES)
        assert counts.failed == counts.retryable == counts.cancelled == 0
    return counts


@pytest.mark.timeout(GUARD * 2)
def test_a_killed_run_is_resumed_until_every_episode_has_one_record(tmp_path: Path) -> None:
    """However often the driver dies: one record an episode, right rewards, and the law at every read of the journal."""
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201 - shown when the test fails
    chance = random.Random(seed)
    (tmp_path / "solver.py").write_text(SOLVER)
    tasks = [{"id": f"ep-{n}", "inputs": {"number": n}, "group": n // 4} for n in range(EPISODES)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    journal, words = tmp_path / "out" / "journal.db", ("--resume", "out")
    driver = start(
        tmp_path, "--output", "out", "--tasks", "tasks.jsonl", "--rollout", "solver:solve", "--parallelism", "6"
    )
    least, kept = 0, {}
    for kill in range(KILLS):
        goal = least + chance.randrange(1, (EPISODES - least) // (KILLS - kill + 1) + 1)
        end = time.monotonic() + GUARD
        while (counts := check(journal)) is None or counts.rewarded < goal:
            assert driver.poll() is None, (tmp_path / "driver.log").read_text()
            assert time.monotonic() < end
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        least = check(journal).rewarded
        assert least >= goal
        records = {record.episode.id: record for record in Journal(journal).records()}
        assert kept.items() <= records.items()
        kept = records
        driver = start(tmp_path, *words)
    code = driver.wait(timeout=GUARD)

    assert code == 0, (tmp_path / "driver.log").read_text()
    assert check(journal) == Counts(submitted=EPISODES, rewarded=EPISODES)
    records = {record.episode.id: record for record in Journal(journal).records()}
    assert kept.items() <= records.items()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["reward"] for row in results["records"]] == [float(n) for n in range(EPISODES)]
    assert {name: record.reward for name, record in records.items()} == {f"ep-{n}": float(n) for n in range(EPISODES)}
    assert all(record.info == {"number": (record.reward,)} for record in records.values())
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert len(receipt["earlier"]) == KILLS
    with sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True) as reader:
        made = [json.loads(row[0]) for row in reader.execute("SELECT data FROM events WHERE name = 'host.created'")]
    reader.close()
    assert len(made) == KILLS + 1
    assert [entry["pid"] for entry in made if started(entry["pid"]) == entry["started"]] == []
    before = (tmp_path / "out" / "results.json").read_text()
    assert start(tmp_path, *words).wait(timeout=GUARD) == 0
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert again["records"] == json.loads(before)["records"]


@pytest.mark.timeout(GUARD)
def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    """A directory without a receipt, other options and a run that goes on are said to be what they are."""

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "agentsandbox.cli", "run", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, " ".join(done.stderr.split())

    (tmp_path / "solver.py").write_text(
        "import sys\nasync def solve(sandbox, episode):\n    await sandbox.exec('sleep 60')\n    return 1.0\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')
    driver = start(tmp_path, "--output", "out", "--tasks", "tasks.jsonl", "--rollout", "solver:solve")
    try:
        end = time.monotonic() + GUARD
        while not (tmp_path / "out" / "journal.db").exists():
            assert driver.poll() is None, (tmp_path / "driver.log").read_text()
            assert time.monotonic() < end
        busy = run("--resume", "out")
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()

    assert busy[0] == 2
    assert f"is still going on (process {driver.pid}); stop it first" in busy[1]
    assert run("--resume", "nowhere") == (2, "error: nowhere has no receipt.json: not the output of a run")
    assert run("--resume", "out", "--count", "3") == (2, "error: --count cannot be changed when a run is resumed")
    assert run("--resume", "out", "--output", "other")[0] == 2
    assert run()[0] == 2
