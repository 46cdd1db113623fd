# SPDX-License-Identifier: Apache-2.0
"""Jobs: Pods until enough of them have succeeded, or too many have failed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from agentsandbox.testing.cluster import podspec
from agentsandbox.testing.cluster.replies import Json, Refusal, invalid

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.store import Event, Stored

__all__ = ["Jobs"]

_INDEX = "batch.kubernetes.io/job-completion-index"


class Jobs:
    """
    The controller.

    Args:
        cluster: Whose Jobs.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._store = cluster.store
        self._jobs = self._store.resource("jobs")
        self._pods = self._store.resource("pods")
        self._dirty: set[tuple[str, str]] = set()
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<Jobs [{self._store.count(self._jobs)}]>"

    def complete(self, job: Json) -> Json:
        """Return a Job with everything that a server adds to it."""
        job = copy.deepcopy(job)
        name, spec = str(job["metadata"]["name"]), job.get("spec") or {}
        template = spec.get("template")
        if not isinstance(template, dict) or not (template.get("spec") or {}).get("containers"):
            raise invalid("Job", name, [("FieldValueRequired", "spec.template.spec.containers", "Required value")])
        if template["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
            words = 'Unsupported value: "Always": supported values: "OnFailure", "Never"'
            raise invalid("Job", name, [("FieldValueNotSupported", "spec.template.spec.restartPolicy", words)])
        spec.setdefault("parallelism", 1)
        spec.setdefault("completions", 1 if "parallelism" not in job["spec"] else spec["parallelism"])
        spec.setdefault("backoffLimit", 6)
        spec.setdefault("completionMode", "NonIndexed")
        labels = {"batch.kubernetes.io/job-name": name, "job-name": name}
        meta = template.setdefault("metadata", {})
        meta["labels"] = {**(meta.get("labels") or {}), **labels}
        return {**job, "spec": spec, "status": {}}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Look after Jobs until cancelled."""
        unsubscribes = [self._store.subscribe(self._jobs, self._hear), self._store.subscribe(self._pods, self._hear)]
        try:
            task_status.started()
            async with anyio.create_task_group() as group:
                while True:
                    while self._dirty:
                        key = self._dirty.pop()
                        stored = self._store.find(self._jobs, *key)
                        if stored is not None and not stored.object["metadata"].get("deletionTimestamp"):
                            left = self._reconcile(stored)
                            if left is not None:
                                group.start_soon(self._later, key, left)
                    self._wake = anyio.Event()
                    await self._wake.wait()
        finally:
            for unsubscribe in unsubscribes:
                unsubscribe()

    async def _later(self, key: tuple[str, str], seconds: float) -> None:
        await anyio.sleep(seconds)
        self._dirty.add(key)
        self._wake.set()

    def _hear(self, event: Event) -> None:
        name = event.now.name
        if event.now.resource is self._pods:
            name = (event.now.object["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-name", "")
            if not name:
                return
        self._dirty.add((event.now.namespace, name))
        self._wake.set()

    def _mine(self, job: Stored) -> list[Json]:
        return [
            one.object
            for one in self._store.all(self._pods, job.namespace)
            if any(owner.get("uid") == job.uid for owner in one.object["metadata"].get("ownerReferences") or ())
        ]

    def _reconcile(self, job: Stored) -> float | None:
        """Bring a Job one step on; return after how many seconds to look again, if that is known."""
        spec, status = job.object["spec"], job.object["status"]
        if any(one["type"] in ("Complete", "Failed") for one in status.get("conditions") or ()):
            return None
        now = self._cluster.clock.stamp()
        first = not status.get("startTime")
        pods = self._mine(job)
        done = [pod for pod in pods if pod["status"].get("phase") == "Succeeded"]
        failed = [pod for pod in pods if pod["status"].get("phase") == "Failed"]
        over = (*done, *failed)
        active = [pod for pod in pods if pod not in over and not pod["metadata"].get("deletionTimestamp")]
        new: Json = {**status, "startTime": status.get("startTime", now)}
        began = self._began(job) if not first else 0.0
        limit = spec.get("activeDeadlineSeconds")
        succeeded = {self._index(pod) for pod in done} if spec["completionMode"] == "Indexed" else None
        finished = len(done) if succeeded is None else len(succeeded)
        end: Json | None = None
        if finished >= spec["completions"]:
            words = "Reached expected number of succeeded pods"
            end = {"type": "Complete", "reason": "CompletionsReached", "message": words}
        elif len(failed) > spec["backoffLimit"]:
            words = "Job has reached the specified backoff limit"
            end = {"type": "Failed", "reason": "BackoffLimitExceeded", "message": words}
        elif limit is not None and began >= limit:
            words = "Job was active longer than specified deadline"
            end = {"type": "Failed", "reason": "DeadlineExceeded", "message": words}
        if end is not None:
            for pod in active:
                self._cluster.delete(self._store.get(self._pods, job.namespace, pod["metadata"]["name"]), None)
            kind = "SuccessCriteriaMet" if end["type"] == "Complete" else "FailureTarget"
            stamps = {"status": "True", "lastProbeTime": now, "lastTransitionTime": now}
            new["conditions"] = [{**end, "type": kind, **stamps}, {**end, **stamps}]
            if end["type"] == "Complete":
                new["completionTime"] = now
            active = []
        else:
            active += self._create(job, len(active), finished, pods)
        new |= {"active": len(active), "succeeded": finished, "failed": len(failed), "terminating": 0}
        new["ready"] = sum(_ready(pod) for pod in active)
        new["uncountedTerminatedPods"] = {}
        new = {key: value for key, value in new.items() if value not in (0, None)} | {"ready": new["ready"]}
        current = self._store.find(self._jobs, job.namespace, job.name)
        if current is not None and new != current.object["status"]:
            self._store.replace(current, {**current.object, "status": new})
        return limit - began if limit is not None and end is None else None

    def _began(self, job: Stored) -> float:
        from datetime import datetime

        return self._cluster.clock.time() - datetime.fromisoformat(job.object["status"]["startTime"]).timestamp()

    @staticmethod
    def _index(pod: Json) -> str:
        return str((pod["metadata"].get("annotations") or {}).get(_INDEX, ""))

    def _create(self, job: Stored, active: int, finished: int, pods: list[Json]) -> list[Json]:
        spec = job.object["spec"]
        wanted = min(spec["parallelism"], spec["completions"] - finished) - active
        taken = {self._index(pod) for pod in pods if pod["status"].get("phase") != "Failed"}
        free = (str(number) for number in range(spec["completions"]) if str(number) not in taken)
        made: list[Json] = []
        for _ in range(max(0, wanted)):
            pod: Json = copy.deepcopy(spec["template"])
            meta = pod["metadata"]
            meta["namespace"] = job.namespace
            meta["labels"] |= {"batch.kubernetes.io/controller-uid": job.uid, "controller-uid": job.uid}
            if spec["completionMode"] == "Indexed":
                index = next(free)
                meta["annotations"] = {**(meta.get("annotations") or {}), _INDEX: index}
                meta["labels"][_INDEX] = index
                meta["name"] = f"{job.name}-{index}-{self._cluster.names.suffix()}"
                for container in pod["spec"]["containers"]:
                    container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": index})
            else:
                meta["name"] = f"{job.name}-{self._cluster.names.suffix()}"
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job.name, "uid": job.uid}
            meta["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
            pod = podspec.complete({"apiVersion": "v1", "kind": "Pod", **pod})
            try:
                podspec.validate(pod, version=self._cluster.version)
                self._cluster.access.admit("CREATE", self._pods, pod)
            except Refusal as refusal:
                words = f"Error creating: {refusal}"
                self._cluster.event(job.object, "Warning", "FailedCreate", words, component="job-controller")
                break
            made.append(self._store.create(self._pods, pod, now=self._cluster.clock.stamp()).object)
        return made


def _ready(pod: Json) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions") or ()}
    return conditions.get("Ready") == "True"
