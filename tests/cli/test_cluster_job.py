# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox job`` on the cluster double."""

from __future__ import annotations

import json

import pytest

from agentsandbox.backends.kubernetes.roles import JOB_RULES, pairs, role
from agentsandbox.testing.cluster import Image

FIGURES = {
    "episodes", "successful_episodes", "reward_sum", "batch_to_all_ready_seconds", "batch_to_all_rewards_seconds",
    "pod_to_ready_p50_seconds", "pod_to_ready_p95_seconds", "pod_to_ready_max_seconds", "pods", "context", "namespace",
    "image", "runtime", "parallelism", "cache_state", "client_job_complete_seconds",
}  # fmt: skip


TRIED = ("networkpolicies", "sandboxclaims", "sandboxtemplates", "sandboxwarmpools")
"""What other runs make: looked for, and done without."""


def names(cluster, plural: str, namespace: str = "") -> list[str]:
    """The names of what is there."""
    return [one.name for one in cluster.store.all(cluster.store.resource(plural), namespace)]


def test_a_job_is_verified_and_then_cleaned_up(start_cluster, invoke, tmp_path) -> None:
    """Every episode has its reward and its files; cleanup leaves the cluster as it was, and the directory as it is."""
    cluster = start_cluster()
    before, output = names(cluster, "namespaces"), tmp_path / "out"

    code, text = invoke("job", "run", "--count", "3", "--output", output)

    assert code == 0, text
    results = json.loads((output / "results.json").read_text())
    assert set(results) >= FIGURES
    assert (results["episodes"], results["successful_episodes"], results["reward_sum"]) == (3, 3, 3)
    assert 0 <= results["batch_to_all_ready_seconds"] <= results["batch_to_all_rewards_seconds"]
    pods = sorted(row["pod"] for row in results["pods"])
    assert sorted(path.stem for path in output.glob("rollout-*.log")) == pods
    assert [pod["metadata"]["name"] for pod in json.loads((output / "pods.json").read_text())] == pods
    assert json.loads((output / "job.json").read_text())["status"]["succeeded"] == 3
    assert all(f"pod/{pod}" in (output / "events.txt").read_text() for pod in pods)
    receipt = json.loads((output / "receipt.json").read_text())
    assert receipt["namespace"] == results["namespace"] == f"asb-rl-{receipt['run_id']}"
    assert {entry["kind"] for entry in receipt["created"]} == {"ConfigMap", "Job"}

    code, text = invoke("job", "cleanup", "--output", output)

    assert (code, text.splitlines()[-1]) == (0, f"deleted namespace {receipt['namespace']}")
    assert names(cluster, "namespaces") == before
    assert (output / "results.json").exists()
    assert invoke("cleanup", "--output", output) == (0, f"nothing is left of run {receipt['run_id']}\n")


def test_the_job_is_one_try_of_everything_at_once(start_cluster, invoke, tmp_path) -> None:
    """Completions and parallelism are as asked for, nothing is tried again, and nobody runs as root."""
    cluster = start_cluster()

    invoke("job", "run", "--count", "2", "--parallelism", "1", "--namespace", "rl", "--output", tmp_path / "out")

    (request,) = [one for one in cluster.asked("POST", r"/jobs$") if one.get("dryRun") is None]
    spec = request.body["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (2, 1, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
    assert names(cluster, "pods", "rl") == sorted(path.stem for path in (tmp_path / "out").glob("rollout-*.log"))


def test_the_receipt_is_written_before_anything_is_made(start_cluster, invoke, tmp_path) -> None:
    """A run that breaks off between two objects has left a receipt by which the first one is removed."""
    cluster = start_cluster()
    cluster.access.deny("create", "configmaps")
    before = names(cluster, "namespaces")

    code, text = invoke("job", "run", "--count", "1", "--output", tmp_path / "out")

    assert (code, 'cannot create resource "configmaps"' in text, "job cleanup --output" in text) == (2, True, True)
    assert not (tmp_path / "out/results.json").exists()
    assert invoke("job", "cleanup", "--output", tmp_path / "out")[0] == 0
    assert names(cluster, "namespaces") == before


def test_without_the_right_to_make_a_namespace_one_has_to_be_named(start_cluster, invoke, tmp_path) -> None:
    """That is told before there is a directory."""
    cluster = start_cluster()
    cluster.access.deny("create", "namespaces")

    for command in (("job", "run"), ("run", "--backend", "kubernetes")):
        code, text = invoke(*command, "--count", "1", "--output", tmp_path / "out")

        assert (code, "name a namespace that is there already with --namespace" in text) == (2, True), text
        assert not (tmp_path / "out").exists()


EVENTS = """\
import json, os, time
for event in ({"event": "ready"}, {"event": "reward", "reward": REWARD}):
    print(json.dumps({"at": time.time(), "episode_id": EPISODE, **event}))
"""
EPISODE = 'os.environ["EPISODE_ID"]'

SCRIPTS = {
    "fails": ("raise SystemExit(3)", "the Job has failed: BackoffLimitExceeded"),
    "silent": ("print('{}')", "0 ready and 0 reward events, not one of each"),
    "not_a_number": (
        EVENTS.replace("REWARD", "None").replace("EPISODE", EPISODE, 1),
        "None is not a finite number",
    ),
    "somebody_else": (EVENTS.replace("REWARD", "1").replace("EPISODE", "'other'", 1), "its log is of other"),
}


@pytest.mark.parametrize(("script", "message"), SCRIPTS.values(), ids=SCRIPTS)
def test_an_episode_that_cannot_be_verified_fails_the_batch(start_cluster, invoke, tmp_path, script, message) -> None:
    """There is no results.json then, all evidence is saved, and the reason is printed."""
    start_cluster()
    (tmp_path / "episode.py").write_text(script)

    words = ("--count", "2", "--script", tmp_path / "episode.py", "--namespace", "rl", "--output", tmp_path / "out")
    code, text = invoke("job", "run", *words)

    assert (code, message in text) == (1, True), text
    assert not (tmp_path / "out/results.json").exists()
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"job.json", "pods.json", "events.txt", "receipt.json"} <= saved


def test_a_script_of_ones_own_gives_any_reward(start_cluster, invoke, tmp_path) -> None:
    """Whatever finite number it prints is the reward."""
    start_cluster()
    (tmp_path / "episode.py").write_text(EVENTS.replace("REWARD", "0.25").replace("EPISODE", EPISODE, 1))

    words = ("--count", "2", "--script", tmp_path / "episode.py", "--namespace", "rl", "--output", tmp_path / "out")
    code, text = invoke("job", "run", *words)

    assert code == 0, text
    assert json.loads((tmp_path / "out/results.json").read_text())["reward_sum"] == 0.5


def test_an_image_that_does_not_exist_ends_the_waiting(start_cluster, invoke, tmp_path) -> None:
    """The kubelet's words come at once, not when the Job's time is up."""
    start_cluster()

    code, text = invoke("job", "run", "--count", "1", "--image", "no/such:1", "--output", tmp_path / "out")

    assert code == 1
    assert "ErrImagePull" in text or "ImagePullBackOff" in text, text


def test_a_job_that_is_out_of_time_says_what_its_pods_waited_for(start_cluster, invoke, tmp_path) -> None:
    """The Job takes its Pods along; what was seen of them is kept."""
    start_cluster(images={"python:3.12-alpine": Image(error="no_host", present=False)})

    code, text = invoke("job", "run", "--count", "1", "--timeout", "4", "--output", tmp_path / "out")

    assert (code, "DeadlineExceeded" in text, "no such host" in text) == (1, True, True), text
    (pod,) = json.loads((tmp_path / "out/pods.json").read_text())
    assert pod["status"]["phase"] == "Pending"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "0"], "--count must be at least 1, not 0"),
        (["--parallelism", "3"], "--parallelism must be from 1 to the number of episodes, 2, not 3"),
        (["--user", "0"], "never run as root"),
        (["--timeout", "0"], "--timeout must be at least 1 second"),
        (["--script", "missing.py"], "cannot use the script missing.py"),
        (["--runtime-class", "gvisor"], "the cluster has no runtime class 'gvisor'"),
        (["--namespace", "nowhere"], 'namespaces "nowhere" not found'),
        (["--context", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_before_anything_is_created(start_cluster, invoke, tmp_path, words, message) -> None:
    """The error names the value, the exit code is 2, and there is neither a directory nor an object."""
    cluster = start_cluster()
    before = names(cluster, "namespaces")

    code, text = invoke("job", "run", "--count", "2", "--output", tmp_path / "out", *words)

    assert (code, message in text) == (2, True), text
    assert not (tmp_path / "out").exists()
    assert names(cluster, "namespaces") == before


def test_an_output_directory_that_exists_is_refused(start_cluster, invoke, tmp_path) -> None:
    """Earlier records are never overwritten, and nothing is made on the cluster."""
    cluster = start_cluster()

    code, text = invoke("job", "run", "--count", "1", "--output", tmp_path)

    assert (code, "results are never overwritten" in text) == (2, True)
    assert [one.path for one in cluster.asked("POST") if one.get("dryRun") is None] == []


@pytest.mark.parametrize("what", ["namespace", "job"])
def test_cleanup_refuses_what_is_not_the_runs(start_cluster, invoke, tmp_path, what) -> None:
    """Another UID than the receipt's means another object, and then nothing at all is deleted."""
    cluster, output = start_cluster(), tmp_path / "out"
    assert invoke("job", "run", "--count", "1", "--output", output)[0] == 0
    receipt = json.loads((output / "receipt.json").read_text())
    if what == "namespace":
        receipt["namespace_uid"] = "another"
    else:
        receipt["created"] = [{**entry, "uid": "another"} for entry in receipt["created"] if entry["kind"] == "Job"]
    (output / "receipt.json").write_text(json.dumps(receipt))

    code, text = invoke("job", "cleanup", "--output", output)

    assert (code, "nothing is deleted" in text) == (2, True), text
    assert cluster.asked("DELETE") == []
    assert names(cluster, "jobs", receipt["namespace"]) == [f"rollout-{receipt['run_id']}"]


def test_the_documented_role_suffices_and_nothing_in_it_is_unused(start_cluster, invoke, tmp_path) -> None:
    """For running a Job in a given namespace, and for removing it."""
    cluster = start_cluster()
    cluster.access.use_role(role("agentsandbox-job", JOB_RULES, namespace="rl"))
    words = ("job", "run", "--count", "1", "--namespace", "rl", "--output")

    ran = invoke(*words, tmp_path / "out")
    removed = invoke("job", "cleanup", "--output", tmp_path / "out")

    assert (ran[0], removed[0]) == (0, 0), (ran, removed)
    used = set()
    for request in cluster.requests:
        plural, _, rest = request.path.partition("/namespaces/rl/")[2].partition("/")
        subresource = rest.partition("/")[2]
        verbs = {"GET": "get" if rest else "list", "POST": "create", "DELETE": "delete"}
        used.add((verbs[request.method], plural + (f"/{subresource}" if subresource else "")))
    assert set(pairs(JOB_RULES)) - used <= {("delete", "pods"), ("get", "pods")}, "those are for Pods without their Job"
    assert used - set(pairs(JOB_RULES)) == {("list", plural) for plural in TRIED}
