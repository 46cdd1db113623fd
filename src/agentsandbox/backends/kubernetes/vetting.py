# SPDX-License-Identifier: Apache-2.0
"""A last look at a Pod before somebody gets it: ready on paper may be dead in fact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentsandbox.backends.kubernetes.conditions import PodPhase, state_of
from agentsandbox.errors import ControlPlaneError, SandboxLost, StreamBroken

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.nodes import Nodes
    from agentsandbox.backends.kubernetes.options import PodOptions
    from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["PROBE_AFTER", "PROBE_WITHIN", "Vetter"]

PROBE_AFTER = 10.0
"""Seconds for which an answer of a sandbox counts; later it is asked for another one before it is leased."""

PROBE_WITHIN = 10.0
"""Seconds it has to give one."""


class Vetter:
    """
    Judges sandboxes that are about to be leased.

    Args:
        reflector: The watch of the run's Pods.
        nodes: What is known of the nodes.
        options: How Pods are made.

    """

    def __init__(self, reflector: Reflector, nodes: Nodes, options: PodOptions) -> None:
        self._reflector = reflector
        self._nodes = nodes
        self._options = options
        self.probes = 0
        """How many sandboxes were asked for an answer."""

    def __repr__(self) -> str:
        return f"<Vetter [{self.probes} probes, {self._nodes!r}]>"

    def doomed(self, sandbox: KubernetesSandbox) -> SandboxLost | None:
        """Return why a Pod is not going to last for an episode, as far as is known without asking; else ``None``."""
        if why := self._nodes.closed(sandbox.node):
            return SandboxLost("node_unschedulable", why)
        left = sandbox.born + self._options.lifetime - anyio.current_time()
        if left < self._options.needed:
            need = self._options.needed
            return SandboxLost("expiring", f"the cluster ends its Pod in {left:.0f} s, and an episode has {need:g} s")
        return None

    async def vet(self, sandbox: KubernetesSandbox) -> None:
        """
        Make sure that a sandbox is worth leasing.

        Raises:
            SandboxLost: If it is not ready, will not last, or does not answer.

        """
        pod = self._reflector.get(sandbox.uid)
        state = None if pod is None else state_of(pod)
        if state is not None and state.phase is not PodPhase.READY:
            raise SandboxLost("not_ready", f"{state.reason} {state.message}".strip())
        if (doom := self.doomed(sandbox)) is not None:
            raise doom
        if not sandbox.dormant and anyio.current_time() - sandbox.proved_at > PROBE_AFTER:
            await self._probe(sandbox)

    async def _probe(self, sandbox: KubernetesSandbox) -> None:
        self.probes += 1
        try:
            await sandbox.session.ping(PROBE_WITHIN)
        except StreamBroken as error:
            if self._reflector.stale_since is not None:
                return  # the control plane is away, which says nothing about the sandbox
            raise SandboxLost("silent", str(error)) from error
        except ControlPlaneError as error:
            if error.status is None:
                return
            raise SandboxLost("unreachable", str(error)) from error
        sandbox.proved_at = anyio.current_time()
