# SPDX-License-Identifier: Apache-2.0
"""A runner's end of the link that is played by the test, in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest
import trio.testing

from agentsandbox.protocol import frames
from agentsandbox.protocol.connection import Connection
from agentsandbox.protocol.frames import AMOUNT, MAX_DATA, Frame, dump, load
from agentsandbox.session import Session
from agentsandbox.transport.memory import MemoryStream, memory_pair

NONCE = "5ec7e7"
FACTS = {"pid": 1, "boot_id": "b", "users": True}


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0 if timeout is not None else None)
        if not events and timeout:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: when nothing is left to do, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run each test on both event loops, under clocks that jump."""
    if request.param == "trio":
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
    return "asyncio", {"loop_factory": VirtualLoop}


class PeerCommand:
    """A command as the played runner sees it."""

    def __init__(self, peer: Peer, number: int, payload: bytes) -> None:
        self.peer = peer
        self.number = number
        self.request = load(payload)
        self.credit = self.request["window"]
        self.stdin = bytearray()
        self.stdin_frames = 0
        self.stdin_granted = 1024 * 1024
        self.stdin_ended = False
        self.killed = False
        self.exited = False
        self.totals = {frames.STDOUT: 0, frames.STDERR: 0}
        self.changed = anyio.Event()
        self.scope = anyio.CancelScope()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def started(self, pid: int = 7) -> None:
        self.peer.send(frames.STARTED, self.number, dump({"pid": pid}))

    def failed(self, kind: str, message: str = "", subject: str = "") -> None:
        self.peer.send(
            frames.FAILED, self.number, dump({"kind": kind, "errno": None, "message": message, "subject": subject})
        )

    async def out(self, data: bytes, kind: int = frames.STDOUT, piece: int = MAX_DATA) -> None:
        """Write output as far as there is credit, wait for more, and so on."""
        for offset in range(0, len(data), piece):
            part = data[offset : offset + piece]
            while self.credit < len(part):
                await self.changed.wait()
            if self.exited:
                return  # killed meanwhile
            self.credit -= len(part)
            self.totals[kind] += len(part)
            self.peer.send(kind, self.number, part)
            await self.peer.flushed()

    def exit(self, code: int = 0, **fields: Any) -> None:
        if self.exited:
            return  # killed meanwhile
        self.exited = True
        value = {
            "code": code,
            "signal": None,
            "limit": None,
            "wall": 0.25,
            "cpu": 0.125,
            "memory": 4096,
            "stdout": self.totals[frames.STDOUT],
            "stderr": self.totals[frames.STDERR],
            "leftovers": [],
            "survivors": [],
            "report": None,
        }
        self.peer.send(frames.EXIT, self.number, dump({**value, **fields}))

    async def read_stdin(self) -> bytes:
        """Return all of standard input, giving credit as it comes."""
        while not self.stdin_ended:
            self.grant()
            await self.changed.wait()
        return bytes(self.stdin)

    def grant(self) -> None:
        owed = len(self.stdin) + 1024 * 1024 - self.stdin_granted
        if owed >= 256 * 1024:
            self.stdin_granted += owed
            self.peer.send(frames.CREDIT, self.number, AMOUNT.pack(owed))


Script = Callable[[PeerCommand], Awaitable[None]]


class Peer:
    """
    The runner's end.

    Args:
        group: Where its tasks run.
        script: What it does for each command.
        dies_on_kill: Whether a killed command ends.
        capacity: Bytes that a stream holds.

    """

    def __init__(
        self, group: anyio.abc.TaskGroup, script: Script, *, dies_on_kill: bool = True, capacity: int = 1024 * 1024
    ) -> None:
        self.group = group
        self.script = script
        self.dies_on_kill = dies_on_kill
        self.capacity = capacity
        self.connection = Connection(frames.TO_RUNNER)
        self.commands: dict[int, PeerCommand] = {}
        self.kills: list[int] = []
        self.seen: list[Frame] = []
        self.facts: dict[str, Any] = dict(FACTS)
        self.discard_stdin = 0  # so many frames get lost on the way
        self.answers_pings = True
        self.welcome: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]] | None = None
        self.streams: list[tuple[MemoryStream, MemoryStream]] = []
        self._scope: anyio.CancelScope | None = None
        self._over: anyio.Event | None = None
        self._wakeup = anyio.Event()
        self._idle = anyio.Event()

    @property
    def stream(self) -> MemoryStream:
        return self.streams[-1][1]

    def open(self) -> MemoryStream:
        """Return the driver's end of a new stream."""
        theirs, ours = memory_pair(self.capacity)
        self.streams.append((theirs, ours))
        self.group.start_soon(self._serve, ours)
        return theirs

    async def reopen(self) -> MemoryStream:
        return self.open()

    def send(self, kind: int, command: int, payload: bytes = b"") -> None:
        self.connection.send(kind, command, payload)
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._wakeup.set()

    async def flushed(self) -> None:
        """Wait until what was sent is under way, if there is a stream."""
        if self.connection.attached and self.connection.pending:
            await self._idle.wait()

    async def _serve(self, stream: MemoryStream) -> None:
        before, self._over = self._over, anyio.Event()
        over = self._over
        if self._scope is not None:
            self._scope.cancel()
        if before is not None:
            await before.wait()
        self.connection.detach()
        try:
            with anyio.CancelScope() as self._scope:
                await self._talk(stream)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        finally:
            if stream is self.stream:
                self.connection.detach()
                self._idle.set()
            over.set()
            await stream.aclose()

    async def _talk(self, stream: MemoryStream) -> None:
        got: list[Frame] = []
        while not got:
            got = self.connection.receive_data(await stream.receive())
        hello = load(got[0].payload)
        assert got[0].type == frames.HELLO
        assert hello["nonce"] == NONCE
        welcome = {"version": 1, "received": self.connection.received, "facts": self.facts}
        kind, payload = self.welcome(welcome) if self.welcome is not None else (frames.WELCOME, welcome)
        self.connection.send(kind, 0, dump(payload))
        if kind == frames.WELCOME:
            self.connection.attach(hello["received"])
        async with anyio.create_task_group() as group:
            group.start_soon(self._write, stream)
            for frame in got[1:]:
                self._act(frame)
            try:
                while True:
                    for frame in self.connection.receive_data(await stream.receive()):
                        self._act(frame)
                    if self.connection.pending:
                        self._wakeup.set()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                group.cancel_scope.cancel()

    async def _write(self, stream: MemoryStream) -> None:
        try:
            while True:
                if chunks := self.connection.data_to_send():
                    await stream.send(chunks)
                else:
                    self._idle.set()
                    self._wakeup = anyio.Event()
                    await self._wakeup.wait()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the reader sees the end

    def _act(self, frame: Frame) -> None:
        self.seen.append(frame)
        command = self.commands.get(frame.command)
        if frame.type == frames.START:
            command = self.commands[frame.command] = PeerCommand(self, frame.command, frame.payload)
            self.group.start_soon(self._play, command)
        elif frame.type == frames.PING:
            if self.answers_pings:
                self.send(frames.PONG, 0, frame.payload)
        elif command is None:
            assert frame.type in (frames.PONG, frames.SHUTDOWN)
        elif frame.type == frames.CREDIT:
            command.credit += AMOUNT.unpack(frame.payload)[0]
            command.notify()
        elif frame.type == frames.STDIN:
            command.stdin_frames += 1
            if command.stdin_frames > self.discard_stdin:
                command.stdin += frame.payload
            assert len(command.stdin) <= command.stdin_granted
            command.notify()
        elif frame.type == frames.STDIN_END:
            command.stdin_ended = True
            command.notify()
        elif frame.type == frames.KILL:
            self.kills.append(frame.command)
            command.killed = True
            command.notify()
            if self.dies_on_kill and not command.exited:
                command.scope.cancel()
                command.exit(137, signal=9, limit="killed")

    async def _play(self, command: PeerCommand) -> None:
        with command.scope:
            await self.script(command)

    def count(self, kind: int) -> int:
        """How many frames of a type arrived."""
        return sum(frame.type == kind for frame in self.seen)


Connected = Callable[..., AbstractAsyncContextManager[tuple[Session, Peer]]]


@pytest.fixture
def connected() -> Connected:
    """Return a function that makes a session with a played runner at the other end."""

    @asynccontextmanager
    async def connect(
        script: Script, *, resumable: bool = False, attach: bool = True, **options: Any
    ) -> AsyncIterator[tuple[Session, Peer]]:
        peer_options = {key: options.pop(key) for key in ("dies_on_kill", "capacity") if key in options}
        async with anyio.create_task_group() as group:
            peer = Peer(group, script, **peer_options)
            session = Session(peer.open(), nonce=NONCE, reopen=peer.reopen if resumable else None, **options)
            if attach:
                await group.start(session.run)
            try:
                yield session, peer
            finally:
                await session.aclose()
                group.cancel_scope.cancel()
        assert "0 of" in repr(session), "no command is left behind"

    return connect
