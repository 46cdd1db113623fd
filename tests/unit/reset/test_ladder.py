# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.command import ProcessInfo
from agentsandbox.models.reset import RUNGS, ResetPolicy, ResetReport
from agentsandbox.reset.ladder import next_rung


def test_replacement_is_always_offered():
    """Whatever a sandbox says of itself, it can be replaced; the reason names what was passed over."""
    assert ("replace", "jail is not offered; files is not offered; restart is not offered") == next_rung(
        ResetPolicy(), offered=()
    )


def test_a_rung_that_failed_is_not_tried_again():
    """After the last one there is none."""
    rung, why = next_rung(ResetPolicy(rungs=("files", "replace")), offered=("replace",), failed={"replace"})

    assert rung is None
    assert "jail is not allowed; files is not offered; restart is not allowed; replace failed" == why


def test_rungs_that_nobody_wrote_yet_are_not_chosen():
    """A sandbox may offer more than this version can apply and verify."""
    assert "replace" == next_rung(ResetPolicy(), offered=RUNGS)[0]


@pytest.mark.parametrize(
    ("rungs", "message"),
    [(("magic",), "^unknown reset rung 'magic'; there are jail, files, restart, replace$"), ((), "at least one rung")],
    ids=["unknown", "none"],
)
def test_a_policy_names_rungs_that_exist(rungs, message):
    """Anything else is refused when it is written down."""
    with pytest.raises(ConfigurationError, match=message):
        ResetPolicy(rungs=rungs)


def test_a_report_says_what_was_done():
    """Rung and duration always, findings where there are any."""
    report = ResetReport(
        rung="files", seconds=0.5, changed=("/tmp/x",), killed=(ProcessInfo(pid=7, command="x"),), verified=True
    )

    assert ("files", 0.5, ("/tmp/x",), 7, True) == (
        report.rung,
        report.seconds,
        report.changed,
        report.killed[0].pid,
        report.verified,
    )
