# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox run`` and ``cleanup`` on the local backend."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentsandbox.backends.local.leftovers import started
from agentsandbox.cli.app import app

KEYS = {
    "episodes", "successful_episodes", "reward_sum", "counts", "batch_to_all_ready_seconds",
    "batch_to_all_rewards_seconds", "sandbox_to_ready_p50_seconds", "sandbox_to_ready_p95_seconds",
    "sandbox_to_ready_max_seconds", "client_complete_seconds", "ttfc", "parallelism", "backend", "image", "run_id",
    "environment", "records",
}  # fmt: skip


def invoke(*words: str | Path) -> tuple[int, str]:
    """Run the command line; return its exit code and what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of the built-in job with three episodes."""
    output = tmp_path_factory.mktemp("run") / "out"
    code, text = invoke("run", "--count", "3", "--output", output)
    assert code == 0, text
    assert "episodes=3 successful_episodes=3 reward_sum=3" in text
    return output


def test_results_have_every_key_and_add_up(finished: Path) -> None:
    """results.json says what came of every episode, and its counts obey the conservation law."""
    results = json.loads((finished / "results.json").read_text())

    assert set(results) >= KEYS
    assert results["counts"] == {"submitted": 3, "rewarded": 3, "failed": 0, "retryable": 0, "cancelled": 0}
    assert {*results["ttfc"]} >= {"n", "mean", "p50", "p95", "p99", "max", "censored"}
    assert [record["episode"] for record in results["records"]] == ["episode-00", "episode-01", "episode-02"]
    assert [record["info"] for record in results["records"]] == [{"baseline_exit": 1, "tests_exit": 0}] * 3
    assert 0 < results["batch_to_all_ready_seconds"] <= results["batch_to_all_rewards_seconds"]
    assert results["batch_to_all_rewards_seconds"] <= results["client_complete_seconds"]


def test_each_episode_has_a_log(finished: Path) -> None:
    """A log tells when the sandbox was ready, every command with its exit code, and the reward."""
    lines = [json.loads(line) for line in (finished / "rollout-episode-01.log").read_text().splitlines()]

    assert [line["event"] for line in lines] == ["ready", "command", "command", "attempt", "reward"]
    assert [line["exit_code"] for line in lines if line["event"] == "command"] == [1, 0]
    assert lines[-1]["reward"] == 1.0
    assert {line["episode_id"] for line in lines} == {"episode-01"}


def test_the_receipt_names_what_was_created(finished: Path) -> None:
    """The receipt has the run's id and the processes that it started, so that cleanup can tell them."""
    receipt = json.loads((finished / "receipt.json").read_text())
    results = json.loads((finished / "results.json").read_text())

    assert receipt["run_id"] == results["run_id"]
    assert receipt["backend"] == "local"
    assert [sorted(created) for created in receipt["created"]] == [["directory", "pid", "started"]]


def test_cleanup_after_a_finished_run_finds_nothing(finished: Path) -> None:
    """A run that ended by itself has left nothing, and its records stay."""
    code, text = invoke("cleanup", "--output", finished)

    assert (code, "nothing is left of run" in text) == (0, True)
    assert (finished / "results.json").exists()


def test_an_output_directory_that_exists_is_refused(finished: Path) -> None:
    """Earlier records are never overwritten."""
    before = (finished / "results.json").read_bytes()

    code, text = invoke("run", "--count", "1", "--output", finished)

    assert (code, "exists; results are never overwritten" in text) == (2, True)
    assert (finished / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallelism", "0"], "--parallelism must be from 1 to the number of episodes, 2, not 0"),
        (["--parallelism", "3"], "--parallelism must be from 1 to the number of episodes, 2, not 3"),
        (["--count", "0"], "--count must be at least 1, not 0"),
        (["--image", "no-such-image"], "no-such-image"),
        (["--backend", "cloud"], "unknown backend 'cloud'"),
        (["--tasks", "x.jsonl"], "--tasks needs --rollout"),
        (["--rollout", "json:dumps"], "async"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_before_anything_is_created(tmp_path: Path, words: list[str], message: str) -> None:
    """The error names the value, the exit code is 2, and there is no output directory."""
    code, text = invoke("run", "--count", "2", "--output", tmp_path / "out", *words)

    assert (code, message in text) == (2, True), text
    assert not (tmp_path / "out").exists()


ROLLOUT = """
async def rollout(sandbox, episode):
    if episode.inputs["kind"] == "raises":
        raise LookupError("a mistake of mine")
    if episode.inputs["kind"] == "none":
        return None
    await sandbox.exec("echo kept > kept.txt", check=True)
    return episode.inputs["reward"]

async def hang(sandbox, episode):
    open("started", "w").close()  # a named pipe: returns when the test reads it
    await sandbox.exec("sleep 600", timeout=None)
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a rollout function, and the path of its tasks file."""
    (tmp_path / "my_rollout_module.py").write_text(ROLLOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rollout_module", raising=False)
    return tmp_path / "tasks.jsonl"


def test_tasks_run_with_the_users_rollout(tasks: Path, tmp_path: Path) -> None:
    """Rewards come back in the order of the lines, and artifacts are kept."""
    lines = [{"id": f"t{n}", "inputs": {"kind": "", "reward": n / 2}, "artifacts": ["kept.txt"]} for n in range(3)]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))

    code, text = invoke("run", "--tasks", tasks, "--rollout", "my_rollout_module:rollout", "--output", tmp_path / "o")

    results = json.loads((tmp_path / "o/results.json").read_text())
    assert code == 0, text
    assert [record["reward"] for record in results["records"]] == [0.0, 0.5, 1.0]
    assert [Path(r["artifacts"]["kept.txt"]).read_text() for r in results["records"]] == ["kept\n"] * 3


def test_an_episode_without_a_valid_reward_fails_the_run(tasks: Path, tmp_path: Path) -> None:
    """No failure is left out: it is in the records, on the terminal, and in the exit code."""
    lines = [{"id": kind, "inputs": {"kind": kind, "reward": 1}} for kind in ("good", "raises", "none")]
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))

    code, text = invoke("run", "--tasks", tasks, "--rollout", "my_rollout_module:rollout", "--output", tmp_path / "o")

    results = json.loads((tmp_path / "o/results.json").read_text())
    assert (code, results["episodes"], results["successful_episodes"]) == (1, 3, 1)
    assert [record["reward"] for record in results["records"]] == [1.0, None, None]
    assert [record["kind"] for record in results["records"]] == [None, "rollout_raised", "invalid_reward"]
    assert "raises: LookupError: a mistake of mine" in text


def test_a_killed_run_leaves_nothing_that_cleanup_does_not_remove(tasks: Path, tmp_path: Path) -> None:
    """A driver that is killed takes its sandboxes along, and cleanup confirms it."""
    tasks.write_text('{"id": "x"}\n')
    os.mkfifo(tmp_path / "started")
    words = ["run", "--tasks", tasks, "--rollout", "my_rollout_module:hang", "--output", tmp_path / "o"]
    driver = subprocess.Popen([sys.executable, "-m", "agentsandbox.cli", *words], cwd=tmp_path)
    (tmp_path / "started").read_bytes()

    refused = invoke("cleanup", "--output", tmp_path / "o")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    code, _ = invoke("cleanup", "--output", tmp_path / "o")
    again = invoke("cleanup", "--output", tmp_path / "o")

    assert (refused[0], f"process {driver.pid}" in refused[1]) == (2, True)
    assert code == 0
    assert (again[0], "nothing is left" in again[1]) == (0, True)
    created = json.loads((tmp_path / "o/receipt.json").read_text())["created"]
    assert [started(entry["pid"]) for entry in created] == [None]


def test_cleanup_never_touches_a_process_that_is_not_the_runs(finished: Path, tmp_path: Path) -> None:
    """A process id that was given away again belongs to somebody else."""
    receipt = json.loads((finished / "receipt.json").read_text())
    receipt["created"] = [{"pid": os.getpid(), "started": 1, "directory": str(tmp_path)}]
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))

    code, text = invoke("cleanup", "--output", tmp_path)

    assert (code, "nothing is left" in text) == (0, True)


def test_cleanup_without_a_receipt_is_refused(tmp_path: Path) -> None:
    """A directory that no run wrote is left alone."""
    code, text = invoke("cleanup", "--output", tmp_path)

    assert (code, "not the output of a run" in text) == (2, True)


def test_doctor_says_that_this_machine_can(tmp_path: Path) -> None:
    """Where the tests run, the local backend works; in JSON as for a person."""
    assert tmp_path
    code, text = invoke("doctor", "--json")

    report = json.loads(text)
    assert (code, report["ok"], report["backend"]) == (0, True, "local")
    assert all({"name", "ok", "detail", "fix", "required"} == set(check) for check in report["checks"])
    assert "the local backend can work here" in invoke("doctor")[1]


def test_bench_puts_each_figure_beside_its_bare_counterpart() -> None:
    """A bench prints one JSON object with both sides of each ratio."""
    report = json.loads(invoke("bench", "rollout", "--count", "100", "--concurrency", "4", "--json")[1])

    assert (report["episodes"], report["rewards"]) == (100, 100.0)
    saturated = report["saturated"]
    assert saturated["ratio"] == pytest.approx(saturated["episode_ms"] / saturated["bare_bwrap_ms"])
    assert sum(part["n"] for part in saturated["ttfc"].values()) == 100
    assert {start: part["n"] for start, part in report["steps"]["ttfc"].items()} == {"warm": 100}
