# SPDX-License-Identifier: Apache-2.0
"""
Episodes on this machine while everything that can die is killed at random, and what is left of the truth afterwards.

A driver runs a batch with a journal. From outside, first processes of sandboxes, which are their runners, are killed or
stopped, and now and then the parent of all of them; from inside, streams are cut. The driver itself is killed again and
again, and another one resumes. All the while the journal is read and held to the law. At the end every episode must
have exactly one record with the right reward, none of them from a sandbox that had failed by then, and no process of
any driver may be left.

    python benchmarks/chaos.py --episodes 2000 --driver-kills 10

Prints one JSON object; what is wrong is an error, with the directory in which everything is still to be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox import Episode, Graded, SandboxPool
from agentsandbox.backends.local import LocalBackend
from agentsandbox.backends.local.leftovers import started
from agentsandbox.cli.bench import environment
from agentsandbox.errors import UsageError
from agentsandbox.models.episode import Counts, Status
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.rollouts.journal import Journal
from agentsandbox.testing.faults import FaultyBackend
from agentsandbox.testing.law import check_journal

if TYPE_CHECKING:
    from agentsandbox.client import Lease

GUARD = 900.0
"""Seconds after which a driver is known to hang."""

MAX_ATTEMPTS = 1000
"""Nobody's bad luck shall end an episode here."""

STALL = 0.05
"""The share of faults from outside that only stop a runner: its driver finds out by itself, after a while."""

HOST = 0.02
"""The share of them that end every sandbox at once."""

LEFT = "ls -A . /tmp | grep -c ^left; grep -las '[s]leep.4321' /proc/[0-9]*/cmdline | wc -l"


async def solve(sandbox: Lease, episode: Episode) -> Graded:
    """Leave something, and return what was left; only a fresh sandbox gives the right reward."""
    number, began = episode.inputs["number"], time.monotonic()
    before = await sandbox.exec(LEFT, check=True)
    await sandbox.write_file("left", str(number))
    await sandbox.exec(f"echo {number} > /tmp/left; setsid sleep 4321 > /dev/null 2>&1 &", check=True)
    await sandbox.exec(["sleep", str(episode.inputs["seconds"])], check=True)
    asked = time.monotonic()
    after = await sandbox.exec("cat left /tmp/left", check=True)
    right = before.stdout == b"0\n0\n" and after.stdout == b"%d%d\n" % (number, number)
    return Graded(reward=float(number) if right else -1.0, info={"began": began, "asked": asked})


def episodes(count: int, seed: int) -> list[Episode]:
    """Make the same batch for every driver of a run."""
    chance = random.Random(seed)
    return [
        Episode(id=f"ep-{n}", image="host", group=n // 4, inputs={"number": n, "seconds": chance.uniform(0.0, 0.1)})
        for n in range(count)
    ]


async def drive(options: argparse.Namespace) -> None:
    """Be a driver: run the batch, or what is left of it, and cut streams meanwhile."""
    backend = FaultyBackend(LocalBackend())
    chance = random.Random(options.drive)
    # Every second driver uses sandboxes again, so that resets are interrupted as well.
    policy = ResetPolicy(rungs=("files", "replace")) if options.drive % 2 else ResetPolicy()
    with (options.directory / "cuts.jsonl").open("a") as log:

        async def cut() -> None:
            while True:
                await anyio.sleep(chance.expovariate(1.0) * options.pause)
                if names := backend.alive:
                    name = chance.choice(names)
                    with suppress(UsageError):
                        await backend.cut(name)
                        log.write(json.dumps({"run": backend.run_id, "sandbox": name, "at": time.monotonic()}) + "\n")
                        log.flush()

        async with (
            SandboxPool(
                backend,
                images={"host": options.concurrency},
                rollout=solve,
                journal=options.directory / "journal.db",
                resume=True,
                max_attempts=MAX_ATTEMPTS,
                reset=policy,
            ) as pool,
            anyio.create_task_group() as group,
        ):
            group.start_soon(cut)
            await pool.rollout(episodes(options.episodes, options.seed), batch_id="chaos")
            group.cancel_scope.cancel()


def descendants(root: int) -> dict[int, list[int]]:
    """Return the processes that a process has started, and those of theirs, with their ids in each PID namespace."""
    parents, found, pending = {}, {}, [root]
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = dict(line.partition(":")[::2] for line in (entry / "status").read_text().splitlines())
                if fields["State"].split()[0] not in ("Z", "X"):
                    children.setdefault(int(fields["PPid"]), []).append(int(entry.name))
                    parents[int(entry.name)] = [int(word) for word in fields["NSpid"].split()]
    while pending:
        for child in children.get(pending.pop(), ()):
            found[child] = parents[child]
            pending.append(child)
    return found


class Chaos:
    """Drivers one after another, and what is done to them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.chance = random.Random(options.seed)
        self.journal = options.directory / "journal.db"
        self.kills: list[dict[str, Any]] = []
        self.seen: set[tuple[int, int | None]] = set()
        self.reads = 0
        self.generation = 0
        self.next_fault = 0.0

    def start(self) -> subprocess.Popen[bytes]:
        """Start a driver."""
        options = self.options
        words = {
            "--drive": self.generation,
            "--directory": options.directory,
            "--episodes": options.episodes,
            "--concurrency": options.concurrency,
            "--pause": options.pause,
            "--seed": options.seed,
        }
        self.generation += 1
        with (options.directory / "driver.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, __file__, *(str(word) for pair in words.items() for word in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def fault(self, driver: int) -> None:
        """Do something to a sandbox of a driver, or to all of them."""
        family = descendants(driver)
        self.seen.update((pid, started(pid)) for pid in family)
        # Only those of the pool: whether the machine can isolate any is tried out before, and that must not fail.
        hosts = [pid for pid, _ in self.hosts() if pid in family]
        within = {pid: ids for host in hosts for pid, ids in descendants(host).items()}
        inits = [pid for pid, ids in within.items() if len(ids) >= len(family[hosts[0]]) + 2 and ids[-1] == 1]
        if not inits:
            return
        roll, pid = self.chance.random(), self.chance.choice(inits)
        with suppress(OSError):
            space = Path(f"/proc/{pid}/ns/pid").stat().st_ino
            if roll < HOST:
                os.kill(self.chance.choice(hosts), signal.SIGKILL)
                self.kills.append({"what": "host", "space": None, "at": time.monotonic()})
            elif roll < HOST + STALL:
                os.kill(pid, signal.SIGSTOP)
                self.kills.append({"what": "stall", "space": space, "at": time.monotonic()})
            else:
                os.kill(pid, signal.SIGKILL)
                self.kills.append({"what": "sandbox", "space": space, "at": time.monotonic()})

    def watch(self, driver: subprocess.Popen[bytes], goal: float) -> Counts | None:
        """Torment a driver until so many episodes have a reward, or it ends; read its journal all the while."""
        end = time.monotonic() + GUARD
        while True:
            counts = check_journal(self.journal)
            self.reads += 1
            if driver.poll() is not None or (counts is not None and counts.rewarded >= goal):
                return counts
            if time.monotonic() > end:
                raise AssertionError(f"no progress: {counts}")
            if time.monotonic() >= self.next_fault:
                self.fault(driver.pid)
                self.next_fault = time.monotonic() + self.chance.expovariate(1.0) * self.options.pause
            time.sleep(0.01)  # noqa: TID251 - not in an event loop

    def run(self) -> dict[str, Any]:
        """Do all of it, and return the figures."""
        began, options = time.monotonic(), self.options
        goals = sorted(self.chance.sample(range(1, options.episodes), options.driver_kills))
        driver, kept = self.start(), {}
        try:
            for goal in goals:
                self.watch(driver, goal)
                assert driver.poll() is None, f"a driver ended by itself with {driver.returncode}"
                driver.kill()
                driver.wait()
                records = {record.episode.id: record for record in Journal(self.journal).records()}
                assert kept.items() <= records.items(), "a record changed after it was written"
                kept = records
                driver = self.start()
            self.watch(driver, float("inf"))
            assert driver.returncode == 0, f"the last driver ended with {driver.returncode}"
        finally:
            if driver.poll() is None:
                driver.kill()
                driver.wait()
        seconds = time.monotonic() - began
        return {**self.verify(kept), "seconds": round(seconds, 1), "driver_kills": len(goals), "reads": self.reads}

    def verify(self, kept: dict[str, Any]) -> dict[str, Any]:
        """Hold the outcome to what was promised."""
        count = self.options.episodes
        counts = check_journal(self.journal)
        assert counts == Counts(submitted=count, rewarded=count), counts
        records = {record.episode.id: record for record in Journal(self.journal).records()}
        assert kept.items() <= records.items(), "a record changed after it was written"
        wrong = {n: records[f"ep-{n}"].reward for n in range(count) if records[f"ep-{n}"].reward != float(n)}
        assert not wrong, f"wrong rewards: {wrong}"
        failures = self.check_attempts(records)
        left = self.left()
        assert not left, f"left behind: {left}"
        done = Counter(kill["what"] for kill in self.kills)
        cuts = len((self.options.directory / "cuts.jsonl").read_text().splitlines())
        return {
            "episodes": count,
            "attempts": sum(record.attempts for record in records.values()),
            "failed_attempts": dict(failures),
            "killed_sandboxes": done["sandbox"],
            "killed_hosts": done["host"],
            "stalled_runners": done["stall"],
            "cut_streams": cuts,
            "left_behind": 0,
        }

    def check_attempts(self, records: dict[str, Any]) -> Counter[str]:
        """Make sure that no reward is from a sandbox that had failed when its last command was asked for."""
        failures: Counter[str] = Counter()
        cuts = [json.loads(line) for line in (self.options.directory / "cuts.jsonl").read_text().splitlines()]
        fell: dict[Any, list[float]] = {}
        for kill in self.kills:
            fell.setdefault(kill["space"], []).append(kill["at"])
        for one in cuts:
            fell.setdefault(one["sandbox"], []).append(one["at"])
        for record in records.values():
            assert record.status is Status.REWARDED, record
            assert [attempt.reward is None for attempt in record.history[:-1]] == [True] * (len(record.history) - 1)
            for attempt in record.history:
                if attempt.failure is not None:
                    assert attempt.failure.retryable, attempt
                    failures[attempt.failure.kind.value] += 1
            last = record.history[-1]
            space = int(dict(word.split(":") for word in last.identity.instance.split("/")[1:])["pid"])
            for key in (space, last.sandbox):
                hits = [at for at in fell.get(key, ()) if record.info["began"] < at < record.info["asked"]]
                assert not hits, f"{record.episode.id} has a reward from {last.sandbox}, which failed before"
        return failures

    def hosts(self) -> list[tuple[int, int]]:
        """Return the parents of sandboxes that the journal names, and when they were started."""
        if not self.journal.exists():
            return []
        with closing(sqlite3.connect(f"{self.journal.as_uri()}?mode=ro", uri=True)) as reader:
            rows = reader.execute("SELECT data FROM events WHERE name = 'host.created'").fetchall()
        return [(int(data["pid"]), int(data["started"])) for data in (json.loads(text) for (text,) in rows)]

    def left(self) -> list[str]:
        """Name every process and directory of any driver that is still there."""
        everything = {*self.seen, *self.hosts()}
        processes = [pid for pid, begin in everything if begin is not None and started(pid) == begin]
        with closing(sqlite3.connect(f"{self.journal.as_uri()}?mode=ro", uri=True)) as reader:
            runs = [run for (run,) in reader.execute("SELECT DISTINCT run FROM events")]
        directories = [str(path) for run in runs for path in Path(tempfile.gettempdir()).glob(f"*{run}*")]
        return [f"process {pid}" for pid in processes] + directories


def main() -> None:
    """Parse the words of the command line, and be a driver or who torments drivers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--driver-kills", type=int, default=10, help="how often the driver is killed and resumed")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.1, help="mean seconds between two faults of one source")
    parser.add_argument("--seed", type=int, default=None, help="for what is chosen; random, and told, if not given")
    parser.add_argument("--directory", type=Path, default=None, help="for the journal; a temporary one if not given")
    parser.add_argument("--drive", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive is not None:
        # Every third driver has the other event loop, where there is one: a journal knows no difference.
        other = options.drive % 3 == 2 and find_spec("trio") is not None
        anyio.run(drive, options, backend="trio" if other else "asyncio")
        return
    if options.seed is None:
        options.seed = random.randrange(10**6)
    options.directory = Path(options.directory or tempfile.mkdtemp(prefix="chaos-")).resolve()
    options.directory.mkdir(parents=True, exist_ok=True)
    try:
        figures = Chaos(options).run()
    except AssertionError as error:
        log = options.directory / "driver.log"
        sys.exit(f"seed {options.seed}, see {options.directory}: {error}\n{log.read_text()[-4000:]}")
    shutil.rmtree(options.directory)
    print(json.dumps({"seed": options.seed, **figures, "environment": environment()}, indent=2))


if __name__ == "__main__":
    main()
