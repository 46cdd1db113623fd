# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox run``, ``cleanup``, ``reap`` and ``doctor`` on the cluster double."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from agentsandbox.cli.output import OutputDirectory
from agentsandbox.testing.cluster import images

RUN = ("run", "--backend", "kubernetes")

HANG = """
async def hang(sandbox, episode):
    open("started", "a").write(episode.id + "\\n")
    await sandbox.exec("sleep 600", timeout=None)
"""


def names(cluster, plural: str, namespace: str = "") -> list[str]:
    """The names of what is there."""
    return [one.name for one in cluster.store.all(cluster.store.resource(plural), namespace)]


def test_a_run_has_a_namespace_of_its_own_and_leaves_none(start_cluster, invoke, tmp_path) -> None:
    """Every record says where it ran and on which image, and nothing is left on the cluster afterwards."""
    cluster = start_cluster()
    before, output = names(cluster, "namespaces"), tmp_path / "out"

    code, text = invoke(*RUN, "--count", "3", "--output", output)

    assert code == 0, text
    results = json.loads((output / "results.json").read_text())
    assert results["counts"] == {"submitted": 3, "rewarded": 3, "failed": 0, "retryable": 0, "cancelled": 0}
    assert results["namespace"] == f"asb-rl-{results['run_id']}"
    pods = {pod["metadata"]["name"]: pod for pod in json.loads((output / "pods.json").read_text())}
    for record in results["records"]:
        pod = pods[record["pod"]]
        assert record["node"] == pod["spec"]["nodeName"] == "node1"
        assert record["identity"]["uid"] == pod["metadata"]["uid"]
        assert record["image_id"] == pod["status"]["containerStatuses"][0]["imageID"]
    assert all(f"pod/{name}" in (output / "events.txt").read_text() for name in pods)
    assert [names(cluster, "namespaces"), names(cluster, "pods", results["namespace"])] == [before, []]
    assert invoke("cleanup", "--output", output) == (0, f"nothing is left of run {results['run_id']}\n")


def test_a_given_namespace_stays(start_cluster, invoke, tmp_path) -> None:
    """In a namespace that is there already, only Pods are made, and they are gone at the end."""
    cluster = start_cluster()

    code, text = invoke(*RUN, "--count", "2", "--namespace", "rl", "--output", tmp_path / "out")

    assert code == 0, text
    made = [one.path for one in cluster.asked("POST") if one.get("dryRun") is None]
    assert made == ["/api/v1/namespaces/rl/pods"] * 2
    assert names(cluster, "pods", "rl") == []
    receipt = json.loads((tmp_path / "out/receipt.json").read_text())
    assert [entry["kind"] for entry in receipt["created"]] == ["Pod", "Pod"]


def test_pods_scale_with_parallelism_and_not_with_images(start_cluster, invoke, tmp_path, monkeypatch) -> None:
    """Pods serve one image after the other, and each record names the image that its episode really had."""
    cluster = start_cluster(images=dict.fromkeys(("a", "b", "c"), "host"))
    (tmp_path / "touching.py").write_text(
        "async def touch(sandbox, episode):\n    return float((await sandbox.exec(['true'])).ok)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = [{"id": f"{image}{number}", "image": image} for number in range(2) for image in "abc"]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    words = ("--tasks", tmp_path / "tasks.jsonl", "--rollout", "touching:touch", "--parallelism", "2", "--user", "1000")
    code, text = invoke(*RUN, *words, "--output", tmp_path / "out")

    assert code == 0, text
    made = [one for one in cluster.asked("POST", "/pods$") if one.get("dryRun") is None]
    assert len(made) == 2
    records = json.loads((tmp_path / "out/results.json").read_text())["records"]
    assert [record["image_id"] for record in records] == [images.digest(task["image"]) for task in tasks]


def test_bench_compares_a_stream_with_connections(start_cluster, invoke) -> None:
    """Both in the same Pod, in turn; the ratio is that of the medians."""
    start_cluster()

    code, text = invoke("bench", "exec", "--backend", "kubernetes", "--repeats", "5", "--json")

    latency = json.loads(text)["latency"]
    assert (code, latency["open_stream"]["n"], latency["connection_each"]["n"]) == (0, 5, 5)
    ratio = latency["connection_each"]["p50_ms"] / latency["open_stream"]["p50_ms"]
    assert latency["times_faster_p50"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runtime-class", "gvisor"], "the cluster has no runtime class 'gvisor'"),
        (["--namespace", "nowhere"], 'namespaces "nowhere" not found'),
        (["--context", "nowhere"], "nowhere"),
        (["--user", "0"], "run_as_root"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_before_anything_is_created(start_cluster, invoke, tmp_path, words, message) -> None:
    """The error names the value, the exit code is 2, and there is neither a directory nor an object."""
    cluster = start_cluster()
    before = names(cluster, "namespaces")

    code, text = invoke(*RUN, "--count", "2", "--output", tmp_path / "out", *words)

    assert (code, message in text) == (2, True), text
    assert not (tmp_path / "out").exists()
    assert names(cluster, "namespaces") == before


def test_options_of_clusters_are_refused_elsewhere(invoke, tmp_path) -> None:
    """An option that would do nothing is a mistake."""
    code, text = invoke("run", "--namespace", "rl", "--output", tmp_path / "out")

    assert (code, "--namespace is for clusters: add --backend kubernetes" in text) == (2, True)


@pytest.fixture
def killed(start_cluster, tmp_path):
    """A cluster on which a driver was killed while it held two sandboxes; and the directory of its run."""
    cluster = start_cluster()
    (tmp_path / "hanging.py").write_text(HANG)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    words = ["--namespace", "rl", "--tasks", "tasks.jsonl", "--rollout", "hanging:hang", "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    driver = subprocess.Popen(
        [sys.executable, "-m", "agentsandbox.cli", *RUN, "--user", "1000", *words], cwd=tmp_path, env=environment
    )
    try:
        started = tmp_path / "started"
        while not (started.exists() and len(started.read_text().split()) == 2):
            assert driver.poll() is None
            time.sleep(0.05)  # noqa: TID251 - a test in a thread of its own
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    return cluster, tmp_path / "out"


def stranger(cluster, run_id: str, name: str) -> str:
    """Put the Pod of another run there; return its name."""
    domain = "agentsandbox.dev"
    labels = {f"{domain}/run-id": run_id, f"{domain}/managed-by": "agentsandbox"}
    metadata = {"name": name, "namespace": "rl", "labels": labels}
    spec = {"containers": [{"name": "sandbox", "image": "python:3.12-alpine", "command": ["sleep", "600"]}]}
    status = {"phase": "Pending", "qosClass": "BestEffort"}
    cluster.create("pods", {"metadata": metadata, "spec": spec, "status": status})
    return name


def test_p46_a_killed_driver_leaves_nothing_that_reap_does_not_remove(killed, invoke, portal) -> None:
    """Reaping removes exactly the Pods of the run; those of another one stay."""
    cluster, output = killed
    run_id = json.loads((output / "receipt.json").read_text())["run_id"]
    ours = names(cluster, "pods", "rl")
    assert len(ours) == 2
    assert all(pod["spec"]["activeDeadlineSeconds"] > 0 for pod in cluster.pods())
    other = "0123456789ab"
    others = [portal.call(stranger, cluster, other, f"asb-{other}-{n}-abcdef") for n in range(2)]

    without = invoke("reap", "--namespace", "rl")
    code, text = invoke("reap", "--run-id", run_id, "--namespace", "rl")

    assert without[0] == 2
    assert (code, text.splitlines()) == (0, [f"deleted Pod rl/{name}" for name in sorted(ours)])
    assert names(cluster, "pods", "rl") == others
    deletes = [one for one in cluster.asked("DELETE") if one.status == 200]
    assert len(deletes) == 2
    assert all(one.body["preconditions"]["uid"] for one in deletes)


@pytest.mark.parametrize("run_id", ["", "*", "0123", "0123456789ab,app", "0123456789AB"])
def test_p46_reap_refuses_what_is_no_run_id(start_cluster, invoke, run_id) -> None:
    """There is no way to say "everything", and nothing is asked of the cluster."""
    cluster = start_cluster()

    code, text = invoke("reap", "--run-id", run_id)

    assert (code, "12 hexadecimal digits" in text) == (2, True)
    assert cluster.requests == []


def test_cleanup_removes_what_a_killed_driver_left(killed, invoke) -> None:
    """By the receipt alone."""
    cluster, output = killed

    code, text = invoke("cleanup", "--output", output)

    assert (code, text.count("deleted Pod rl/asb-")) == (0, 2)
    assert names(cluster, "pods", "rl") == []


def test_cleanup_refuses_a_pod_that_was_replaced(killed, invoke, portal) -> None:
    """Another Pod under a name of the run is not the run's: nothing is deleted, not even the others."""
    cluster, output = killed
    portal.call(cluster.replace_pod, names(cluster, "pods", "rl")[0])

    code, text = invoke("cleanup", "--output", output)

    assert (code, "nothing is deleted" in text) == (2, True), text
    assert len(names(cluster, "pods", "rl")) == 2
    assert cluster.asked("DELETE") == []


def test_doctor_names_each_thing_that_is_missing(start_cluster, invoke) -> None:
    """It passes where everything is there, makes nothing, and fails with the missing verb where it is not."""
    cluster = start_cluster()

    good = invoke("doctor", "--backend", "kubernetes", "--json")
    cluster.access.deny("create", "pods/exec")
    bad = invoke("doctor", "--backend", "kubernetes")

    assert (good[0], json.loads(good[1])["ok"]) == (0, True), good[1]
    assert (bad[0], "not allowed: create pods/exec" in bad[1]) == (1, True), bad[1]
    assert names(cluster, "pods", "rl") == []


def test_doctor_says_what_an_image_gives(start_cluster, invoke) -> None:
    """With an image it makes one sandbox, tells its exec level, and removes it."""
    cluster = start_cluster()

    words = ("--image", "python:3.12-alpine", "--image", "no/such:1", "--user", "1000", "--json")
    code, text = invoke("doctor", "--backend", "kubernetes", *words)

    checks = {check["name"]: check for check in json.loads(text)["checks"]}
    assert code == 1
    assert "exec level runner" in checks["image python:3.12-alpine"]["detail"]
    assert "protocol v5.channel.k8s.io" in checks["image python:3.12-alpine"]["detail"]
    assert checks["image no/such:1"]["ok"] is False
    assert names(cluster, "pods", "rl") == []


def test_doctor_says_whether_a_network_policy_is_enforced(start_cluster, invoke) -> None:
    """It makes one, tries it, tells what was seen, and leaves nothing; for other backends there is no such thing."""
    cluster = start_cluster(process="echo-runner", network="enforcing")

    words = ("doctor", "--image", "python:3.12-alpine", "--user", "1000", "--deny-network")
    code, text = invoke(*words, "--backend", "kubernetes", "--json")
    local = invoke(*words[:1], "--deny-network")

    checks = {check["name"]: check for check in json.loads(text)["checks"]}
    assert code == 0
    assert "network policy enforced: a connection" in checks["image python:3.12-alpine"]["detail"]
    assert checks["permission networkpolicies"]["ok"] is True
    assert names(cluster, "pods", "rl") == names(cluster, "networkpolicies", "rl") == []
    assert (local[0], "--deny-network is for clusters" in local[1]) == (2, True), local[1]


def test_thousands_of_pods_do_not_mean_thousands_of_receipts(tmp_path, monkeypatch) -> None:
    """The first ones are noted at once, later ones together, and the last word has them all."""
    noted = []
    monkeypatch.setattr("agentsandbox.cli.output.NOTED_AT_ONCE", 3)
    output = OutputDirectory(tmp_path / "out", {"run_id": "0123456789ab"})
    for number in range(10):
        output.created("Pod", {"metadata": {"name": f"p{number}", "uid": str(number)}})
        noted.append(len(json.loads((tmp_path / "out" / "receipt.json").read_text())["created"]))
    output.end()

    assert noted == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert len(json.loads((tmp_path / "out" / "receipt.json").read_text())["created"]) == 10
