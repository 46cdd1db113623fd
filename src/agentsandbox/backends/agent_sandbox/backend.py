# SPDX-License-Identifier: Apache-2.0
"""Sandboxes in Pods that the agent-sandbox controller makes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import attrs

from agentsandbox.backends.agent_sandbox.claims import Claims
from agentsandbox.backends.agent_sandbox.given import find_all, named, offer
from agentsandbox.backends.agent_sandbox.held import Held
from agentsandbox.backends.agent_sandbox.objects import CORE, EXTENSIONS, MERGE, left_to_live, mode_patch, path, served
from agentsandbox.backends.agent_sandbox.pools import Pools
from agentsandbox.backends.agent_sandbox.preflight import INSTALL, examine_controller, without_pods
from agentsandbox.backends.agent_sandbox.roles import ROLE_RULES
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
    ResetUnverified,
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

    An image can also be a pool or a template that somebody else has made. Those are read, and never changed, scaled or
    deleted. Their Pods do not start with our runner and are not made anew in place, so that every used sandbox is
    followed by a new claim.

    Args:
        warm: How many ready Sandboxes the controller keeps in each pool of ours for claims to come. Only where a used
            sandbox cannot be used again in place, so that each is followed by a new claim; otherwise they are dropped
            as soon as that is known.
        pools: Image → name of a SandboxWarmPool that is there already. The image may be any word; episodes name it.
        templates: Image → name of a SandboxTemplate that is there already; this run makes a pool of it.
        options: Those of :class:`~agentsandbox.backends.kubernetes.KubernetesBackend`. How Pods are made does not
            apply to the Pods of *pools* and *templates*.

    Raises:
        ConfigurationError: If an option is out of range, or asks of somebody else's Pods what only ours can do.

    """

    name: ClassVar[str] = "agent-sandbox"
    rules = ROLE_RULES

    def __init__(
        self,
        *,
        warm: int = 0,
        pools: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(warm, bool) or not isinstance(warm, int) or warm < 0:
            raise ConfigurationError(f"warm must be a whole number of at least 0, not {warm!r}")
        super().__init__(**options)
        self._warm = warm
        self._given = named(pools, templates)
        placed = [one for one in self._given.values() if self._pins.node(one.image) is not None]
        for option, theirs in (
            ("network", [] if self.network is None else self._given.values()),
            ("jail", [] if self.options.jail is None else self._given.values()),
            ("placement", placed),
        ):
            for one in theirs:
                raise ConfigurationError(
                    f"{option}= is for Pods that this run makes; those of {one.words} are as their template says"
                )
        self._nonce = secrets.token_hex(16)
        self._held: dict[str, Held] = {}

    def __repr__(self) -> str:
        state = "running" if self._group is not None else "stopped"
        taken = getattr(self, "_claims", None)
        launched = "none launched" if taken is None else ", ".join(f"{n} {how}" for how, n in taken.launched.items())
        return f"<AgentSandboxBackend [run {self.run_id}, {state}, {len(self._held)} claims, {launched}]>"

    async def examine(self) -> list[Check]:
        """Ask the cluster about everything that is needed; nothing is made."""
        checks = [without_pods(check) for check in await super().examine()]
        return [*checks, *await examine_controller(self._where, self._given)]

    async def _start(self, api: KubernetesApi, group: TaskGroup) -> None:
        version, core = await served_at(api, EXTENSIONS), await served_at(api, CORE)
        self._versions = {"extensions": version, "core": core}
        self._given = await find_all(api, version, self._given)
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
        held = Held(claim=pod_name(self.run_id, next(self._numbers)), given=self._given.get(spec.image))
        # A Sandbox that is started cold and its Pod are named like the claim; any other is entered under its own name.
        nonce = self._nonce if held.given is None else secrets.token_hex(16)
        sandbox = KubernetesSandbox(spec, name, held.claim, nonce, lambda: self.sink)
        self._held[sandbox.pod] = held
        self._sandboxes[sandbox.pod] = sandbox
        began = anyio.current_time()
        try:
            with anyio.move_on_after(self._create_timeout) as limit, self._pins.held(self._pins.node(spec.image)):
                pool = await self._pool(spec, sandbox, held, jails=jails)
                await self._pools.raise_one(pool)
                found = await self._claims.take(held, pool, timeout=self._ready_timeout)
                self._enter(sandbox, held, found)
                self._tell(sandbox, held, pool, anyio.current_time() - began)
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

    async def _pool(self, spec: SandboxSpec, sandbox: KubernetesSandbox, held: Held, *, jails: bool) -> str:
        """Return the name of the pool to claim from."""
        given = held.given
        if given is None:
            return await self._pools.ensure(await self._like(spec, sandbox.pod, jails=jails))
        return given.pool or await self._pools.ensure_of(given.template)

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
        now = time.time() + (self._api.clock_offset or 0.0)
        sandbox.born = anyio.current_time() + min(0.0, left_to_live(pod, now) - self.options.lifetime)
        if held.given is not None:
            held.offer = offer(pod)
            sandbox.container, sandbox.ours = held.offer.container, False
        self._held[sandbox.pod], self._sandboxes[sandbox.pod] = held, sandbox

    def _tell(self, sandbox: KubernetesSandbox, held: Held, pool: str, seconds: float) -> None:
        data = {"claim": held.claim, "launch": str(held.launch), "seconds": seconds, "pod": sandbox.pod, "pool": pool}
        self.sink(Event(name="sandbox.claimed", at=anyio.current_time(), sandbox=sandbox.name, data=data))

    def _capabilities(self, state: PodState, facts: Any) -> Capabilities:
        found = super()._capabilities(state, facts)
        held = self._held[state.name]
        more = {"claim": held.claim, "sandbox": held.sandbox, "launch": str(held.launch)}
        offered = held.offer
        if held.given is None or offered is None:
            return attrs.evolve(found, facts={**found.facts, **more})
        more |= {"pool": held.given.pool, "template": held.given.template, "container": offered.container}
        more |= {"template_lacks": "; ".join(offered.missing), "template_image": offered.image}
        isolation = f"a Pod of runtime class {offered.runtime}" if offered.runtime else "a Pod"
        return attrs.evolve(found, rungs=("replace",), isolation=isolation, facts={**found.facts, **more})

    def can_recycle(self, sandbox: BackendSandbox) -> bool:
        """Whether its Pod can start another container at once; that of somebody else's template cannot."""
        ours = isinstance(sandbox, KubernetesSandbox) and sandbox.ours
        return ours and super().can_recycle(sandbox)

    async def recycle(self, sandbox: BackendSandbox, spec: SandboxSpec, name: str) -> KubernetesSandbox:
        """
        Have the Pod of a sandbox start a new container, of the same image or of another one.

        Raises:
            UsageError: If it is of somebody else's template.
            ResetUnverified: If it is to be of somebody else's template, which takes a claim on another pool.
            ProvisionError: If that did not work.
            ControlPlaneError: If the API server does not answer.

        """
        if isinstance(sandbox, KubernetesSandbox) and not sandbox.ours:
            raise UsageError(f"{sandbox!r} is of a template that is not ours: it is replaced, not made anew in place")
        if (given := self._given.get(spec.image)) is not None:
            raise ResetUnverified(f"image {spec.image!r} takes a claim on {given.words}")
        return await super().recycle(sandbox, spec, name)

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
        fresh = KubernetesSandbox(mine.spec, mine.name, mine.pod, mine.nonce, lambda: self.sink)
        fresh.container, fresh.ours = mine.container, mine.ours
        self._sandboxes[fresh.pod] = fresh
        try:
            found = await self._claims.another(held, mine.pod, mine.uid, timeout=self._ready_timeout)
            self._enter(fresh, held, found)
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
        await super()._remove_all()
        self._held.clear()

    async def _remove_run(self) -> None:
        await sweep(self._api, self._api.namespace, self.run_id, self._versions["extensions"], pools=self._pools.any)


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
