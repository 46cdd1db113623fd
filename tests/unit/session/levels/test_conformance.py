# SPDX-License-Identifier: Apache-2.0
"""The backend contract over shell sessions: local sandboxes, but no runner that the session knows of."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from shells import ShellBackend

from agentsandbox.client import SandboxClient
from agentsandbox.testing import conformance

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

GUARD = 90.0
"""Seconds that a check may take. Only what ends inside of the loop leaves it to the checks that follow."""

MAY_SKIP = {
    "check_result_says_what_it_cost": "a shell learns nothing about the memory of a process that has ended",
    "check_user": "the sandbox's shell is not root",
    "check_file_permissions": "the sandbox's shell is root",
}
"""Rules that may not apply, and why."""


@pytest.fixture(scope="module")
async def source(shell: str, anyio_backend: str) -> AsyncIterator[SandboxClient]:
    """Grant sandboxes to all checks; each gets fresh ones."""
    backend = ShellBackend()
    backend.shell = shell
    async with SandboxClient(backend, images={"host": 2}, spares=1) as client:
        yield client


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check, source: SandboxClient) -> None:
    """The rule in the check's docstring holds for sessions of exec level ``shell``, whatever the shell."""
    try:
        with anyio.fail_after(GUARD):
            await check(source, "host")
    except conformance.NotApplicable as reason:
        assert check.__name__ in MAY_SKIP
        pytest.skip(str(reason))
