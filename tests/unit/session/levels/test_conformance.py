# SPDX-License-Identifier: Apache-2.0
"""The backend contract over shell sessions: local sandboxes, but no runner that the session knows of."""

from __future__ import annotations

import pytest
from shells import ShellBackend

from agentsandbox.client import SandboxClient
from agentsandbox.testing import conformance

pytestmark = pytest.mark.anyio

LACKING = {
    "check_result_says_what_it_cost": "the shell learns nothing about memory of a process that has ended",
}
"""Rules that do not hold at this level, and why. The documentation says the same."""


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check, shell: str) -> None:
    """The rule in the check's docstring holds for sessions of exec level ``shell``, whatever the shell."""
    if check.__name__ in LACKING:
        pytest.skip(LACKING[check.__name__])
    backend = ShellBackend()
    backend.shell = shell
    async with SandboxClient(backend, images={"host": 2}) as client:
        try:
            await check(client, "host")
        except conformance.NotApplicable as reason:
            assert check.__name__ == "check_user"
            pytest.skip(str(reason))
