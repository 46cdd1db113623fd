# SPDX-License-Identifier: Apache-2.0
"""The backend contract on the cluster double, with each way of reaching a sandbox."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.testing import conformance
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio

MODES = ("runner",)


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@asynccontextmanager
async def client(tmp_path, mode):
    """A client of a cluster of its own."""
    async with FakeCluster(images={"host": "host"}) as cluster:
        options = {"kubeconfig": cluster.kubeconfig(tmp_path), "exec_mode": mode}
        async with SandboxClient("kubernetes", images={"host": 2}, backend_options=options) as found:
            yield found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check, mode: str, tmp_path) -> None:
    """The rule in the check's docstring holds on the cluster double."""
    async with client(tmp_path, mode) as source:
        try:
            await check(source, "host")
        except conformance.NotApplicable as reason:
            pytest.skip(str(reason))
