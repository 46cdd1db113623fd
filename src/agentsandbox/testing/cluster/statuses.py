# SPDX-License-Identifier: Apache-2.0
"""A Pod's status in the shapes that a kubelet gives it. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.testing.cluster.podspec import has_rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentsandbox.testing.cluster.replies import Json

__all__ = [
    "ContainerView",
    "PodView",
    "disruption",
    "exit_status",
    "removed",
    "start_failure",
    "terminated",
    "unschedulable",
    "waiting",
]

_NO_MEMORY_LIMIT = "9007199254740988Ki"
_REMOVED = "The container is removed because RestartAllContainers in place"


def exit_status(code: int, argv: Sequence[str], *, v5: bool) -> bytes:
    """Return what an exec stream says at the end of its command."""
    if code == 0:
        return _dump({"metadata": {}, "status": "Success"})
    how = f"command terminated with exit code {code}"
    if not v5:
        how = f"error executing command [{' '.join(argv)}], exit code {code}"
    return _dump(
        {
            "metadata": {},
            "status": "Failure",
            "message": f"command terminated with non-zero exit code: {how}",
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
        }
    )


def start_failure(words: str, exec_id: str) -> bytes:
    """Return what an exec stream says of a command that could not be started."""
    text = (
        "Internal error occurred: error executing command in container: failed to exec in container: failed to start "
        f'exec "{exec_id}": OCI runtime exec failed: exec failed: unable to start container process: {words}: unknown'
    )
    return _dump(
        {
            "metadata": {},
            "status": "Failure",
            "message": f"Internal error occurred: {text}",
            "reason": "InternalError",
            "details": {"causes": [{"message": text}]},
            "code": 500,
        }
    )


def _dump(status: Json) -> bytes:
    return json.dumps(status, separators=(",", ":")).encode()


def waiting(reason: str, message: str = "") -> Json:
    """Return the state of a container that does not run yet, or again."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def terminated(
    code: int, *, container_id: str, started: str, finished: str, oom: bool = False, reason: str = "", message: str = ""
) -> Json:
    """Return the state of a container whose first process has ended."""
    reason = reason or ("OOMKilled" if oom else "Completed" if code == 0 else "Error")
    times = {"startedAt": started, "finishedAt": finished, "containerID": container_id}
    return {"terminated": {"exitCode": code, "reason": reason, **({"message": message} if message else {}), **times}}


def removed() -> tuple[Json, Json]:
    """Return state and last state of a container that is removed to be made anew with all others."""
    reason = "RestartingAllContainers"
    last = {"exitCode": 137, "reason": reason, "message": _REMOVED, "startedAt": None, "finishedAt": None}
    return waiting(reason, _REMOVED), {"terminated": last}


def unschedulable(pod: Json, message: str, now: str) -> Json:
    """Return the status of a Pod that no node takes."""
    condition = {
        "type": "PodScheduled",
        "observedGeneration": pod["metadata"]["generation"],
        "status": "False",
        "lastProbeTime": None,
        "lastTransitionTime": now,
        "reason": "Unschedulable",
        "message": message,
    }
    return {"phase": "Pending", "conditions": [condition], "qosClass": pod["status"]["qosClass"]}


def disruption(reason: str, message: str, now: str, generation: int) -> Json:
    """Return the condition of a Pod that somebody else ends."""
    return {
        "type": "DisruptionTarget",
        "observedGeneration": generation,
        "status": "True",
        "lastProbeTime": None,
        "lastTransitionTime": now,
        "reason": reason,
        "message": message,
    }


@attrs.define(eq=False, kw_only=True)
class ContainerView:
    """What is told of a container."""

    state: Json = attrs.field(factory=lambda: waiting("ContainerCreating"))
    last: Json = attrs.field(factory=dict)
    restarts: int = 0
    container_id: str = ""
    image: str = ""
    image_id: str = ""

    def status(self, container: Json) -> Json:
        """Return its entry in ``containerStatuses``."""
        running = "running" in self.state
        status: Json = {
            "name": container["name"],
            "state": self.state,
            "lastState": self.last,
            "ready": running,
            "restartCount": self.restarts,
            "image": self.image or container["image"],
            "imageID": self.image_id,
        }
        if self.container_id:
            status["containerID"] = self.container_id
        status["started"] = running
        if self.container_id:
            given = container.get("resources") or {}
            resources = {key: dict(given[key]) for key in ("limits", "requests") if given.get(key)}
            if resources.get("requests"):
                status["allocatedResources"] = dict(resources["requests"])
            status["resources"] = resources
        return status


@attrs.define(eq=False, kw_only=True)
class PodView:
    """What is told of a Pod that has a node."""

    node_ip: str
    pod_ip: str
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    sandbox_ready: bool = False
    """Whether it has a network."""
    restarting: bool = False
    """Whether all its containers are being restarted."""
    started: str = ""
    """Since when the kubelet knows it."""
    container: ContainerView = attrs.field(factory=ContainerView)
    extra: list[Json] = attrs.field(factory=list)
    """Further conditions."""
    _since: dict[str, tuple[str, str]] = attrs.field(factory=dict, init=False)

    def status(self, pod: Json, now: str) -> Json:
        """Return the whole status, as of *now*."""
        spec = pod["spec"]
        generation = pod["metadata"]["generation"]
        over = self.phase in ("Succeeded", "Failed")
        running = "running" in self.container.state
        status: Json = {
            "observedGeneration": generation,
            "phase": self.phase,
            "conditions": self._conditions(pod, now, generation, over=over, running=running),
        }
        for key, value in (("message", self.message), ("reason", self.reason)):
            if value:
                status[key] = value
        status |= {"hostIP": self.node_ip, "hostIPs": [{"ip": self.node_ip}]}
        if self.sandbox_ready or over:
            status |= {"podIP": self.pod_ip, "podIPs": [{"ip": self.pod_ip}]}
        status["startTime"] = self.started
        first, *others = spec["containers"]
        status["containerStatuses"] = [self.container.status(first)]
        for other in others:  # told of as if they ran along; no process stands behind them
            its_id = f"{self.container.container_id}-{other['name']}"
            view = ContainerView(state=self.container.state, container_id=its_id)
            status["containerStatuses"].append(view.status(other))
        status["qosClass"] = pod["status"]["qosClass"]
        status |= _pod_resources(spec)
        return status

    def _conditions(self, pod: Json, now: str, generation: int, *, over: bool, running: bool) -> list[Json]:
        failed = self.phase == "Failed"
        names = ", ".join(container["name"] for container in pod["spec"]["containers"])
        ready: Json = {"status": "True"}
        if over:
            ready = {"status": "False", "reason": "PodFailed" if failed else "PodCompleted"}
        elif not running:
            words = f"containers with unready status: [{names.replace(', ', ' ')}]"
            ready = {"status": "False", "reason": "ContainersNotReady", "message": words}
        rows: list[tuple[str, Json]] = [
            ("PodReadyToStartContainers", {"status": "True" if self.sandbox_ready and not over else "False"}),
            ("Initialized", {"status": "True", **({"reason": "PodCompleted"} if over and not failed else {})}),
            ("Ready", ready),
            ("ContainersReady", ready),
            ("PodScheduled", {"status": "True"}),
        ]
        if has_rule(pod):
            started = {"status": "True", "reason": "RestartAllContainersStarted"}
            rows.append(("AllContainersRestarting", started if self.restarting else {"status": "False"}))
        result = []
        for kind, row in rows:
            before = self._since.get(kind)
            if before is None or before[0] != row["status"]:
                self._since[kind] = (row["status"], now)
            since = self._since[kind][1]
            condition = {"type": kind, "observedGeneration": generation, "status": row["status"], "lastProbeTime": None}
            condition["lastTransitionTime"] = since
            condition.update({key: row[key] for key in ("reason", "message") if key in row})
            result.append(condition)
        return [*self.extra, *result]


def _pod_resources(spec: Json) -> Json:
    """Return what a Pod has of its node, as the kubelet sums it up."""
    allocated: dict[str, Any] = {}
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for container in spec["containers"]:
        resources = container.get("resources") or {}
        for key, value in (resources.get("requests") or {}).items():
            allocated.setdefault(key, value)
            if key in ("cpu", "memory"):
                requests.setdefault(key, value)
        given = resources.get("limits") or {}
        limits.update({key: value for key, value in given.items() if key in ("cpu", "memory")})
        if given and "memory" not in given:
            limits["memory"] = _NO_MEMORY_LIMIT
    result: Json = {}
    if allocated:
        result["allocatedResources"] = allocated
    if limits or requests:
        result["resources"] = {**({"limits": limits} if limits else {}), **({"requests": requests} if requests else {})}
    return result
