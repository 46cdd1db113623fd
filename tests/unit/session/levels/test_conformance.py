# SPDX-License-Identifier: Apache-2.0
"""The backend contract over shell sessions: local sandboxes, but no runner that the session knows of."""

from __future__ import annotations

import pytest
from shells import ShellBackend

from agentsandbox.client import SandboxClient
from agentsandbox.testing import conformance

pytestmark = pytest.mark.anyio

NOT_APPLICABLE = {
    "check_result_says_what_it_cost": "a shell learns nothing about the memory of a process that has ended",
    "check_user": "the sandbox's shell is not root",
    "check_file_permissions": "the sandbox's shell is root",
}
"""Rules that may not apply at this level, and why. The documentation says the same."""


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check, shell: str) -> None:
    """The rule in the check's docstring holds for sessions of exec level ``shell``, whatever the shell."""
    backend = ShellBackend()
    backend.shell = shell
    async with SandboxClient(backend, images={"host": 2}) as client:
        try:
            await check(client, "host")
        except conformance.NotApplicable as reason:
            assert check.__name__ in NOT_APPLICABLE
            pytest.skip(str(reason))
