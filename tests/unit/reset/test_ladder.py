# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.command import ProcessInfo
from agentsandbox.models.reset import RUNGS, ResetPolicy, ResetReport
from agentsandbox.reset.ladder import Ladder, next_rung


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


def test_the_cheapest_rung_that_is_offered_comes_first():
    """In the order of the ladder, as long as nothing was measured."""
    assert ("jail", "") == next_rung(ResetPolicy(), offered=RUNGS)
    assert ("files", "jail is not offered") == next_rung(ResetPolicy(), offered=("files", "restart"))
    assert "restart" == next_rung(ResetPolicy(), offered=("files", "restart"), failed={"files"})[0]


def test_measured_costs_change_the_order():
    """Where a restart takes less time than looking at every file, it is tried first; the others keep their place."""
    costs = {"files": 4.0, "restart": 1.0}

    assert "restart" == next_rung(ResetPolicy(), offered=RUNGS, failed={"jail"}, costs=costs)[0]
    assert "jail" == next_rung(ResetPolicy(), offered=RUNGS, costs=costs)[0]


def test_a_sandbox_is_used_again_so_often_and_no_more():
    """Then it is replaced, whatever it offers."""
    policy = ResetPolicy(max_reuses=2)

    assert "files" == next_rung(policy, offered=("files", "restart"), reuses=1)[0]
    assert "replace" == next_rung(policy, offered=("files", "restart"), reuses=2)[0]


def test_a_rung_that_keeps_failing_rests():
    """Longer each time, and one success ends it."""
    ladder = Ladder(ResetPolicy())
    for _ in range(3):
        assert "files" == ladder.next(100.0, ("files",))[0]
        ladder.failed("files", 100.0)

    assert ("replace", "jail is not offered; files failed too often; restart is not offered") == ladder.next(
        100.5, ("files",)
    )
    assert "files" == ladder.next(101.0, ("files",))[0]
    ladder.failed("files", 101.0)
    assert "replace" == ladder.next(102.9, ("files",))[0]
    ladder.succeeded("files", 0.25)
    assert "files" == ladder.next(102.9, ("files",))[0]
    assert "<Ladder [files 0.250 s | none resting]>" == repr(ladder)


def test_the_cost_of_a_rung_is_a_moving_mean():
    """One slow reset does not turn the ladder over."""
    ladder = Ladder(ResetPolicy())
    for seconds in (1.0, 1.0, 2.0):
        ladder.succeeded("restart", seconds)

    assert {"restart": pytest.approx(1.2)} == ladder.costs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "/opt"}, r"not one string; use \['/opt'\]"),
        ({"scope": ["opt"]}, "^scope has absolute paths such as '/opt/env', not 'opt'$"),
        ({"exclude": [3]}, "^exclude has absolute paths"),
        ({"budget_seconds": 0}, "^budget_seconds must be a number above 0 seconds, not 0$"),
        ({"on_change": "ignore"}, "^on_change is one of restore, replace, not 'ignore'$"),
        ({"max_reuses": -1}, "^max_reuses must be a whole number of at least 0, not -1$"),
        ({"copies_limit": True}, "^copies_limit must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_policy_that_cannot_work_is_refused(settings, message):
    """With the value, and what it may be."""
    with pytest.raises(ConfigurationError, match=message):
        ResetPolicy(**settings)


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
