# SPDX-License-Identifier: Apache-2.0
"""Sandboxes in Pods that the agent-sandbox controller makes."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import attrs

from agentsandbox.backends.agent_sandbox.claims import Claims, Held
from agentsandbox.backends.agent_sandbox.objects import CORE, EXTENSIONS, mode_patch, path, served
from agentsandbox.backends.agent_sandbox.pools import MERGE, Pools
from agentsandbox.backends.agent_sandbox.preflight import INSTALL, examine_controller
from agentsandbox.backends.agent_sandbox.sweeping import sweep
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.manifests import pod_name, selector
from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
from agentsandbox.backends.kubernetes.watch import Reflector
from agentsandbox.errors import (
    ConfigurationError,
    InfrastructureError,
    NotFound,
    PermissionDenied,
    ProvisionError,
    UsageError,
)
from agentsandbox.models.events import Event

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentsandbox.backends.base import BackendSandbox, Check
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.conditions import PodState
    from agentsandbox.models.sandbox import Capabilities, SandboxSpec

__all__ = ["AgentSandboxBackend"]


class AgentSandboxBackend(KubernetesBackend):
    """
    Make sandboxes by claims on the warm pools of the agent-sandbox controller.

    Every image has one SandboxTemplate and one SandboxWarmPool of this run; every sandbox is a SandboxClaim. Everything
    else is as with the backend ``kubernetes``: the runner, the fence, restarts in place.

    Args:
        warm: How many ready Sandboxes the controller keeps in each pool for claims to come. Only where a used sandbox
            cannot be used again in place, so that each is followed by a new claim; otherwise they are dropped as soon
            as that is known.
        options: Those of :class:`~agentsandbox.backends.kubernetes.KubernetesBackend`.

    Raises:
        ConfigurationError: If an option is out of range.

    """

    name: ClassVar[str] = "agent-sandbox"

    def __init__(self, *, warm: int = 0, **options: Any) -> None:
        if isinstance(warm, bool) or not isinstance(warm, int) or warm < 0:
            raise ConfigurationError(f"warm must be a whole number of at least 0, not {warm!r}")
        super().__init__(**options)
        self._warm = warm
        self._nonce = secrets.token_hex(16)
        self._held: dict[str, Held] = {}

    def __repr__(self) -> str:
        state = "running" if self._group is not None else "stopped"
        taken = getattr(self, "_claims", None)
        launched = "none launched" if taken is None else ", ".join(f"{n} {how}" for how, n in taken.launched.items())
        return f"<AgentSandboxBackend [run {self.run_id}, {state}, {len(self._held)} claims, {launched}]>"

    async def examine(self) -> list[Check]:
        """Ask the cluster about everything that is needed; nothing is made."""
        return [*await super().examine(), *await examine_controller(self._where)]

    async def _start(self, api: KubernetesApi, group: TaskGroup) -> None:
        version, core = await served_at(api, EXTENSIONS), await served_at(api, CORE)
        self._versions = {"extensions": version, "core": core}
        where = path(version, "sandboxclaims", api.namespace)
        self._claim_watch = Reflector(api, where, selector=selector(self.run_id))
        await group.start(self._claim_watch.run)
        await super()._start(api, group)
        self._pools = Pools(api, run_id=self.run_id, version=version, warm=self._warm)
        self._claims = Claims(
            api,
            self._claim_watch,
            self._reflector,
            run_id=self.run_id,
            version=version,
            core=core,
            lifetime=self.options.lifetime,
        )

    async def _create(self, spec: SandboxSpec, name: str, *, jails: bool = False) -> KubernetesSandbox:
        held = Held(claim=pod_name(self.run_id, next(self._numbers)))
        # A Sandbox that is started cold and its Pod are named like the claim; any other is entered under its own name.
        sandbox = KubernetesSandbox(spec, name, held.claim, self._nonce, lambda: self.sink)
        self._held[sandbox.pod] = held
        self._sandboxes[sandbox.pod] = sandbox
        began = anyio.current_time()
        try:
            with anyio.move_on_after(self._create_timeout) as limit:
                pool = await self._pools.ensure(await self._like(spec, sandbox.pod, jails=jails))
                await self._pools.raise_one(pool)
                found = await self._claims.take(held, pool, timeout=self._ready_timeout)
                self._enter(sandbox, held, found)
                self._tell(sandbox, held, anyio.current_time() - began)
                sandbox.born = anyio.current_time()
                state = await self._placer.ready(sandbox.pod, sandbox.uid, timeout=self._ready_timeout)
                await self._arrive(sandbox, state)
                if self.can_recycle(sandbox):
                    await self._pools.drop(pool)
            if limit.cancelled_caught:
                raise ProvisionError(f"claim {held.claim} was given up after {self._create_timeout:g} s")
        except BaseException:
            with anyio.move_on_after(120.0, shield=True):
                await self._discard(sandbox, "")
            raise
        return sandbox

    async def _like(self, spec: SandboxSpec, name: str, *, jails: bool) -> dict[str, Any]:
        """Return a Pod like which those of a template are made."""
        first = self._sessions.first_process(spec.image)
        pod = self._manifest(spec, name, "", self._nonce, rule=True, first=first, jails=jails)
        try:
            self._rule = await self._placer.knows_rule(pod)
        except PermissionDenied:
            self._rule = False  # who may not make Pods cannot ask
        return pod if self._rule else self._manifest(spec, name, "", self._nonce, rule=False, first=first, jails=jails)

    def _enter(self, sandbox: KubernetesSandbox, held: Held, pod: dict[str, Any]) -> None:
        del self._held[sandbox.pod], self._sandboxes[sandbox.pod]
        sandbox.pod, sandbox.uid = pod["metadata"]["name"], held.pod_uid
        self._held[sandbox.pod], self._sandboxes[sandbox.pod] = held, sandbox

    def _tell(self, sandbox: KubernetesSandbox, held: Held, seconds: float) -> None:
        data = {"claim": held.claim, "launch": str(held.launch), "seconds": seconds, "pod": sandbox.pod}
        self.sink(Event(name="sandbox.claimed", at=anyio.current_time(), sandbox=sandbox.name, data=data))

    def _capabilities(self, state: PodState, facts: Any) -> Capabilities:
        found = super()._capabilities(state, facts)
        held = self._held[state.name]
        more = {"claim": held.claim, "sandbox": held.sandbox, "launch": str(held.launch)}
        return attrs.evolve(found, facts={**found.facts, **more})

    async def suspend(self, sandbox: BackendSandbox) -> None:
        """
        Have the controller end a sandbox's Pod and keep its claim. The sandbox is of no use until it is resumed.

        Raises:
            UsageError: If it is not of this backend.
            InfrastructureError: If its Pod is still there after a while.
            ControlPlaneError: If the API server refuses or does not answer.

        """
        mine = self._mine(sandbox)
        await mine.abandon()
        await self._switch(mine, "Suspended")
        try:
            await self._reflector.wait_for(mine.uid, lambda found: found is None, timeout=self._ready_timeout)
        except TimeoutError:
            words = f"Pod {mine.pod} is still there {self._ready_timeout:g} s after its suspension"
            raise InfrastructureError(words) from None

    async def resume(self, sandbox: BackendSandbox) -> KubernetesSandbox:
        """
        Have the controller make a new Pod for a sandbox that was suspended.

        Returns:
            A fresh sandbox: nothing of the old one's file system is in it.

        Raises:
            UsageError: If it is not of this backend.
            ProvisionError: If it did not become ready.
            ControlPlaneError: If the API server refuses or does not answer.

        """
        mine = self._mine(sandbox)
        held = self._held[mine.pod]
        await self._switch(mine, "Running")
        fresh = KubernetesSandbox(mine.spec, mine.name, mine.pod, self._nonce, lambda: self.sink)
        self._sandboxes[fresh.pod] = fresh

        def anew(found: dict[str, Any] | None) -> bool:
            return found is not None and found["metadata"]["uid"] != mine.uid

        try:
            found = await self._reflector.wait_for(mine.pod, anew, timeout=self._ready_timeout)
            assert found is not None
            held.pod_uid = fresh.uid = str(found["metadata"]["uid"])
            fresh.born = anyio.current_time()
            state = await self._placer.ready(fresh.pod, fresh.uid, timeout=self._ready_timeout)
            await self._open(fresh, state)
        except TimeoutError:
            raise ProvisionError(
                f"Pod {mine.pod} is not there {self._ready_timeout:g} s after its resumption"
            ) from None
        return fresh

    def _mine(self, sandbox: BackendSandbox) -> KubernetesSandbox:
        if not isinstance(sandbox, KubernetesSandbox) or self._sandboxes.get(sandbox.pod) is not sandbox:
            raise UsageError(f"{sandbox!r} is not of this backend")
        return sandbox

    async def _switch(self, sandbox: KubernetesSandbox, mode: str) -> None:
        held = self._held[sandbox.pod]
        where = path(self._versions["core"], "sandboxes", self._api.namespace, held.sandbox)
        await self._api.request("PATCH", where, body=mode_patch(held.sandbox_uid, mode), content_type=MERGE)

    async def _discard(self, sandbox: KubernetesSandbox, mark: str) -> None:  # noqa: ARG002 - a claim has its own
        await sandbox.abandon()
        held = self._held.get(sandbox.pod)
        if held is not None:
            await self._claims.drop(held)
            self._held.pop(sandbox.pod, None)
        self._sandboxes.pop(sandbox.pod, None)

    async def _remove_all(self) -> None:
        for sandbox in self._sandboxes.values():
            sandbox.unwanted = True
            sandbox.unguard()
        try:
            await sweep(self._api, self._api.namespace, self.run_id, self._versions["extensions"])
        finally:
            for sandbox in self._sandboxes.values():
                await sandbox.abandon()
            self._sandboxes.clear()
            self._held.clear()


async def served_at(api: KubernetesApi, group: str) -> str:
    """
    Ask the server which version of a group to speak.

    Raises:
        ConfigurationError: If it has none that is known here.

    """
    try:
        return served(group, await api.request("GET", f"/apis/{group}"))
    except NotFound:
        raise ConfigurationError(f"the cluster does not serve {group}: {INSTALL}") from None
