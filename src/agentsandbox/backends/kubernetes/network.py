# SPDX-License-Identifier: Apache-2.0
"""
A network policy for the Pods of a run, and whether the cluster enforces it.

A cluster takes such a policy whether or not it has anything that enforces it. So two Pods of the run are made before
the policy is: one connects to the other, which must work; then the policy is there, and it must not work any more.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.kubernetes import owned
from agentsandbox.backends.kubernetes.manifests import DOMAIN, label_value, network_policy
from agentsandbox.errors import (
    CommandError,
    ConfigurationError,
    InfrastructureError,
    NotFound,
    PermissionDenied,
)
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import ExecLevel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agentsandbox.backends.kubernetes.api import Json, KubernetesApi
    from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox

__all__ = ["CONNECT", "LISTEN", "Fence", "NetworkRules", "Verdict", "policies_path"]

PROGRAMMED = 5.0
"""Seconds in which a policy engine must have put a policy into force."""

PATIENCE = 1.0
"""Seconds that a connection gets: Pods of one cluster answer in thousandths."""

EVERY = 0.25
TRIES = 3
PROBE_LIMIT = 60.0
"""Seconds that everything in the two Pods may take."""

PORTS = (20000, 32000)

LISTEN = """\
import os,socket,sys,time
for f,a in(socket.AF_INET6,"::"),(socket.AF_INET,"0.0.0.0"):
 try:
  s=socket.socket(f)
  if f==socket.AF_INET6:s.setsockopt(socket.IPPROTO_IPV6,socket.IPV6_V6ONLY,0)
  s.bind((a,int(sys.argv[1])));s.listen(64);break
 except OSError as e:err=e
else:sys.exit(str(err))
if os.fork():os._exit(0)
n=os.open(os.devnull,2)
for i in 0,1,2:os.dup2(n,i)
s.settimeout(1);e=time.time()+120
while time.time()<e:
 try:s.accept()[0].close()
 except OSError:pass
"""
"""Listens on the port that is its argument, for two minutes, and lets whoever started it go on."""

CONNECT = """\
import socket,sys
try:socket.create_connection((sys.argv[1],int(sys.argv[2])),float(sys.argv[3])).close()
except OSError as e:sys.exit("%s: %s"%(type(e).__name__,e))
"""
"""Connects to an address and port, within some seconds; the exit code says whether that worked."""


class Verdict(StrEnum):
    """Whether a policy is in force."""

    ENFORCED = "enforced"
    """A connection that worked before the policy was there did not work any more."""
    UNENFORCED = "unenforced"
    """It still worked: the cluster has nothing that enforces policies, and Pods reach whatever they can."""
    UNKNOWN = "unknown"
    """It did not work before either, or could not be tried."""


@attrs.frozen(kw_only=True)
class NetworkRules:
    """Where the Pods of a run may connect to. Nobody may connect to them."""

    allow: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    """``"dns"``, networks such as ``"10.1.0.0/16"``, or with a TCP port, ``"10.1.2.3/32:443"``; nothing else."""
    require: bool = False
    """Whether to make no sandbox unless the cluster was seen to enforce it."""
    probe: bool = True
    """Whether to find out, which takes two Pods for a few seconds before the first sandbox."""

    def __attrs_post_init__(self) -> None:
        """Refuse what no policy can say."""
        network_policy("0" * 12, allow=self.allow)
        if self.require and not self.probe:
            raise ConfigurationError("network: require=True needs probe=True, or nobody knows whether it is enforced")

    @classmethod
    def of(cls, value: Any) -> NetworkRules | None:
        """
        Read the option ``network`` of a backend.

        Args:
            value: ``None`` or ``True`` for the cluster's own; ``False`` for no connection at all; what is allowed, as a
                list; a mapping of the fields of this class, or one of these.

        Raises:
            ConfigurationError: If it is something else.

        """
        if value is None or value is True or isinstance(value, cls):
            return value if isinstance(value, cls) else None
        if value is False:
            return cls()
        if isinstance(value, Mapping):
            if unknown := set(value) - {field.name for field in attrs.fields(cls)}:
                raise ConfigurationError(f"network has no field {', '.join(sorted(map(str, unknown)))}")
            value = dict(value)
            if isinstance(value.get("allow"), str):
                raise ConfigurationError(f"network: allow is a list; use [{value['allow']!r}]")
            return cls(**value)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ConfigurationError(
                f"network is False, a list of what is allowed such as ['dns', '10.0.0.0/8:443'], or a mapping with "
                f"'allow', 'require' and 'probe', not {value!r}"
            )
        return cls(allow=tuple(value))


def policies_path(namespace: str, name: str | None = None) -> str:
    """Return the path of a namespace's network policies, or of one."""
    return f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies" + (f"/{name}" if name else "")


class Fence:
    """
    The network policy of a run.

    Args:
        api: The API server.
        rules: What is allowed.
        run_id: Of the run.
        owner: Who pays for it.

    """

    def __init__(self, api: KubernetesApi, rules: NetworkRules, run_id: str, owner: str) -> None:
        self.rules = rules
        self.verdict: Verdict | None = None
        """Whether it is in force; ``None`` before it is there."""
        self.detail = ""
        """What was seen."""
        self._api = api
        self._path = policies_path(api.namespace)
        self._manifest = _policy(run_id, owner, rules)
        self._uid = ""
        self._asked = False
        self._raising = anyio.Lock()

    def __repr__(self) -> str:
        return f"<Fence [{self.verdict or 'not there'}, {len(self.rules.allow)} allowed]>"

    @property
    def text(self) -> str:
        """What is known of it, in a line."""
        return f"{self.verdict or 'not there yet'}" + (f": {self.detail}" if self.detail else "")

    @property
    def reaches(self) -> bool:
        """Whether sandboxes may reach anything but themselves, as far as anybody knows."""
        return self.verdict is not Verdict.ENFORCED or bool(self.rules.allow)

    async def up(
        self,
        make: Callable[[str], Awaitable[KubernetesSandbox]],
        remove: Callable[[KubernetesSandbox], Awaitable[None]],
    ) -> bool:
        """
        Make the policy if it is not there, and find out whether it is enforced.

        Args:
            make: Makes a Pod of the run, of that name.
            remove: Removes it again.

        Returns:
            Whether this call made it.

        Raises:
            ConfigurationError: If it may not be made, or is required and not enforced.
            ControlPlaneError: If the API server does not answer.

        """
        async with self._raising:
            first = self.verdict is None
            if first and self.rules.probe:
                await self._try(make, remove)
            elif first:
                await self._put()
                self.verdict, self.detail = Verdict.UNKNOWN, "not tried, as was asked for"
            if self.rules.require and self.verdict is not Verdict.ENFORCED:
                raise ConfigurationError(
                    f"the network policy of this run is not known to be enforced by the cluster ({self.text}), and "
                    "network has require=True: it needs a network plugin that does, such as Cilium or Calico"
                )
            return first

    async def down(self) -> None:
        """Remove the policy, if it may have been made."""
        if not self._asked:
            return
        path = f"{self._path}/{self._manifest['metadata']['name']}"
        uid = self._uid
        if not uid:
            nonce = self._manifest["metadata"]["annotations"][f"{DOMAIN}/nonce"]
            try:
                found = await self._api.request("GET", path)
            except NotFound:
                return
            if (found["metadata"].get("annotations") or {}).get(f"{DOMAIN}/nonce") != nonce:
                return
            uid = found["metadata"]["uid"]
        await owned.delete(self._api, path, uid)
        self._asked = False

    async def _put(self) -> None:
        self._asked = True
        try:
            made = await owned.create(self._api, self._path, self._manifest)
        except PermissionDenied as error:
            self._asked = False
            raise ConfigurationError(
                f"{error}; network= needs create, delete, get and list on networkpolicies.networking.k8s.io"
            ) from error
        self._uid = str(made["metadata"]["uid"])

    async def _try(
        self,
        make: Callable[[str], Awaitable[KubernetesSandbox]],
        remove: Callable[[KubernetesSandbox], Awaitable[None]],
    ) -> None:
        pair: list[KubernetesSandbox] = []
        failures: list[Exception] = []

        async def one(name: str) -> None:
            try:
                pair.append(await make(name))
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        try:
            async with anyio.create_task_group() as group:
                for name in ("probe-1", "probe-2"):
                    group.start_soon(one, name)
            if failures:
                raise failures[0]
            with anyio.move_on_after(PROBE_LIMIT) as limit:
                await self._compare(*pair)
            if limit.cancelled_caught:
                self.detail = "the two Pods did not answer in time"
            if not self._uid:
                await self._put()
            if self.verdict is None:
                self.verdict = Verdict.UNKNOWN
        finally:
            with anyio.move_on_after(PROBE_LIMIT, shield=True):
                for sandbox in pair:
                    with suppress(InfrastructureError):  # the end of the run removes it
                        await remove(sandbox)

    async def _compare(self, server: KubernetesSandbox, client: KubernetesSandbox) -> None:
        levels = {sandbox.capabilities.exec_level for sandbox in (server, client)}
        if levels != {ExecLevel.RUNNER}:
            self.detail = "the image has no Python to try it with"
            return
        found = await self._api.request("GET", f"/api/v1/namespaces/{self._api.namespace}/pods/{server.pod}")
        address = str((found.get("status") or {}).get("podIP") or "")
        port = random.randint(*PORTS)  # noqa: S311 - any will do
        try:
            await _run(server, LISTEN, str(port))
            reason = "it has no address"
            for _ in range(TRIES if address else 0):
                reason = await _connect(client, address, port)
                if not reason:
                    break
                await anyio.sleep(EVERY)
            if reason:
                self.detail = f"Pods do not reach each other here, policy or not: {reason}"
                return
            await self._put()
            began = anyio.current_time()
            while not (reason := await _connect(client, address, port)):
                if anyio.current_time() - began >= PROGRAMMED:
                    self.verdict = Verdict.UNENFORCED
                    self.detail = f"a connection between two Pods still worked {PROGRAMMED:g} s after it was forbidden"
                    return
                await anyio.sleep(EVERY)
        except (CommandError, OSError) as error:
            self.detail = f"it could not be tried: {error}"
            return
        self.verdict, self.detail = Verdict.ENFORCED, f"a connection that is forbidden failed: {reason}"


def _policy(run_id: str, owner: str, rules: NetworkRules) -> Json:
    policy = network_policy(run_id, allow=rules.allow)
    meta = policy["metadata"]
    meta["labels"][f"{DOMAIN}/owner"] = label_value(owner)
    meta["annotations"] = {f"{DOMAIN}/nonce": secrets.token_hex(8)}
    return policy


async def _run(sandbox: KubernetesSandbox, program: str, *arguments: str) -> str:
    """Run a program; return its last words if it failed."""
    python = sandbox.session.facts.get("executable") or "python3"
    command = Command(command=(python, "-ISc", program, *arguments), cwd="/", timeout=10.0)
    result = await sandbox.session.exec(command)
    if result.ok:
        return ""
    return (result.error_text or result.text).strip()[-300:] or f"exit code {result.exit_code}"


async def _connect(client: KubernetesSandbox, address: str, port: int) -> str:
    return await _run(client, CONNECT, address, str(port), f"{PATIENCE:g}")
