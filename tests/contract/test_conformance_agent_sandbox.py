# SPDX-License-Identifier: Apache-2.0
"""The backend contract on sandboxes that the agent-sandbox controller's double makes."""

from __future__ import annotations

import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.testing import conformance
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="module")
async def source(tmp_path_factory, anyio_backend):
    """A client of a cluster with the controller, for all checks."""
    async with FakeCluster(agent_sandbox=True) as cluster:
        options = {"kubeconfig": cluster.kubeconfig(tmp_path_factory.mktemp("cluster"))}
        async with SandboxClient("agent-sandbox", images={"host": 2}, backend_options=options) as client:
            yield client


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check, source: SandboxClient) -> None:
    """The rule in the check's docstring holds, or what it needs is not there."""
    try:
        await check(source, "host")
    except conformance.NotApplicable as reason:
        pytest.skip(str(reason))
