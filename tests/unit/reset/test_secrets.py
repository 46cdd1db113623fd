# SPDX-License-Identifier: Apache-2.0
"""Files with credentials and the rungs of the ladder: none is clean that may still have one."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.models.reset import ResetPolicy
from agentsandbox.testing.virtualtime import virtual_time

from .test_rungs import TAKEN, Backend, opened, told

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time."""
    return virtual_time(request.param)


async def test_a_reset_says_which_secrets_are_gone():
    """Once: the next one has nothing to say."""
    backend = Backend()
    backend.baseline = {**TAKEN, "scope": ["/dev/shm", "/tmp"]}
    async with opened(backend) as client:
        async with await client.acquire("host") as lease:
            path = await lease.place_secret("hunter22")
            assert b"hunter22" == backend.sandboxes[lease.sandbox].session.files[path]
            first, second = await lease.reset(), await lease.reset()

        assert [("files", (path,)), ("files", ())] == [(one.rung, one.secrets) for one in (first, second)]
        assert [1, 0] == [data["secrets"] for data in told(client, "sandbox.reset")]


async def test_a_secret_outside_of_the_scope_makes_a_reset_unverified():
    """The files rung would not see it: the sandbox is replaced."""
    backend = Backend()
    async with opened(backend) as client:
        async with await client.acquire("host") as lease:
            name, path = lease.sandbox, await lease.place_secret("hunter22")
            report = await lease.reset()

        assert ("replace", (path,)) == (report.rung, report.secrets)
        assert name != lease.sandbox
        assert [False] == [data["verified"] for data in told(client, "sandbox.reset")]
        assert f"a secret is outside of the scope: {path}" == told(client, "sandbox.reset")[0]["reason"]


async def test_a_restart_in_place_says_so_too():
    """The container is another one, and what the Pod shares was emptied."""
    backend = Backend()
    backend.recycling = True
    async with opened(backend, ResetPolicy(rungs=("restart", "replace")), spares=0) as client:
        async with await client.acquire("host") as lease:
            await lease.place_secret("hunter22")
        async with await client.acquire("host"):
            pass
        await anyio.sleep(1)

    assert [("restart", 1)] == [(data["rung"], data["secrets"]) for data in told(client, "sandbox.reset")][:1]


async def test_a_secret_in_a_sandbox_that_is_gone_is_nobodys():
    """Nothing has to be remembered of it."""
    backend = Backend()
    async with opened(backend) as client:
        async with await client.acquire("host") as lease:
            resets, sandbox = client._engine.resets, lease._tenure.sandbox
            resets.forget(sandbox.name)
            resets.placed(sandbox, "/dev/shm/x")
            assert resets.baseline(sandbox) is None
            await lease.release(discard=True)
