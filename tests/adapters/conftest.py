# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Inspect AI adapter share."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Any]:
    """Lease a sandbox as Inspect does, by the ``CONFIG`` of the module."""
    from agentsandbox.adapters.inspect_ai import AgentSandboxEnvironment

    if os.getuid() and request.node.originalname == "test_exec_as_user":
        request.node.add_marker(pytest.mark.xfail(reason="an unprivileged id map can run no second user"))
    config = request.module.CONFIG
    await AgentSandboxEnvironment.task_init("test", config)
    try:
        environments = await AgentSandboxEnvironment.sample_init("test", config, {})
        environment = environments["default"]
        assert isinstance(environment, AgentSandboxEnvironment)
        try:
            yield environment
        finally:
            await AgentSandboxEnvironment.sample_cleanup("test", config, environments, False)
    finally:
        await AgentSandboxEnvironment.task_cleanup("test", config, True)
