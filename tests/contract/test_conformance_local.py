# SPDX-License-Identifier: Apache-2.0
"""The backend contract on the local backend. The checks named after a user's pain are in ``test_user_pains_local``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.testing import conformance
from agentsandbox.testing.subject import LACKING, Need

pytestmark = pytest.mark.anyio

MAY_SKIP = {"check_user"} if os.getuid() else set()

CHECKS = [check for check in conformance.CHECKS if not re.match(r"check_p\d\d_", check.__name__)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check) -> None:
    """The rule in the check's docstring holds on the local backend."""
    async with SandboxClient("local", images={"host": 2}) as client:
        try:
            await check(client, "host")
        except conformance.NotApplicable as reason:
            assert check.__name__ in MAY_SKIP
            pytest.skip(str(reason))


async def test_run_all_collects_failures() -> None:
    """``run_all`` runs every check, names those that hold, and raises the failures together, each with its rule."""

    async def check_good(source: conformance.Source, image: str) -> None:
        """Good."""
        async with await source.acquire(image) as lease:
            assert (await lease.exec(["true"])).ok

    async def check_other(source: conformance.Source, image: str) -> None:
        """Do not apply."""
        raise conformance.NotApplicable("no users")

    async def check_bad(source: conformance.Source, image: str) -> None:
        """Never hold."""
        async with await source.acquire(image) as lease:
            assert (await lease.exec(["false"])).ok

    async with SandboxClient("local", images={"host": 2}) as client:
        report = await conformance.run_all(client, "host", checks=[check_good, check_other])
        assert report.passed == ("check_good",)
        assert report.not_applicable == (("check_other", "no users"),)

        with pytest.raises(ExceptionGroup, match="1 of 2 checks failed") as caught:
            await conformance.run_all(client, "host", checks=[check_good, check_bad, check_other])
        (failure,) = caught.value.exceptions
        assert isinstance(failure, AssertionError)
        assert failure.__notes__ == ["check_bad: Never hold."]


def test_the_documentation_says_what_no_level_can() -> None:
    """The page on exec levels has one row for whatever a level cannot do, and says of each level whether it can."""
    page = Path(__file__).parents[2] / "docs" / "topics" / "exec-levels.md"
    table = page.read_text(encoding="utf-8").partition("| what a rule is about |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]

    for level, column in ((ExecLevel.SHELL, 1), (ExecLevel.DIRECT, 2)):
        said = {row[0]: row[column].startswith("no") for row in rows}
        assert said == {str(need): need in LACKING[level] for need in Need}
    assert not LACKING[ExecLevel.RUNNER]
