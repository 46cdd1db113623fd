# SPDX-License-Identifier: Apache-2.0
"""Inspect AI's own checks of a sandbox, over Pods of the cluster double."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

pytest.importorskip("inspect_ai", reason="the Inspect adapter has a session of its own")

from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - 44 checks that Inspect ships

from agentsandbox.adapters.inspect_ai import AgentSandboxConfig, AgentSandboxEnvironment
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio

CONFIG = AgentSandboxConfig(backend="kubernetes", size=2)


@pytest.fixture(scope="module")
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory, anyio_backend) -> AsyncIterator[FakeCluster]:
    """A cluster that the environment names."""
    async with FakeCluster(images={"host": "host"}) as found:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", found.kubeconfig(tmp_path_factory.mktemp("cluster")))
            yield found


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest, cluster: FakeCluster) -> AsyncIterator[AgentSandboxEnvironment]:
    """Lease a sandbox as Inspect does."""
    if request.node.originalname == "test_exec_as_user":
        request.node.add_marker(pytest.mark.xfail(reason="a Pod without root can run no second user"))
    await AgentSandboxEnvironment.task_init("test", CONFIG)
    try:
        environments = await AgentSandboxEnvironment.sample_init("test", CONFIG, {})
        environment = environments["default"]
        assert isinstance(environment, AgentSandboxEnvironment)
        try:
            yield environment
        finally:
            await AgentSandboxEnvironment.sample_cleanup("test", CONFIG, environments, False)
    finally:
        await AgentSandboxEnvironment.task_cleanup("test", CONFIG, True)
