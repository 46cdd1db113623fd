# SPDX-License-Identifier: Apache-2.0
"""Inspect AI's own checks of a sandbox, over Pods of the cluster double."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

pytest.importorskip("inspect_ai", reason="the Inspect adapter has a session of its own")

from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - 44 checks that Inspect ships

from agentsandbox.adapters.inspect_ai import AgentSandboxConfig, AgentSandboxEnvironment
from agentsandbox.testing.cluster import FakeCluster

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("pool")]

CONFIG = AgentSandboxConfig(
    backend="kubernetes",
    size=2,
    user="sandbox",
    backend_options={
        "user": 0,
        "run_as_root": True,
        "capabilities": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"],
    },
)
"""One of the checks makes a user, and runs commands as that one and as root."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> AsyncIterator[None]:
    """Keep the pool open that all checks share, on a cluster that the environment names."""
    async with FakeCluster(images={"host": "host"}) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", cluster.kubeconfig(tmp_path_factory.mktemp("cluster")))
            await AgentSandboxEnvironment.task_init("all", CONFIG)
            try:
                yield
            finally:
                await AgentSandboxEnvironment.task_cleanup("all", CONFIG, True)
