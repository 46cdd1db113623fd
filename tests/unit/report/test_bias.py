# SPDX-License-Identifier: Apache-2.0
"""What the missing rewards have in common."""

from __future__ import annotations

import itertools
import math
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agentsandbox.errors import Phase, SandboxLost, classify
from agentsandbox.models.episode import Attempt, Episode, EpisodeRecord, RolloutResult, Status
from agentsandbox.models.timing import Timings
from agentsandbox.report import bias_lines, bias_report

LOST = classify(SandboxLost("evicted"), Phase.EXEC)


def record(
    name: str,
    reward: float | None,
    seconds: float | None = 1.0,
    *,
    image: str = "host",
    nodes: tuple[str, ...] = ("n1",),
) -> EpisodeRecord:
    """Make a record; all attempts but the last have failed, one a node."""
    history = tuple(
        Attempt(
            number=number,
            node=node,
            reward=reward if number == len(nodes) else None,
            failure=None if number == len(nodes) and reward is not None else LOST,
            timings=Timings(run=seconds),
        )
        for number, node in enumerate(nodes, 1)
    )
    return EpisodeRecord(
        episode=Episode(id=name, image=image),
        status=Status.RETRYABLE if reward is None else Status.REWARDED,
        reward=reward,
        failure=LOST if reward is None else None,
        attempts=len(nodes),
        history=history,
    )


def batch(*parts: tuple[int, float | None, float]) -> list[EpisodeRecord]:
    """Make (how many, reward, seconds) records of each kind; lengths differ a little."""
    numbers = itertools.count()
    return [
        record(f"e{next(numbers)}", reward, seconds + index / 1000)
        for count, reward, seconds in parts
        for index in range(count)
    ]


def test_nothing_missing() -> None:
    """A batch with every reward has nothing to report."""
    report = bias_report(RolloutResult(records=tuple(batch((8, 0.0, 1.0)))))

    assert (report.episodes, report.missing, report.longer, report.notable) == (8, 0, None, ())
    assert bias_lines(report) == ["no reward is missing"]


def test_g7_long_episodes_that_go_missing_are_named() -> None:
    """The longest quarter has lost its rewards: the report says that, and how sure it is."""
    report = bias_report(batch((48, 1.0, 10.0), (16, None, 60.0)))

    assert report.longer == 1.0
    assert report.longer_score > 5
    assert [(share.episodes, share.missing) for share in report.by_length] == [(16, 0), (16, 0), (16, 0), (16, 16)]
    assert report.by_length[3].rate == 1.0
    assert report.by_length[3].notable
    assert bias_lines(report) == [
        "16 of 64 rewards are missing (25.0%)",
        f"episodes without a reward ran longer: 100% of pairs, {report.longer_score:.1f} deviations",
    ]


def test_failures_by_lot_are_no_bias() -> None:
    """Every fourth episode of any length is missing: nothing sets it apart."""
    records = [record(f"e{n}", None if n % 4 == 0 else 1.0, float(n % 16)) for n in range(64)]
    report = bias_report(records)

    assert report.notable == ()
    assert abs(report.longer - 0.5) < 0.15
    assert bias_lines(report)[1] == "nothing in length, image or node sets them apart from the others"


def test_an_image_and_a_node_that_fail_are_named() -> None:
    """Shares are by image over episodes, and by node over attempts: a retry elsewhere hides no ill node."""
    records = [record(f"a{n}", 1.0, image="good", nodes=("n1",)) for n in range(20)]
    records += [record(f"b{n}", None if n < 5 else 1.0, image="bad", nodes=("n3",)) for n in range(6)]
    records += [record(f"c{n}", 1.0, image="good", nodes=("ill", "n1")) for n in range(6)]
    report = bias_report(records)

    assert [(share.part, share.episodes, share.missing) for share in report.by_image] == [
        ("bad", 6, 5),
        ("good", 26, 0),
    ]
    assert [(share.part, share.episodes, share.missing) for share in report.by_node] == [
        ("ill", 6, 6),
        ("n1", 26, 0),
        ("n3", 6, 5),
    ]
    assert [line.partition(":")[0] for line in report.notable] == ["image bad", "node ill", "node n3"]


def test_what_never_ran_has_no_length() -> None:
    """An episode that never got a sandbox counts as missing and lies in no quarter."""
    records = [record("a", None, None, nodes=()), record("b", 1.0, 2.0), record("c", None, 3.0)]
    report = bias_report(records)

    assert (report.missing, report.never_ran) == (2, 1)
    assert sum(share.episodes for share in report.by_length) == 2


def test_nothing_at_all() -> None:
    """No records, no figures."""
    assert bias_report(()).by_length == ()


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=12))
def test_the_pairs_are_those_of_the_definition(known: list[tuple[int, bool]]) -> None:
    """The figure from ranks equals the share of pairs, counted one by one; equal lengths count half."""
    report = bias_report([record(f"e{n}", None if gone else 1.0, float(s)) for n, (s, gone) in enumerate(known)])
    gone, there = ([s for s, missing in known if missing is side] for side in (True, False))
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in gone for b in there]

    if not pairs:
        assert report.longer is None
    else:
        assert report.longer == pytest.approx(statistics.fmean(pairs))
        assert math.isfinite(report.longer_score)
