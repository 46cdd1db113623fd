# SPDX-License-Identifier: Apache-2.0
"""
What a Pod's JSON says about it. Pure: no clock, no connection.

What is not in a Pod's status cannot be judged here: a child that was killed for memory leaves no trace in it (its
cgroup counts it), a volume that cannot be mounted and a network that cannot be set up are only told in Events, and a
quota or an admission webhook refuses the Pod before there is one (see :func:`~.refusals.error_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import attrs

from agentsandbox.backends.kubernetes.failures import START_REASONS, Cause, PodFailure, pull_failure, waiting_failure
from agentsandbox.backends.kubernetes.manifests import CONTAINER, RESTART_EXIT_CODE
from agentsandbox.errors import SandboxLost
from agentsandbox.models.sandbox import Identity

__all__ = [
    "Cause",
    "PodFailure",
    "PodPhase",
    "PodState",
    "Stages",
    "container_of",
    "deleted",
    "lost",
    "pull_failure",
    "state_of",
]


DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""The annotation that says which container commands go to."""


class PodPhase(StrEnum):
    """Where a Pod stands, as far as its use as a sandbox goes."""

    PENDING = "pending"
    """On its way, or between two containers of a restart in place."""
    READY = "ready"
    """Its first process runs."""
    FAILING = "failing"
    """Something that it says itself keeps it from being ready."""
    TERMINATING = "terminating"
    """Marked for deletion."""
    LOST = "lost"
    """It was there, and is over."""


@attrs.frozen(kw_only=True)
class Stages:
    """When a Pod got where, in seconds since the epoch by the cluster's clock; its resolution is one second."""

    created: float | None = None
    """The API server stored it."""
    scheduled: float | None = None
    """It has a node."""
    sandbox_ready: float | None = None
    """Its network and volumes are there."""
    started: float | None = None
    """The present container runs."""
    ready: float | None = None
    """It became ready, the last time it did."""


@attrs.frozen(kw_only=True)
class PodState:
    """A Pod's JSON, judged."""

    phase: PodPhase
    """Where it stands."""
    reason: str = ""
    """One word for it: the cluster's own for ``pending`` and ``failing``, :class:`SandboxLost`'s for the rest."""
    message: str = ""
    """The cluster's own sentence."""
    failure: PodFailure | None = None
    """Why it fails, if it does."""
    name: str
    """Its name."""
    identity: Identity
    """Its UID, container id and restart count."""
    node: str | None = None
    """Where it runs."""
    image: str = ""
    """The image that its spec asks for; after a change in place, the next container's."""
    running_image: str = ""
    """What the present container was made from, as the runtime spells it."""
    image_id: str | None = None
    """What that image turned out to be on that node."""
    stages: Stages = attrs.field(factory=Stages)
    """When it got where."""


# Who ended a Pod, from the reason of its condition DisruptionTarget.
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted",
    "PreemptionByKubeScheduler": "preempted",
    "DeletionByTaintManager": "node_lost",
    "DeletionByPodGC": "node_lost",
    "EvictionByEvictionAPI": "evicted",
    "TerminationByKubelet": "evicted",
}
# Who ended it, from its own reason, which the kubelet or the node controller sets.
_ENDS = {
    "Evicted": "evicted",
    "Preempting": "preempted",
    "Preempted": "preempted",
    "NodeLost": "node_lost",
    "NodeShutdown": "node_shutdown",
    "Shutdown": "node_shutdown",
    "Terminated": "node_shutdown",
    "DeadlineExceeded": "deadline_exceeded",
}


def state_of(pod: Mapping[str, Any]) -> PodState:
    """
    Judge a Pod.

    The Pod's own reason and message come before the container's, as an eviction leaves exit code 137 behind like many
    another end; deletion comes before everything, because a Pod that is to be deleted still says Ready.
    """
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    spec = container_of(pod)
    container = _container(pod)
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    phase, reason, message, failure = _judge(pod, meta, status, container, conditions)
    running = (container.get("state") or {}).get("running") or {}
    return PodState(
        phase=phase,
        reason=reason,
        message=message.strip(),
        failure=failure,
        name=str(meta.get("name", "")),
        identity=Identity(
            uid=str(meta.get("uid", "")),
            instance=str(container.get("containerID") or ""),
            restarts=int(container.get("restartCount") or 0),
        ),
        node=(pod.get("spec") or {}).get("nodeName"),
        image=str(spec.get("image", "")),
        running_image=str(container.get("image") or ""),
        image_id=container.get("imageID") or None,
        stages=Stages(
            created=_time(meta.get("creationTimestamp")),
            scheduled=_since(conditions, "PodScheduled"),
            sandbox_ready=_since(conditions, "PodReadyToStartContainers"),
            started=_time(running.get("startedAt")),
            ready=_since(conditions, "Ready"),
        ),
    )


_Verdict = tuple[PodPhase, str, str, PodFailure | None]


def _judge(
    pod: Mapping[str, Any],
    meta: Mapping[str, Any],
    status: Mapping[str, Any],
    container: Mapping[str, Any],
    conditions: Mapping[Any, Mapping[str, Any]],
) -> _Verdict:
    own, words, phase = str(status.get("reason") or ""), str(status.get("message") or ""), status.get("phase")
    disruption = conditions.get("DisruptionTarget") or {}
    disrupted = disruption.get("status") == "True"
    end = _ENDS.get(own) or (_DISRUPTIONS.get(str(disruption.get("reason")), "evicted") if disrupted else "")
    words = words or (str(disruption.get("message") or "") if disrupted else "")
    if end == "evicted" and "node shutdown" in words.lower():
        end = "node_shutdown"
    if meta.get("deletionTimestamp") or (disrupted and phase not in ("Failed", "Succeeded")):
        return PodPhase.TERMINATING, end or "deleted", words, None
    if own and not end and phase == "Failed" and not container.get("containerID"):
        # The kubelet would not have it although the scheduler sent it there: OutOfcpu, NodeAffinity, …
        return _fail(Cause.REJECTED, own, words, permanent=False, over=True)
    if end and phase in ("Failed", "Unknown"):
        return PodPhase.LOST, end, words, None
    state = container.get("state") or {}
    terminated = state.get("terminated") or {}
    if phase == "Unknown":
        return PodPhase.LOST, "node_lost", words, None
    if terminated:
        return _ended(pod, phase, conditions, terminated, words)
    if phase in ("Failed", "Succeeded"):
        return PodPhase.LOST, "completed" if phase == "Succeeded" else "died", words or own, None
    waiting = state.get("waiting") or {}
    if waiting:
        why, text = str(waiting.get("reason") or "ContainerCreating"), str(waiting.get("message") or "")
        failure = waiting_failure(container, why, text)
        if failure is None:
            return PodPhase.PENDING, "Restarting" if why == "RestartingAllContainers" else why, text, None
        return PodPhase.FAILING, why, failure.message, failure
    ready = conditions.get("Ready") or {}
    if state.get("running"):
        if ready.get("status") == "True" and container.get("ready"):
            return PodPhase.READY, "", "", None
        return PodPhase.PENDING, str(ready.get("reason") or "NotReady"), str(ready.get("message") or ""), None
    scheduled = conditions.get("PodScheduled") or {}
    if scheduled.get("status") == "False":
        why, text = str(scheduled.get("reason") or "Unscheduled"), str(scheduled.get("message") or "")
        if why == "Unschedulable":
            return _fail(Cause.UNSCHEDULABLE, why, text, permanent=False)
        return PodPhase.PENDING, why, text, None
    return PodPhase.PENDING, "ContainerCreating" if scheduled else "Unscheduled", "", None


def _ended(
    pod: Mapping[str, Any],
    phase: Any,
    conditions: Mapping[Any, Mapping[str, Any]],
    terminated: Mapping[str, Any],
    words: str,
) -> _Verdict:
    reason, code = str(terminated.get("reason") or ""), terminated.get("exitCode")
    text = words or str(terminated.get("message") or "") or f"exit code {code} ({reason or 'no reason given'})"
    if reason in START_REASONS:
        return _fail(Cause.START, reason, text, permanent=True, over=phase == "Failed")
    restarting = (conditions.get("AllContainersRestarting") or {}).get("status") == "True"
    if phase == "Running" and (restarting or (code == RESTART_EXIT_CODE and _has_rule(pod))):
        return PodPhase.PENDING, "Restarting", text, None
    if reason == "OOMKilled":
        return PodPhase.LOST, "oom_killed", text, None
    if phase == "Succeeded" or code == 0:
        return PodPhase.LOST, "completed", text, None
    return PodPhase.LOST, "died", text, None


def _fail(cause: Cause, reason: str, message: str, *, permanent: bool, over: bool = False) -> _Verdict:
    failure = PodFailure(cause=cause, reason=reason, message=message.strip(), permanent=permanent, over=over)
    return PodPhase.FAILING, reason, failure.message, failure


def deleted(pod: Mapping[str, Any]) -> PodState:
    """Judge a Pod that is gone, from the last that was seen of it."""
    state = state_of(pod)
    if state.phase in (PodPhase.LOST, PodPhase.TERMINATING):
        return attrs.evolve(state, phase=PodPhase.LOST)
    return attrs.evolve(state, phase=PodPhase.LOST, reason="deleted", failure=None)


def lost(
    pod: Mapping[str, Any] | None, identity: Identity, *, last: Mapping[str, Any] | None = None
) -> SandboxLost | None:
    """
    Compare a Pod with the identity it had when it was leased.

    Args:
        pod: What is there now under its name; ``None`` if nothing is.
        identity: What it was.
        last: The last that was seen of it, if ``pod`` is ``None``: it may say why it went.

    Returns:
        The error to raise, or ``None`` while it is the same and alive.

    """
    if pod is None:
        gone = deleted(last) if last is not None else None
        return SandboxLost(gone.reason, gone.message) if gone else SandboxLost("deleted", "the Pod is gone")
    state = state_of(pod)
    if state.identity.uid != identity.uid:
        return SandboxLost("replaced", f"UID {state.identity.uid} instead of {identity.uid}")
    if state.phase in (PodPhase.LOST, PodPhase.TERMINATING):
        return SandboxLost(state.reason, state.message)
    container = _container(pod)
    same = state.identity.restarts == identity.restarts and state.identity.instance == identity.instance
    if same and (container.get("state") or {}).get("running"):
        return None
    if same and state.reason == "Restarting":
        return SandboxLost("restarted", state.message)
    before = (container.get("lastState") or {}).get("terminated") or {}
    if before.get("reason") == "OOMKilled":
        return SandboxLost("oom_killed", f"exit code {before.get('exitCode')}, and then restarted")
    if same:
        return SandboxLost("died", state.message or state.reason)
    return SandboxLost(
        "restarted",
        f"restart count {state.identity.restarts} instead of {identity.restarts}"
        + (f"; before: exit code {before.get('exitCode')}, {before.get('reason')}" if before else ""),
    )


def container_of(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """
    Return which of a Pod's containers is the sandbox, as its spec has it.

    Ours has a name of its own. In Pods that somebody else has described it is the one that ``kubectl exec`` takes: the
    one that an annotation names, else the first.
    """
    containers = (pod.get("spec") or {}).get("containers") or ()
    named = ((pod.get("metadata") or {}).get("annotations") or {}).get(DEFAULT_CONTAINER)
    for name in (CONTAINER, named):
        for container in containers:
            if container.get("name") == name:
                found: Mapping[str, Any] = container
                return found
    return next(iter(containers), {})


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    name = container_of(pod).get("name", CONTAINER)
    return next((c for c in (pod.get("status") or {}).get("containerStatuses") or () if c.get("name") == name), {})


def _has_rule(pod: Mapping[str, Any]) -> bool:
    return bool(container_of(pod).get("restartPolicyRules"))


def _since(conditions: Mapping[Any, Mapping[str, Any]], kind: str) -> float | None:
    condition = conditions.get(kind) or {}
    return _time(condition.get("lastTransitionTime")) if condition.get("status") == "True" else None


def _time(text: Any) -> float | None:
    if not text:
        return None
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
