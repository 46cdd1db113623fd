# SPDX-License-Identifier: Apache-2.0
"""Pods of one run: how each is made, made anew in place, and removed."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.base import Backend, BackendSandbox
from agentsandbox.backends.kubernetes.attach import first_process
from agentsandbox.backends.kubernetes.inplace import same_place
from agentsandbox.backends.kubernetes.manifests import DOMAIN, FirstProcess, pod, pod_name
from agentsandbox.backends.kubernetes.pinning import Displaced
from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
from agentsandbox.errors import ProvisionError, SandboxLost, UsageError
from agentsandbox.models.events import Event
from agentsandbox.models.sandbox import Capabilities, ExecLevel, SandboxSpec

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.attach import Attacher
    from agentsandbox.backends.kubernetes.conditions import PodState
    from agentsandbox.backends.kubernetes.inplace import Changer
    from agentsandbox.backends.kubernetes.network import Fence
    from agentsandbox.backends.kubernetes.options import PodOptions
    from agentsandbox.backends.kubernetes.pinning import Pins
    from agentsandbox.backends.kubernetes.placing import Placer
    from agentsandbox.backends.kubernetes.removal import Remover
    from agentsandbox.backends.kubernetes.sessions import Sessions
    from agentsandbox.backends.kubernetes.vetting import Vetter
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["CLEANUP_LIMIT", "PodBackend"]

CLEANUP_LIMIT = 60.0
"""Seconds that removing a half-made sandbox, or all of them, may take."""


class PodBackend(Backend):
    """
    A backend each of whose sandboxes is a Pod. Who runs it sets what it works with.

    Subclasses may get their Pods in another way: by overriding :meth:`_create` and :meth:`_discard`.
    """

    run_id: str
    """What marks everything of this run."""
    owner: str
    """Who pays for it."""
    options: PodOptions
    """How its Pods are made."""
    _api: KubernetesApi
    _attacher: Attacher
    _changer: Changer
    _create_timeout: float
    _fence: Fence | None
    _group: TaskGroup | None
    _lazy: bool
    _numbers: Iterator[int]
    _pins: Pins
    _placer: Placer
    _ready_timeout: float
    _reflector: Reflector
    _remover: Remover
    _reuse: bool
    _rule: bool
    _sandboxes: dict[str, KubernetesSandbox]
    _sessions: Sessions
    _vetter: Vetter

    def _require(self) -> TaskGroup:
        if self._group is None:
            raise UsageError("this backend is not running")
        return self._group

    async def _make(self, spec: SandboxSpec, name: str, *, jails: bool = False) -> KubernetesSandbox:
        while True:
            try:
                return await self._create(spec, name, jails=jails)
            except Displaced:
                continue  # to another node
            except ProvisionError as error:
                if not self._sessions.step_down(spec.image, error):
                    raise

    async def _create(self, spec: SandboxSpec, name: str, *, jails: bool = False) -> KubernetesSandbox:
        nonce = secrets.token_hex(16)
        sandbox = KubernetesSandbox(spec, name, pod_name(self.run_id, next(self._numbers)), nonce, lambda: self.sink)
        first = self._sessions.first_process(spec.image)
        manifest = self._manifest(spec, sandbox.pod, name, nonce, rule=True, first=first, jails=jails)
        mark = manifest["metadata"]["annotations"][f"{DOMAIN}/nonce"]
        self._sandboxes[sandbox.pod] = sandbox
        doing = "the API server"
        try:
            with anyio.move_on_after(self._create_timeout) as limit, self._pins.held(self._pins.node(spec.image)):
                self._rule = await self._placer.knows_rule(manifest)
                if not self._rule:
                    manifest = self._manifest(
                        spec, sandbox.pod, name, nonce, rule=False, first=first, mark=mark, jails=jails
                    )
                sandbox.uid = await self._placer.post(manifest)
                sandbox.born = anyio.current_time()
                doing = "the Pod to be ready"
                state = await self._placer.ready(sandbox.pod, sandbox.uid, timeout=self._ready_timeout)
                doing = "an answer from the Pod"
                await self._arrive(sandbox, state)
            if limit.cancelled_caught:
                raise ProvisionError(
                    f"Pod {sandbox.pod} was given up after {self._create_timeout:g} s (create_timeout): "
                    f"it still waited for {doing}"
                )
        except BaseException:
            with anyio.move_on_after(CLEANUP_LIMIT, shield=True):
                await self._discard(sandbox, mark)
            raise
        return sandbox

    def can_recycle(self, sandbox: BackendSandbox) -> bool:
        """Whether its Pod can start another container at once, and has most of its life before it."""
        if not (self._reuse and self._rule and isinstance(sandbox, KubernetesSandbox)):
            return False
        if not all(mount.get("readOnly") for mount in self.options.volume_mounts):
            return False  # what an episode wrote there would outlive its container
        if not sandbox.opened or self._vetter.doomed(sandbox) is not None:
            return False
        runner = sandbox.capabilities.exec_level is ExecLevel.RUNNER  # others cannot show what a container left behind
        return runner and sandbox.loss is None and sandbox.session.alive

    async def recycle(self, sandbox: BackendSandbox, spec: SandboxSpec, name: str) -> KubernetesSandbox:
        """
        Have the Pod of a sandbox start a new container, of the same image or of another one.

        Raises:
            ProvisionError: If that did not work.
            ControlPlaneError: If the API server does not answer.

        """
        if not isinstance(sandbox, KubernetesSandbox) or self._sandboxes.get(sandbox.pod) is not sandbox:
            raise UsageError(f"{sandbox!r} is not of this backend")
        if not self._changer.backs_off(sandbox, spec.image):
            return await self._recycle(sandbox, spec, name)
        between = await self._recycle(sandbox, sandbox.spec, name)
        try:
            return await self._recycle(between, spec, name)
        except BaseException:
            self._sandboxes[sandbox.pod] = sandbox  # who asked knows no other one, and has to remove it
            with anyio.move_on_after(CLEANUP_LIMIT, shield=True):
                await between.abandon()
            raise

    async def _recycle(self, sandbox: KubernetesSandbox, spec: SandboxSpec, name: str) -> KubernetesSandbox:
        state = await self._changer.renew(sandbox, spec.image)
        fresh = KubernetesSandbox(spec, name, sandbox.pod, sandbox.nonce, lambda: self.sink)
        fresh.uid, fresh.born = sandbox.uid, sandbox.born
        before = sandbox.session.facts.get("place")
        try:
            await self._open(fresh, state)
            same_place(before, fresh.session.facts.get("place"))
        except BaseException:
            with anyio.move_on_after(CLEANUP_LIMIT, shield=True):
                await fresh.abandon()
            raise
        self._sandboxes[fresh.pod] = fresh
        return fresh

    async def restart(self, sandbox: BackendSandbox) -> KubernetesSandbox:
        """Have the Pod of a sandbox start a new container of the same image: see :meth:`recycle`."""
        return await self.recycle(sandbox, sandbox.spec, sandbox.name)

    async def change_image(self, sandbox: BackendSandbox, spec: SandboxSpec) -> KubernetesSandbox:
        """Have the Pod of a sandbox start a container of another image: see :meth:`recycle`."""
        return await self.recycle(sandbox, spec, sandbox.name)

    def _manifest(
        self,
        spec: SandboxSpec,
        name: str,
        sandbox: str,
        nonce: str,
        *,
        rule: bool,
        first: FirstProcess = FirstProcess.RUNNER,
        mark: str | None = None,
        jails: bool = True,
    ) -> dict[str, Any]:
        program, arguments = first_process(nonce)
        manifest = pod(
            name,
            spec.image,
            # Without a jail around it, an episode must not have what it takes to make one.
            options=self.options if jails else attrs.evolve(self.options, jail=None, slots=1),
            run_id=self.run_id,
            owner=self.owner,
            nonce=secrets.token_hex(8) if mark is None else mark,
            program=program,
            arguments=arguments,
            first_process=first,
            restart_rule=rule,
            node=self._pins.node(spec.image),
        )
        manifest["metadata"]["annotations"][f"{DOMAIN}/sandbox"] = sandbox
        return manifest

    async def _arrive(self, sandbox: KubernetesSandbox, state: PodState) -> None:
        """Open a session to a Pod that is ready, or leave that for when somebody takes it."""
        if not self._lazy or (self._fence is not None and self._fence.verdict is None):  # else the fence is being tried
            await self._open(sandbox, state)
            return
        sandbox.vetter = self._vetter
        sandbox.guard(self._reflector, state)
        sandbox.still_there()
        sandbox.capabilities = self._capabilities(state, {"level": self._sessions.level(sandbox.spec.image)})
        sandbox.leave_closed(functools.partial(self._open, sandbox, state))

    async def _open(self, sandbox: KubernetesSandbox, state: PodState) -> None:
        group = self._require()
        sandbox.vetter = self._vetter
        sandbox.guard(self._reflector, state)
        sandbox.still_there()
        sandbox.session = await self._sessions.make(sandbox)
        sandbox.still_there()
        try:
            await group.start(self._serve, sandbox)
        except SandboxLost as error:
            raise ProvisionError(f"Pod {sandbox.pod} does not answer: {error}") from error
        facts = sandbox.session.facts
        self._attacher.learn(state.image, facts.get("executable"))
        self._changer.learn(state.image, state)
        sandbox.capabilities = self._capabilities(state, facts)

    async def _serve(self, sandbox: KubernetesSandbox, *, task_status: TaskStatus[None]) -> None:
        await sandbox.session.run(task_status=task_status)
        if not sandbox.unwanted and sandbox.session.lost is not None:
            sandbox.lose(sandbox.session.lost)

    def _capabilities(self, state: PodState, facts: Any) -> Capabilities:
        runtime = self.options.runtime_class
        return Capabilities(
            exec_level=ExecLevel(facts.get("level", ExecLevel.RUNNER)),
            isolation=f"a Pod of runtime class {runtime}" if runtime else "a Pod",
            users=bool(facts.get("users")),
            network=self._fence is None or self._fence.reaches,
            rungs=("restart", "replace") if self._rule and self._reuse and "place" in facts else ("replace",),
            python=facts.get("python"),
            facts={
                "pod": state.name,
                "uid": state.identity.uid,
                "image_id": state.image_id or "",
                "protocol": self._api.protocol or "",
                "root": "yes" if facts.get("uid") == 0 else "no",
                **({} if self._fence is None else {"network_policy": self._fence.text}),
            },
        )

    async def _discard(self, sandbox: KubernetesSandbox, mark: str) -> None:
        await sandbox.abandon()
        if sandbox.uid:
            await self._remover.remove(sandbox.pod, sandbox.uid)
        elif mark:
            await self._remover.remove_unknown(sandbox.pod, mark)
        self._sandboxes.pop(sandbox.pod, None)

    def _resists(self, pod: str, uid: str) -> None:
        if (sandbox := self._sandboxes.get(pod)) is not None and sandbox.uid == uid:
            data = {"error": f"Pod {pod} goes on terminating", "pod": pod, "node": sandbox.node}
            self._emit("sandbox.stuck", data, sandbox=sandbox.name)

    def _sandbox_of(self, pod: str) -> str | None:
        sandbox = self._sandboxes.get(pod)
        return None if sandbox is None else sandbox.name

    def _emit(self, name: str, data: Mapping[str, Any], *, sandbox: str | None = None) -> None:
        self.sink(Event(name=name, at=anyio.current_time(), sandbox=sandbox, data=data))
