# SPDX-License-Identifier: Apache-2.0
"""What a driver sees of its Pods: their last state, what their containers were made of, and when it saw which stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.conditions import state_of
from agentsandbox.backends.kubernetes.manifests import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.backends.kubernetes.view import Change
    from agentsandbox.models.sandbox import Identity

__all__ = ["STAGES", "PodRecorder"]

STAGES = ("created", "scheduled", "sandbox_ready", "started")
"""Of a Pod, in order."""


class PodRecorder:
    """
    Takes changes of Pods.

    Args:
        made: Called with every new Pod.

    """

    def __init__(self, made: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        """The last state of every Pod, by UID."""
        self.moments: dict[str, dict[str, float]] = {}
        """Name of a sandbox → stage of its Pod → when it was first seen, on the driver's monotonic clock."""
        self._containers: dict[tuple[str, str], dict[str, Any]] = {}
        self._made = made

    def __repr__(self) -> str:
        return f"<PodRecorder [{len(self.pods)} Pods, {len(self._containers)} containers]>"

    def __call__(self, change: Change) -> None:
        """Take a change."""
        pod, now = change.object, anyio.current_time()
        state = state_of(pod)
        uid = state.identity.uid
        if uid not in self.pods:
            self._made(pod)
        self.pods[uid] = pod
        if state.identity.instance:
            facts = {"pod": state.name, "node": state.node, "image_id": state.image_id}
            self._containers[uid, state.identity.instance] = facts
        sandbox = (pod["metadata"].get("annotations") or {}).get(f"{DOMAIN}/sandbox")
        if not sandbox:
            return
        seen = self.moments.setdefault(sandbox, {})
        if change.previous is not None and state_of(change.previous).identity.restarts != state.identity.restarts:
            seen.pop("started", None)  # that was the container before
        for stage in STAGES:
            if getattr(state.stages, stage) is not None:
                seen.setdefault(stage, now)

    def where(self, identity: Identity | None) -> dict[str, Any]:
        """Return Pod, node and image id of the container with an identity."""
        nothing = {"pod": None, "node": None, "image_id": None}
        return nothing if identity is None else self._containers.get((identity.uid, identity.instance), nothing)
