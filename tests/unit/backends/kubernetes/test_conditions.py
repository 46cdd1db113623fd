# SPDX-License-Identifier: Apache-2.0
"""What a Pod's JSON says, judged on recorded Pods and on what the API's documentation describes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from agentsandbox.backends.kubernetes.conditions import Cause, PodPhase, deleted, lost, pull_failure, state_of
from agentsandbox.errors import FailureKind, ImagePullFailed, Phase, ProvisionError, Unschedulable, classify
from agentsandbox.models.sandbox import Identity

PODS = json.loads((Path(__file__).parent / "facts" / "pod_status.json").read_text())["cases"]


def changed(case="running_ready", *, meta=None, spec=None, container=None, conditions=(), **status):
    """A recorded Pod with some of it replaced."""
    pod = copy.deepcopy(PODS[case])
    pod["metadata"].update(meta or {})
    pod["spec"].update(spec or {})
    pod["status"].update(status)
    if container is not None:
        pod["status"]["containerStatuses"][0].update(container)
    for condition in conditions:
        kept = [c for c in pod["status"]["conditions"] if c["type"] != condition["type"]]
        pod["status"]["conditions"] = [*kept, condition]
    return pod


@pytest.mark.parametrize(
    ("case", "phase", "reason", "words"),
    [
        ("running_ready", PodPhase.READY, "", ""),
        ("after_oom_in_child", PodPhase.READY, "", ""),
        ("crash_loop_back_off", PodPhase.FAILING, "CrashLoopBackOff", "last exit code 1, Error"),
        ("first_process_oom_killed", PodPhase.LOST, "oom_killed", "exit code 137 (OOMKilled)"),
        ("succeeded", PodPhase.LOST, "completed", "exit code 0"),
        ("ImagePullBackOff", PodPhase.FAILING, "ImagePullBackOff", "no such host"),
        ("InvalidImageName", PodPhase.FAILING, "InvalidImageName", "must be lowercase"),
        ("ErrImageNeverPull", PodPhase.FAILING, "ErrImageNeverPull", "pull policy of Never"),
        ("unschedulable", PodPhase.FAILING, "Unschedulable", "Insufficient cpu"),
        ("evicted_ephemeral_storage", PodPhase.LOST, "evicted", "ephemeral local storage usage exceeds"),
        ("terminating", PodPhase.TERMINATING, "deleted", ""),
        ("no_shell", PodPhase.FAILING, "StartError", '"sh": executable file not found'),
        ("root_image", PodPhase.FAILING, "CreateContainerConfigError", "image will run as root"),
        ("restarting_in_place_1", PodPhase.PENDING, "Restarting", "exit code 42"),
        ("restarting_in_place_2", PodPhase.PENDING, "Restarting", "RestartAllContainers in place"),
        ("restarted_in_place", PodPhase.READY, "", ""),
    ],
)
def test_recorded_pods_are_judged(case, phase, reason, words):
    """Each Pod that was recorded on a real cluster has its phase, its reason and the cluster's own words."""
    state = state_of(PODS[case])

    assert (state.phase, state.reason) == (phase, reason)
    assert words in state.message
    assert (state.failure is not None) == (phase is PodPhase.FAILING)


def test_every_recorded_pod_is_in_the_table():
    """The table above leaves no recorded Pod out."""
    (mark,) = [m for m in test_recorded_pods_are_judged.pytestmark if m.name == "parametrize"]
    assert {row[0] for row in mark.args[1]} == set(PODS)


@pytest.mark.parametrize(
    ("case", "cause", "permanent", "over", "error", "kind"),
    [
        ("crash_loop_back_off", Cause.CRASHING, False, False, ProvisionError, FailureKind.PROVISION),
        ("ImagePullBackOff", Cause.IMAGE_UNAVAILABLE, False, False, ImagePullFailed, FailureKind.IMAGE_PULL),
        ("InvalidImageName", Cause.IMAGE_INVALID, True, False, ImagePullFailed, FailureKind.IMAGE_PULL),
        ("ErrImageNeverPull", Cause.IMAGE_ABSENT, True, False, ImagePullFailed, FailureKind.IMAGE_PULL),
        ("unschedulable", Cause.UNSCHEDULABLE, False, False, Unschedulable, FailureKind.UNSCHEDULABLE),
        ("no_shell", Cause.START, True, True, ProvisionError, FailureKind.PROVISION),
        ("root_image", Cause.CONFIG, True, False, ProvisionError, FailureKind.PROVISION),
    ],
)
def test_p48_failures_are_told_apart(case, cause, permanent, over, error, kind):
    """Each has its error, says whether another Pod would fail alike, and is retried only if it would not."""
    failure = state_of(PODS[case]).failure
    raised = failure.error()
    verdict = classify(raised, Phase.ACQUIRE)

    assert (failure.cause, failure.permanent, failure.over) == (cause, permanent, over)
    assert (type(raised), verdict.kind, verdict.retryable) == (error, kind, not permanent)
    hint = f"; {failure.hint}" if failure.hint else ""
    assert str(raised) == f"{failure.reason}: {failure.message}{hint}"


def test_what_a_pod_is_stands_in_its_state():
    """Identity, node, image and the times of its stages."""
    state = state_of(PODS["running_ready"])

    assert state.identity == Identity(
        uid="327d9bf3-9cc3-478a-be6e-c77401f37986",
        instance="containerd://d98736127c6a83d2e0045ea78225da29272863ad77a257d221e60d321209a9ce",
        restarts=0,
    )
    assert (state.name, state.node, state.image) == ("a", "node1", "docker.io/sandbox/swe:1")
    assert state.image_id == "sha256:e93f46704d089b341f06a22d9165935b30ab11f89b0a39e395d1f35146a6daf8"
    stages = state.stages
    created = 1795971251.0
    assert (stages.created, stages.scheduled, stages.sandbox_ready) == (created, created, created)
    assert (stages.started, stages.ready) == (created + 1, created + 1)


def test_new_pods_are_pending():
    """An object that nobody has looked at yet, one that is bound, and one that is held back are on their way."""
    bound = {"type": "PodScheduled", "status": "True"}
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "waiting"}
    reasons = []
    for conditions in ([], [bound], [gated]):
        state = state_of(
            {"metadata": {"uid": "u", "name": "n"}, "status": {"phase": "Pending", "conditions": conditions}}
        )
        reasons.append((state.phase, state.reason))

    assert reasons == [
        (PodPhase.PENDING, "Unscheduled"),
        (PodPhase.PENDING, "ContainerCreating"),
        (PodPhase.PENDING, "SchedulingGated"),
    ]
    assert state_of({}).phase is PodPhase.PENDING


def test_p44_running_pod_that_is_not_ready_is_pending():
    """A node that stopped reporting makes its Pods unready; they may come back."""
    pod = changed(conditions=[{"type": "Ready", "status": "False", "reason": "NodeNotReady"}])

    assert (state_of(pod).phase, state_of(pod).reason) == (PodPhase.PENDING, "NodeNotReady")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("PreemptionByScheduler", "preempted"),
        ("DeletionByTaintManager", "node_lost"),
        ("DeletionByPodGC", "node_lost"),
        ("EvictionByEvictionAPI", "evicted"),
        ("TerminationByKubelet", "evicted"),
        ("SomethingNew", "evicted"),
    ],
)
def test_p55_disruption_is_named(reason, expected):
    """Who disrupts a Pod is known before it goes, while it is terminating, and after it is gone."""
    target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "the words"}
    announced = changed(conditions=[target])
    leaving = changed("terminating", conditions=[target])

    for pod in (announced, leaving):
        state = state_of(pod)
        assert (state.phase, state.reason, state.message) == (PodPhase.TERMINATING, expected, "the words")
    assert (deleted(leaving).phase, deleted(leaving).reason) == (PodPhase.LOST, expected)


@pytest.mark.parametrize(
    ("own", "message", "phase", "expected"),
    [
        ("Evicted", "The node was low on resource: memory.", "Failed", "evicted"),
        ("Preempting", "Preempted in order to admit critical pod", "Failed", "preempted"),
        ("NodeLost", "Node x which was running pod y is unresponsive", "Unknown", "node_lost"),
        (None, "", "Unknown", "node_lost"),
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", "Failed", "node_shutdown"),
        ("NodeShutdown", "Pod was rejected as the node is shutting down.", "Failed", "node_shutdown"),
        (
            "DeadlineExceeded",
            "Pod was active on the node longer than the specified deadline",
            "Failed",
            "deadline_exceeded",
        ),
    ],
)
def test_p55_pods_own_reason_comes_first(own, message, phase, expected):
    """The container's exit code 137 says nothing where the Pod says why it ended."""
    ended = {"terminated": {"exitCode": 137, "reason": "Error"}}
    pod = changed(container={"state": ended, "ready": False}, reason=own, message=message, phase=phase)

    state = state_of(pod)
    assert (state.phase, state.reason, state.message) == (PodPhase.LOST, expected, message)


@pytest.mark.parametrize("own", ["OutOfcpu", "OutOfmemory", "NodeAffinity", "UnexpectedAdmissionError"])
def test_pod_that_its_node_rejects_has_never_been_there(own):
    """It is a matter of finding room, not a loss, and this Pod will not recover."""
    pod = {"metadata": {"uid": "u", "name": "n"}, "status": {"phase": "Failed", "reason": own, "message": "no room"}}
    failure = state_of(pod).failure

    assert (failure.cause, failure.permanent, failure.over) == (Cause.REJECTED, False, True)
    assert isinstance(failure.error(), Unschedulable)


def test_p20_exit_code_137_alone_is_not_out_of_memory():
    """Only the runtime's own word makes it that."""
    pod = changed(container={"state": {"terminated": {"exitCode": 137, "reason": "Error"}}}, phase="Failed")

    assert (state_of(pod).reason, state_of(pod).message) == ("died", "exit code 137 (Error)")


def test_ended_container_is_a_loss_unless_it_is_made_anew():
    """Exit code 42 without the rule is an end like any other."""
    ended = {"state": {"terminated": {"exitCode": 42, "reason": "Error"}}, "ready": False}

    assert state_of(changed(container=ended)).reason == "died"
    assert state_of(changed("restarting_in_place_1", conditions=[])).reason == "Restarting"


@pytest.mark.parametrize(
    ("reason", "message", "permanent"),
    [
        ("CreateContainerConfigError", 'secret "x" not found', True),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition", False),
        ("CreateContainerError", "context deadline exceeded", False),
        ("CreateContainerError", 'name "sandbox_a" is reserved for "123"', False),
        ("RunContainerError", 'exec: "python9": executable file not found in $PATH', True),
    ],
)
def test_p48_containers_that_cannot_be_made(reason, message, permanent):
    """What is wrong with the Pod stays wrong; what the node was too slow for may pass."""
    pod = changed(container={"state": {"waiting": {"reason": reason, "message": message}}, "ready": False})
    state = state_of(pod)

    assert (state.phase, state.reason, state.message) == (PodPhase.FAILING, reason, message)
    assert state.failure.permanent is permanent


@pytest.mark.parametrize(
    ("message", "seconds"),
    [
        ("back-off 10s restarting failed container=sandbox", 10.0),
        ("back-off 2m40s restarting failed container=sandbox", 160.0),
        ("back-off 5m0s restarting failed container=sandbox", 300.0),
        ("something else", None),
    ],
)
def test_back_off_says_how_long(message, seconds):
    """The kubelet names its back-off."""
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}

    assert state_of(changed(container={"state": waiting})).failure.retry_in == seconds


@pytest.mark.parametrize(
    ("message", "cause", "permanent"),
    [
        ('failed to resolve reference "r.example/a:1": r.example/a:1: not found', Cause.IMAGE_NOT_FOUND, True),
        ("rpc error: code = NotFound desc = failed to pull and unpack image", Cause.IMAGE_NOT_FOUND, True),
        ("manifest for nginx:nope not found: manifest unknown", Cause.IMAGE_NOT_FOUND, True),
        ("429 Too Many Requests - Server message: toomanyrequests: You have reached", Cause.IMAGE_THROTTLED, False),
        ("denied: toomanyrequests: rate limit", Cause.IMAGE_THROTTLED, False),
        ("pull QPS exceeded", Cause.IMAGE_THROTTLED, False),
        ("unexpected status from HEAD request to https://r/v2/a: 401 Unauthorized", Cause.IMAGE_FORBIDDEN, True),
        ("failed to fetch oauth token: 403 Forbidden", Cause.IMAGE_FORBIDDEN, True),
        (
            "pull access denied, repository does not exist or may require authorization: insufficient_scope",
            Cause.IMAGE_FORBIDDEN,
            True,
        ),
        ("no match for platform in manifest: not found", Cause.IMAGE_PLATFORM, True),
        ("no matching manifest for linux/arm64 in the manifest list entries", Cause.IMAGE_PLATFORM, True),
        ("dial tcp: lookup r.invalid on 10.0.0.10:53: no such host", Cause.IMAGE_UNAVAILABLE, False),
        ("dial tcp 10.0.0.1:443: connect: connection refused", Cause.IMAGE_UNAVAILABLE, False),
        ("dial tcp 10.0.0.1:443: i/o timeout", Cause.IMAGE_UNAVAILABLE, False),
        ("net/http: TLS handshake timeout", Cause.IMAGE_UNAVAILABLE, False),
        ("unexpected status: 503 Service Unavailable", Cause.IMAGE_UNAVAILABLE, False),
        ("write /var/lib/containerd: no space left on device", Cause.IMAGE_UNAVAILABLE, False),
        ("something that nobody has seen before", Cause.IMAGE_UNAVAILABLE, False),
        ('failed to resolve reference "r.example/not-found/denied:1": EOF', Cause.IMAGE_UNAVAILABLE, False),
        (
            "unexpected status from GET request to https://r/v2/not-found/blobs: 502 Bad Gateway",
            Cause.IMAGE_UNAVAILABLE,
            False,
        ),
    ],
)
def test_p49_image_failures_are_told_apart(message, cause, permanent):
    """A missing or forbidden image stays so, a throttle or an outage passes, and an image's name is no evidence."""
    direct = pull_failure("ErrImagePull", message)
    backed_off = pull_failure("ImagePullBackOff", f'Back-off pulling image "r.example/a:1": ErrImagePull: {message}')

    for failure in (direct, backed_off):
        assert (failure.cause, failure.permanent, failure.message) == (cause, permanent, message)


def test_back_off_without_a_cause_is_no_proof():
    """Older kubelets do not repeat why; then the image is not written off."""
    failure = pull_failure("ImagePullBackOff", 'Back-off pulling image "not-found:1"')

    assert (failure.permanent, failure.message) == (False, 'Back-off pulling image "not-found:1"')


READY = state_of(PODS["running_ready"]).identity


def reason_of(pod, identity=READY, **options):
    """Why a leased Pod is lost, or ``None``."""
    error = lost(pod, identity, **options)
    return None if error is None else error.reason


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (PODS["running_ready"], None),
        (PODS["after_oom_in_child"], None),
        (changed(meta={"uid": "other"}), "replaced"),
        (changed(meta={"deletionTimestamp": "2026-11-29T17:00:00Z"}), "deleted"),
        (changed(container={"containerID": "containerd://new"}), "restarted"),
        (changed(container={"restartCount": 1, "containerID": "containerd://new"}), "restarted"),
        (
            changed(
                container={
                    "restartCount": 1,
                    "containerID": "containerd://new",
                    "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                }
            ),
            "oom_killed",
        ),
        (changed(container={"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}), "died"),
        (changed(container={"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}), "oom_killed"),
        (changed(container={"state": {"waiting": {"reason": "CrashLoopBackOff"}}}), "died"),
        (changed(phase="Failed", reason="Evicted", message="low on memory"), "evicted"),
        (PODS["restarting_in_place_1"], "restarted"),
        (PODS["restarting_in_place_2"], "restarted"),
        (PODS["restarted_in_place"], "restarted"),
        (changed(conditions=[{"type": "Ready", "status": "False"}]), None),
    ],
)
def test_identity_fence(pod, reason):
    """The same UID, container and restart count, alive: the same sandbox; anything else is a loss with its reason."""
    assert reason_of(pod) == reason


def test_identity_fence_after_the_pod_is_gone():
    """The last that was seen of a Pod says why it went."""
    evicted = changed(
        "terminating", conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    )

    assert reason_of(None) == "deleted"
    assert reason_of(None, last=PODS["running_ready"]) == "deleted"
    assert reason_of(None, last=evicted) == "evicted"
    assert deleted(PODS["first_process_oom_killed"]).reason == "oom_killed"


def test_container_of_another_name_is_not_ours():
    """A sidecar that an admission webhook adds says nothing about the sandbox."""
    pod = changed()
    sidecar = {"name": "proxy", "containerID": "x", "restartCount": 7, "state": {"terminated": {"exitCode": 1}}}
    pod["status"]["containerStatuses"].insert(0, sidecar)

    assert state_of(pod).phase is PodPhase.READY
    assert reason_of(pod) is None
