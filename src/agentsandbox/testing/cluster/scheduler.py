# SPDX-License-Identifier: Apache-2.0
"""Nodes, and which of them takes a Pod. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs

from agentsandbox.testing.cluster.podspec import quantity, requests_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agentsandbox.testing.cluster.replies import Json

__all__ = ["NodeSpec", "place"]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_RESOURCES = ("cpu", "memory", "ephemeral-storage")


@attrs.frozen(kw_only=True)
class NodeSpec:
    """A node to have."""

    name: str
    """Its name."""
    cpu: str = "1000"
    """What Pods may reserve."""
    memory: str = "1000Gi"
    """What Pods may reserve."""
    storage: str = "1000Gi"
    """What Pods may reserve on its disk."""
    pods: int = 10_000
    """How many Pods it takes."""
    labels: Mapping[str, str] = attrs.field(factory=dict)
    """Its labels beside the usual ones."""
    taints: tuple[Mapping[str, str], ...] = ()
    """Its taints."""
    address: str = ""
    """Its address; by default its name."""

    def object(self, now: str, images: Iterable[Json]) -> Json:
        """Return it as an object."""
        resources = {"cpu": self.cpu, "memory": self.memory, "ephemeral-storage": self.storage, "pods": str(self.pods)}
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name,
                "labels": {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self.labels},
            },
            "spec": {"taints": [dict(taint) for taint in self.taints]} if self.taints else {},
            "status": {
                "capacity": resources,
                "allocatable": resources,
                "addresses": [{"type": "InternalIP", "address": self.address or self.name}],
                "conditions": [
                    {"type": "MemoryPressure", "status": "False", "lastTransitionTime": now},
                    {"type": "DiskPressure", "status": "False", "lastTransitionTime": now},
                    {"type": "PIDPressure", "status": "False", "lastTransitionTime": now},
                    {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": now},
                ],
                "images": list(images),
                "nodeInfo": {"kubeletVersion": "v1.36.2", "containerRuntimeVersion": "containerd://2.1.0"},
            },
        }


def place(pod: Json, nodes: Iterable[Json], used: Mapping[str, Counter[str]]) -> tuple[str | None, str]:
    """
    Choose a node: of those that take the Pod, the one with the fewest Pods.

    Args:
        pod: The Pod.
        nodes: All nodes.
        used: What is reserved, by node and resource; ``pods`` counts them.

    Returns:
        The node's name and no words, or ``None`` and the scheduler's words.

    """
    reasons: Counter[str] = Counter()
    fit: list[tuple[int, int, str]] = []
    total, only = 0, _named(pod)
    for order, node in enumerate(nodes):
        total += 1
        name = node["metadata"]["name"]
        found = list(_obstacles(pod, node, used.get(name) or Counter(), only))
        if found:
            reasons.update(found)
        else:
            fit.append((int((used.get(name) or Counter())["pods"]), order, name))
    if fit:
        return min(fit)[2], ""
    texts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    helpless = f"preemption: 0/{total} nodes are available: {total} Preemption is not helpful for scheduling."
    return None, f"0/{total} nodes are available: {texts}. no new claims to deallocate, {helpless}"


def _named(pod: Json) -> set[str] | None:
    """Return the nodes of which each term of a Pod's affinity names one; ``None`` if some term names none."""
    found: set[str] = set()
    for term in (terms := _terms(pod)):
        names = [set(field["values"]) for field in term.get("matchFields") or () if field["operator"] == "In"]
        if not names:
            return None
        found |= set.intersection(*names)
    return found if terms else None


def _terms(pod: Json) -> list[Json]:
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED) or {}
    return list(affinity.get("nodeSelectorTerms") or ())


def _matches(term: Json, node: Json) -> bool:
    """Return whether a node is as a term asks; one that asks for nothing matches none."""
    labels = node["metadata"].get("labels") or {}
    asked = [(one, labels.get(one["key"])) for one in term.get("matchExpressions") or ()]
    asked += [(one, node["metadata"]["name"]) for one in term.get("matchFields") or ()]
    return bool(asked) and all(_holds(one, value) for one, value in asked)


def _holds(one: Json, value: str | None) -> bool:
    operator: str = one["operator"]
    values: list[str] = one.get("values") or []
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    if operator in ("In", "NotIn"):
        return (value in values) == (operator == "In")
    if value is None or not value.isdigit():
        return False
    limit = int(values[0])
    return int(value) > limit if operator == "Gt" else int(value) < limit


def _obstacles(pod: Json, node: Json, used: Counter[str], only: set[str] | None) -> Iterable[str]:
    spec = pod["spec"]
    if only is not None and node["metadata"]["name"] not in only:
        yield "node(s) didn't satisfy plugin(s) [NodeAffinity]"  # found out before any node is looked at
        return
    labels = node["metadata"].get("labels") or {}
    taints = list((node.get("spec") or {}).get("taints") or ())
    if (node.get("spec") or {}).get("unschedulable"):
        taints.append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    for taint in taints:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not any(
            _tolerates(one, taint) for one in spec.get("tolerations") or ()
        ):
            if taint["key"] == "node.kubernetes.io/unschedulable":
                yield "node(s) were unschedulable"
            else:
                yield f"node(s) had untolerated taint(s) {{{taint['key']}: {taint.get('value', '')}}}"
            return
    chosen = all(labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())
    terms = _terms(pod)
    if not chosen or (terms and not any(_matches(term, node) for term in terms)):
        yield "node(s) didn't match Pod's node affinity/selector"
        return
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    if used["pods"] + 1 > quantity(allocatable.get("pods", 110)):
        yield "Too many pods"
    for resource in _RESOURCES:
        wanted = requests_of(pod, resource)
        if wanted and used[resource] + wanted > quantity(allocatable.get(resource, 0)):
            yield f"Insufficient {resource}"


def _tolerates(toleration: Json, taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint["key"]:
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
