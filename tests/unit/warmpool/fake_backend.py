# SPDX-License-Identifier: Apache-2.0
"""A backend in memory: instant, unless a test says otherwise, and it counts everything."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from agentsandbox.backends.base import Backend, BackendSandbox
from agentsandbox.errors import ConfigurationError, SandboxLost, StreamBroken
from agentsandbox.models.command import ExecResult
from agentsandbox.models.sandbox import Capabilities, Identity, SandboxSpec


class FakeSession:
    """Answers every command at once, unless the sandbox was told otherwise."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self.sandbox = sandbox
        self.requests: list = []
        self.files: dict[str, bytes] = {}

    async def exec(self, command, *, stdin=None, on_output=None, on_started=None, require_complete=False):
        self.requests.append(command)
        await anyio.lowlevel.checkpoint()
        if on_started is not None:
            on_started()
        await self.sandbox.act()
        return ExecResult(exit_code=self.sandbox.exit_code, stdout=self.sandbox.name.encode(), wall_seconds=0.25)

    async def open_process(self, command):
        await anyio.lowlevel.checkpoint()
        return FakeProcess(self.sandbox)

    async def read_file(self, path, *, user=None, limit=None):
        await self.sandbox.act()
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    async def write_file(self, path, data, *, mode=None, user=None):
        await self.sandbox.act()
        self.files[path] = data

    async def upload_dir(self, source, target, *, user=None):
        self.files[target] = str(source).encode()

    async def download_dir(self, source, target, *, user=None):
        self.files[str(target)] = source.encode()

    async def ping(self, timeout=5.0):
        if self.sandbox.silent:
            raise StreamBroken("silent", "no answer to a ping")
        return 0.001


class FakeProcess:
    def __init__(self, sandbox: FakeSandbox) -> None:
        self.sandbox = sandbox
        self.killed = False
        self.stdin, self.stdout, self.stderr = "in", "out", "err"

    async def wait(self):
        await self.sandbox.act()
        return ExecResult(exit_code=0)

    async def kill(self):
        self.killed = True

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.killed = True


class FakeSandbox(BackendSandbox):
    """A sandbox that a test can kill, block or make fail."""

    def __init__(self, name: str, spec: SandboxSpec) -> None:
        self.name = name
        self.spec = spec
        self.identity = Identity(uid=f"uid-{name}", instance="1")
        self.capabilities = Capabilities()
        self.node = "node-1"
        self.dead: SandboxLost | None = None
        self.silent = False
        self.exit_code = 0
        self.errors: deque[BaseException] = deque()
        self.block: anyio.Event | None = None
        self.checks = 0
        self.check_block: anyio.Event | None = None
        self.session = FakeSession(self)

    async def act(self) -> None:
        if self.block is not None:
            await self.block.wait()
        if self.errors:
            raise self.errors.popleft()

    async def check(self) -> None:
        self.checks += 1
        if self.check_block is not None:
            await self.check_block.wait()
        if self.dead is not None:
            raise SandboxLost(self.dead.reason, self.dead.detail)


class FakeBackend(Backend):
    """Counts creates, destroys and what is alive; fails and blocks as scripted."""

    name = "fake"
    default_creates_in_flight = 4

    def __init__(self, *, spares: int = 0) -> None:
        self.spares = spares
        self.create_errors: deque[BaseException | None] = deque()
        """One an attempt; ``None`` and an empty queue mean success."""
        self.create_delay = 0.0
        """Virtual seconds."""
        self.create_block: anyio.Event | None = None
        self.destroy_errors: deque[BaseException | None] = deque()
        self.destroy_block: anyio.Event | None = None
        self.unknown: set[str] = set()
        self.born_dead: set[int] = set()
        """Ordinals of sandboxes that are dead on arrival."""
        self.attempts: list[str] = []
        self.sandboxes: dict[str, FakeSandbox] = {}
        """Every sandbox ever made, by name."""
        self.alive: set[str] = set()
        self.in_flight = 0
        self.most_in_flight = 0
        self.most_alive = 0
        self.destroy_calls: list[str] = []
        self.running_now = False
        self.recycling = False
        """Whether sandboxes can become fresh ones in place."""
        self.recycled: list[tuple[str, str]] = []
        """Name and image, one an attempt."""
        self.recycle_errors: deque[BaseException | None] = deque()
        self.recycle_block: anyio.Event | None = None

    def default_spares(self, size: int) -> int:
        return self.spares

    async def validate(self, specs: Iterable[SandboxSpec]) -> None:
        for spec in specs:
            if spec.image in self.unknown:
                raise ConfigurationError(f"no image {spec.image!r}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.running_now = True
        try:
            yield
        finally:
            self.running_now = False
            self.left_at_exit = set(self.alive)

    async def create(self, spec: SandboxSpec, name: str) -> FakeSandbox:
        assert name not in self.attempts
        self.attempts.append(name)
        number = len(self.attempts)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.most_alive = max(self.most_alive, self.in_flight + len(self.alive))
        try:
            await anyio.lowlevel.checkpoint()
            if self.create_block is not None:
                await self.create_block.wait()
            if self.create_delay:
                await anyio.sleep(self.create_delay)
            if self.create_errors and (error := self.create_errors.popleft()) is not None:
                raise error
        finally:
            self.in_flight -= 1
        sandbox = FakeSandbox(name, spec)
        if number in self.born_dead:
            sandbox.dead = SandboxLost("died", "dead on arrival")
        self.sandboxes[name] = sandbox
        self.alive.add(name)
        self.most_alive = max(self.most_alive, self.in_flight + len(self.alive))
        return sandbox

    def can_recycle(self, sandbox: FakeSandbox) -> bool:
        return self.recycling and sandbox.dead is None

    async def recycle(self, sandbox: FakeSandbox, spec: SandboxSpec, name: str) -> FakeSandbox:
        assert sandbox is self.sandboxes[name]
        assert name in self.alive
        self.recycled.append((name, spec.image))
        await anyio.lowlevel.checkpoint()
        if self.recycle_block is not None:
            await self.recycle_block.wait()
        if self.recycle_errors and (error := self.recycle_errors.popleft()) is not None:
            raise error
        fresh = FakeSandbox(name, spec)
        fresh.identity = Identity(uid=sandbox.identity.uid, instance=f"{len(self.recycled) + 1}")
        self.sandboxes[name] = fresh
        return fresh

    async def destroy(self, sandbox: FakeSandbox) -> None:
        self.destroy_calls.append(sandbox.name)
        await anyio.lowlevel.checkpoint()
        if self.destroy_block is not None:
            await self.destroy_block.wait()
        if self.destroy_errors and (error := self.destroy_errors.popleft()) is not None:
            raise error
        self.alive.discard(sandbox.name)
