# SPDX-License-Identifier: Apache-2.0
"""Rollout functions that do not stop when they are told to."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.models.episode import Episode, Status
from agentsandbox.pool import SandboxPool

from ..warmpool.fake_backend import FakeBackend  # noqa: TID252 - doubles are shared within the tests

pytestmark = pytest.mark.anyio


async def test_a_pool_goes_on_while_a_straggler_hangs() -> None:
    """A batch returns although one rollout function ignores its cancellation; the next batch runs meanwhile."""
    go, ended = anyio.Event(), []

    async def solve(sandbox: object, episode: Episode) -> float:
        if episode.id == "stubborn":
            with anyio.CancelScope(shield=True):
                await go.wait()
            ended.append(episode.id)
        return 1.0

    backend = FakeBackend()
    async with SandboxPool(backend, images={"host": 2}, rollout=solve) as pool:
        batch = [Episode(id="stubborn", image="host"), Episode(id="good", image="host")]
        first = await pool.rollout(batch, deadline=2.0)
        second = await pool.rollout([Episode(id="next", image="host")])

        assert first.rewards == (None, 1.0)
        assert first.records[0].status is Status.RETRYABLE
        assert first.wall_seconds == pytest.approx(7.0)  # The deadline, and the grace to stop in.
        assert second.rewards == (1.0,)
        assert ended == []
        go.set()

    assert ended == ["stubborn"]
    assert backend.alive == set()
