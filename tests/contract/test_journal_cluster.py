# SPDX-License-Identifier: Apache-2.0
"""A driver on a cluster that is killed and goes on: its Pods go, its records stay, other Pods are left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from agentsandbox.rollouts.journal import Journal
from agentsandbox.testing.cluster import FakeCluster
from agentsandbox.testing.law import check_journal

EPISODES, BEFORE = 12, 4
IMAGE = "python:3.12"
DOMAIN = "agentsandbox.dev"
GUARD = 120.0

SOLVER = f"""
import pathlib

async def solve(sandbox, episode):
    number = episode.inputs["number"]
    if number >= {BEFORE} and not pathlib.Path("second").exists():
        await sandbox.exec("sleep 600", timeout=None)
    await sandbox.write_file("number", str(number))
    return float((await sandbox.exec("cat number", check=True)).stdout)
"""


def stranger(cluster, name: str, run_id: str) -> None:
    """Put a Pod of another run there."""
    labels = {f"{DOMAIN}/run-id": run_id, f"{DOMAIN}/managed-by": "agentsandbox"}
    metadata = {"name": name, "namespace": "rl", "labels": labels}
    spec = {"containers": [{"name": "sandbox", "image": IMAGE, "command": ["sleep", "600"]}]}
    cluster.create("pods", {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", "qosClass": "x"}})


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster in a thread, since each driver has a process of its own; and the way to it in the environment."""
    with start_blocking_portal() as portal:
        whole = FakeCluster(images={IMAGE: "host"})
        with portal.wrap_async_context_manager(whole):
            portal.call(stranger, whole, "asb-0123456789ab-1-abcdef", "0123456789ab")
            monkeypatch.setenv("KUBECONFIG", whole.kubeconfig(tmp_path))
            monkeypatch.setenv(
                "PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
            )
            yield whole


def names(cluster) -> set[str]:
    """The Pods that are there."""
    return {pod["metadata"]["name"] for pod in cluster.pods()}


@pytest.mark.timeout(GUARD * 2)
def test_p46_what_a_killed_driver_held_is_removed_and_what_it_had_finished_stays(cluster, tmp_path: Path) -> None:
    """Finished records are returned as they were, the rest runs in other Pods, and the orphans go by their run's id."""
    (tmp_path / "solver.py").write_text(SOLVER)
    tasks = [{"id": f"ep-{n}", "image": IMAGE, "inputs": {"number": n}} for n in range(EPISODES)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    command = [sys.executable, "-m", "agentsandbox.cli", "run"]
    words = ["--backend", "kubernetes", "--namespace", "rl", "--user", "1000", "--tasks", "tasks.jsonl"]
    words += ["--rollout", "solver:solve", "--parallelism", "3", "--output", "out"]
    journal = tmp_path / "out" / "journal.db"
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen([*command, *words], cwd=tmp_path, stdout=log, stderr=log)
    try:
        end = time.monotonic() + GUARD
        while (counts := check_journal(journal)) is None or counts.rewarded < BEFORE or len(names(cluster)) < 4:
            assert driver.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)  # noqa: TID251 - nothing here has an event loop
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    held, kept = names(cluster), {record.episode.id: record for record in Journal(journal).records()}
    run_id = json.loads((tmp_path / "out" / "receipt.json").read_text())["run_id"]
    ours = {name for name in held if name.startswith(f"asb-{run_id}-")}
    assert (len(kept), len(ours), len(held)) == (BEFORE, 3, 4)

    (tmp_path / "second").touch()
    done = subprocess.run(
        [*command, "--resume", "out"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=GUARD
    )

    assert done.returncode == 0, done.stdout + done.stderr
    counts = check_journal(journal)
    assert (counts.submitted, counts.rewarded, counts.pending) == (EPISODES, EPISODES, 0)
    records = {record.episode.id: record for record in Journal(journal).records()}
    assert kept.items() <= records.items()
    assert {name: record.reward for name, record in records.items()} == {f"ep-{n}": float(n) for n in range(EPISODES)}
    interrupted = [record for record in records.values() if len(record.history) > 1]
    assert ["interrupted"] * len(interrupted) == [record.history[0].failure.kind for record in interrupted]
    lost = {record.history[0].identity.uid for record in interrupted if record.history[0].identity is not None}
    assert lost.isdisjoint(record.history[-1].identity.uid for name, record in records.items() if name not in kept)
    assert names(cluster) == {"asb-0123456789ab-1-abcdef"}
    deleted = [one for one in cluster.asked("DELETE") if one.path.rpartition("/")[2] in ours and one.status == 200]
    assert {one.path.rpartition("/")[2] for one in deleted} == ours
    assert all(one.body["preconditions"]["uid"] for one in deleted)
