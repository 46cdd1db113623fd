# SPDX-License-Identifier: Apache-2.0
"""Leaving a client or a pool early, over the local backend."""

from __future__ import annotations

import gc

import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.pool import SandboxPool

pytestmark = pytest.mark.anyio

FACES = pytest.mark.parametrize("face", [SandboxClient, SandboxPool])


@FACES
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
async def test_what_the_caller_raises_arrives_bare(
    face: type[SandboxClient | SandboxPool], error: BaseException
) -> None:
    """An error of the caller leaves the block as it is, not inside a group of errors."""
    with pytest.raises(type(error)) as caught:
        async with face("local", images={"host": 1}) as source:
            async with await source.acquire("host") as lease:
                await lease.exec(["true"])
                raise error

    assert caught.value is error


@FACES
@pytest.mark.filterwarnings("ignore:the lease of sandbox:ResourceWarning")
async def test_lease_that_is_lost_while_leaving_does_no_harm(face: type[SandboxClient | SandboxPool]) -> None:
    """A lease that nobody released and that is collected while its pool closes neither fails nor outlives it."""
    async with face("local", images={"host": 1}) as source:
        lease = await source.acquire("host")
        await lease.exec(["true"])
        del lease
        gc.collect()
