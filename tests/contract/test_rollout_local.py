# SPDX-License-Identifier: Apache-2.0
"""Batches on the local backend: real sandboxes, real losses, real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from agentsandbox.blocking import BlockingPool
from agentsandbox.errors import BatchFailed, FailureKind
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.episode import Counts, Episode, Graded, Status
from agentsandbox.models.timing import StartKind
from agentsandbox.pool import SandboxPool
from agentsandbox.rollouts.grading import grade_tests, require_failing

if TYPE_CHECKING:
    from agentsandbox.client import Lease
    from agentsandbox.models.events import Event

pytestmark = pytest.mark.anyio

GUARD = 60.0
"""Seconds after which a test is known to hang."""


def make(count: int, **options: Any) -> list[Episode]:
    """Return *count* episodes."""
    return [Episode(id=f"ep-{index}", image="host", **options) for index in range(count)]


def processes(word: str) -> list[int]:
    """Return the processes of this machine that have *word* among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words:
                found.append(int(entry.name))
    return found


async def gone(word: str) -> None:
    """Wait until no process has *word* among its arguments."""
    with anyio.fail_after(GUARD):
        while processes(word):  # noqa: ASYNC110 - nobody tells us
            await anyio.sleep(0.01)


def first_process(pid: int) -> int:
    """Return the process that the process namespace of *pid* hangs on."""
    namespace = (Path("/proc") / str(pid) / "ns" / "pid").readlink()
    while True:
        status = (Path("/proc") / str(pid) / "status").read_text()
        parent = int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))
        if parent == 0 or (Path("/proc") / str(parent) / "ns" / "pid").readlink() != namespace:
            return pid
        pid = parent


async def destroy_from_outside(sandbox: Lease, marker: str) -> None:
    """Kill everything in a sandbox behind its owner's back, by way of a process that has *marker* as its argument."""
    await sandbox.exec(f"sleep {marker} >/dev/null 2>&1 &")
    with anyio.fail_after(GUARD):
        while not (found := processes(marker)):  # noqa: ASYNC110 - nobody tells us
            await anyio.sleep(0.01)
    os.kill(first_process(found[0]), signal.SIGKILL)
    await gone(marker)


async def one(sandbox: Lease, episode: Episode) -> float:
    """Run one command and give 1."""
    return float((await sandbox.exec(["true"])).ok)


async def test_records_come_in_input_order() -> None:
    """Every episode has its own sandbox and its own answer, in input order."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        await sandbox.write_file("answer", episode.inputs["text"])
        result = await sandbox.exec("cat answer; ls | wc -l")
        assert result.text == f"{episode.inputs['text']}1\n"
        return float(episode.id.removeprefix("ep-"))

    batch = [Episode(id=f"ep-{index}", image="host", inputs={"text": f"text {index}\n"}) for index in range(12)]
    async with SandboxPool("local", images={"host": 4}, rollout=solve) as pool:
        result = await pool.rollout(batch)

    assert result.rewards == tuple(float(index) for index in range(12))
    assert len({record.last.identity for record in result.records}) == 12
    assert all(record.last.node == result.records[0].last.node for record in result.records)


async def test_p54_p55_a_sandbox_killed_from_outside_is_tried_again() -> None:
    """The first attempt loses its sandbox for real: no reward from it, and the second attempt's counts."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        if sandbox.attempt == 1:
            await destroy_from_outside(sandbox, "86411")
            return float((await sandbox.exec("true")).ok)
        return 0.5

    async with SandboxPool("local", images={"host": 2}, rollout=solve) as pool:
        record = (await pool.rollout(make(1))).records[0]

    assert record.reward == 0.5
    assert record.attempts == 2
    assert record.history[0].failure.kind in {FailureKind.SANDBOX_LOST, FailureKind.STREAM_BROKEN}
    assert record.history[0].reward is None
    assert record.history[0].identity != record.history[1].identity


async def test_p54_p55_a_swallowed_loss_gives_no_reward() -> None:
    """A number returned after the sandbox died is no reward."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        await destroy_from_outside(sandbox, "86412")
        return 1.0

    async with SandboxPool("local", images={"host": 1}, rollout=solve, max_attempts=1) as pool:
        record = (await pool.rollout(make(1))).records[0]

    assert record.reward is None
    assert record.status is Status.RETRYABLE


async def test_p56_time_to_first_command_is_complete() -> None:
    """Every attempt has a sample: those with a command are positive and add up, those without are censored."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        if episode.id != "ep-0":
            await sandbox.exec("true")
        return 1.0

    async with SandboxPool("local", images={"host": 2}, rollout=solve) as pool:
        result = await pool.rollout(make(6))

    assert (result.ttfc.n, result.ttfc.censored) == (5, 1)
    for sample in result.samples:
        assert sample.seconds > 0
        assert sum(sample.stages.values()) == pytest.approx(sample.seconds, rel=0.01) or sample.censored
        assert sample.start in StartKind
    assert result.records[1].timings.first_command == result.records[1].ttfc.seconds


async def test_p57_a_lost_member_is_tried_again_alone() -> None:
    """A group of 8 in which episode 5 loses its sandbox once takes 9 attempts and is complete."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        if episode.id == "ep-5" and sandbox.attempt == 1:
            await destroy_from_outside(sandbox, "86413")
        return float((await sandbox.exec("true")).ok)

    async with SandboxPool("local", images={"host": 4}, rollout=solve) as pool:
        result = await pool.rollout(make(8, group="g"))
        granted = pool.statistics().granted_total

    assert granted == 9
    assert result.valid_count == 8
    assert [record.attempts for record in result.records] == [1, 1, 1, 1, 1, 2, 1, 1]
    assert result.groups["g"].complete


async def test_p57_a_member_that_is_always_lost_leaves_its_group_incomplete() -> None:
    """Seven rewards stay; with all members lost there are none, and no fallback."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        if episode.id in episode.inputs["lost"]:
            await destroy_from_outside(sandbox, f"864{int(episode.id.removeprefix('ep-')) + 20}")
        return float((await sandbox.exec("true")).ok)

    everybody = {f"ep-{index}" for index in range(8)}
    async with SandboxPool("local", images={"host": 4}, rollout=solve) as pool:
        some = await pool.rollout(make(8, group=0, inputs={"lost": {"ep-5"}}))
        none = await pool.rollout(make(8, group=0, inputs={"lost": everybody}), max_attempts=1)

    assert some.counts == Counts(submitted=8, rewarded=7, retryable=1)
    assert some.records[5].attempts == 2
    assert not some.groups[0].complete
    assert none.rewards == (None,) * 8
    assert none.valid_count == 0
    assert none.retryable == tuple(record.episode for record in none.records)


async def test_p58_a_straggler_does_not_hold_the_step() -> None:
    """15 rewards at the deadline, one retryable record, and the straggler's process is gone."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        await sandbox.exec("sleep 60.86414" if episode.id == "ep-7" else "true")
        return 1.0

    async with SandboxPool("local", images={"host": 8}, rollout=solve) as pool:
        with anyio.fail_after(GUARD):
            result = await pool.rollout(make(16), deadline=2.0)
        await gone("60.86414")

    record = result.records[7]
    assert result.wall_seconds < 4
    assert result.valid_count == 15
    assert (record.status, record.reward, record.failure.kind) == (Status.RETRYABLE, None, "timed_out")
    assert result.counts == Counts(submitted=16, rewarded=15, retryable=1)


async def test_p58_the_late_result_of_a_superseded_attempt_is_dropped() -> None:
    """Attempt 1 swallows its timeout and returns, attempt 2 succeeds: one record, one late result."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        if sandbox.attempt == 1:
            try:
                await sandbox.exec("sleep 60.86415")
            except anyio.get_cancelled_exc_class():
                return 0.25
        await sandbox.exec("true")
        return 1.0

    async with SandboxPool("local", images={"host": 1}, rollout=solve) as pool:
        result = await pool.rollout(make(1), episode_timeout=0.5, retry_timeouts=True)
        await gone("60.86415")

    assert result.rewards == (1.0,)
    assert result.late_results == 1
    assert result.records[0].attempts == 2


TEST_FILE = """
import unittest
from shipping import shipping

class ShippingTest(unittest.TestCase):
    def test_below(self):
        self.assertEqual(shipping(98), 10)

    def test_boundary(self):
        self.assertEqual(shipping(99), 0)
"""


async def test_p59_only_evidence_pays() -> None:
    """Solved, unsolved, solved from the start, and tests that never run: 1, 0, invalid task, no evidence."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        before, after = episode.inputs["before"], episode.inputs["after"]
        command = ["python3", "-B", "-m", "unittest", "-v", "test_shipping"]
        await sandbox.write_file("test_shipping.py", TEST_FILE)
        await sandbox.write_file("shipping.py", f"def shipping(total):\n    return 0 if {before} else 10\n")
        require_failing(await sandbox.exec(command))
        await sandbox.write_file("shipping.py", f"def shipping(total):\n    return 0 if {after} else 10\n")
        tests = ["test_shipping.ShippingTest.test_below", "test_shipping.ShippingTest.test_boundary"]
        return grade_tests(await sandbox.exec(command, require_complete=True), tests=tests)

    wrong, right = "total > 99", "total >= 99"
    cases = [(wrong, right), (wrong, wrong), (right, right), (wrong, "__import__('os')._exit(0)")]
    batch = [
        Episode(id=str(number), image="host", inputs={"before": before, "after": after})
        for number, (before, after) in enumerate(cases)
    ]
    async with SandboxPool("local", images={"host": 2}, rollout=solve) as pool:
        result = await pool.rollout(batch)

    assert result.rewards == (1.0, 0.0, None, None)
    assert [record.failure.kind for record in result.records[2:]] == ["invalid_task", "evidence_missing"]
    assert {record.attempts for record in result.records} == {1}


async def test_p60_a_batch_that_mostly_failed_raises_with_every_record() -> None:
    """10 of 16 sandboxes lost, threshold one half: the error carries 16 records, 6 of them with a reward."""

    async def solve(sandbox: Lease, episode: Episode) -> float:
        number = int(episode.id.removeprefix("ep-"))
        if number < 10:
            await destroy_from_outside(sandbox, f"864{number + 40}")
        return float((await sandbox.exec("true")).ok)

    async with SandboxPool("local", images={"host": 4}, rollout=solve, max_attempts=1, failure_threshold=0.5) as pool:
        with pytest.raises(BatchFailed, match="10 of 16") as caught:
            await pool.rollout(make(16))

    assert len(caught.value.records) == 16
    assert sum(record.reward is not None for record in caught.value.records) == 6


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.2, 0.5])
async def test_p42_cancelling_a_batch_leaves_nothing(seconds: float) -> None:
    """Whenever a batch is cancelled: no process, no leased sandbox, one record an episode, and the pool goes on."""
    events: list[Event] = []
    marker = "60.86416"

    async def solve(sandbox: Lease, episode: Episode) -> float:
        await sandbox.exec(["sleep", marker])
        return 1.0

    async with SandboxPool("local", images={"host": 3}, rollout=solve, sink=events.append) as pool:
        with anyio.move_on_after(seconds) as scope:
            await pool.rollout(make(6))
        assert scope.cancelled_caught
        assert pool.statistics().leased == 0
        ended = [event.data["status"] for event in events if event.name == "episode.ended"]
        assert ended in ([], ["cancelled"] * 6)
        await gone(marker)
        assert (await pool.rollout(make(4), rollout=one)).valid_count == 4


def waited_for_a_processor() -> float:
    """Seconds for which this thread could have run, and others did; no fault of the loop."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@pytest.mark.timeout(120)
async def test_p53_hundreds_of_rollouts_do_not_starve_the_loop() -> None:
    """300 rollouts at once end, the loop keeps ticking, and a full thread pool holds up nothing."""
    full, lags = threading.Event(), []

    async def tick() -> None:
        while True:
            before, starved = anyio.current_time(), waited_for_a_processor()
            await anyio.sleep(0.02)
            late = anyio.current_time() - before - 0.02
            lags.append(late - (waited_for_a_processor() - starved))

    async def solve(sandbox: Lease, episode: Episode) -> float:
        return float((await sandbox.exec("sleep 0.2")).ok)

    async with (
        SandboxPool("local", images={"host": 300}, spares=0, rollout=solve) as pool,
        anyio.create_task_group() as background,
    ):
        for _ in range(int(anyio.to_thread.current_default_thread_limiter().total_tokens)):
            background.start_soon(anyio.to_thread.run_sync, full.wait)
        background.start_soon(tick)
        try:
            with anyio.fail_after(60):
                result = await pool.rollout(make(300))
        finally:
            full.set()
            background.cancel_scope.cancel()

    assert result.valid_count == 300
    assert pool.statistics().leased == 0
    # The garbage collector may hold up single ticks; a blocking call would delay many.
    assert quantile(lags, 0.99) < 0.25


async def test_p53_the_default_executor_may_be_full(anyio_backend_name: str) -> None:
    """The event loop's own executor is not needed for anything: full, it holds up neither commands nor releases."""
    if anyio_backend_name == "trio":
        pytest.skip("asyncio's executor")
    full = threading.Event()
    loop = asyncio.get_running_loop()
    waiting = [loop.run_in_executor(None, full.wait) for _ in range(64)]
    try:
        async with SandboxPool("local", images={"host": 4}, rollout=one) as pool:
            with anyio.fail_after(GUARD):
                assert (await pool.rollout(make(8))).valid_count == 8
    finally:
        full.set()
        await asyncio.wait(waiting)


async def test_artifacts_are_saved_before_the_sandbox_goes(tmp_path: Path) -> None:
    """Files, patch and command log are on disk with the record; a missing file is noted and changes no reward."""

    async def solve(sandbox: Lease, episode: Episode) -> Graded:
        await sandbox.exec("mkdir -p out && printf 'r\\377' > out/report.bin")
        return Graded(reward=1.0, patch="--- a\n+++ b\n")

    async with SandboxPool("local", images={"host": 1}, rollout=solve, output=tmp_path) as pool:
        record = (await pool.rollout(make(1, artifacts=("out/report.bin", "nothing.txt")))).records[0]

    assert record.reward == 1.0
    assert record.artifacts["out/report.bin"].read_bytes() == b"r\xff"
    assert record.artifacts["patch.diff"].read_text() == "--- a\n+++ b\n"
    assert "mkdir -p out" in record.artifacts["commands.jsonl"].read_text()
    assert list(record.info["artifacts_missing"]) == ["nothing.txt"]
    assert all(path.is_relative_to(tmp_path / "ep-0" / "attempt-1") for path in record.artifacts.values())


def test_the_blocking_pool_runs_real_sandboxes() -> None:
    """Synchronous code gets the same sandboxes, from several threads at once."""
    with BlockingPool("local", images={"host": 2}, rollout=one) as pool:
        assert pool.rollout(make(4)).rewards == (1.0,) * 4
        with pool.acquire("host") as lease:
            lease.write_file("a.txt", "hello\n")
            assert lease.exec(["cat", "a.txt"]).stdout == b"hello\n"
            assert lease.read_file("a.txt") == b"hello\n"
