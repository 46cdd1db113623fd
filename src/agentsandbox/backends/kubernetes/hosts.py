# SPDX-License-Identifier: Apache-2.0
"""Pods that serve several sandboxes: which has room, which is to be made, and which is of no use any more."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.backends.kubernetes.jails import JailRefused, Jails, JailSandbox
from agentsandbox.errors import ConfigurationError, InfrastructureError, ProvisionError, SandboxError, SandboxLost
from agentsandbox.models.sandbox import ExecLevel

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from agentsandbox.backends.kubernetes.options import PodOptions
    from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
    from agentsandbox.models.events import EventSink
    from agentsandbox.models.sandbox import SandboxSpec

__all__ = ["Host", "Hosts"]

CREATE_RATE = 20.0
"""Pods asked for in a second when nothing is said; as many at once."""

IDLE = 30.0
"""Seconds that a Pod without a sandbox is kept; it gives way at once when another one is to be made."""

VACANT_WITHIN = 0.25
"""Seconds that a sandbox may wait for a place in a Pod that is full, before another Pod is made for it."""


@attrs.define(eq=False, repr=False)
class Host:
    """One Pod, from the wish to have it to its end."""

    spec: SandboxSpec
    """From what its sandboxes are made."""
    name: str
    """Its name in the run."""
    slots: int
    """How many sandboxes it serves at once."""
    taken: int = 0
    """How many it serves, those that are still being made included."""
    jails: Jails | None = None
    """Its jails, once it is there."""
    failure: SandboxError | None = None
    """Why it did not come to that."""
    settled: anyio.Event = attrs.field(factory=anyio.Event)
    """Set when either is known."""
    retired: bool = False
    """Whether it takes no sandbox any more."""
    idle_since: float = 0.0
    """When it last had none."""

    @property
    def good(self) -> bool:
        """Whether another sandbox may begin in it."""
        if self.retired or self.jails is None:
            return not self.retired
        made = self.jails.host
        return not self.jails.shunned and (made.vetter is None or made.vetter.doomed(made) is None)

    def __repr__(self) -> str:
        state = "retired" if self.retired else "ready" if self.jails else "failed" if self.failure else "making"
        return f"<Host {self.name} of {self.spec.image} [{state}, {self.taken} of {self.slots} slots]>"


class Hosts:
    """
    The Pods with jails of one backend.

    Args:
        options: How Pods and their jails are made.
        group: Where their tasks belong.
        make: Makes a Pod and opens the session to its first process.
        remove: Removes one.
        sink: Where events go.

    """

    def __init__(
        self,
        options: PodOptions,
        group: TaskGroup,
        *,
        make: Callable[[SandboxSpec, str], Awaitable[KubernetesSandbox]],
        remove: Callable[[KubernetesSandbox], Awaitable[None]],
        sink: Callable[[], EventSink],
    ) -> None:
        self._options = options
        self._group = group
        self._make = make
        self._remove = remove
        self._sink = sink
        self._hosts: list[Host] = []
        self._numbers = itertools.count(1)
        self._due = 0.0
        self._vacancy = anyio.Event()
        self._closed = False
        self.refused: dict[str, str] = {}
        """Image → why its Pods cannot make jails."""
        self.made = 0
        """Pods that were made, ever."""

    def __repr__(self) -> str:
        taken = sum(host.taken for host in self._hosts)
        return f"<Hosts [{len(self._hosts)} Pods, {taken} sandboxes, {self.made} Pods made]>"

    async def create(self, spec: SandboxSpec, name: str) -> JailSandbox | None:
        """
        Make a sandbox, in a Pod that has room or in a new one.

        Returns:
            The sandbox; ``None`` if Pods of this image cannot make jails, and each serves one sandbox only.

        Raises:
            ProvisionError: If it could not be made.
            ConfigurationError: If Pods of this image cannot make jails, and are to serve several sandboxes.
            ControlPlaneError: If the API server refuses or does not answer.

        """
        while spec.image not in self.refused:
            host, first = await self._reserve(spec)
            kept = False
            try:
                await host.settled.wait()
                if host.jails is not None and not host.retired:
                    sandbox = await host.jails.take(name)
                    sandbox.on_end = functools.partial(self._free, host)
                    kept = True
                    return sandbox
                if host.failure is not None and first:
                    raise host.failure
                # Whoever asked for that Pod tells of it. The others ask for another one, each in its turn.
            except JailRefused as error:
                raise ProvisionError(f"sandbox {name} could not be made: {error}") from error
            finally:
                if not kept:
                    self._free(host)
        if self._options.slots > 1:
            raise ConfigurationError(
                f"slots={self._options.slots} needs jails, and Pods of image {spec.image!r} cannot make any: "
                f"{self.refused[spec.image]}"
            )
        return None

    async def destroy(self, sandbox: JailSandbox) -> None:
        """
        Remove a sandbox, and return when nothing of it is left.

        Raises:
            InfrastructureError: If something is. Its Pod is removed, and with it all that it serves.

        """
        sandbox.unwanted = True
        sandbox.end()  # its place is free as soon as it is to end: nobody waits in it
        host = sandbox.jails.host
        left = await sandbox.jail.kill() if host.loss is None else []
        if host.loss is not None or host.unwanted:
            await self._remove(host)  # what is left of it is gone with its Pod
        elif left:
            error = SandboxLost("jail_left", f"of sandbox {sandbox.name} there is still {', '.join(left)}")
            host.lose(error)
            raise InfrastructureError(str(error))

    def tell(self, sandbox: KubernetesSandbox) -> None:
        """Note in a sandbox without a jail why it has none, if it was to have one."""
        if (why := self.refused.get(sandbox.spec.image)) is not None:
            facts = {**sandbox.capabilities.facts, "jail": f"no: {why}"}
            sandbox.capabilities = attrs.evolve(sandbox.capabilities, facts=facts)

    def close(self) -> None:
        """Make nothing any more."""
        self._closed = True
        for host in self._hosts:
            host.retired = True
        self._hosts.clear()

    async def _reserve(self, spec: SandboxSpec) -> tuple[Host, bool]:
        """Take a place in the fullest Pod that has room; else in one that is begun now."""
        if self._closed:
            raise ProvisionError("the backend is being closed")
        if (host := self._with_room(spec)) is None and any(host.spec == spec for host in self._hosts):
            # What a sandbox is replaced by may be asked for a moment before its place is free.
            with anyio.move_on_after(VACANT_WITHIN):
                while self._with_room(spec) is None:
                    await self._vacancy.wait()
            host = self._with_room(spec)
        if host is not None:
            host.taken += 1
            return host, False
        for idle in [host for host in self._hosts if not host.taken and host.settled.is_set()]:
            self._retire(idle)
        self.made += 1
        host = Host(spec, f"host-{next(self._numbers)}", self._options.slots, taken=1)
        self._hosts.append(host)
        self._group.start_soon(self._begin, host)
        return host, True

    def _with_room(self, spec: SandboxSpec) -> Host | None:
        able = [host for host in self._hosts if host.spec == spec and host.taken < host.slots and host.good]
        return max(able, key=lambda host: (host.jails is not None, host.taken), default=None)

    def _free(self, host: Host) -> None:
        host.taken -= 1
        self._vacancy.set()
        self._vacancy = anyio.Event()
        if host.taken or host.retired:
            return
        if not host.good:
            self._retire(host)
        else:
            host.idle_since = anyio.current_time()
            self._group.start_soon(self._rest, host, host.idle_since)

    async def _rest(self, host: Host, since: float) -> None:
        await anyio.sleep(IDLE)
        if not host.taken and host.idle_since == since and not host.retired:
            self._retire(host)

    def _retire(self, host: Host) -> None:
        """Give nothing to a Pod any more, and remove it."""
        if host.retired:
            return
        host.retired = True
        if host in self._hosts:
            self._hosts.remove(host)
        if host.jails is not None:
            self._group.start_soon(self._discard, host.jails.host)

    async def _discard(self, sandbox: KubernetesSandbox) -> None:
        with suppress(InfrastructureError):  # the end of the run removes it, or says that it could not
            await self._remove(sandbox)

    async def _begin(self, host: Host) -> None:
        made: KubernetesSandbox | None = None
        try:
            await self._turn()
            plain = attrs.evolve(host.spec, user=None, workdir=None, env={})
            made = await self._make(plain, host.name)
            if made.capabilities.exec_level is not ExecLevel.RUNNER:
                raise JailRefused("there is no Python in the image", 0)
            jails = Jails(made, host.spec, self._options, self._group, self._sink)
            await jails.prepare()
            made.shared = True
            made.on_lost = lambda error: self._lost(host, jails, error)
            host.jails = jails
            if made.loss is not None:
                self._lost(host, jails, made.loss)
        except JailRefused as error:
            self.refused[host.spec.image] = str(error)
            await self._failed(host, made, None)
        except SandboxError as error:
            await self._failed(host, made, error)
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the Pod
            failure = ProvisionError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            await self._failed(host, made, failure)
        finally:
            host.settled.set()

    async def _turn(self) -> None:
        """Wait until another Pod may be asked for."""
        now = anyio.current_time()
        self._due = max(self._due, now - 1) + 1 / CREATE_RATE
        await anyio.sleep(max(0.0, self._due - now))

    async def _failed(self, host: Host, made: KubernetesSandbox | None, error: SandboxError | None) -> None:
        host.failure = None if error is None else copy.copy(error)
        self._retire(host)
        host.settled.set()
        if made is not None:
            await self._discard(made)

    def _lost(self, host: Host, jails: Jails, error: SandboxLost) -> None:
        self._retire(host)
        jails.lose(error)
