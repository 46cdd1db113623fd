# SPDX-License-Identifier: Apache-2.0
"""
A batch as one Job, for clusters where exec is not allowed: an episode is a Pod, and its log is its result.

Pure: what to create, and what the Pods and logs of a finished Job are worth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import Any

import attrs

from agentsandbox.backends.kubernetes.failures import waiting_failure
from agentsandbox.backends.kubernetes.manifests import DOMAIN
from agentsandbox.backends.kubernetes.owned import marks
from agentsandbox.errors import (
    ConfigurationError,
    EvidenceMissing,
    InvalidReward,
    InvalidTask,
    RewardError,
    SandboxLost,
)
from agentsandbox.metrics.quantiles import quantile

__all__ = ["CONTAINER", "JobOptions", "built_in_script", "collect", "config_map", "finished", "job", "trouble"]

Json = dict[str, Any]

CONTAINER = "episode"
"""The one container of an episode's Pod."""

_SCRIPT_LIMIT = 1_000_000
"""Bytes; a ConfigMap holds a MiB, its metadata included."""


@attrs.frozen(kw_only=True)
class JobOptions:
    """What the Job is to be."""

    count: int = 10
    """Episodes."""
    parallelism: int | None = None
    """Episodes at once; ``None`` is all of them."""
    image: str = "python:3.12-alpine"
    """An image with ``python3``, 3.9 or later."""
    runtime_class: str | None = None
    """Runtime class."""
    deadline: int = 240
    """Seconds after which the cluster ends the Job whatever we do."""
    user: int = 1000
    """User and group id to run as."""
    requests: Mapping[str, str] = attrs.field(factory=lambda: {"cpu": "100m", "memory": "64Mi"})
    """What the scheduler sets aside for an episode."""
    limits: Mapping[str, str] = attrs.field(factory=lambda: {"cpu": "500m", "memory": "128Mi"})
    """What an episode can use at most."""

    @property
    def at_once(self) -> int:
        """Episodes at once."""
        return self.count if self.parallelism is None else self.parallelism

    def __attrs_post_init__(self) -> None:
        """Check what can be checked without a cluster."""
        if self.count < 1:
            raise ConfigurationError(f"--count must be at least 1, not {self.count}")
        if not 1 <= self.at_once <= self.count:
            raise ConfigurationError(
                f"--parallelism must be from 1 to the number of episodes, {self.count}, not {self.parallelism}"
            )
        if self.deadline < 1:
            raise ConfigurationError(f"--timeout must be at least 1 second, not {self.deadline}")
        if self.user < 1:
            raise ConfigurationError(f"--user must be at least 1, not {self.user}: episodes of a Job never run as root")


def built_in_script() -> str:
    """Return the source of the built-in episode."""
    return resources.files("agentsandbox.backends.kubernetes").joinpath("episode_script.py").read_text("utf-8")


def config_map(run_id: str, nonce: str, script: str) -> Json:
    """
    Return the ConfigMap that carries the episode's script.

    Raises:
        ConfigurationError: If the script does not fit.

    """
    if len(script.encode()) > _SCRIPT_LIMIT:
        raise ConfigurationError(f"a script of {len(script.encode())} bytes does not fit into a ConfigMap")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(f"episode-{run_id}", run_id, nonce),
        "data": {"episode.py": script},
    }


def job(run_id: str, nonce: str, options: JobOptions) -> Json:
    """Return the Job: one Pod an episode, each tried once and with a directory of its own."""
    container = {
        "name": CONTAINER,
        "image": options.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-B", "/episode/episode.py"],
        "workingDir": "/workspace",
        "env": [{"name": "EPISODE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": dict(options.requests), "limits": dict(options.limits)},
        "volumeMounts": [
            {"name": "script", "mountPath": "/episode", "readOnly": True},
            {"name": "workspace", "mountPath": "/workspace"},
        ],
    }
    spec: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "script", "configMap": {"name": f"episode-{run_id}"}},
            {"name": "workspace", "emptyDir": {}},
        ],
    }
    if options.runtime_class:
        spec["runtimeClassName"] = options.runtime_class
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(f"rollout-{run_id}", run_id, nonce),
        "spec": {
            "completions": options.count,
            "parallelism": options.at_once,
            "backoffLimit": 0,
            "activeDeadlineSeconds": options.deadline,
            "template": {"metadata": {"labels": marks(run_id)}, "spec": spec},
        },
    }


def _meta(name: str, run_id: str, nonce: str) -> Json:
    return {"name": name, "labels": marks(run_id), "annotations": {f"{DOMAIN}/nonce": nonce}}


def finished(job: Mapping[str, Any]) -> str | None:
    """Return ``Complete`` or ``Failed`` if a Job has come to its end."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    over = [one["type"] for one in conditions if one.get("status") == "True" and one["type"] in ("Complete", "Failed")]
    return str(over[0]) if over else None


def trouble(pods: Sequence[Mapping[str, Any]]) -> tuple[str, bool] | None:
    """
    Find a Pod that does not get on.

    Returns:
        What it says of it, and whether it will never start, so that there is no use in waiting for the Job's end.

    """
    found: list[tuple[str, bool]] = []
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status") or {}
        found += [
            (f"Pod {name}: Unschedulable: {condition.get('message')}", False)
            for condition in status.get("conditions") or ()
            if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable"
        ]
        for container in status.get("containerStatuses") or ():
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason = str(waiting.get("reason") or "")
            failure = waiting_failure(container, reason, str(waiting.get("message") or "")) if reason else None
            if failure is not None:
                found.append((f"Pod {name}: {failure.reason}: {failure.message}", failure.permanent))
    return max(found, key=lambda one: one[1], default=None)


def collect(
    pods: Sequence[Mapping[str, Any]], logs: Mapping[str, str], job: Mapping[str, Any], *, own_script: bool = False
) -> Json:
    """
    Verify what a completed Job has left, and put it into figures.

    Every Pod must have succeeded at its first try, and its log must show, in its own name and in the right order, that
    it was ready and what its reward is. With the built-in script the test must have failed before and passed after. One
    that does not spoils the whole: nothing is left out, so that no figure is of the good ones only.

    Durations are in seconds from the creation of the Job or Pod, by the API server's clock of whole seconds, to an
    event, by the node's clock.

    Args:
        pods: The Job's Pods.
        logs: Name of the Pod → its log.
        job: The Job.
        own_script: Whether the script is the user's, so that any finite number is a reward.

    Raises:
        SandboxLost: If an episode did not succeed, was restarted, or there are more or fewer than there should be.
        RewardError: If a reward is missing or not proven, or the timestamps are not in order.

    """
    count = int(job["spec"]["completions"])
    if len(pods) != count:
        raise SandboxLost("replaced", f"{len(pods)} Pods for {count} episodes; look for failures and replacements")
    origin = _seconds(job["metadata"]["creationTimestamp"])
    rows = [
        _row(pod, logs.get(pod["metadata"]["name"], ""), origin, own_script=own_script)
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    ]
    startup = [row["pod_to_ready_seconds"] for row in rows]
    return {
        "episodes": count,
        "successful_episodes": len(rows),
        "reward_sum": math.fsum(row["reward"] for row in rows),
        "batch_to_all_ready_seconds": max(row["batch_to_ready_seconds"] for row in rows),
        "batch_to_all_rewards_seconds": max(row["batch_to_reward_seconds"] for row in rows),
        "pod_to_ready_p50_seconds": quantile(startup, 0.50),
        "pod_to_ready_p95_seconds": quantile(startup, 0.95),
        "pod_to_ready_max_seconds": max(startup),
        "pods": rows,
    }


def _row(pod: Mapping[str, Any], log: str, origin: float, *, own_script: bool) -> Json:
    name, status = str(pod["metadata"]["name"]), pod.get("status") or {}
    if status.get("phase") != "Succeeded":
        words = status.get("message") or status.get("reason") or ""
        raise SandboxLost("died", f"episode {name} is {status.get('phase')}, not Succeeded {words}".rstrip())
    statuses = status.get("containerStatuses") or ()
    container: Mapping[str, Any] = next((one for one in statuses if one["name"] == CONTAINER), {})
    exit_code = ((container.get("state") or {}).get("terminated") or {}).get("exitCode")
    if container.get("restartCount") != 0 or exit_code != 0:
        restarts = container.get("restartCount")
        raise SandboxLost("restarted", f"episode {name}: exit code {exit_code} after {restarts} restarts")
    events = list(_events(log))
    ready = [event for event in events if event["event"] == "ready"]
    rewards = [event for event in events if event["event"] == "reward"]
    if len(ready) != 1 or len(rewards) != 1:
        raise EvidenceMissing(f"episode {name}: {len(ready)} ready and {len(rewards)} reward events, not one of each")
    for event in (*ready, *rewards):
        if event.get("episode_id") != name:
            raise EvidenceMissing(f"episode {name}: its log is of {event.get('episode_id')}")
    _verify_reward(name, rewards[0], own_script=own_script)
    created, at, done = _seconds(pod["metadata"]["creationTimestamp"]), _at(ready[0]), _at(rewards[0])
    if not origin <= created <= at <= done:
        raise RewardError(
            f"episode {name}: the timestamps are not in order (Job {origin}, Pod {created}, ready {at}, reward {done})"
            ": check the synchronisation of the clocks"
        )
    return {
        "pod": name,
        "node": (pod.get("spec") or {}).get("nodeName"),
        "image_id": container.get("imageID"),
        "reward": rewards[0]["reward"],
        "pod_to_ready_seconds": at - created,
        "batch_to_ready_seconds": at - origin,
        "batch_to_reward_seconds": done - origin,
    }


def _events(log: str) -> Iterator[Json]:
    for line in log.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # whatever else the episode prints
        if isinstance(event, dict) and "event" in event:
            yield event


def _verify_reward(name: str, event: Mapping[str, Any], *, own_script: bool) -> None:
    reward = event.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise InvalidReward(f"episode {name}: {reward!r} is not a finite number")
    if own_script:
        return
    if event.get("baseline_exit") == 0:
        raise InvalidTask(f"episode {name}: the test passes before the fix")
    if reward != 1 or event.get("tests_exit") != 0 or not isinstance(event.get("baseline_exit"), int):
        raise EvidenceMissing(f"episode {name}: the fixed code does not pass its test")


def _at(event: Mapping[str, Any]) -> float:
    at = event.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        raise EvidenceMissing(f"an event of episode {event.get('episode_id')} does not say when it was: {at!r}")
    return float(at)


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
