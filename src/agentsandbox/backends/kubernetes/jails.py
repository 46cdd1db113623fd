# SPDX-License-Identifier: Apache-2.0
"""Jails of one Pod: each is a command of its first process, whose streams are the stream of the runner inside."""

from __future__ import annotations

import itertools
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.base import BackendSandbox
from agentsandbox.backends.kubernetes.jailing import STORAGE
from agentsandbox.backends.kubernetes.options import quantity
from agentsandbox.errors import ConfigurationError, ProvisionError, SandboxError, SandboxLost, StartError
from agentsandbox.models.events import Event
from agentsandbox.models.sandbox import Capabilities, Identity
from agentsandbox.session import Session
from agentsandbox.session.nested import ENDED_WITHIN, ProcessStream

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from agentsandbox.backends.kubernetes.options import PodOptions
    from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
    from agentsandbox.models.events import EventSink
    from agentsandbox.models.sandbox import SandboxSpec
    from agentsandbox.session.process import Process

__all__ = ["Jail", "JailRefused", "JailSandbox", "Jails"]

WINDOW = 4 * 1024 * 1024
"""Bytes from a jail that may be on their way: all its commands share them, and each has less."""

HEARTBEAT = 60.0
"""Seconds of silence after which a jail is asked for an answer."""

REST = 0.02
"""Seconds between two jails that nobody waits for: what was just taken is to run its first command now."""

MADE_WITHIN = 30.0
"""Seconds in which a jail must be there; it takes some thousandths, and more when the node is busy."""


class JailRefused(Exception):
    """
    A Pod cannot make jails.

    Args:
        stage: What was not possible, in words.
        number: The kernel's reason; 0 if it has none.

    """

    def __init__(self, stage: str, number: int) -> None:
        super().__init__(f"{stage}: {os.strerror(number)}" if number else stage)


@attrs.define(eq=False)
class Jail:
    """One jail and the session to the runner in it."""

    name: str
    """Unique in its Pod."""
    process: Process = attrs.field(repr=False)
    """The command of the Pod's first process that keeps it."""
    session: Session
    """Its runner."""
    sandbox: JailSandbox | None = attrs.field(default=None, repr=False)
    """Whom it serves."""

    async def kill(self) -> list[str]:
        """End it; return what is still there of it, which should be nothing."""
        await self.session.aclose()
        await self.process.end(ENDED_WITHIN)
        report = self.process.report
        return [str(path) for path in report["left"]] if "left" in report else ["what nobody saw end"]


class JailSandbox(BackendSandbox):
    """
    A sandbox in a jail of a Pod.

    Args:
        jails: Those of its Pod.
        jail: Its own.
        name: Its name in the run.

    """

    def __init__(self, jails: Jails, jail: Jail, name: str) -> None:
        self.jails = jails
        self.jail = jail
        self.name = name
        self.spec = jails.spec
        self.session = jail.session
        self.node = jails.host.node
        self.pod = jails.host.pod
        """The name of its Pod."""
        host, spaces = jails.host.identity, jail.session.facts.get("namespaces") or {}
        inner = ",".join(f"{kind}:{spaces[kind]}" for kind in ("mnt", "pid") if kind in spaces)
        self.identity = Identity(uid=host.uid, instance=f"{host.instance}/{jail.name}/{inner}", restarts=host.restarts)
        self.capabilities = jails.capabilities(jail)
        self.unwanted = False
        """Whether its end is what somebody wants."""
        self.loss: SandboxLost | None = None
        """Why it is of no use any more."""
        self.on_end: Callable[[], None] = lambda: None
        """Called once when it needs its place no longer."""

    def __repr__(self) -> str:
        state = "unwanted" if self.unwanted else self.loss.reason if self.loss else "ready"
        return f"<JailSandbox {self.name} in {self.jail.name} of {self.pod} [{self.spec.image}, {state}]>"

    async def check(self) -> None:
        """
        Make sure that it is still the same, by what is known of its Pod and of its jail; no call is made.

        Raises:
            SandboxLost: If it is not.

        """
        if self.loss is not None:
            raise type(self.loss)(self.loss.reason, self.loss.detail)
        await self.jails.host.check()
        if not self.session.alive:
            lost = self.session.lost or SandboxLost("died", "its session was closed")
            raise type(lost)(lost.reason, lost.detail)

    async def vet(self) -> None:
        """
        Make sure that its Pod is worth leasing a sandbox in: see :meth:`.sandbox.KubernetesSandbox.vet`.

        Raises:
            SandboxLost: If it is not.

        """
        await self.check()
        try:
            await self.jails.host.vet()
        except SandboxLost:
            self.jails.shunned = True  # for whoever comes next; those who are in it hear for themselves
            raise

    def end(self) -> None:
        """Need no place any longer. Idempotent."""
        on_end, self.on_end = self.on_end, lambda: None
        self.jails.leased.discard(self)
        on_end()

    def lose(self, error: SandboxLost) -> None:
        """Give it up: who waits for a command in it is told so at once."""
        if self.unwanted or self.loss is not None:
            return
        self.loss = error
        self.session.lose(error)
        self.end()
        data = {"reason": error.reason, "detail": error.detail, "pod": self.pod, "node": self.node}
        self.jails.sink()(Event(name="sandbox.lost", at=anyio.current_time(), sandbox=self.name, data=data))


class Jails:
    """
    What one Pod has: jails that are leased, and some that are ready.

    Args:
        host: The Pod.
        spec: From what its sandboxes are made.
        options: How its jails are to be.
        group: Where their tasks belong.
        sink: Where to tell that a sandbox is lost.

    """

    def __init__(
        self,
        host: KubernetesSandbox,
        spec: SandboxSpec,
        options: PodOptions,
        group: TaskGroup,
        sink: Callable[[], EventSink],
    ) -> None:
        self.host = host
        self.sink = sink
        self.spec = spec
        self.leased: set[JailSandbox] = set()
        """Those that serve a sandbox."""
        self.made = 0
        """Jails that were made, ever."""
        self.shunned = False
        """Whether the Pod was found not to be worth another lease."""
        self._options = options
        self._group = group
        self._spares: deque[Jail] = deque()
        self._refilling = False
        self._numbers = itertools.count(1)
        assert options.jail is not None
        self._jail = options.jail
        memory = options.limits.get("memory")
        self._groups = self._jail.groups(slots=options.slots, memory=None if memory is None else int(quantity(memory)))

    def __repr__(self) -> str:
        return f"<Jails of {self.host.pod} [{len(self.leased)} leased, {len(self._spares)} spare, {self.made} made]>"

    async def prepare(self) -> None:
        """
        Make the first jail, to see whether that is possible.

        Raises:
            JailRefused: If it is not.
            SandboxLost: If the Pod was lost.

        """
        self._spares.append(await self._make())

    async def take(self, name: str) -> JailSandbox:
        """
        Return a sandbox that nobody has used, and see to the next one.

        Raises:
            JailRefused: If there is none, and none can be made.
            ProvisionError: If the Pod was lost.

        """
        try:
            jail = self._ready() or await self._make()
        except SandboxLost as error:
            raise ProvisionError(f"Pod {self.host.pod} {error}") from error
        sandbox = jail.sandbox = JailSandbox(self, jail, name)
        self.leased.add(sandbox)
        if not self._refilling:
            self._refilling = True
            self._group.start_soon(self._refill)
        return sandbox

    def lose(self, error: SandboxLost) -> None:
        """Tell every sandbox that its Pod is lost: nobody knows who has brought it about."""
        reason, detail = error.reason, error.detail
        if self._options.slots > 1:
            reason = f"host_{reason}"
            detail = f"{detail} (Pod {self.host.pod}, with {len(self.leased)} sandboxes)".lstrip()
        for sandbox in tuple(self.leased):
            sandbox.lose(SandboxLost(reason, detail))
        self._spares.clear()

    def capabilities(self, jail: Jail) -> Capabilities:
        """Return what a sandbox in a jail can do."""
        host, facts = self.host.capabilities, jail.session.facts
        own = "user, mount, PID, IPC and UTS" if self._jail.network else "user, mount, PID, IPC, UTS and network"
        return Capabilities(
            exec_level=host.exec_level,
            isolation=f"{host.isolation}, and in it a jail: {own} namespaces",
            users=bool(facts.get("users")),
            network=self._jail.network and host.network,
            rungs=("jail", "replace"),
            python=facts.get("python"),
            facts={
                **host.facts,
                "jail": jail.name,
                "slots": str(self._options.slots),
                "groups": ", ".join(facts.get("groups") or ()) or "no",
                "system_calls": "filtered" if facts.get("sifted") else "as for its Pod",
            },
        )

    def _hear(self, place: Mapping[str, Any]) -> None:
        """Give the Pod up if memory or disk was short for all: whatever ran in it meanwhile may have suffered."""
        if self._options.slots == 1:
            return  # it was its own doing, as it would be without a jail
        if place.get("full"):
            self.host.lose(SandboxLost("disk_full", "the disk that jails share is full"))
        killed = place.get("oom")
        if isinstance(killed, int) and killed > 0:
            self.host.lose(SandboxLost("oom_killed", "a process was killed for the memory of the Pod"))

    def _ready(self) -> Jail | None:
        while self._spares:
            jail = self._spares.popleft()
            if jail.session.alive:
                return jail
        return None

    async def _refill(self) -> None:
        """Have as many jails ready as there are slots, for a batch ends in all of them at once."""
        try:
            while len(self._spares) < self._options.slots and self.host.loss is None:
                await anyio.sleep(REST)
                self._spares.append(await self._make())
        except (JailRefused, SandboxError):
            pass  # whoever needs one makes it, and hears why not
        finally:
            self._refilling = False

    async def _make(self) -> Jail:
        number = next(self._numbers)
        name, nonce = f"jail-{number}", secrets.token_hex(16)
        spec = self.spec
        arguments: dict[str, Any] = {
            "name": name,
            "number": number,
            "nonce": nonce,
            "env": dict(spec.env),
            "workdir": spec.workdir,
            "user": spec.user,
            "network": self._jail.network,
            "storage": STORAGE if self._jail.storage == "disk" else None,
            "limits": self._jail.limits(),
            "groups": self._groups,
        }
        try:
            process = await self.host.session.open_builtin("jail", arguments, window=WINDOW)
        except (StartError, ConfigurationError) as error:
            raise JailRefused(str(error), 0) from error
        # The session of the Pod has a heartbeat of its own, and lives through losses of the stream that this one must
        # live through, too.
        session = Session(
            ProcessStream(process),
            nonce=nonce,
            heartbeat=HEARTBEAT,
            heartbeat_timeout=2 * HEARTBEAT,
            on_place=self._hear,
        )
        jail = Jail(name, process, session)
        try:
            with anyio.fail_after(MADE_WITHIN):
                await self._group.start(self._serve, jail)
        except TimeoutError:
            await process.end(ENDED_WITHIN)
            raise JailRefused(f"no jail within {MADE_WITHIN:g} s", 0) from None
        except SandboxLost:
            await process.end(ENDED_WITHIN)
            if session.lost is not None and session.lost.reason == "refused":
                raise ConfigurationError(f"a sandbox of image {spec.image!r}: {session.lost.detail}") from None
            if (stage := process.report.get("stage")) is None:
                raise
            if process.report.get("mistake"):
                raise ConfigurationError(f"a sandbox of image {spec.image!r}: {stage}") from None
            raise JailRefused(str(stage), int(process.report.get("errno") or 0)) from None
        except BaseException:
            with anyio.move_on_after(5, shield=True):
                await session.aclose()
                await process.end(ENDED_WITHIN)
            raise
        self.made += 1
        return jail

    async def _serve(self, jail: Jail, *, task_status: TaskStatus[None]) -> None:
        await jail.session.run(task_status=task_status)
        if jail.sandbox is not None and jail.session.lost is not None:
            jail.sandbox.lose(jail.session.lost)
