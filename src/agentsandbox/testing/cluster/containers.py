# SPDX-License-Identifier: Apache-2.0
"""Containers of real processes, on the namespaces of the local backend."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import anyio.abc
import anyio.to_thread
import attrs

from agentsandbox.backends.local import layout, preflight
from agentsandbox.backends.local.images import HOST, prepare, resolve
from agentsandbox.backends.local.parent import MODULES, Child, Parent
from agentsandbox.errors import ConfigurationError, InfrastructureError
from agentsandbox.testing.cluster.images import Image

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentsandbox.testing.cluster.replies import Json

__all__ = ["Command", "Container", "NotStarted", "Runtime", "Unconfined"]
READ_SIZE = 32 * 1024
LOG_LIMIT = 4 * 1024 * 1024


class Unconfined(UserWarning):
    """The cluster's containers are not isolated, because this machine cannot."""


class NotStarted(Exception):
    """A container or a command could not be started. The message is a container runtime's."""


@attrs.define(eq=False)
class _Process(Child):
    code: int | None = None
    out_of_memory: bool = False


class ContainerParent(Parent):
    """A process that makes containers of one image."""

    entry: ClassVar[str] = "agentsandbox.testing.cluster.inside:main"
    modules: ClassVar[tuple[str, ...]] = (
        *MODULES,
        "agentsandbox.testing.cluster.entering",
        "agentsandbox.testing.cluster.inside",
    )

    async def start(self, request: Json, descriptors: Sequence[int], *, within: str | None = None) -> _Process:
        """
        Start a container, or a command in one; return when it runs.

        Raises:
            NotStarted: If it does not.

        """
        self._count += 1
        process = _Process(str(self._count))
        self._children[process.id] = process
        memory = os.memfd_create("request")
        try:
            os.write(memory, json.dumps(request).encode())
            os.lseek(memory, 0, os.SEEK_SET)
            message = {"op": "spawn" if within is None else "exec", "id": process.id, "container": within}
            await self._send(message, [memory, *descriptors])
        except BaseException:
            self._children.pop(process.id, None)
            raise
        finally:
            os.close(memory)
        try:
            await process.settled.wait()
        except BaseException:
            with anyio.move_on_after(10, shield=True):
                await self.kill(process)
            raise
        if process.failure is not None:
            with anyio.move_on_after(10, shield=True):
                await process.ended.wait()
            raise NotStarted(process.failure)
        return process

    async def signal(self, process: _Process, number: int) -> None:
        """Send a signal to a process, from outside of its container."""
        if not process.ended.is_set() and self.alive:
            await self._send({"op": "signal", "id": process.id, "signal": number})

    def _hear(self, message: dict[str, Any]) -> None:
        process = self._children.get(message["id"])
        if isinstance(process, _Process):
            if message["event"] == "oom":
                process.out_of_memory = True
                return
            if message["event"] == "ended":
                process.code = message["code"] if message["signal"] is None else 128 + message["signal"]
        super()._hear(message)


@attrs.define(eq=False)
class Command:
    """A command that runs in a container."""

    stdin: int | None
    """Where to write its standard input, if it has any. Not blocking."""
    stdout: int | None
    """Where to read its output."""
    stderr: int | None
    """Where to read its errors; ``None`` with a terminal."""
    _parent: ContainerParent
    _process: _Process

    async def wait(self) -> int:
        """Wait for its end and return its exit code; 128 and more if a signal ended it."""
        await self._process.ended.wait()
        return 137 if self._process.code is None else self._process.code

    def close(self) -> None:
        """Close our ends. That does not end it: nobody can end a command but with its container."""
        for descriptor in {self.stdin, self.stdout, self.stderr} - {None}:
            assert descriptor is not None
            anyio.notify_closing(descriptor)
            os.close(descriptor)
        self.stdin = self.stdout = self.stderr = None

    def end_stdin(self) -> None:
        """End its standard input."""
        if self.stdin is not None and self.stdin != self.stdout:
            anyio.notify_closing(self.stdin)
            os.close(self.stdin)
            self.stdin = None


@attrs.define(eq=False)
class Container:
    """A container that runs or has run."""

    _parent: ContainerParent
    _process: _Process
    _request: Json
    output: list[int]
    """Where to read what its first process writes. Not blocking."""

    def __repr__(self) -> str:
        return f"<Container {self._process.id} of {self._parent.image} [{self._process.end or 'running'}]>"

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left."""
        return self._process.ended.is_set()

    @property
    def out_of_memory(self) -> bool:
        """Whether its first process was killed for memory."""
        return self._process.out_of_memory

    async def wait(self) -> int:
        """Wait until nothing of it is left; return the exit code of its first process."""
        await self._process.ended.wait()
        return 137 if self._process.code is None else self._process.code

    async def signal(self, number: int) -> None:
        """Send a signal to the first process."""
        await self._parent.signal(self._process, number)

    async def kill(self) -> None:
        """Kill everything."""
        await self._parent.kill(self._process)

    async def exec(self, argv: Sequence[str], *, stdin: bool, tty: bool) -> Command:
        """
        Run a command in it.

        Raises:
            NotStarted: If it cannot be started.

        """
        request = {**self._request, "argv": list(argv), "tty": tty}
        if tty:
            return await self._exec_terminal(request)
        opened: list[int] = []
        ours: list[int | None] = []
        theirs: list[int] = []
        try:
            if stdin:
                read, write = os.pipe()
                opened += [read, write]
                theirs.append(read)
                ours.append(write)
            else:
                null = os.open(os.devnull, os.O_RDONLY)
                opened.append(null)
                theirs.append(null)
                ours.append(None)
            for _ in range(2):
                read, write = os.pipe()
                opened += [read, write]
                theirs.append(write)
                ours.append(read)
            for descriptor in ours:
                if descriptor is not None:
                    os.set_blocking(descriptor, False)
            process = await self._parent.start(request, theirs, within=self._process.id)
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        for descriptor in theirs:
            os.close(descriptor)
        return Command(ours[0], ours[1], ours[2], self._parent, process)

    async def _exec_terminal(self, request: Json) -> Command:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            null = os.open(os.devnull, os.O_RDWR)
            try:
                request["env"] = {"TERM": "xterm", **request["env"]}
                process = await self._parent.start(request, [theirs.fileno(), null, null], within=self._process.id)
            finally:
                os.close(null)
            _, (master,), *_ = socket.recv_fds(ours, 16, 1)
        os.set_blocking(master, False)
        return Command(master, master, None, self._parent, process)


class Runtime:
    """
    What makes containers.

    Args:
        isolation: ``namespaces``, ``none``, or ``auto``: the first if this machine can, else the second with a warning.
        cgroup: The version of control groups whose files show how often memory was short.

    """

    def __init__(self, *, isolation: str = "auto", cgroup: int = 1) -> None:
        self.isolation = isolation
        self.cgroup = cgroup
        self._group: anyio.abc.TaskGroup | None = None
        self._parents: dict[str, ContainerParent] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._images: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<Runtime [{self.isolation}, {len(self._parents)} images]>"

    async def start(self, group: anyio.abc.TaskGroup) -> None:
        """Be ready; processes belong to that task group."""
        self._group = group
        if self.isolation == "auto":
            self.isolation = "namespaces"
            try:
                await self._try()
            except (ConfigurationError, InfrastructureError, NotStarted) as error:
                self.isolation = "none"
                await self.stop()
                warnings.warn(f"containers of the cluster double are not isolated: {error}", Unconfined, stacklevel=2)

    async def _try(self) -> None:
        """Make a container, to be sure; what made it is needed again in any case."""
        nothing: dict[str, Any] = dict.fromkeys(("workdir", "user", "group", "memory"))
        nothing |= {"env": {}, "drop": (), "volumes": (), "hostname": "trial"}
        container = await self.run(Image(), argv=["true"], **nothing)
        await container.wait()
        for descriptor in container.output:
            os.close(descriptor)

    async def stop(self) -> None:
        """End all containers and what made them."""
        for parent in self._parents.values():
            parent.close()
        for parent in self._parents.values():
            await parent.stopped.wait()
        self._parents.clear()

    async def run(
        self,
        image: Image,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        workdir: str | None,
        user: str | None,
        group: int | None,
        drop: Sequence[int],
        nested: bool = False,
        memory: int | None,
        volumes: Sequence[tuple[str, str, Mapping[str, str]]],
        hostname: str,
    ) -> Container:
        """
        Start a container.

        Raises:
            NotStarted: If its first process cannot be started.

        """
        parent = await self._parent(image)
        local = self._images[image.root]
        base = {"PATH": parent.layout.path if parent.layout else os.environ.get("PATH", layout.STANDARD_PATH)}
        account: str | None = user or image.user or local.user
        if account is None:
            account = layout.USER if image.root == HOST else "0"
        if parent.ids.kind == "single" or parent.layout is None:
            account = None
        directory = workdir or image.workdir or local.workdir
        if directory is None and parent.layout is not None:
            directory = layout.WORKDIR if image.root == HOST else "/"
        request: Json = {
            "argv": list(argv) or list(image.command),
            "env": {**base, "HOSTNAME": hostname, **dict(local.env), **dict(image.env), **env},
            "user": account,
            "group": group,
            "workdir": directory,
            "drop": list(drop),
            "nested": nested,
            "memory": memory,
            "cgroup": self.cgroup,
            "volumes": [list(volume) for volume in volumes],
        }
        null = os.open(os.devnull, os.O_RDONLY)
        pipes = [os.pipe(), os.pipe()]
        try:
            process = await parent.start(request, [null, pipes[0][1], pipes[1][1]])
        except BaseException:
            for read, _ in pipes:
                os.close(read)
            raise
        finally:
            os.close(null)
            for _, write in pipes:
                os.close(write)
        for read, _ in pipes:
            os.set_blocking(read, False)
        return Container(parent, process, {**request, "volumes": []}, [read for read, _ in pipes])

    async def _parent(self, image: Image) -> ContainerParent:
        async with self._locks.setdefault(image.root, anyio.Lock()):
            parent = self._parents.get(image.root)
            if parent is not None and parent.alive:
                return parent
            assert self._group is not None
            source = resolve(image.root)
            cache = Path(tempfile.gettempdir()) / "agentsandbox-cluster-images"
            local = await anyio.to_thread.run_sync(prepare, source, cache, limiter=anyio.CapacityLimiter(1))
            shown = None
            if self.isolation != "none":
                owner = preflight.owner()
                shown = layout.of_host(owner=owner) if source.kind == HOST else layout.of_root(local.root, owner=owner)
            parent = ContainerParent(image.root, shown, limits=preflight.limits(), directory=tempfile.gettempdir())
            await self._group.start(parent.run)
            self._images[image.root] = local
            self._parents[image.root] = parent
            return parent


async def write(descriptor: int, data: bytes) -> bool:
    """Write all of *data*; ``False`` if nobody reads any more."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            with suppress(OSError):
                await anyio.wait_writable(descriptor)
        except OSError:
            return False
    return True


async def read(descriptor: int, size: int = READ_SIZE) -> bytes:
    """Read what there is; nothing at the end."""
    while True:
        try:
            return os.read(descriptor, size)
        except BlockingIOError:
            await anyio.wait_readable(descriptor)
        except OSError:  # a terminal whose last user is gone
            return b""
