# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes backend: what users choose, and what runs between its start and its end."""

from __future__ import annotations

import functools
import getpass
import importlib.util
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import attrs

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.attach import Attacher
from agentsandbox.backends.kubernetes.hosts import CREATE_RATE, Hosts
from agentsandbox.backends.kubernetes.inplace import Changer
from agentsandbox.backends.kubernetes.jails import JailSandbox
from agentsandbox.backends.kubernetes.manifests import pod_name, pods_path, selector
from agentsandbox.backends.kubernetes.network import Fence, NetworkRules
from agentsandbox.backends.kubernetes.nodes import Nodes
from agentsandbox.backends.kubernetes.options import PodOptions, check_run_id
from agentsandbox.backends.kubernetes.pinning import Pins
from agentsandbox.backends.kubernetes.placing import Placer
from agentsandbox.backends.kubernetes.pods import CLEANUP_LIMIT, PodBackend
from agentsandbox.backends.kubernetes.pulls import Pulls
from agentsandbox.backends.kubernetes.removal import Remover
from agentsandbox.backends.kubernetes.roles import NETWORK_RULES, PLACEMENT_RULES, ROLE_RULES
from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
from agentsandbox.backends.kubernetes.sessions import MODES, Sessions
from agentsandbox.backends.kubernetes.vetting import Vetter
from agentsandbox.backends.kubernetes.watch import Reflector
from agentsandbox.errors import ApiUnavailable, ConfigurationError, UsageError
from agentsandbox.models.sandbox import SandboxSpec

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentsandbox.backends.base import BackendSandbox, Check
    from agentsandbox.backends.kubernetes.roles import Rule
    from agentsandbox.backends.kubernetes.view import Change

__all__ = ["KubernetesBackend"]

START_LIMIT = 20.0
"""Seconds that a cluster may take to answer for the first time."""

BEYOND_READY = 120.0
"""Seconds that the rest of making a sandbox may take when nothing is said: to ask for its Pod, and to attach to it."""

LEAST_CONNECTIONS = 1024
"""Streams that may be open at a time when nothing is said and the pool is small."""

IDLE = 60.0
"""Seconds after which the strictest of the usual load balancers cuts an idle connection."""


class KubernetesBackend(PodBackend):
    """
    Make sandboxes on a cluster, in Pods that belong to this run.

    Args:
        context: The kubeconfig context; ``None`` is the current one, or the service account inside a Pod.
        namespace: Where; ``None`` is the context's.
        kubeconfig: Path; ``None`` is ``$KUBECONFIG``, else ``~/.kube/config``.
        run_id: 12 hexadecimal digits that mark everything of this run; random if not given.
        owner: Who pays for it; the user's name if not given.
        exec_mode: How commands reach a sandbox: ``"runner"`` through Python in the image, ``"shell"`` through a POSIX
            shell, ``"direct"`` by one connection a command, ``"auto"`` as good as the image allows.
        streams: ``"warm"`` opens a stream to every sandbox as soon as it is ready; ``"lazy"`` when it is first leased,
            which costs the first command some tenths of a second, and the cluster nothing for those that nobody takes.
        max_connections: Streams that may be open at a time; ``None`` is as many as the pool may have sandboxes, and at
            least 1024.
        ready_timeout: Seconds in which a Pod must be ready, the time to pull its image and to find a node included.
        create_timeout: Seconds that making a sandbox may take in all, until its runner answers; ``None`` is two minutes
            more than *ready_timeout*.
        heartbeat: Seconds of silence after which a sandbox is asked for an answer, and idle timers on the way to it are
            reset. Load balancers cut what is idle for 60 seconds.
        heartbeat_timeout: Seconds it has to give one.
        reuse: Whether a used sandbox may become a fresh one by a restart in place, where the server can.
        network: Where sandboxes may connect to, by a network policy of this run: ``False`` for nowhere, a list such as
            ``["dns", "10.0.0.0/8:443"]``, or a mapping with ``allow``, ``require`` and ``probe``; see
            :class:`~agentsandbox.backends.kubernetes.network.NetworkRules`. ``None`` leaves it to the cluster.
        placement: Image → the node that its sandboxes are on, such as the ``placement`` of a plan: as long as that node
            takes Pods, none is made elsewhere, and none becomes one of the image elsewhere. Others may be anywhere. It
            needs permission to list and watch nodes.
        pod: Fields of :class:`~agentsandbox.backends.kubernetes.options.PodOptions`: ``requests``, ``limits``,
            ``stages``, ``lifetime``, ``run_as_root``, ``runtime_class``, ``node_selector``, ``jail``, ``slots``, …

    Raises:
        ConfigurationError: If an option is out of range.

    """

    name: ClassVar[str] = "kubernetes"
    rules: tuple[Rule, ...] = ROLE_RULES
    """What the cluster must allow."""
    default_create_rate: float | None = CREATE_RATE
    default_creates_in_flight: int = 32

    def __init__(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        kubeconfig: str | None = None,
        run_id: str | None = None,
        owner: str | None = None,
        exec_mode: str = "auto",
        streams: str = "warm",
        max_connections: int | None = None,
        ready_timeout: float = 300.0,
        create_timeout: float | None = None,
        heartbeat: float = 15.0,
        heartbeat_timeout: float = 30.0,
        reuse: bool = True,
        network: Any = None,
        placement: Mapping[str, str] | None = None,
        **pod: Any,
    ) -> None:
        if exec_mode not in MODES:
            raise ConfigurationError(f"exec_mode is one of {', '.join(MODES)}, not {exec_mode!r}")
        if streams not in ("warm", "lazy"):
            raise ConfigurationError(f'streams is "warm" or "lazy", not {streams!r}')
        unknown = set(pod) - {field.name for field in attrs.fields(PodOptions)}
        if unknown:
            raise ConfigurationError(f"backend 'kubernetes' has no option {', '.join(sorted(unknown))}")
        create_timeout = ready_timeout + BEYOND_READY if create_timeout is None else create_timeout
        for what, seconds in (
            ("ready_timeout", ready_timeout),
            ("create_timeout", create_timeout),
            ("heartbeat", heartbeat),
            ("heartbeat_timeout", heartbeat_timeout),
        ):
            if not seconds > 0:
                raise ConfigurationError(f"{what} must be above 0 seconds, not {seconds!r}")
        if heartbeat >= IDLE:
            raise ConfigurationError(
                f"heartbeat must be below {IDLE:g} seconds, not {heartbeat!r}: idle streams are cut"
            )
        if max_connections is not None and (type(max_connections) is not int or max_connections < 1):
            raise ConfigurationError(f"max_connections must be a whole number of at least 1, not {max_connections!r}")
        self.options = PodOptions(**pod)
        """How its Pods are made."""
        self._lazy = streams == "lazy"
        if self._lazy and self.options.jail is not None:
            raise ConfigurationError('streams="lazy" is for Pods of one sandbox: jails are made through the stream')
        if self.options.jail is not None:
            self.default_create_rate = None  # a jail asks nothing of the API server, and Pods have their own rate
            self.default_creates_in_flight *= self.options.slots
        self.run_id = secrets.token_hex(6) if run_id is None else run_id
        """What marks everything of this run."""
        check_run_id(self.run_id)
        self.owner = _user() if owner is None else owner
        """Who pays for it."""
        self.observers: list[Callable[[Change], None]] = []
        """Told of every change of a Pod of the run. They must be quick and must not raise."""
        self.network = NetworkRules.of(network)
        """Where its sandboxes may connect to; ``None`` leaves it to the cluster."""
        self._pins = Pins(placement, self.options, tell=self._emit)
        self.placement = self._pins.placement
        self._fence: Fence | None = None
        self._where = {"context": context, "namespace": namespace, "kubeconfig": kubeconfig}
        self._max_connections = max_connections
        self._expected = 0
        self._exec_mode = exec_mode
        self._ready_timeout = ready_timeout
        self._create_timeout = create_timeout
        self.default_create_timeout = create_timeout + CLEANUP_LIMIT  # what the cluster says comes first
        self._beats = {"heartbeat": heartbeat, "heartbeat_timeout": heartbeat_timeout}
        self._reuse = reuse
        self._numbers = itertools.count(1)
        self._sandboxes: dict[str, KubernetesSandbox] = {}
        self._group: TaskGroup | None = None
        self._rule = False

    def __repr__(self) -> str:
        state = "running" if self._group is not None else "stopped"
        return f"<KubernetesBackend [run {self.run_id}, {state}, {len(self._sandboxes)} Pods]>"

    def expect(self, sandboxes: int) -> None:
        """Hear how many sandboxes there may be: each takes a connection."""
        self._expected = sandboxes

    @property
    def _connections(self) -> int:
        return max(LEAST_CONNECTIONS, self._expected) if self._max_connections is None else self._max_connections

    @property
    def guaranteed_life(self) -> float | None:
        """Seconds that a Pod has left at least when it is leased; see the option ``stages``."""
        return self.options.needed

    async def validate(self, specs: Iterable[SandboxSpec]) -> None:
        """
        Refuse what cannot work, without a call to the cluster.

        Raises:
            ConfigurationError: If the event loop is not asyncio's, the client library is missing, or a name is wrong.

        """
        import asyncio

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigurationError("backend 'kubernetes' runs on asyncio, not on trio") from None
        if importlib.util.find_spec("kubernetes_asyncio") is None:
            raise ConfigurationError("backend 'kubernetes' needs kubernetes-asyncio: pip install kubernetes-asyncio")
        for spec in specs:
            self._manifest(spec, pod_name(self.run_id, 0), "", "0" * 32, rule=True)

    async def examine(self) -> list[Check]:
        """Ask the cluster about everything that is needed; no Pod is made."""
        from agentsandbox.backends.kubernetes.preflight import examine_at

        rules = self.rules if self.network is None else (*self.rules, *NETWORK_RULES)
        rules = rules if self.placement is None else (*rules, *PLACEMENT_RULES)
        manifest = self.manifest(SandboxSpec(image="python:3.12-alpine"), rule=True)
        return await examine_at(self._where, manifest, rules=rules)

    def manifest(self, spec: SandboxSpec, *, rule: bool = False) -> dict[str, Any]:
        """
        Return a Pod as it is made, for a dry run.

        Args:
            spec: From what.
            rule: Whether with the rule for restarts in place, which not every server knows.

        """
        return self._manifest(spec, pod_name(self.run_id, 0), "", "0" * 32, rule=rule)

    def receipt(self) -> Mapping[str, Any]:
        """Return where its Pods are."""
        api = getattr(self, "_api", None)
        return {} if api is None else {"context": api.context, "namespace": api.namespace}

    @classmethod
    async def remove_leftovers(cls, receipt: Mapping[str, Any]) -> list[str]:
        """
        Remove what a run left on the cluster, after a look at the UID and the labels of each thing.

        Raises:
            UsageError: If the run is still going on, or something is not provably its own; nothing is removed then.

        """
        from agentsandbox.backends.kubernetes.reaping import remove_leftovers

        return await remove_leftovers(receipt)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be able to make sandboxes; on exit every Pod of the run is gone."""
        if self._group is not None:
            raise UsageError("this backend is running already")
        raised: BaseException | None = None
        api = self._api = await KubernetesApi.connect(**self._where, max_connections=self._connections)
        try:
            async with anyio.create_task_group() as group:
                try:
                    await self._start(api, group)
                    yield
                except (anyio.get_cancelled_exc_class(), GeneratorExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - to be raised as it is, and not in a group
                    raised = error
                finally:
                    if self._group is not None:
                        with anyio.move_on_after(CLEANUP_LIMIT, shield=True):
                            await self._remove_all()
                    self._group = None
                    group.cancel_scope.cancel()
        finally:
            await api.aclose()
        if raised is not None:
            raise raised

    async def _start(self, api: KubernetesApi, group: TaskGroup) -> None:
        self._reflector = Reflector(api, pods_path(api.namespace), selector=selector(self.run_id))
        for observer in self.observers:
            self._reflector.subscribe(observer)
        self._placer = Placer(api, self._reflector)
        self._remover = Remover(api, self._reflector, self.run_id, tell=self._resists)
        self._attacher = Attacher(api, jails=self.options.jail is not None)
        make = functools.partial(self._make, jails=True)
        self._hosts = Hosts(self.options, group, make=make, remove=self.destroy, sink=lambda: self.sink)
        self._sessions = Sessions(api, self._reflector, self._attacher, mode=self._exec_mode, **self._beats)
        self._nodes = Nodes(api)
        self._pulls = Pulls(api, self._reflector, sandbox_of=self._sandbox_of, tell=self._emit)
        self._vetter = Vetter(self._reflector, self._nodes, self.options)
        self._changer = Changer(api, self._reflector, self._placer, timeout=self._ready_timeout)
        self._fence = None if self.network is None else Fence(api, self.network, self.run_id, self.owner)
        answers = False
        with anyio.move_on_after(START_LIMIT):
            await group.start(self._reflector.run)
            if self.placement is None:
                group.start_soon(self._nodes.run)
            else:
                await group.start(self._nodes.run)
            answers = True
        if not answers:
            raise self._reflector.failure or ApiUnavailable(f"{api.host} does not answer")
        if self.placement is not None:
            await self._pins.begin(api, self._nodes)
        group.start_soon(self._pulls.run)
        group.start_soon(self._sessions.pulse.run)
        self._group = group

    async def create(self, spec: SandboxSpec, name: str) -> KubernetesSandbox | JailSandbox:
        """
        Make a Pod and open a session to its runner, or a jail in a Pod that has room for it.

        Raises:
            ProvisionError: If it could not be made, in the cluster's own words.
            ControlPlaneError: If the API server refuses or does not answer.

        """
        self._require()
        if self._fence is not None:
            await self._fenced(self._fence, spec)
        if self.options.jail is not None and (jailed := await self._hosts.create(spec, name)) is not None:
            return jailed
        sandbox = await self._make(spec, name)
        self._hosts.tell(sandbox)
        return sandbox

    async def _fenced(self, fence: Fence, spec: SandboxSpec) -> None:
        """Have the network policy before anything runs that it is for."""
        if await fence.up(functools.partial(self._create, spec), self.destroy):
            data = {"verdict": str(fence.verdict), "detail": fence.detail, "allow": list(fence.rules.allow)}
            self._emit("network.fenced", data)

    async def destroy(self, sandbox: BackendSandbox) -> None:
        """
        Remove a sandbox, and return when its Pod is gone.

        Raises:
            InfrastructureError: If it is still there after a while.

        """
        if isinstance(sandbox, JailSandbox):
            await self._hosts.destroy(sandbox)
            return
        if not isinstance(sandbox, KubernetesSandbox):
            raise UsageError(f"{sandbox!r} is not of this backend")
        sandbox.unwanted = True
        if self._sandboxes.get(sandbox.pod) is not sandbox:
            return  # gone, or the Pod is another sandbox by now
        await self._discard(sandbox, "")

    async def _remove_all(self) -> None:
        self._hosts.close()
        for sandbox in self._sandboxes.values():
            sandbox.unwanted = True
            sandbox.unguard()
        try:
            await self._remove_run()
        finally:
            for sandbox in self._sandboxes.values():
                await sandbox.abandon()
            self._sandboxes.clear()
            if self._fence is not None:
                await self._fence.down()

    async def _remove_run(self) -> None:
        """Have no Pod of the run any more."""
        await self._remover.remove_run()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
