# SPDX-License-Identifier: Apache-2.0
"""What the Pods and logs of a Job are worth, and the episode as a program."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time

import pytest

from agentsandbox.backends.kubernetes import jobs
from agentsandbox.errors import (
    ConfigurationError,
    EvidenceMissing,
    InvalidReward,
    InvalidTask,
    RewardError,
    SandboxLost,
)

RUN = "0123456789ab"
JOB = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"completions": 2}}
BORN = 1767225600.0


def pod(number: int) -> dict:
    """A Pod that has done its work."""
    state = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    container = {"name": "episode", "restartCount": 0, "imageID": "sha256:1", "state": state}
    return {
        "metadata": {"name": f"rollout-{number}", "creationTimestamp": f"2026-01-01T00:00:0{number}Z"},
        "spec": {"nodeName": "node1"},
        "status": {"phase": "Succeeded", "containerStatuses": [container]},
    }


def log(number: int, **reward) -> str:
    """What an episode writes that is ready two and done three seconds after its Pod was made."""
    name, at = f"rollout-{number}", BORN + number
    reward = {"event": "reward", "at": at + 3, "reward": 1, "baseline_exit": 1, "tests_exit": 0, **reward}
    lines = [{"event": "ready", "at": at + 2, "episode_id": name}, {"episode_id": name, **reward}]
    return "some noise\n" + "".join(json.dumps(line) + "\n" for line in lines)


def finished() -> tuple[list[dict], dict[str, str]]:
    """The Pods of a good batch and their logs."""
    return [pod(2), pod(1)], {"rollout-1": log(1), "rollout-2": log(2)}


def test_a_good_batch_becomes_figures() -> None:
    """Durations count from the creation of the Job or the Pod; rows are in the order of names."""
    report = jobs.collect(*finished(), JOB)

    assert (report["episodes"], report["successful_episodes"], report["reward_sum"]) == (2, 2, 2.0)
    assert report["batch_to_all_ready_seconds"] == 4
    assert report["batch_to_all_rewards_seconds"] == 5
    assert report["pod_to_ready_p50_seconds"] == report["pod_to_ready_max_seconds"] == 2
    assert report["pods"][0] == {
        "pod": "rollout-1", "node": "node1", "image_id": "sha256:1", "reward": 1, "pod_to_ready_seconds": 2.0,
        "batch_to_ready_seconds": 3.0, "batch_to_reward_seconds": 4.0,
    }  # fmt: skip


def restarted(one: dict) -> None:
    one["status"]["containerStatuses"][0]["restartCount"] = 1


def exited(one: dict) -> None:
    one["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] = 2


def failed(one: dict) -> None:
    one["status"] = {"phase": "Failed", "reason": "Evicted", "message": "memory"}


def early(one: dict) -> None:
    one["metadata"]["creationTimestamp"] = "2025-12-31T23:59:59Z"


def late(one: dict) -> None:
    one["metadata"]["creationTimestamp"] = "2026-01-01T00:00:09Z"


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (restarted, SandboxLost, "exit code 0 after 1 restarts"),
        (exited, SandboxLost, "exit code 2 after 0 restarts"),
        (failed, SandboxLost, "rollout-1 is Failed, not Succeeded memory"),
        (early, RewardError, "timestamps are not in order"),
        (late, RewardError, "timestamps are not in order"),
    ],
)
def test_one_bad_pod_spoils_the_batch(spoil, error, message) -> None:
    """Nothing is left out of the figures: one episode that is not verified means that there are none."""
    pods, logs = finished()
    spoil(pods[1])

    with pytest.raises(error, match=message):
        jobs.collect(pods, logs, JOB)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", EvidenceMissing, "0 ready and 0 reward events"),
        (log(1) + log(1), EvidenceMissing, "2 ready and 2 reward events"),
        (log(2), EvidenceMissing, "its log is of rollout-2"),
        (log(1, baseline_exit=0), InvalidTask, "passes before the fix"),
        (log(1, baseline_exit=None), EvidenceMissing, "does not pass its test"),
        (log(1, tests_exit=1), EvidenceMissing, "does not pass its test"),
        (log(1, reward=0), EvidenceMissing, "does not pass its test"),
        (log(1, reward=None), InvalidReward, "None is not a finite number"),
        (log(1, reward=float("nan")), InvalidReward, "nan is not a finite number"),
        (log(1, at=BORN + 2), RewardError, "timestamps are not in order"),
        (log(1, at="now"), EvidenceMissing, "does not say when"),
    ],
)
def test_one_bad_log_spoils_the_batch(text, error, message) -> None:
    """A reward counts only with the proof of it, in the episode's own name."""
    pods, logs = finished()

    with pytest.raises(error, match=message):
        jobs.collect(pods, {**logs, "rollout-1": text}, JOB)


@pytest.mark.parametrize("count", [1, 3])
def test_there_is_one_pod_an_episode(count) -> None:
    """A Pod too many or too few means that something was replaced or failed."""
    with pytest.raises(SandboxLost, match=f"2 Pods for {count} episodes"):
        jobs.collect(*finished(), {**JOB, "spec": {"completions": count}})


def test_the_user_s_own_script_needs_no_baseline() -> None:
    """Any finite number is its reward."""
    pods, logs = finished()
    logs["rollout-1"] = log(1, reward=-0.5, baseline_exit=None, tests_exit=None)

    assert jobs.collect(pods, logs, JOB, own_script=True)["reward_sum"] == 0.5


def test_the_built_in_episode_is_a_program_of_its_own(tmp_path) -> None:
    """It runs outside of the package, and what it prints is what is verified."""
    (tmp_path / "episode.py").write_text(jobs.built_in_script())
    before = time.time()

    done = subprocess.run(
        [sys.executable, "-IB", "episode.py"],
        cwd=tmp_path,
        env={**os.environ, "EPISODE_ID": "rollout-1"},
        capture_output=True,
        text=True,
    )

    ready, reward = (json.loads(line) for line in done.stdout.splitlines())
    assert (done.returncode, ready["event"], reward["event"]) == (0, "ready", "reward")
    assert (reward["reward"], reward["baseline_exit"], reward["tests_exit"]) == (1, 1, 0)
    assert before <= ready["at"] <= reward["at"]
    assert reward["episode_id"] == "rollout-1"


def test_an_episode_of_the_job_is_confined() -> None:
    """No root, no token, no capability, its own work directory, and our marks on everything."""
    manifest = jobs.job(RUN, "nonce", jobs.JobOptions(count=4, runtime_class="gvisor"))

    spec = manifest["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (manifest["spec"]["completions"], manifest["spec"]["parallelism"]) == (4, 4)
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {"name": "workspace", "emptyDir": {}} in spec["volumes"]
    assert manifest["metadata"]["labels"] == manifest["spec"]["template"]["metadata"]["labels"]
    assert manifest["metadata"]["labels"]["agentsandbox.dev/run-id"] == RUN


def test_a_script_that_does_not_fit_is_refused() -> None:
    """A ConfigMap holds a MiB."""
    with pytest.raises(ConfigurationError, match="1000001 bytes"):
        jobs.config_map(RUN, "nonce", "#" * 1_000_001)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([], None),
        ([{"type": "SuccessCriteriaMet", "status": "True"}], None),
        ([{"type": "Failed", "status": "False"}], None),
        ([{"type": "FailureTarget", "status": "True"}, {"type": "Failed", "status": "True"}], "Failed"),
        ([{"type": "Complete", "status": "True"}], "Complete"),
    ],
)
def test_a_job_is_over_by_its_conditions(conditions, expected) -> None:
    """Only the two final ones count, and only when they are true."""
    assert jobs.finished({"status": {"conditions": conditions}}) == expected


def test_a_pod_that_can_never_start_is_told() -> None:
    """A missing image is final; one that is being pulled is not."""
    waiting = copy.deepcopy(pod(1))
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ContainerCreating"}}
    assert jobs.trouble([waiting]) is None

    words = 'rpc error: code = NotFound desc = failed to pull: "x": not found'
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ErrImagePull", "message": words}}
    assert jobs.trouble([waiting]) == (f"Pod rollout-1: ErrImagePull: {words}", True)

    unscheduled = copy.deepcopy(pod(2))
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    unscheduled["status"] = {"phase": "Pending", "conditions": [condition]}
    assert jobs.trouble([unscheduled]) == ("Pod rollout-2: Unschedulable: 0/1 nodes", False)
    assert jobs.trouble([unscheduled, waiting])[1] is True
