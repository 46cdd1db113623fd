# SPDX-License-Identifier: Apache-2.0
"""The embedded default: sandboxes on this machine, confined by namespaces, without a cluster or a daemon."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import tempfile
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import anyio
import anyio.abc
import anyio.to_thread

from agentsandbox.backends.base import Backend, BackendSandbox, Check
from agentsandbox.backends.local import layout, preflight
from agentsandbox.backends.local.images import HOST, Image, prepare, resolve
from agentsandbox.backends.local.leftovers import PREFIX, remove, started
from agentsandbox.backends.local.parent import SPAWN_LIMIT, Child, Parent
from agentsandbox.errors import ConfigurationError, InfrastructureError, ProvisionError, SandboxLost, UsageError
from agentsandbox.models.events import Event
from agentsandbox.models.sandbox import Capabilities, ExecLevel, Identity, SandboxSpec
from agentsandbox.session import Session
from agentsandbox.transport.pipe import SocketStream

__all__ = ["LocalBackend", "LocalSandbox", "Unconfined"]

GIB = 1024**3

CLEANUP_LIMIT = 60.0
"""Seconds that removing a half-made sandbox, or all of them, may take."""

END_SEEN = 2.0
"""Seconds in which the end of a sandbox must have been told once its stream has ended."""


class Unconfined(UserWarning):
    """Sandboxes are not isolated, because the caller said so."""


class LocalSandbox(BackendSandbox):
    """A sandbox on this machine."""

    def __init__(self, spec: SandboxSpec, name: str, parent: Parent, child: Child, session: Session) -> None:
        self.spec = spec
        self.name = name
        self.session = session
        self.parent = parent
        self.child = child
        self.node = None
        self.unwanted = False
        """Whether its end is what somebody wants."""

    def __repr__(self) -> str:
        state = self.child.end or ("ready" if self.session.alive else "unreachable")
        return f"<LocalSandbox {self.name} [{self.spec.image}, {state}]>"

    async def check(self) -> None:
        """
        Make sure that it is still there.

        Raises:
            SandboxLost: If it is not.

        """
        if not self.session.alive and not self.child.ended.is_set():
            with anyio.move_on_after(END_SEEN):  # to tell why, and not only that
                await self.child.ended.wait()
        if self.child.ended.is_set():
            raise SandboxLost("died", self.child.end or "")
        if not self.session.alive:
            raise self.session.lost or SandboxLost("died", "its session was closed")


class LocalBackend(Backend):
    """
    Make sandboxes on this machine.

    Args:
        isolation: ``"namespaces"``, or ``"none"`` for no isolation at all: commands then run as the driver's user, with
            its files and its network. For tests of trusted code where namespaces are forbidden.
        disk_limit: How much a sandbox may write, in bytes. It is memory: files are gone with their sandbox.
        max_processes: How many processes and threads a sandbox may have.
        open_files: How many descriptors a process in it may have.
        memory_limit: How much address space each of its processes may have, in bytes; ``None`` sets no limit.
        network: Must be ``False``: a sandbox reaches itself, and nothing else.
        cache_dir: Where unpacked images are kept; by default ``agentsandbox`` below the user's cache directory.
        run_id: What tells this run from any other; by default random.

    Raises:
        ConfigurationError: If an option is out of range.

    """

    name: ClassVar[str] = "local"
    default_creates_in_flight: int = 2 * (os.cpu_count() or 1)

    def __init__(
        self,
        *,
        isolation: str = "namespaces",
        disk_limit: int = GIB,
        max_processes: int = 1024,
        open_files: int = 65536,
        memory_limit: int | None = None,
        network: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
    ) -> None:
        if isolation not in ("namespaces", "none"):
            raise ConfigurationError(f'isolation is "namespaces" or "none", not {isolation!r}')
        if network:
            raise ConfigurationError(
                "network=True is not supported by the local backend: its sandboxes reach only themselves"
            )
        for option, value, least in (
            ("disk_limit", disk_limit, 1024**2),
            ("max_processes", max_processes, 8),
            ("open_files", open_files, 64),
            ("memory_limit", memory_limit, 16 * 1024**2),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigurationError(f"{option} must be a whole number of at least {least}, not {value!r}")
        if isolation == "none":
            warnings.warn(
                'isolation="none": commands of sandboxes can read and change everything that this user can, and reach '
                "its network",
                Unconfined,
                stacklevel=2,
            )
        self.isolation = isolation
        self._limits = preflight.limits(
            disk_limit=disk_limit, max_processes=max_processes, open_files=open_files, memory_limit=memory_limit
        )
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._cache = Path(cache_dir) if cache_dir is not None else Path(cache) / "agentsandbox"
        self._group: anyio.abc.TaskGroup | None = None
        self._parents: dict[str, Parent] = {}
        self._images: dict[str, Image] = {}
        self._starting: dict[str, anyio.Lock] = {}
        self._sandboxes: set[LocalSandbox] = set()
        self._checking = anyio.Lock()
        self._run_id = run_id or secrets.token_hex(8)

    @property
    def run_id(self) -> str:
        """What tells this run from any other."""
        return self._run_id

    def __repr__(self) -> str:
        state = "running" if self._group is not None else "stopped"
        return (
            f"<LocalBackend [{self.isolation}, {state}, {len(self._parents)} hosts, {len(self._sandboxes)} sandboxes]>"
        )

    def default_spares(self, size: int) -> int:
        """Keep one ready for each that is leased: it costs little, and the next batch does not wait."""
        return size

    @classmethod
    async def remove_leftovers(cls, receipt: Mapping[str, Any]) -> list[str]:
        """End what is left of a run whose driver was killed; see :func:`.leftovers.remove`."""
        return await remove(receipt)

    async def examine(self) -> list[Check]:
        """Look at what isolation needs, and make a sandbox to be sure."""
        if self.isolation == "none":
            return [Check(name="isolation", ok=True, detail="NONE, as asked for")]
        return await preflight.checks()

    async def validate(self, specs: Iterable[SandboxSpec]) -> None:
        """
        Refuse images that do not exist, and a machine that cannot isolate.

        Raises:
            ConfigurationError: Saying what is missing.

        """
        for spec in specs:
            source = resolve(spec.image)
            if self.isolation == "none" and source.kind != HOST:
                raise ConfigurationError(f'image {spec.image!r} needs isolation; isolation="none" has only "host"')
            if source.kind != HOST and preflight.kernel_version() < preflight.IMAGE_KERNEL:
                raise ConfigurationError(
                    "image {!r} needs Linux {}.{} or later; this kernel has only {!r}".format(
                        spec.image, *preflight.IMAGE_KERNEL, HOST
                    )
                )
        if self.isolation != "none":
            async with self._checking:
                await preflight.require()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be able to make sandboxes; on exit all of them are gone."""
        if self._group is not None:
            raise UsageError("this backend is running already")
        raised: BaseException | None = None
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                yield
            except (anyio.get_cancelled_exc_class(), GeneratorExit):
                raise
            except BaseException as error:  # noqa: BLE001 - to be raised as it is, and not in a group
                raised = error
            finally:
                with anyio.move_on_after(CLEANUP_LIMIT, shield=True):
                    await self._remove_all()
                self._group = None
                group.cancel_scope.cancel()
        if raised is not None:
            raise raised

    async def create(self, spec: SandboxSpec, name: str) -> LocalSandbox:
        """
        Make a sandbox and open its session.

        Raises:
            ProvisionError: If it could not be made.
            ConfigurationError: If the image or the user does not exist.

        """
        await self.validate([spec])
        parent = await self._parent(spec.image)
        try:
            return await self._make(spec, name, parent)
        except ProvisionError:
            if parent.alive:
                raise
        # It was killed, and all that it was making with it: that is one failure, and not one of each sandbox.
        return await self._make(spec, name, await self._parent(spec.image))

    async def _make(self, spec: SandboxSpec, name: str, parent: Parent) -> LocalSandbox:
        image = self._images[spec.image]
        nonce = secrets.token_hex(16)
        ours, theirs = socket.socketpair()
        stream = SocketStream(ours)
        try:
            child = await parent.spawn(self._request(spec, image, parent, nonce), theirs)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
            raise
        finally:
            theirs.close()
        session = Session(stream, nonce=nonce)
        sandbox = LocalSandbox(spec, name, parent, child, session)
        self._sandboxes.add(sandbox)
        child.on_end = functools.partial(self._ended, sandbox)
        try:
            await self._open(sandbox)
        except BaseException:
            with anyio.move_on_after(CLEANUP_LIMIT, shield=True):
                await self.destroy(sandbox)
                await stream.aclose()
            raise
        return sandbox

    async def destroy(self, sandbox: BackendSandbox) -> None:
        """
        Remove a sandbox, and return when nothing of it is left.

        Raises:
            InfrastructureError: If something is.

        """
        if not isinstance(sandbox, LocalSandbox):
            raise UsageError(f"{sandbox!r} is not of this backend")
        sandbox.unwanted = True
        await sandbox.parent.kill(sandbox.child)
        await sandbox.session.aclose()
        self._sandboxes.discard(sandbox)
        if sandbox.child.left is not None:
            raise InfrastructureError(f"{sandbox.child.left} of sandbox {sandbox.name} could not be removed")

    def _ended(self, sandbox: LocalSandbox) -> None:
        if not sandbox.unwanted:
            data = {"reason": "died", "detail": sandbox.child.end or ""}
            self.sink(Event(name="sandbox.lost", at=anyio.current_time(), sandbox=sandbox.name, data=data))

    async def _open(self, sandbox: LocalSandbox) -> None:
        if self._group is None:
            raise UsageError("this backend is not running")
        child, session = sandbox.child, sandbox.session
        with anyio.move_on_after(SPAWN_LIMIT) as scope:
            try:
                # The runner's greeting says that the sandbox is there: nothing else has to be waited for.
                await self._group.start(session.run)
            except SandboxLost as error:
                await child.settled.wait()
                await self._explain(sandbox, error)
            await child.settled.wait()
        if scope.cancelled_caught:
            raise ProvisionError(f"sandbox {sandbox.name} is not there after {SPAWN_LIMIT:g} s")
        if child.namespaces is None:  # its runner answered, and was killed before anything else was told of it
            await self._explain(sandbox, SandboxLost("died", child.end or ""))
        instance = "/".join([child.id, *(f"{name}:{inode}" for name, inode in sorted(child.namespaces.items()))])
        sandbox.identity = Identity(uid=f"{self._run_id}/{sandbox.parent.pid}", instance=instance)
        sandbox.capabilities = self._capabilities(sandbox)

    async def _explain(self, sandbox: LocalSandbox, error: SandboxLost) -> NoReturn:
        child, words = sandbox.child, sandbox.parent.last_words
        if error.reason == "refused" or child.mistake:
            raise ConfigurationError(f"sandbox {sandbox.name}: {child.failure or error.detail}") from error
        if child.failure is None:
            await child.ended.wait()
        what = child.failure or child.end or str(error)
        message = f"sandbox {sandbox.name} could not be made: {what}" + (f" ({words})" if words else "")
        raise ProvisionError(message) from error

    async def _parent(self, name: str) -> Parent:
        """Return the parent of the sandboxes of an image, started if need be."""
        async with self._starting.setdefault(name, anyio.Lock()):
            parent = self._parents.get(name)
            if parent is not None and parent.alive:
                return parent
            if self._group is None:
                raise UsageError("this backend is not running")
            source = resolve(name)
            # A thread of its own: the default ones may all be taken by the trainer.
            image = await anyio.to_thread.run_sync(prepare, source, self._cache, limiter=anyio.CapacityLimiter(1))
            shown = None
            if self.isolation != "none":
                owner = preflight.owner()
                shown = layout.of_host(owner=owner) if source.kind == HOST else layout.of_root(image.root, owner=owner)
            parent = Parent(
                name, shown, limits=self._limits, directory=tempfile.gettempdir(), prefix=f"{PREFIX}{self._run_id}-"
            )
            await self._group.start(parent.run)
            data = {"pid": parent.pid, "started": started(parent.pid), "directory": tempfile.gettempdir()}
            self.sink(Event(name="host.created", at=anyio.current_time(), data=data))
            self._images[name] = image
            self._parents[name] = parent
            return parent

    def _request(self, spec: SandboxSpec, image: Image, parent: Parent, nonce: str) -> dict[str, Any]:
        env = {"LANG": "C.UTF-8"}
        user: str | int | None = spec.user
        workdir: str | None = None
        if parent.layout is None:
            env["PATH"] = os.environ.get("PATH", layout.STANDARD_PATH)
        elif image.source.kind == HOST:
            env["PATH"] = parent.layout.path
            user = layout.USER if user is None else user
            workdir = layout.WORKDIR
        else:
            env = {"PATH": layout.STANDARD_PATH, **image.env}
            if user is None:
                user = image.user if parent.ids.kind == "range" else layout.USER
            workdir = image.workdir or "/"
        if spec.workdir is not None:
            workdir = os.path.join(workdir or "/", spec.workdir)
        return {"nonce": nonce, "user": user, "workdir": workdir, "env": {**env, **spec.env}}

    def _capabilities(self, sandbox: LocalSandbox) -> Capabilities:
        parent, facts = sandbox.parent, sandbox.session.facts
        if parent.layout is None:
            isolation = "NONE: commands run as the driver's user, with its files and its network"
            details = {}
        elif parent.ids.kind == "range":
            isolation = "user, mount, PID, IPC, UTS and network namespaces; ids that nobody has outside"
            details = {
                "ids": f"{parent.ids.base}+65536",
                "idmap": "no: " + ", ".join(parent.plain) if parent.plain else "yes",
            }
        else:
            isolation = "user, mount, PID, IPC, UTS and network namespaces; one id, without capabilities"
            details = {"ids": str(os.getuid()), "idmap": "no: one id"}
        return Capabilities(
            exec_level=ExecLevel.RUNNER,
            isolation=isolation,
            users=bool(facts.get("users")),
            network=parent.layout is None,
            # The end of its namespaces is the end of all that ever was in it, and another one is a fork away.
            rungs=("replace",) if parent.layout is None else ("jail", "replace"),
            python=str(facts.get("python", "")),
            facts=details,
        )

    async def _remove_all(self) -> None:
        for sandbox in self._sandboxes:
            sandbox.unwanted = True
        for parent in self._parents.values():
            parent.close()
        for sandbox in list(self._sandboxes):
            await sandbox.child.ended.wait()
            await sandbox.session.aclose()
        self._sandboxes.clear()
        for parent in self._parents.values():
            await parent.stopped.wait()
        self._parents.clear()
