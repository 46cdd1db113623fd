# SPDX-License-Identifier: Apache-2.0
"""The documented Role allows what is done by claims, and nothing more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.agent_sandbox import AgentSandboxBackend
from agentsandbox.backends.agent_sandbox.roles import GIVEN_RULES, ROLE_RULES
from agentsandbox.backends.kubernetes.roles import role
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio

from agentsandbox.models.reset import ResetPolicy

RESTART = ResetPolicy(rungs=("restart", "replace"))
PAGE = Path(__file__).parents[4] / "docs" / "howto" / "agent-sandbox.md"


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


def test_the_page_has_the_roles_of_the_code():
    """Word for word."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    expected = [
        role(name, rules, namespace="rollouts")
        for name, rules in (("agentsandbox-claims", ROLE_RULES), ("agentsandbox-given", GIVEN_RULES))
    ]
    assert expected == [yaml.safe_load(block) for block in blocks]


async def solve(sandbox, episode):
    """One command."""
    return float((await sandbox.exec(["true"])).ok)


@pytest.mark.parametrize(("optional", "claims"), [(True, 1), (False, 3)], ids=["whole", "least"])
async def test_the_role_suffices(tmp_path, optional, claims):
    """With all of it one claim serves three episodes; with the least of it each episode takes a claim of its own."""
    async with FakeCluster(agent_sandbox=True) as cluster:
        cluster.access.use_role(role("agentsandbox", ROLE_RULES, namespace="rl", optional=optional))
        backend = AgentSandboxBackend(kubeconfig=cluster.kubeconfig(tmp_path), warm=1)
        batch = [Episode(id=str(number), image="host") for number in range(3)]
        async with SandboxPool(
            backend, images={"host": 1}, spares=0, max_sandboxes=1, rollout=solve, reset=RESTART
        ) as pool:
            assert (1.0,) * 3 == (await pool.rollout(batch)).rewards
        assert claims == len(cluster.asked("POST", "/sandboxclaims$"))
        if optional:
            async with backend.running():
                sandbox = await backend.create(SandboxSpec(image="host"), "one")
                await backend.suspend(sandbox)
                await backend.resume(sandbox)
