# SPDX-License-Identifier: Apache-2.0
"""The figures of a batch, for programs and for people."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from agentsandbox.errors import (
    Blame,
    Failure,
    FailureKind,
    ImagePullFailed,
    Phase,
    SandboxLost,
    classify,
)
from agentsandbox.metrics import summarise_ttfc
from agentsandbox.models.episode import Attempt, Counts, Episode, EpisodeRecord, RolloutResult, Status
from agentsandbox.models.sandbox import Identity
from agentsandbox.models.timing import StartKind, Timings, TTFCSample
from agentsandbox.report import describe_environment, record_row, results, summary_lines

LOST = classify(SandboxLost("evicted", "node pressure"), Phase.EXEC)
NO_IMAGE = classify(ImagePullFailed("no such image", permanent=True), Phase.ACQUIRE)
CANCELLED = Failure(
    kind=FailureKind.CANCELLED, phase=Phase.EXEC, blame=Blame.CALLER, retryable=True, message="the batch was cancelled"
)
KEYS = {
    "episodes",
    "successful_episodes",
    "reward_sum",
    "counts",
    "batch_to_all_ready_seconds",
    "batch_to_all_rewards_seconds",
    "sandbox_to_ready_p50_seconds",
    "sandbox_to_ready_p95_seconds",
    "sandbox_to_ready_max_seconds",
    "client_complete_seconds",
    "ttfc",
    "parallelism",
    "backend",
    "image",
    "run_id",
    "environment",
    "records",
}


def attempt(number: int = 1, *, ready_at: float = 1.0, reward: float | None = 1.0, **options: object) -> Attempt:
    """Return an attempt that was granted after 0.5 s and ran for 2 s."""
    return Attempt(
        number=number,
        sandbox=f"box-{number}",
        node="node-1",
        identity=Identity(uid="u", instance="i"),
        reward=reward,
        ttfc=TTFCSample(seconds=0.75, start=StartKind.WARM, stages={"queue": 0.5, "start": 0.25}),
        timings=Timings(acquire=0.5, run=2.0, ready_at=ready_at),
        **options,
    )


def record(name: str, *history: Attempt, **options: object) -> EpisodeRecord:
    """Return a record that says what its last attempt says."""
    values = {
        "status": Status.REWARDED,
        "reward": history[-1].reward if history else None,
        "failure": history[-1].failure if history else None,
        "attempts": len(history),
        **options,
    }
    return EpisodeRecord(episode=Episode(id=name, image="host", group=0), history=history, **values)


def result_of(*records: EpisodeRecord, wall: float = 9.0) -> RolloutResult:
    """Return the result of a batch."""
    statuses = [entry.status.value for entry in records]
    samples = tuple(entry.ttfc for one in records for entry in one.history if entry.ttfc)
    return RolloutResult(
        records=records,
        counts=Counts(submitted=len(records), **{status: statuses.count(status) for status in set(statuses)}),
        ttfc=summarise_ttfc(samples),
        samples=samples,
        wall_seconds=wall,
    )


def document(result: RolloutResult, **options: object) -> dict:
    """Return the document of a batch."""
    return results(result, **{"parallelism": 4, "backend": "local", "image": "host", "run_id": "r1", **options})


def test_a_good_batch() -> None:
    """Every figure of a batch in which everything went well."""
    report = document(result_of(record("a", attempt()), record("b", attempt(ready_at=3.0, reward=0.5))))

    assert set(report) >= KEYS
    assert (report["episodes"], report["successful_episodes"], report["reward_sum"]) == (2, 2, 1.5)
    assert report["counts"] == {"submitted": 2, "rewarded": 2, "failed": 0, "retryable": 0, "cancelled": 0}
    assert report["batch_to_all_ready_seconds"] == 3.0
    assert report["batch_to_all_rewards_seconds"] == 5.0
    assert report["sandbox_to_ready_p50_seconds"] == 0.5
    assert report["sandbox_to_ready_max_seconds"] == 0.5
    assert report["client_complete_seconds"] == 9.0
    assert {key: report["ttfc"][key] for key in ("n", "mean", "p50", "p95", "p99", "max", "censored")} == {
        "n": 2,
        "mean": 0.75,
        "p50": 0.75,
        "p95": 0.75,
        "p99": 0.75,
        "max": 0.75,
        "censored": 0,
    }
    assert report["ttfc"]["by_start"]["warm"]["n"] == 2
    assert report["ttfc"]["by_stage"]["queue"]["max"] == 0.5
    assert report["groups"] == [{"group": 0, "size": 2, "valid": 2, "complete": True}]
    assert (report["parallelism"], report["backend"], report["image"], report["run_id"]) == (4, "local", "host", "r1")
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_no_failure_is_left_out() -> None:
    """Failures have rows like everybody; a batch with a missing reward has no time of all rewards."""
    never = record("c", status=Status.RETRYABLE, failure=LOST, reward=None)
    failed = record(
        "b", attempt(reward=None, failure=LOST), attempt(2, reward=None, failure=LOST), status=Status.RETRYABLE
    )
    report = document(result_of(record("a", attempt()), failed, never))

    assert (report["episodes"], report["successful_episodes"], report["reward_sum"]) == (3, 1, 1.0)
    assert report["batch_to_all_ready_seconds"] is None
    assert report["batch_to_all_rewards_seconds"] is None
    assert [row["episode"] for row in report["records"]] == ["a", "b", "c"]
    assert [row["attempts"] for row in report["records"]] == [1, 2, 0]
    assert report["records"][2]["ttfc"] is None
    assert report["records"][2]["identity"] is None
    assert [entry["reason"] for entry in report["records"][1]["history"]] == [
        "SandboxLost: evicted: node pressure",
        "SandboxLost: evicted: node pressure",
    ]


def test_a_row_says_everything() -> None:
    """What came of an episode, where it ran and why it has no reward."""
    info = {"turns": 3, "path": Path("/x"), "nan": float("nan"), 5: (1, {2}), "none": None, "status": Status.FAILED}
    row = record_row(
        record(
            "a",
            attempt(reward=None, failure=LOST),
            status=Status.RETRYABLE,
            info=info,
            artifacts={"patch.diff": Path("/out/patch.diff")},
        )
    )

    assert {key: row[key] for key in ("episode", "group", "status", "reward", "reason", "kind", "retryable")} == {
        "episode": "a",
        "group": 0,
        "status": "retryable",
        "reward": None,
        "reason": "SandboxLost: evicted: node pressure",
        "kind": "sandbox_lost",
        "retryable": True,
    }
    assert (row["phase"], row["blame"], row["sandbox"], row["node"]) == ("exec", "sandbox", "box-1", "node-1")
    assert row["identity"] == {"uid": "u", "instance": "i", "restarts": 0}
    assert row["ttfc"]["stages"] == {"queue": 0.5, "start": 0.25}
    assert row["timings"]["run"] == 2.0
    assert row["artifacts"] == {"patch.diff": "/out/patch.diff"}
    assert row["info"] == {
        "turns": 3,
        "path": repr(Path("/x")),
        "nan": "nan",
        "5": [1, [2]],
        "none": None,
        "status": "failed",
    }
    assert type(row["info"]["status"]) is str


def test_an_empty_batch_has_a_document() -> None:
    """Nothing submitted: figures are absent or zero."""
    report = document(RolloutResult(records=()), environment={"python": "3.11"})

    assert (report["episodes"], report["reward_sum"], report["records"]) == (0, 0.0, [])
    assert report["batch_to_all_ready_seconds"] is None
    assert report["sandbox_to_ready_p95_seconds"] is None
    assert report["environment"] == {"python": "3.11"}


def test_the_lines_of_a_good_batch() -> None:
    """The first line is the one that scripts look for."""
    assert summary_lines(result_of(*(record(str(index), attempt()) for index in range(10)), wall=1.5)) == [
        "episodes=10 successful_episodes=10 reward_sum=10",
        "submitted=10 rewarded=10 failed=0 retryable=0 cancelled=0 seconds=1.500",
        "ttfc_seconds n=10 mean=0.7500 p50=0.7500 p95=0.7500 p99=0.7500 max=0.7500 censored=0",
    ]


def test_the_lines_name_every_kind_of_failure() -> None:
    """A group that is not complete is told; each kind of failure has a line, the most frequent first."""
    lost = [record(f"l{index}", attempt(reward=None, failure=LOST), status=Status.RETRYABLE) for index in range(2)]
    pull = record("p", status=Status.FAILED, failure=NO_IMAGE, reward=None)
    lines = summary_lines(result_of(pull, *lost))

    assert lines[0] == "episodes=3 successful_episodes=0 reward_sum=0"
    assert lines[3:] == [
        "groups=1 complete=0 incomplete=0 all_failed=1",
        "retryable sandbox_lost: 2, for instance l0: SandboxLost: evicted: node pressure",
        "failed image_pull: 1, for instance p: ImagePullFailed: no such image",
    ]


@pytest.mark.parametrize(("censored", "lines"), [(True, 3), (False, 2)])
def test_without_a_first_command_there_are_no_figures(censored: bool, lines: int) -> None:
    """Only the number of censored attempts is told, if there are any."""
    history = (attempt(),)
    if censored:
        history = (attrs.evolve(history[0], ttfc=TTFCSample(seconds=3.0, censored=True)),)
    else:
        history = (attrs.evolve(history[0], ttfc=None),)

    shown = summary_lines(result_of(record("a", *history)))

    assert len(shown) == lines
    assert not censored or shown[2] == "ttfc_seconds n=0 censored=1"


def test_the_environment_says_where_it_ran() -> None:
    """Versions and processors, so that figures can be compared."""
    assert set(describe_environment()) == {"agentsandbox", "python", "system", "machine", "processors"}
    assert describe_environment()["processors"] >= 1


def test_a_cancelled_batch_is_told_as_such() -> None:
    """Cancelled episodes are counted apart."""
    assert "cancelled=1" in summary_lines(result_of(record("a", status=Status.CANCELLED, failure=CANCELLED)))[1]
