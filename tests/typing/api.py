# SPDX-License-Identifier: Apache-2.0
"""How users' code uses the public interface. Never executed: ``mypy --strict`` reads it."""

from __future__ import annotations

from typing import assert_type

from agentsandbox import (
    Counts,
    Episode,
    EpisodeRecord,
    Event,
    ExecResult,
    Graded,
    Lease,
    RolloutResult,
    SandboxClient,
    SandboxPool,
    Status,
    TTFCSummary,
)


async def solve(sandbox: Lease, episode: Episode) -> float:
    await sandbox.write_file("answer.py", "print(42)\n", mode=0o644)
    result = await sandbox.exec(["python3", "answer.py"], timeout=20, env={"A": "1"}, stdin=b"")
    assert_type(result, ExecResult)
    assert_type(result.stdout, bytes)
    assert_type(await sandbox.read_file("answer.py"), bytes)
    assert_type(await sandbox.alive(), bool)
    assert_type(episode.id, str)
    return float(result.exit_code == 0)


async def graded(sandbox: Lease, episode: Episode) -> Graded:
    async with await sandbox.open_process("cat") as process:
        await process.kill()
    return Graded(reward=1.0, patch="", info={"why": episode.id})


def sink(event: Event) -> None:
    assert_type(event.name, str)


async def main() -> None:
    async with SandboxPool("local", images={"host": 8}, rollout=solve, sink=sink, deadline=600) as pool:
        result = await pool.rollout([Episode(id="a", image="host", group=0, inputs={"x": 1})])
        await pool.rollout([], rollout=graded)
    assert_type(result, RolloutResult)
    assert_type(result.rewards, tuple[float | None, ...])
    assert_type(result.records, tuple[EpisodeRecord, ...])
    assert_type(result.records[0].status, Status)
    assert_type(result.retryable, tuple[Episode, ...])
    assert_type(result.counts, Counts)
    assert_type(result.ttfc, TTFCSummary)

    async with SandboxClient(images=["host"], spares=0, acquire_timeout=None) as client:
        lease = await client.acquire("host", timeout=5)
        assert_type(lease, Lease)
        assert_type(await client.exec(lease, "true", check=True), ExecResult)
        await client.release(lease)
