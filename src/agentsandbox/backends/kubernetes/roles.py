# SPDX-License-Identifier: Apache-2.0
"""What the cluster must allow us: the one list that the documentation, ``doctor`` and the tests share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

__all__ = [
    "CLUSTER_RULES",
    "EVENTS_RULE",
    "EXEC_RULE",
    "JOB_RULES",
    "NETWORK_RULES",
    "PLACEMENT_RULES",
    "ROLE_RULES",
    "Rule",
    "pairs",
    "role",
]


@attrs.frozen(kw_only=True)
class Rule:
    """Some verbs on one resource."""

    resource: str
    """Such as ``pods`` or ``pods/exec``."""
    verbs: tuple[str, ...]
    """What is done to it."""
    group: str = ""
    """Its API group; empty is the core one."""
    required: bool = True
    """Whether nothing works without it."""
    everywhere: bool = False
    """Whether it is asked for in the whole cluster, where it takes a ClusterRole."""
    why: str
    """What it is for."""


# Opening a websocket is a GET. Servers from 1.35 on ask for create as well.
EXEC_RULE = Rule(resource="pods/exec", verbs=("create", "get"), why="commands run over exec streams")

EVENTS_RULE = Rule(
    resource="events",
    verbs=("list", "watch"),
    required=False,
    why="events.txt; tells waiting for images apart from other waiting",
)

ROLE_RULES: tuple[Rule, ...] = (
    Rule(
        resource="pods",
        verbs=("create", "delete", "get", "list", "patch", "watch"),
        why="sandboxes are Pods; patch is for another image in place",
    ),
    EXEC_RULE,
    Rule(resource="pods", verbs=("deletecollection",), required=False, why="ends all Pods of a run by one call"),
    EVENTS_RULE,
    Rule(resource="resourcequotas", verbs=("list",), required=False, why="says beforehand what a quota leaves"),
)
"""In the namespace of the sandboxes, for everything but ``job``."""

NETWORK_RULES: tuple[Rule, ...] = (
    Rule(
        resource="networkpolicies",
        group="networking.k8s.io",
        verbs=("create", "delete", "get", "list"),
        why="where sandboxes may connect to",
    ),
)
"""In the namespace as well, for the option ``network``."""

PLACEMENT_RULES: tuple[Rule, ...] = (
    Rule(
        resource="nodes",
        verbs=("list", "watch"),
        everywhere=True,
        why="where images are placed, and how much room is there",
    ),
    Rule(resource="pods", verbs=("list",), everywhere=True, required=False, why="what others take of that room"),
)
"""In the whole cluster, for the option ``placement``."""

JOB_RULES: tuple[Rule, ...] = (
    Rule(resource="jobs", group="batch", verbs=("create", "delete", "get", "list"), why="the batch is one Job"),
    Rule(resource="configmaps", verbs=("create", "delete", "get", "list"), why="it carries the episode's script"),
    Rule(resource="pods", verbs=("delete", "get", "list"), why="what became of the episodes"),
    Rule(resource="pods/log", verbs=("get",), why="results come from the logs"),
    Rule(resource="events", verbs=("list",), required=False, why="events.txt"),
)
"""In the namespace, for ``job run`` and ``job cleanup``."""

CLUSTER_RULES: tuple[Rule, ...] = (
    Rule(resource="namespaces", verbs=("create", "delete", "get"), required=False, why="a namespace for each run"),
    Rule(
        resource="runtimeclasses",
        group="node.k8s.io",
        verbs=("get",),
        required=False,
        why="says beforehand whether there is such a runtime class",
    ),
    Rule(
        resource="nodes",
        verbs=("list", "watch"),
        required=False,
        why="no sandbox is leased on a node that is cordoned or not ready; facts about the nodes in reports",
    ),
)
"""In the whole cluster. Not needed in a namespace that is there already."""


def pairs(rules: Iterable[Rule]) -> Iterator[tuple[str, str]]:
    """Yield every (verb, resource)."""
    for rule in rules:
        for verb in rule.verbs:
            yield verb, rule.resource


def role(name: str, rules: Iterable[Rule], *, namespace: str | None = None, optional: bool = True) -> dict[str, Any]:
    """
    Return a Role to apply.

    Args:
        name: Its name.
        rules: What it allows.
        namespace: Where; ``None`` makes it a ClusterRole.
        optional: Whether what is not required is in it, too.

    """
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role" if namespace else "ClusterRole",
        "metadata": {"name": name, **({"namespace": namespace} if namespace else {})},
        "rules": [
            {"apiGroups": [rule.group], "resources": [rule.resource], "verbs": list(rule.verbs)}
            for rule in rules
            if rule.required or optional
        ],
    }
