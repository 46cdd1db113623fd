# SPDX-License-Identifier: Apache-2.0
"""Follow a plan: the Pods of an image go to the node that it is placed on, as long as that node takes any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.nodes import room, shut_out
from agentsandbox.backends.kubernetes.owned import list_all
from agentsandbox.errors import ConfigurationError, PermissionDenied, ProvisionError
from agentsandbox.models.placement import Placement

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.nodes import Nodes
    from agentsandbox.backends.kubernetes.options import PodOptions

__all__ = ["Displaced", "Pins"]

_SHOWN = 10
"""Nodes that are named in an error."""


class Displaced(ProvisionError):
    """The node that a Pod was to go to takes no more; the image may be anywhere from now on."""


class Pins:
    """
    Which node each image's Pods are pinned to.

    A node may be cordoned, tainted, out of reach or gone. Its images are pinned to none until it is back: a sandbox in
    the wrong place is better than none.

    Args:
        placement: Image → node.
        options: How Pods are made.
        tell: Told ``node.closed`` and ``node.opened``, each with what there is to say of it.

    Raises:
        ConfigurationError: If the placement is not a mapping of names to names.

    """

    def __init__(
        self,
        placement: Mapping[str, str] | None,
        options: PodOptions,
        *,
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        if placement is not None and not isinstance(placement, Mapping):
            raise ConfigurationError(f"placement is a mapping of images to nodes, not {placement!r}")
        for image, node in (placement or {}).items():
            if not isinstance(image, str) or not isinstance(node, str) or not image or not node:
                raise ConfigurationError(f"placement is a mapping of images to nodes, not of {image!r} to {node!r}")
        self._of = dict(placement or {})
        self._images = Counter(self._of.values())
        self._room: dict[str, int] = {}
        self._options = options
        self._tell = tell
        self._closed: dict[str, str] = {}
        self._held: dict[str, list[anyio.CancelScope]] = {}
        self.placement = Placement(nodes=self._of, room=self._room) if self._of else None
        """What the pool goes by. The room is known as soon as the backend runs."""

    def __repr__(self) -> str:
        closed = f", {len(self._closed)} closed" if self._closed else ""
        return f"<Pins [{len(self._of)} images on {len(self._images)} nodes{closed}]>"

    def node(self, image: str) -> str | None:
        """Return the node that a Pod of an image is to be on now; ``None`` if it may be anywhere."""
        node = self._of.get(image)
        return None if node in self._closed else node

    async def begin(self, api: KubernetesApi, nodes: Nodes) -> None:
        """
        Look at the nodes for the first time, and hear of every change from then on.

        Args:
            api: The API server. What other Pods take of a node's room is known only where they may be listed.
            nodes: What is known of the nodes.

        Raises:
            ConfigurationError: If nodes may not be read, or the cluster has none of a name.

        """
        if nodes.refusal is not None:
            raise ConfigurationError(f"placement needs permission to list and watch nodes: {nodes.refusal}")
        for image, node in self._of.items():
            if node not in nodes.known:
                there = ", ".join(sorted(nodes.known)[:_SHOWN]) or "no node"
                there += f" and {len(nodes.known) - _SHOWN} more" if len(nodes.known) > _SHOWN else ""
                raise ConfigurationError(f"image {image!r} is placed on {node!r}, and there is {there}")
        try:
            pods = await list_all(api, "/api/v1/pods")
        except PermissionDenied:
            pods = []
        there_of: dict[str, list[dict[str, Any]]] = {}
        for pod in pods:
            there_of.setdefault(pod["spec"].get("nodeName", ""), []).append(pod)
        for node in self._images:
            # At least one is tried, so that the scheduler says what is wrong.
            free = room(nodes.known.get(node) or {}, there_of.get(node, ()), self._options.requests)
            self._room[node] = max(1, free * self._options.slots)
            self._look(nodes, node)
        nodes.observers.append(lambda name: self._look(nodes, name))

    @contextmanager
    def held(self, node: str | None) -> Iterator[None]:
        """
        Give up what is done meanwhile for a Pod on a node as soon as the node takes no more.

        Raises:
            Displaced: Then.

        """
        if node is None:
            yield
            return
        held = self._held.setdefault(node, [])
        with anyio.CancelScope() as scope:
            held.append(scope)
            try:
                yield
            finally:
                held.remove(scope)
        if scope.cancelled_caught:
            raise Displaced(self._closed.get(node, f"node {node} takes no more Pods"))

    def _look(self, nodes: Nodes, name: str) -> None:
        if name not in self._images:
            return
        known = nodes.known.get(name)
        why = f"node {name} is gone" if known is None else shut_out(known, self._options.tolerations)
        before = self._closed.get(name)
        if why and before is None:
            self._closed[name] = why
            self._tell("node.closed", {"node": name, "reason": why, "images": self._images[name]})
            for scope in self._held.get(name, ()):
                scope.cancel()
        elif not why and before is not None:
            del self._closed[name]
            self._tell("node.opened", {"node": name, "images": self._images[name]})
