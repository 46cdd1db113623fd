# SPDX-License-Identifier: Apache-2.0
"""What the cluster must allow us: the one list that the documentation and the tests share."""

from __future__ import annotations

from agentsandbox.backends.agent_sandbox.objects import CORE, EXTENSIONS
from agentsandbox.backends.kubernetes.roles import EVENTS_RULE, EXEC_RULE, Rule

__all__ = ["GIVEN_RULES", "ROLE_RULES"]

_CLAIMS = Rule(
    resource="sandboxclaims",
    group=EXTENSIONS,
    verbs=("create", "delete", "get", "list", "watch"),
    why="one for each sandbox",
)
_SANDBOXES = Rule(resource="sandboxes", group=CORE, verbs=("get",), why="how a Sandbox was started, and its Pod")
_SUSPENDING = Rule(resource="sandboxes", group=CORE, verbs=("patch",), required=False, why="suspends and resumes")

ROLE_RULES: tuple[Rule, ...] = (
    Rule(
        resource="sandboxtemplates",
        group=EXTENSIONS,
        verbs=("create", "delete", "get", "list"),
        why="one for each kind of Pod",
    ),
    Rule(
        resource="sandboxwarmpools",
        group=EXTENSIONS,
        verbs=("create", "delete", "get", "list", "patch"),
        why="one for each template; patch moves how many ready ones it keeps",
    ),
    _CLAIMS,
    _SANDBOXES,
    Rule(resource="pods", verbs=("get", "list", "patch", "watch"), why="patch is for another image in place"),
    EXEC_RULE,
    Rule(
        resource="pods",
        verbs=("create",),
        required=False,
        why="dry runs only: whether Pods can be restarted in place, without which nothing is used again",
    ),
    _SUSPENDING,
    EVENTS_RULE,
    Rule(resource="resourcequotas", verbs=("list",), required=False, why="says beforehand what a quota leaves"),
)
"""In the namespace of the sandboxes."""

GIVEN_RULES: tuple[Rule, ...] = (
    Rule(resource="sandboxtemplates", group=EXTENSIONS, verbs=("get",), why="what its Pods give"),
    Rule(resource="sandboxwarmpools", group=EXTENSIONS, verbs=("get",), why="of which template it is"),
    _CLAIMS,
    _SANDBOXES,
    Rule(resource="pods", verbs=("get", "list", "patch", "watch"), why="patch labels the Pods of claims"),
    EXEC_RULE,
    _SUSPENDING,
    EVENTS_RULE,
)
"""The same where all images are pools that somebody else has made (the option ``pools``)."""
