# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox ttfc``: its figures add up, on this machine and on the cluster double."""

from __future__ import annotations

import json

import pytest

from agentsandbox.cli.stages import StageRecorder, split
from agentsandbox.models.events import Event
from agentsandbox.models.timing import StartKind, TTFCSample


def test_the_parts_of_a_cold_start_add_up() -> None:
    """Each part ends where the next begins, and what was not seen is part of what was seen next."""
    sample = TTFCSample(seconds=10.0)
    moments = {"requested": 100.0, "asked": 101.0, "created": 102.0, "scheduled": 104.0, "open": 107.0}
    moments |= {"prepared": 108.0, "granted": 109.0}

    parts = split(sample, moments)

    assert parts.stages == {
        "queued": 1.0,
        "created": 1.0,
        "scheduled": 2.0,
        "stream open": 3.0,
        "prepared": 1.0,
        "granted": 1.0,
        "first command": 1.0,
    }
    assert sum(parts.stages.values()) == sample.seconds
    assert parts.making == 7.0


def test_what_was_ready_before_takes_no_part() -> None:
    """A warm start consists of its last two parts; how long the sandbox took to make is told apart."""
    moments = {"requested": 100.0, "asked": 50.0, "created": 51.0, "prepared": 60.0, "granted": 100.25}

    parts = split(TTFCSample(seconds=0.5, start=StartKind.WARM), moments)

    assert {name: seconds for name, seconds in parts.stages.items() if seconds} == {
        "granted": 0.25, "first command": 0.25,
    }  # fmt: skip
    assert parts.making == 10.0


def test_moments_out_of_order_never_make_a_part_negative() -> None:
    """A watch may tell late, but no wait is shorter than nothing or longer than the whole."""
    moments = {"requested": 0.0, "asked": 0.5, "created": 3.0, "scheduled": 2.0, "open": 2.5, "granted": 2.5}

    parts = split(TTFCSample(seconds=2.75), moments).stages

    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(2.75)


def test_a_recycled_sandbox_was_asked_for_when_its_restart_began() -> None:
    """Its making is the restart, not its first creation long ago."""
    recorder = StageRecorder(lambda sandbox: {"scheduled": 2.0})
    recorder(Event(name="sandbox.created", at=1.0, sandbox="s"))
    recorder(Event(name="sandbox.opened", at=4.0, sandbox="s"))
    recorder(Event(name="sandbox.ready", at=5.0, sandbox="s"))
    recorder(Event(name="sandbox.ready", at=20.0, sandbox="s", data={"recycled": 1.5}))
    recorder(Event(name="lease.granted", at=21.0, sandbox="s", episode="e", data={"queue": 3.0}))

    assert recorder.moments["e", "s"] == {
        "asked": 18.5, "scheduled": 2.0, "prepared": 20.0, "granted": 21.0, "requested": 18.0,
    }  # fmt: skip


def check(report, *, n) -> None:
    """What holds of every report."""
    figures = report["ttfc"]
    assert (figures["n"], figures["censored"], report["failures"]) == (n, 0, [])
    assert 0 < figures["p50"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    assert report["slowest"][0]["seconds"] == figures["max"]
    for row in report["slowest"]:
        assert sum(row["stages"].values()) == pytest.approx(row["seconds"])
    assert [entry["round"] for entry in report["by_round"]] == list(range(report["rounds"]))
    assert report["environment"]["driver"]["processors"] >= 1


@pytest.mark.parametrize("scenario", ["warm", "cold"])
def test_local_sandboxes_are_measured(invoke, scenario) -> None:
    """Every sandbox of every round counts, as warm or as cold."""
    code, text = invoke("ttfc", "--scenario", scenario, "--count", "3", "--rounds", "2", "--json")

    assert code == 0, text
    report = json.loads(text.splitlines()[-1])
    check(report, n=6)
    assert set(report["ttfc"]["by_start"]) == {scenario}


def test_a_cluster_is_measured_by_what_the_driver_sees(start_cluster, invoke, tmp_path) -> None:
    """The Pod's stages are among the parts, and nodes and images among the facts."""
    start_cluster()

    words = ("--backend", "kubernetes", "--count", "2", "--rounds", "1", "--output", tmp_path / "report.json")
    code, text = invoke("ttfc", "--scenario", "cold", *words)

    assert code == 0, text
    assert "ttfc_seconds n=2" in text
    report = json.loads((tmp_path / "report.json").read_text())
    check(report, n=2)
    stages = {"queued", "created", "scheduled", "container started", "stream open", "granted", "first command"}
    assert stages <= set(report["by_stage"])
    assert [node["name"] for node in report["environment"]["cluster"]["nodes"]] == ["node1"]
    assert set(report["environment"]["cluster"]["images"]["python:3.12-alpine"]) == {"nodes", "bytes"}
    assert all(row["pod"].startswith(f"asb-{report['run_id']}-") for row in report["slowest"])


def test_many_images_share_few_pods(start_cluster, invoke, tmp_path) -> None:
    """With fewer Pods than images, Pods serve one image after the other."""
    cluster = start_cluster(images=dict.fromkeys(("a", "b", "c"), "host"))

    images = [word for name in ("a", "b", "c") for word in ("--image", name)]
    words = ("--user", "1000", "--count", "6", "--parallelism", "3", "--rounds", "1", "--output", tmp_path / "r.json")
    code, text = invoke("ttfc", "--backend", "kubernetes", "--scenario", "many-images", *images, *words)

    assert code == 0, text
    report = json.loads((tmp_path / "r.json").read_text())
    check(report, n=6)
    made = [one for one in cluster.asked("POST", "/pods$") if one.get("dryRun") is None]
    assert report["sandboxes_made"] == len(made) <= 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scenario", "tepid"], "--scenario is one of warm, cold, many-images, not 'tepid'"),
        (["--scenario", "many-images", "--image", "a"], "needs --image at least twice"),
        (["--scenario", "cold", "--image", "a", "--image", "b"], "about one --image, not 2"),
        (["--scenario", "cold", "--count", "2", "--parallelism", "3"], "--parallelism must be from 1 to --count, 2"),
        (["--scenario", "warm", "--count", "2", "--parallelism", "1"], "--parallelism makes no sense"),
        (["--context", "x"], "--context is for clusters"),
        (["--output", "."], "results are never overwritten"),
        (["--image", "no-such-image"], "no-such-image"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused(invoke, words, message) -> None:
    """With the name of the option, and exit code 2."""
    code, text = invoke("ttfc", *words)

    assert (code, message in text) == (2, True), text
