# SPDX-License-Identifier: Apache-2.0
"""Exec connections without a cluster: real processes in sandboxes of the local backend, reached as ``pods/exec`` is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import anyio.abc
import attrs

from agentsandbox.backends.local import LocalBackend
from agentsandbox.errors import CommandNotFound, SandboxLost, StartError
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import ExecLevel, SandboxSpec
from agentsandbox.session import Session
from agentsandbox.session.levels import ShellSession
from agentsandbox.transport.exec import STDERR, STDOUT
from agentsandbox.transport.websocket import ExecStatus

if TYPE_CHECKING:
    from agentsandbox.backends.base import BackendSandbox
    from agentsandbox.session import Process

SHELLS = ("dash", "bash", "busybox")

SETUP = {
    **{name: f'ln -s "$(command -v {name})" /tmp/shell/sh' for name in ("dash", "bash")},
    "busybox": "busybox --install -s /tmp/shell",
}
"""What puts a shell into ``/tmp/shell``, as ``sh``; busybox with its other programs."""


class LocalConnection:
    """One command in a local sandbox, with the interface and the manners of an exec websocket."""

    protocol = "v5.channel.k8s.io"

    def __init__(self, process: Process | None, status: ExecStatus | None = None) -> None:
        self.process = process
        self.status = status
        self._told: ExecStatus | None = None
        self.closed = False
        self.broken = False
        self.sent = 0
        self.kept_alive = 0
        self._send, self._receive = anyio.create_memory_object_stream[tuple[int, bytes]](8)
        self._break = anyio.Event()
        if process is None:
            self._send.close()
            self._receive.close()

    async def pump(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Carry output until the command has ended and nobody holds it any more."""
        task_status.started()
        process = self.process
        assert process is not None

        async def carry(stream: Any, channel: int) -> None:
            async for data in stream:
                if not (self.closed or self.broken):
                    with suppress(anyio.BrokenResourceError):
                        await self._send.send((channel, data))

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(carry, process.stdout, STDOUT)
                group.start_soon(carry, process.stderr, STDERR)
            code = (await process.wait()).exit_code
            self._told = ExecStatus(exit_code=code, reason="NonZeroExitCode" if code else "")
        except Exception:  # noqa: BLE001 - the sandbox is gone: no status, and the stream ends
            pass
        finally:
            self._send.close()

    async def receive(self) -> tuple[int, bytes]:
        if self.process is None:
            raise anyio.EndOfStream
        if self.broken:
            raise anyio.BrokenResourceError
        result: tuple[int, bytes] | None = None
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await self._break.wait()
                group.cancel_scope.cancel()

            group.start_soon(watch)
            with suppress(anyio.EndOfStream):
                result = await self._receive.receive()
            group.cancel_scope.cancel()
        if self.broken:
            raise anyio.BrokenResourceError
        if result is not None:
            return result
        self.status = self._told  # as a server does it: after all that the command wrote
        raise anyio.EndOfStream

    async def send(self, data: bytes) -> None:
        if self.broken or self.process is None:
            raise anyio.BrokenResourceError
        try:
            await self.process.stdin.send(data)
        except SandboxLost as lost:
            raise anyio.BrokenResourceError from lost
        self.sent += len(data)

    async def end_stdin(self) -> bool:
        if self.process is not None:
            await self.process.stdin.aclose()
        return True

    async def keep_alive(self) -> None:
        self.kept_alive += 1
        if self.broken:
            raise anyio.BrokenResourceError

    async def aclose(self) -> None:
        self.closed = True
        if self.process is not None and not self.broken:
            await self.process.stdin.aclose()
        self._receive.close()

    def cut(self) -> None:
        """Break the connection. What runs over there is not told."""
        self.broken = True
        self._break.set()


class LocalConnect:
    """Starts commands in one local sandbox, each over a connection of its own."""

    def __init__(self, runner: Session, group: anyio.abc.TaskGroup, path: str | None = None) -> None:
        self.runner = runner
        self.connections: list[LocalConnection] = []
        self.refuse: Callable[[int], Exception | None] = lambda _: None
        self.wrap: Callable[[int, LocalConnection], Any] = lambda _, connection: connection
        self._group = group
        self._env = {} if path is None else {"PATH": path}

    async def __call__(self, command: Sequence[str], *, stdin: bool = False) -> Any:
        assert sum(map(len, command)) < 2048
        error = self.refuse(len(self.connections))
        if error is not None:
            raise error
        request = Command(command=tuple(command), env=self._env, timeout=None)
        try:
            process = await self.runner.open_process(request)
        except StartError as error:
            words = "executable file not found in $PATH" if isinstance(error, CommandNotFound) else "permission denied"
            where = "OCI runtime exec failed: exec failed: unable to start container process"
            message = f'{where}: exec: "{command[0]}": {words}'
            connection = LocalConnection(None, ExecStatus(exit_code=None, reason="InternalError", message=message))
        else:
            connection = LocalConnection(process)
            if not stdin:
                await process.stdin.aclose()
            await self._group.start(connection.pump)
        self.connections.append(connection)
        return self.wrap(len(self.connections) - 1, connection)


def path_of(shell: str) -> str:
    """Return a PATH on which ``sh`` is that shell."""
    return "/tmp/shell" if shell == "busybox" else "/tmp/shell:/usr/bin:/bin"


class ShellBackend(LocalBackend):
    """The local backend, with sessions of exec level ``shell``."""

    shell = "dash"
    options: ClassVar[dict[str, Any]] = {}
    wrap: Any = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running(), anyio.create_task_group() as self.group:
            yield
            self.group.cancel_scope.cancel()

    async def create(self, spec: SandboxSpec, name: str) -> BackendSandbox:
        sandbox = await super().create(spec, name)
        runner = sandbox.session
        made = await runner.exec(Command(command=f"mkdir /tmp/shell && {SETUP[self.shell]}"))
        made.check()
        sandbox.connect = LocalConnect(runner, self.group, path_of(self.shell))
        if self.wrap is not None:
            sandbox.connect.wrap = self.wrap
        session = ShellSession(sandbox.connect, **self.options)
        await self.group.start(session.run)
        sandbox.runner = runner
        sandbox.session = session
        users = session.facts["users"]
        sandbox.capabilities = attrs.evolve(sandbox.capabilities, exec_level=ExecLevel.SHELL, users=users)
        return sandbox


SHARED: list[ShellBackend] = []
"""What makes the sandboxes of a module's tests, while there is one: starting it takes longer than most tests."""


@asynccontextmanager
async def shared_backend() -> AsyncIterator[None]:
    """Have one backend make all sandboxes that need no limits of their own."""
    backend = ShellBackend()
    async with backend.running():
        SHARED.append(backend)
        try:
            yield
        finally:
            SHARED.clear()


@asynccontextmanager
async def shell_sandbox(
    shell: str = "dash", *, wrap: Any = None, limits: Mapping[str, int] | None = None, **options: Any
) -> AsyncIterator[tuple[ShellSession, LocalConnect, Session]]:
    """Make one sandbox: its shell session, the connections that it made, and the runner that carries them."""
    async with AsyncExitStack() as stack:
        if limits is None and SHARED:
            backend = SHARED[0]
        else:
            backend = ShellBackend(**(limits or {}))
            await stack.enter_async_context(backend.running())
        backend.shell, backend.options, backend.wrap = shell, options, wrap
        sandbox = await backend.create(SandboxSpec(image="host"), "one")
        try:
            yield sandbox.session, sandbox.connect, sandbox.runner
        finally:
            await sandbox.session.aclose()
            await backend.destroy(sandbox)
