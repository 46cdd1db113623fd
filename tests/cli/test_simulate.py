# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox simulate`` and ``plan``: the same engine for every strategy, and figures beside their bounds."""

from __future__ import annotations

import json
import sys

import anyio
import attrs
import pytest
from trio.testing import MockClock
from typer.testing import CliRunner

from agentsandbox.backends.simulated import ClusterModel, Faults
from agentsandbox.cli.app import app
from agentsandbox.cli.simulation import EventRecord, bounds, simulate
from agentsandbox.cli.simulation_table import draw
from agentsandbox.cli.strategies import STRATEGIES, run
from agentsandbox.cli.workload import made_up
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import plan
from agentsandbox.metrics.recorder import summarise_ttfc
from agentsandbox.models.events import Event, discard
from agentsandbox.testing.cluster import Image

SMALL = ClusterModel(nodes=2, pods_per_node=40)


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def report():
    """Every strategy in both shapes, on two nodes that have room for a third of the rollouts."""
    workload = made_up(SMALL, images=60, rollouts=4, seconds=30.0, seed=0)
    return simulate(workload, tuple(STRATEGIES), jobs=1)


def rows(report, shape):
    return {row["strategy"]: row for row in report["rows"] if row["shape"] == shape}


@pytest.mark.parametrize("shape", ["hydrated", "cold-nodes"])
def test_every_rollout_has_its_reward_whatever_the_strategy(report, shape):
    """None is lost, none is censored; a Pod a rollout makes as many Pods as rollouts."""
    found = rows(report, shape)

    assert list(STRATEGIES) == list(found)
    assert {(240, 240, 0)} == {(row["rewarded"], row["submitted"], row["ttfc"]["censored"]) for row in found.values()}
    assert 240 == found["cold"]["pods_created"]


@pytest.mark.parametrize("shape", ["hydrated", "cold-nodes"])
def test_ours_keeps_to_its_promises(report, shape):
    """A mean below a second, no straggler, one Pod for each place, and near what nothing can beat."""
    ours, cold = rows(report, shape)["ours"], rows(report, shape)["cold"]

    assert ours["ttfc"]["mean"] <= 1.0
    assert ours["ttfc"]["p99"] <= 5.0
    assert ours["ttfc"]["max"] <= 10.0
    assert ours["pods_created"] <= 80
    assert ours["batch_seconds"] < cold["batch_seconds"]
    assert ours["pulled_bytes"] <= cold["pulled_bytes"]


@pytest.mark.parametrize("shape", ["hydrated", "cold-nodes"])
def test_nothing_beats_its_bound(report, shape):
    """Whatever the strategy, no figure is better than the bound beside it."""
    least = report["bounds"][shape]
    for row in rows(report, shape).values():
        assert row["batch_over_bound"] >= 1.0
        assert row["ttfc"]["mean"] >= least["ttfc_seconds"] - 1e-9
        assert row["pulled_bytes"] >= least["pulled_bytes"]
        assert row["api_writes"] >= least["api_writes"]
        assert row["accelerator_idle_share"] >= least["accelerator_idle_share"] - 1e-9


def record_of(strategy, seed, **options):
    workload = made_up(attrs.evolve(SMALL, **options), images=30, rollouts=3, seconds=20.0, seed=seed)
    lines = []
    record = EventRecord(lines.append)
    from agentsandbox.backends.simulated.virtualtime import VirtualTimeLoop

    planned = plan(workload.uses, workload.nodes(), advise=False)
    anyio.run(
        lambda: run(workload, strategy, planned, hydrated=False, sink=record),
        backend_options={"loop_factory": VirtualTimeLoop},
    )
    return b"".join(lines), record


@pytest.mark.parametrize("strategy", ["ours", "cold"])
def test_the_same_seed_gives_the_same_record_byte_for_byte(strategy):
    """Also with sandboxes that are lost and starts that fail; another seed gives another one."""
    faults = Faults(losses_per_hour=20.0, failed_starts=0.02)

    first, record = record_of(strategy, 5, faults=faults)
    again, _ = record_of(strategy, 5, faults=faults)
    other, _ = record_of(strategy, 6, faults=faults)

    assert first == again
    assert first != other
    assert b" episode.ended " in first
    assert first.count(b"\n") == record.events
    assert repr(record).startswith(f"<EventRecord [{record.events} events, {record.fingerprint[:12]}")


def test_trio_comes_to_the_same_figures():
    """Under trio's clock every episode is rewarded as well, in as many Pods."""
    workload = made_up(SMALL, images=60, rollouts=2, seconds=20.0, seed=0)
    planned = plan(workload.uses, workload.nodes(), advise=False)

    done = anyio.run(
        lambda: run(workload, "ours", planned, hydrated=True, sink=discard),
        backend="trio",
        backend_options={"clock": MockClock(autojump_threshold=0)},
    )

    ((_, result),) = done.results
    assert (120, 80) == (result.counts.rewarded, done.backend.pods_created)
    assert summarise_ttfc(result.samples).max <= 1.0


def test_runs_in_processes_of_their_own_give_the_same_report(report):
    """Several at a time, each with other addresses and another seed of hashes; rows keep their order."""
    told = []
    workload = made_up(SMALL, images=60, rollouts=4, seconds=30.0, seed=0)

    beside = simulate(workload, ("ours", "naive"), jobs=2, progress=told.append)

    names = ("shape", "strategy", "journal_sha256", "batch_seconds")
    assert [[row[name] for name in names] for row in beside["rows"]] == [
        [rows(report, shape)[strategy][name] for name in names]
        for shape in ("hydrated", "cold-nodes")
        for strategy in ("ours", "naive")
    ]
    assert sorted(text.partition(",")[0] for text in told) == sorted(
        f"{row['shape']}: {row['strategy']}" for row in beside["rows"]
    )


def test_a_disk_that_cannot_hold_everything_is_used_in_waves():
    """With room for a part of the images at a time, later waves come as earlier ones are used; nothing is lost."""
    model = attrs.evolve(SMALL, disk=80 * 10**9, writable_layer=0)
    workload = made_up(model, images=300, rollouts=2, seconds=20.0, seed=0)
    planned = plan(workload.uses, workload.nodes(), advise=False)
    assert max(len(node.waves) for node in planned.nodes) > 1

    (row,) = simulate(workload, ("ours",), shapes=("cold-nodes",))["rows"]

    assert (600, 80) == (row["rewarded"], row["pods_created"])
    assert row["disk_peak_share"] <= 0.86
    assert row["ttfc"]["max"] <= 1.0


def test_bounds_count_what_must_be_done():
    """Fetching counts from cold nodes only, and running the time between two rollouts of a place."""
    workload = made_up(SMALL, images=120, rollouts=4, seconds=30.0, seed=0)

    warm, cold = bounds(workload, hydrated=True), bounds(workload, hydrated=False)

    assert (0.0, 0.0) == (warm["pull_seconds"], warm["pulled_bytes"])
    assert cold["pull_seconds"] > 0
    assert warm["run_seconds"] == max(workload.longest, (workload.work + 400 * 0.8) / 80)
    assert (80, 120) == (warm["pods"], warm["pods_without_change"])


def test_an_event_is_a_line():
    """With its time, who it is about, and its data in a fixed order."""
    lines = []
    record = EventRecord(lines.append)
    record(Event(name="sandbox.ready", at=1.25, sandbox="s", data={"b": 1, "a": None}))
    record(Event(name="episode.ended", at=2.0, episode="e", attempt=1))

    assert [
        b'1.250000 sandbox.ready s - - {"a": null, "b": 1}\n',
        b"2.000000 episode.ended - e 1 {}\n",
    ] == lines


def test_the_command_prints_a_table_and_writes_the_report(tmp_path):
    """Labelled as simulated; the same figures in the table and in the file, and a journal a run."""
    output, journal = tmp_path / "report.json", tmp_path / "journal"

    result = invoke(
        *("simulate", "--images", 10, "--nodes", 1, "--pods-per-node", 20, "--strategy", "ours", "--strategy", "cold"),
        *("--shape", "cold-nodes", "--output", output, "--journal", journal),
    )

    assert 0 == result.exit_code, result.output
    assert "SIMULATED: 40 rollouts of 10 images, 1 nodes, 20 sandboxes at once" in result.output
    assert "TTFC p99, s" in result.output
    assert "batch complete, s" in result.output
    written = json.loads(output.read_text())
    assert written["simulated"] is True
    assert ["ours", "cold"] == [row["strategy"] for row in written["rows"]]
    assert ["cold-nodes-cold.log", "cold-nodes-ours.log"] == sorted(path.name for path in journal.iterdir())
    assert (journal / "cold-nodes-ours.log").read_bytes().count(b"\n") == written["rows"][0]["events"]


def test_the_command_prints_json(tmp_path):
    """One object, of images that a file names."""
    images = tmp_path / "images.csv"
    images.write_text("image,size,rollouts,seconds\na,100000000,3,5\nb,200000000,2,9\n")

    result = invoke("simulate", "--csv", images, "--nodes", 1, "--strategy", "naive", "--json")

    assert 0 == result.exit_code, result.output
    found = json.loads(result.stdout)
    assert (2, 5, 2) == (found["images"], found["rollouts"], len(found["rows"]))


def test_a_figure_is_drawn(report, tmp_path):
    """All strategies in both shapes, each beside its bound, and said to be simulated."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.svg"

    draw(report, path)
    drawn = path.read_text()

    for text in ("Simulated: 240 rollouts of 60 images, 2 nodes", "images beforehand", "empty nodes", *STRATEGIES):
        assert f"<!-- {text}" in drawn
    assert 4 == drawn.count("<!-- bound: ")


def test_a_figure_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    """Before anything is simulated."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    result = invoke(
        *("simulate", "--images", 4, "--nodes", 1, "--strategy", "ours", "--figure", tmp_path / "figure.png")
    )

    assert 2 == result.exit_code
    assert "a figure needs matplotlib: pip install 'agentsandbox[report]'" in result.output
    assert "simulated" not in result.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--strategy", "magic"), "unknown strategy 'magic'"),
        (("--shape", "round"), "unknown shape 'round'"),
        (("--csv", "no.csv"), "cannot read no.csv"),
        (("--csv", "a", "--oci-layout", "b"), "give either --csv or --oci-layout"),
        (("--disk", "21"), "fit on no node"),
    ],
)
def test_what_cannot_be_simulated_is_refused(words, reason):
    """Exit code 2, and one line that says why."""
    result = invoke("simulate", "--images", 3, "--nodes", 1, *words)

    assert 2 == result.exit_code
    assert reason in " ".join(result.output.split())


def test_a_plan_says_where_everything_goes_and_what_does_not_fit(tmp_path):
    """Exit code 1 if something does not, with the change that would help; the whole plan is in the file."""
    images, output = tmp_path / "images.csv", tmp_path / "plan.json"
    images.write_text("image,size,base,base_size\na,100000000,b0,900000000\nb,1,b0,900000000\nhuge,99000000000,,\n")

    result = invoke("plan", "--csv", images, "--nodes", 2, "--disk", 100, "--output", output)

    assert 1 == result.exit_code, result.output
    assert "does not fit: huge: it takes 267.3 GB on disk" in result.output
    assert "what would help most: a disk of" in result.output
    made = json.loads(output.read_text())
    assert {"a", "b"} == set(made["placement"])
    assert ["huge"] == [each["image"] for each in made["unplaced"]]


def test_a_plan_is_printed_as_json(tmp_path):
    """Exit code 0 if everything fits."""
    images = tmp_path / "images.csv"
    images.write_text("image,size\n" + "".join(f"i{n},1000000\n" for n in range(30)))

    result = invoke("plan", "--csv", images, "--nodes", 12, "--json")
    text = invoke("plan", "--csv", images, "--nodes", 12)

    assert 0 == result.exit_code
    assert 12 == len(json.loads(result.stdout)["nodes"])
    assert "and 2 more nodes" in text.output


def test_a_plan_needs_images_and_nodes(tmp_path):
    """Without images, and for a backend without nodes."""
    images = tmp_path / "images.csv"
    images.write_text("image,size\na,1\n")

    assert "give either --csv or --oci-layout" in invoke("plan").output
    assert "--backend is kubernetes or simulated" in invoke("plan", "--csv", images, "--backend", "local").output


def test_an_unknown_strategy_is_a_mistake():
    """From Python, too."""
    workload = made_up(SMALL, images=1, rollouts=1, seconds=1.0, seed=0)
    with pytest.raises(ConfigurationError, match="unknown strategy"):
        simulate(workload, ("magic",))


def test_a_plan_for_a_cluster_is_made_of_its_nodes_and_carried_out(start_cluster, tmp_path):
    """Room, images and disks come from the nodes; --fetch leaves the images on them, and no Pod."""
    names = [f"registry.example/i{n}:1" for n in range(3)]
    cluster = start_cluster(
        nodes=2, images={name: Image(present=False) for name in names}, process="echo-runner", namespace="default"
    )
    images = tmp_path / "images.csv"
    images.write_text("image,size\n" + "".join(f"{name},1000000\n" for name in names))
    words = ("plan", "--csv", images, "--backend", "kubernetes", "--json")

    planned = invoke(*words)
    assert 0 == planned.exit_code, planned.output
    assert {"node1", "node2"} == {node["node"] for node in json.loads(planned.stdout)["nodes"]}
    assert [] == cluster.asked("POST", "/pods")

    fetched = invoke(*words, "--fetch", "--lanes", 1)
    assert 0 == fetched.exit_code, fetched.output
    assert {} == json.loads(fetched.stdout)["failed"]
    assert 2 >= len([request for request in cluster.asked("POST") if request.path.endswith("/pods")])
    assert [] == cluster.pods()


def test_only_a_cluster_can_fetch(tmp_path):
    """A model has no registry."""
    images = tmp_path / "images.csv"
    images.write_text("image,size\na,1\n")

    assert "--fetch needs nodes" in invoke("plan", "--csv", images, "--fetch").output
