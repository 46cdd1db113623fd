# SPDX-License-Identifier: Apache-2.0
"""What the cluster must allow us: the one list that the documentation and the tests share."""

from __future__ import annotations

from agentsandbox.backends.agent_sandbox.objects import CORE, EXTENSIONS
from agentsandbox.backends.kubernetes.roles import Rule

__all__ = ["ROLE_RULES"]

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
    Rule(
        resource="sandboxclaims",
        group=EXTENSIONS,
        verbs=("create", "delete", "get", "list", "watch"),
        why="one for each sandbox",
    ),
    Rule(resource="sandboxes", group=CORE, verbs=("get",), why="how a Sandbox was started, and its Pod"),
    Rule(resource="pods", verbs=("get", "list", "patch", "watch"), why="patch is for another image in place"),
    # Opening a websocket is a GET. Servers from 1.35 on ask for create as well.
    Rule(resource="pods/exec", verbs=("create", "get"), why="commands run over exec streams"),
    Rule(
        resource="pods",
        verbs=("create",),
        required=False,
        why="dry runs only: whether Pods can be restarted in place, without which nothing is used again",
    ),
    Rule(resource="sandboxes", group=CORE, verbs=("patch",), required=False, why="suspends and resumes"),
    Rule(resource="events", verbs=("list",), required=False, why="events.txt"),
    Rule(resource="resourcequotas", verbs=("list",), required=False, why="says beforehand what a quota leaves"),
)
"""In the namespace of the sandboxes."""
