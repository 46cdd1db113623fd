# SPDX-License-Identifier: Apache-2.0
"""
The custom resources of the agent-sandbox controller, and what it does about them.

Also what it tells nobody: it starts cold where no warm one is ready, refills a pool as soon as a claim has taken from
it, makes another Pod of the same name where one has vanished, points Pods at public resolvers, and makes a network
policy for every template that does not refuse one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from agentsandbox.testing.cluster import podspec
from agentsandbox.testing.cluster.replies import Json, Refusal
from agentsandbox.testing.cluster.sandbox_policies import keep_policy
from agentsandbox.testing.cluster.store import Resource

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.store import Event, Stored

__all__ = ["KINDS", "AgentSandbox", "name_hash"]

CORE = "agents.x-k8s.io"
EXTENSIONS = "extensions.agents.x-k8s.io"

KINDS = (
    Resource(plural="sandboxes", kind="Sandbox", group=CORE, version="v1beta1"),
    Resource(plural="sandboxtemplates", kind="SandboxTemplate", group=EXTENSIONS, version="v1beta1"),
    Resource(plural="sandboxwarmpools", kind="SandboxWarmPool", group=EXTENSIONS, version="v1beta1"),
    Resource(plural="sandboxclaims", kind="SandboxClaim", group=EXTENSIONS, version="v1beta1"),
)

GRACE = 2.0
"""Seconds for which a claim waits for members of its pool that are not ready yet."""

WARM_LABEL = f"{CORE}/warm-pool-sandbox"
TEMPLATE_HASH = f"{CORE}/sandbox-template-ref-hash"


def name_hash(name: str) -> str:
    """Return a name as the controller writes it into labels: FNV-1a, 32 bits, in hexadecimal."""
    found = 0x811C9DC5
    for byte in name.encode():
        found = (found ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{found:08x}"


class AgentSandbox:
    """
    The controller.

    Args:
        cluster: Whose custom resources.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._store = cluster.store
        for kind in KINDS:
            self._store.register(kind)
        self._sandboxes, self._templates, self._pools, self._claims = KINDS
        self._pods = self._store.resource("pods")
        self._refusals: list[tuple[str, str]] = []
        self._refused: dict[str, tuple[str, str]] = {}
        self._dirty: dict[tuple[Resource, str, str], None] = {}
        self._wake = anyio.Event()
        self._group: anyio.abc.TaskGroup | None = None

    def __repr__(self) -> str:
        counts = ", ".join(f"{self._store.count(kind)} {kind.plural}" for kind in KINDS)
        return f"<AgentSandbox [{counts}]>"

    def refuse(self, reason: str, message: str = "") -> None:
        """Answer the next claim that has no Sandbox yet with a reason for not being ready, for ever."""
        self._refusals.append((reason, message))

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Look after everything until cancelled."""
        unsubscribes = [self._store.subscribe(kind, self._hear) for kind in (*KINDS, self._pods)]
        acts = {self._sandboxes: self._sandbox, self._pools: self._pool, self._claims: self._claim}
        acts[self._templates] = lambda template: keep_policy(self._cluster, template, name_hash(template.name))
        try:
            task_status.started()
            async with anyio.create_task_group() as self._group:
                while True:
                    while self._dirty:
                        key = next(iter(self._dirty))
                        del self._dirty[key]
                        stored = self._store.find(*key)
                        if stored is not None and key[0] in acts:
                            acts[key[0]](stored)
                    self._wake = anyio.Event()
                    await self._wake.wait()
        finally:
            for unsubscribe in unsubscribes:
                unsubscribe()

    def _hear(self, event: Event) -> None:
        stored = event.now
        self._touch(stored.resource, stored.namespace, stored.name)
        for owner in stored.object["metadata"].get("ownerReferences") or ():
            kind = next((one for one in KINDS if one.kind == owner["kind"]), None)
            if kind is not None:
                self._touch(kind, stored.namespace, owner["name"])
        if stored.resource is self._sandboxes and event.before is not None:
            for owner in event.before.object["metadata"].get("ownerReferences") or ():
                if owner["kind"] == "SandboxWarmPool":
                    self._touch(self._pools, stored.namespace, owner["name"])
        if stored.resource in (self._templates, self._pools, self._sandboxes):
            for kind in (self._pools, self._claims):
                for other in self._store.all(kind, stored.namespace):
                    if stored.name in (self._template_of(other), self._pool_of(other)) or kind is self._claims:
                        self._touch(kind, other.namespace, other.name)

    def _touch(self, kind: Resource, namespace: str, name: str) -> None:
        self._dirty[kind, namespace, name] = None
        self._wake.set()

    async def _later(self, stored: Stored, seconds: float) -> None:
        await anyio.sleep(max(0.0, seconds))
        self._touch(stored.resource, stored.namespace, stored.name)

    @staticmethod
    def _template_of(pool: Stored) -> str:
        return str((pool.object["spec"].get("sandboxTemplateRef") or {}).get("name", ""))

    @staticmethod
    def _pool_of(claim: Stored) -> str:
        return str((claim.object["spec"].get("warmPoolRef") or {}).get("name", ""))

    # Pools.

    def _members(self, pool: Stored) -> list[Stored]:
        label = name_hash(pool.name)
        return [
            one
            for one in self._store.all(self._sandboxes, pool.namespace)
            if (one.object["metadata"].get("labels") or {}).get(WARM_LABEL) == label
        ]

    def _pool(self, pool: Stored) -> None:
        members = self._members(pool)
        wanted = pool.object["spec"].get("replicas", 1)
        template = self._store.find(self._templates, pool.namespace, self._template_of(pool))
        if template is not None:
            for _ in range(wanted - len(members)):
                members.append(self._make(template, pool, f"{pool.name}-{self._cluster.names.suffix()}"))
        newest = sorted(members, key=lambda one: (_ready(one.object), -one.version))
        for surplus in newest[: max(0, len(members) - wanted)]:
            members.remove(surplus)
            self._cluster.delete(surplus, None)
        current = self._store.find(self._pools, pool.namespace, pool.name)
        if current is not None:
            status: Json = {"replicas": len(members), "selector": f"{WARM_LABEL}={name_hash(pool.name)}"}
            status |= {"readyReplicas": sum(_ready(one.object) for one in members)}
            status |= {"observedGeneration": current.object["metadata"]["generation"]}
            self._status(current, status)

    def _make(self, template: Stored, owner: Stored, name: str) -> Stored:
        """Make a Sandbox for a pool or for a claim."""
        spec = copy.deepcopy(template.object["spec"]["podTemplate"])
        managed = template.object["spec"].get("networkPolicyManagement", "Managed") == "Managed"
        if managed and not template.object["spec"].get("networkPolicy") and "dnsPolicy" not in spec["spec"]:
            spec["spec"] |= {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["8.8.8.8", "1.1.1.1"]}}
        labels = {TEMPLATE_HASH: name_hash(template.name)}
        meta = spec.setdefault("metadata", {})
        meta["labels"] = {**(meta.get("labels") or {}), **labels}
        if owner.resource is self._claims:
            labels |= {f"{CORE}/claim-uid": owner.uid, f"{CORE}/launch-type": "cold"}
            meta["labels"][f"{CORE}/claim-uid"] = owner.uid
        else:
            labels[WARM_LABEL] = name_hash(owner.name)
        annotations = {f"{CORE}/sandbox-template-ref": template.name}
        made: Json = {
            "metadata": {
                "name": name,
                "namespace": owner.namespace,
                "labels": labels,
                "annotations": annotations,
                "ownerReferences": [_owner(owner)],
            },
            "spec": {"operatingMode": "Running", "podTemplate": spec, "shutdownPolicy": "Retain"},
        }
        return self._cluster.create("sandboxes", made)

    # Sandboxes.

    def _sandbox(self, sandbox: Stored) -> None:
        name = (sandbox.object["metadata"].get("annotations") or {}).get(f"{CORE}/pod-name") or sandbox.name
        pod = self._store.find(self._pods, sandbox.namespace, name)
        suspended = sandbox.object["spec"].get("operatingMode") == "Suspended"
        if suspended:
            if pod is not None and not pod.object["metadata"].get("deletionTimestamp"):
                self._cluster.delete(pod, None)
            ready = ("False", "SandboxSuspended", "Sandbox is suspended")
        elif pod is None:
            ready = self._start(sandbox)
        else:
            ready = _judge(pod.object)
        current = self._store.find(self._sandboxes, sandbox.namespace, sandbox.name)
        if current is None:
            return
        annotations = current.object["metadata"].get("annotations") or {}
        if f"{CORE}/pod-name" not in annotations:
            meta = {**current.object["metadata"], "annotations": {**annotations, f"{CORE}/pod-name": name}}
            current = self._store.replace(current, {**current.object, "metadata": meta})
        status: Json = {"selector": f"{CORE}/sandbox-name-hash={name_hash(sandbox.name)}"}
        is_suspended = ("True", "Suspended", "") if suspended else ("False", "NotSuspended", "Sandbox is not suspended")
        status["conditions"] = self._conditions(current, Suspended=is_suspended, Ready=ready)
        if pod is not None and not suspended:
            status |= {"podIPs": [one["ip"] for one in pod.object["status"].get("podIPs") or ()]}
            status["nodeName"] = pod.object["spec"].get("nodeName", "")
        self._status(current, status)

    def _start(self, sandbox: Stored) -> tuple[str, str, str]:
        """Make a Sandbox's Pod: the first one, or another in the place of one that has vanished."""
        template = copy.deepcopy(sandbox.object["spec"]["podTemplate"])
        meta = template.get("metadata") or {}
        labels, annotations = (dict(_foreign(meta.get(field) or {})) for field in ("labels", "annotations"))
        labels |= {f"{CORE}/sandbox-name-hash": name_hash(sandbox.name)}
        labels[TEMPLATE_HASH] = sandbox.object["metadata"]["labels"][TEMPLATE_HASH]
        template["spec"].setdefault("automountServiceAccountToken", False)
        pod: Json = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": sandbox.name,
                "namespace": sandbox.namespace,
                "labels": labels,
                "annotations": {**annotations, f"{CORE}/propagated-annotations": ""},
                "ownerReferences": [_owner(sandbox)],
            },
            "spec": template["spec"],
        }
        try:
            pod = podspec.complete(pod)
            podspec.validate(pod, version=self._cluster.version)
            self._cluster.access.admit("CREATE", self._pods, pod)
            self._store.create(self._pods, pod, now=self._cluster.clock.stamp())
        except Refusal as refusal:
            return ("False", "ReconcilerError", f"Error seen: {refusal}")
        return ("False", "DependenciesNotReady", "Pod exists with phase: Pending")

    # Claims.

    def _claim(self, claim: Stored) -> None:
        over = (claim.object["spec"].get("lifecycle") or {}).get("shutdownTime")
        if over is not None:
            left = datetime.fromisoformat(over).timestamp() - self._cluster.clock.time()
            if left <= 0:
                self._expire(claim)
                return
            self._again(claim, left)
        name = (claim.object["metadata"].get("annotations") or {}).get(f"{CORE}/sandbox-name")
        if not name:
            self._assign(claim)
            return
        sandbox = self._store.find(self._sandboxes, claim.namespace, name)
        if sandbox is None:
            self._answer(claim, ("False", "SandboxMissing", f'Sandbox "{name}" not found'), {})
            return
        conditions = sandbox.object.get("status", {}).get("conditions") or ()
        found = next((one for one in conditions if one["type"] == "Ready"), None)
        if found is None:
            self._answer(claim, ("False", "SandboxNotReady", "Sandbox is not ready"), {"name": name})
            return
        ready = (found["status"], found["reason"], found["message"])
        ips = sandbox.object["status"].get("podIPs") or []
        self._answer(claim, ready, {"name": name, "podIPs": ips})

    def _again(self, stored: Stored, seconds: float) -> None:
        if self._group is not None:
            self._group.start_soon(self._later, stored, seconds * self._cluster.timing.second)

    def _expire(self, claim: Stored) -> None:
        if claim.object["spec"]["lifecycle"].get("shutdownPolicy", "Retain") == "Retain":
            self._answer(claim, ("False", "ClaimExpired", "Claim has expired"), {})
        else:
            self._cluster.delete(claim, None)

    def _assign(self, claim: Stored) -> None:
        if self._refusals and claim.uid not in self._refused:
            self._refused[claim.uid] = self._refusals.pop(0)
        if claim.uid in self._refused:
            self._answer(claim, ("False", *self._refused[claim.uid]), {})
            return
        pool = self._store.find(self._pools, claim.namespace, self._pool_of(claim))
        if pool is None:
            words = f'SandboxWarmPool "{self._pool_of(claim)}" not found'
            self._answer(claim, ("False", "WarmPoolNotFound", words), {})
            return
        template = self._store.find(self._templates, claim.namespace, self._template_of(pool))
        if template is None:
            words = f'SandboxTemplate "{self._template_of(pool)}" not found'
            self._answer(claim, ("False", "TemplateNotFound", words), {})
            return
        members = self._members(pool)
        member = next((one for one in members if _ready(one.object) and one.object["status"].get("podIPs")), None)
        if member is not None:
            self._adopt(claim, member)
            return
        age = self._cluster.clock.time() - _seconds(claim.object["metadata"]["creationTimestamp"])
        if members and age < GRACE * self._cluster.timing.second:
            self._again(claim, GRACE - age)
            return
        self._note(claim, claim.name)
        self._make(template, claim, claim.name)

    def _adopt(self, claim: Stored, member: Stored) -> None:
        self._note(claim, member.name, spec={"additionalPodMetadata": {}})
        meta = member.object["metadata"]
        labels = {key: value for key, value in meta["labels"].items() if key != WARM_LABEL}
        labels |= {f"{CORE}/claim-uid": claim.uid, f"{CORE}/launch-type": "warm"}
        self._store.replace(
            member,
            {**member.object, "metadata": {**meta, "labels": labels, "ownerReferences": [_owner(claim)]}},
            generation=True,
        )

    def _note(self, claim: Stored, sandbox: str, *, spec: Json | None = None) -> None:
        meta = claim.object["metadata"]
        annotations = {**(meta.get("annotations") or {}), f"{CORE}/sandbox-name": sandbox}
        annotations.setdefault(f"{CORE}/controller-first-observed-at", self._cluster.clock.stamp())
        object_ = {**claim.object, "metadata": {**meta, "annotations": annotations}}
        object_["spec"] = {**claim.object["spec"], **(spec or {})}
        self._store.replace(claim, object_, generation=spec is not None)

    def _answer(self, claim: Stored, ready: tuple[str, str, str], sandbox: Json) -> None:
        self._status(claim, {"conditions": self._conditions(claim, Ready=ready), "sandbox": sandbox})

    # Status.

    def _conditions(self, stored: Stored, **found: tuple[str, str, str]) -> list[Json]:
        before = {one["type"]: one for one in (stored.object.get("status") or {}).get("conditions") or ()}
        conditions = []
        for type_, (status, reason, message) in found.items():
            old = before.get(type_, {})
            since = old["lastTransitionTime"] if old.get("status") == status else self._cluster.clock.stamp()
            conditions.append(
                {
                    "type": type_,
                    "status": status,
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": since,
                    "observedGeneration": stored.object["metadata"]["generation"],
                }
            )
        return conditions

    def _status(self, stored: Stored, status: Json) -> None:
        if stored.object.get("status") != status:
            self._store.replace(stored, {**stored.object, "status": status})


def _owner(stored: Stored) -> Json:
    return {
        "apiVersion": stored.resource.api_version,
        "blockOwnerDeletion": True,
        "controller": True,
        "kind": stored.resource.kind,
        "name": stored.name,
        "uid": stored.uid,
    }


def _foreign(labels: Json) -> Iterator[tuple[str, str]]:
    """Yield labels but those in the controller's own domains, which it removes."""
    for key, value in labels.items():
        if key.partition("/")[0] not in (CORE, EXTENSIONS):
            yield key, value


def _ready(object_: Json) -> bool:
    conditions = {one["type"]: one["status"] for one in (object_.get("status") or {}).get("conditions") or ()}
    return conditions.get("Ready") == "True"


def _judge(pod: Json) -> tuple[str, str, str]:
    """Return what a Pod makes of its Sandbox's readiness: status, reason, message."""
    phase = pod["status"].get("phase")
    if phase in ("Failed", "Succeeded"):
        return ("False", f"Pod{phase}", f"Pod is in phase {phase}")
    if pod["metadata"].get("deletionTimestamp") or not _ready(pod):
        return ("False", "DependenciesNotReady", f"Pod exists with phase: {phase}")
    return ("True", "DependenciesReady", "Pod is Ready")


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
