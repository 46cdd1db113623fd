# SPDX-License-Identifier: Apache-2.0
"""Faults to order over the local backend."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.backends.opening import open_backend
from agentsandbox.client import SandboxClient
from agentsandbox.errors import ProvisionError, SandboxLost, StreamBroken, UsageError
from agentsandbox.models.episode import Episode, Status
from agentsandbox.pool import SandboxPool
from agentsandbox.testing.faults import FaultyBackend

pytestmark = pytest.mark.anyio


def faulty() -> FaultyBackend:
    return FaultyBackend(open_backend("local"))


async def test_lost_sandbox_fails_the_fence() -> None:
    """A sandbox that is declared lost gives SandboxLost from the next command on, and its lease is dead."""
    backend = faulty()
    async with (
        SandboxClient(backend, images={"host": 1}, spares=0) as client,
        await client.acquire("host") as lease,
    ):
        assert (await lease.exec(["true"])).ok
        backend.lose(lease.sandbox, reason="evicted")
        with pytest.raises(SandboxLost, match="evicted"):
            await lease.exec(["true"])
        with pytest.raises(SandboxLost, match="evicted"):
            await lease.read_file("/etc/passwd")
        assert not await lease.alive()
    with pytest.raises(UsageError, match="no sandbox named"):
        backend.lose(lease.sandbox)
    assert repr(backend).endswith("0 alive, 0 errors and 0 losses to come]>")


async def test_result_on_the_wrong_side_of_the_fence_is_dropped() -> None:
    """A command that ran while its sandbox was lost has no result, although it ended with exit code 0."""
    backend = faulty()
    async with (
        SandboxClient(backend, images={"host": 1}, spares=0) as client,
        await client.acquire("host") as lease,
    ):
        backend.lose(lease.sandbox, after=1)  # the check before the command still succeeds
        with pytest.raises(SandboxLost, match="replaced"):
            await lease.exec(["true"])


async def test_lost_sandbox_costs_an_attempt_and_no_reward() -> None:
    """The pool tries an episode whose sandbox is lost on another one; the record shows both."""
    backend = faulty()
    backend.lose_created(after=1)

    async def rollout(sandbox: object, episode: Episode) -> float:
        return float((await sandbox.exec(["true"])).ok)  # type: ignore[attr-defined]

    async with SandboxPool(backend, images={"host": 1}, spares=0, rollout=rollout) as pool:
        result = await pool.rollout([Episode(id="a", image="host")])

    (record,) = result.records
    assert (record.status, record.reward, record.attempts) == (Status.REWARDED, 1.0, 2)
    assert isinstance(record.history[0].failure.cause, SandboxLost)  # type: ignore[union-attr]
    assert record.history[0].sandbox != record.history[1].sandbox


async def test_failing_creates_are_replaced() -> None:
    """A create that fails once does not fail the caller."""
    backend = faulty()
    backend.fail_creates(ProvisionError("no room"))
    async with SandboxClient(backend, images={"host": 1}, spares=0) as client:
        with anyio.fail_after(30):
            async with await client.acquire("host") as lease:
                assert (await lease.exec(["true"])).ok


async def test_a_cut_stream_is_a_lost_sandbox_and_no_result() -> None:
    """Where nobody can attach again, the command under way has no result, and neither has any other."""
    backend = faulty()
    async with (
        SandboxClient(backend, images={"host": 1}, spares=0) as client,
        await client.acquire("host") as lease,
    ):
        assert backend.alive == (lease.sandbox,)

        async with anyio.create_task_group() as group:

            async def cut(_: str, data: bytes) -> None:
                assert data == b"there\n"
                group.start_soon(backend.cut, lease.sandbox)

            with pytest.raises(StreamBroken, match="stream_ended") as caught:
                await lease.exec("echo there; sleep 60", on_output=cut)
        assert caught.value.stdout == b"there\n"
        with pytest.raises(SandboxLost):
            await lease.exec("true")
    assert backend.alive == ()
    with pytest.raises(UsageError, match="no sandbox named"):
        await backend.cut(lease.sandbox)


async def test_a_journal_knows_whose_the_sandboxes_of_a_faulty_backend_are() -> None:
    """The driver that comes after a killed one finds what the inner backend made, by the inner backend's name."""
    backend = faulty()
    receipt = {"backend": backend.name, "run_id": backend.run_id, "created": (), "driver": {}, "ended": False}

    assert backend.name == "local"
    assert backend.receipt() == {}
    assert await FaultyBackend.remove_leftovers(receipt) == []
