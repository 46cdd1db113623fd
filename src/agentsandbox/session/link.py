# SPDX-License-Identifier: Apache-2.0
"""
The tasks behind a session: one reads, one writes while there is something to write; both start over on a new stream.

The reader hands frames on and never waits for anybody, so that a slow consumer can neither stop the heartbeat nor the
other commands.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.errors import InfrastructureError, ProtocolError, SandboxLost, StreamBroken
from agentsandbox.protocol.connection import Connection
from agentsandbox.protocol.frames import (
    PING,
    PONG,
    REFUSED,
    SHUTDOWN,
    TO_DRIVER,
    WELCOME,
    Frame,
    FrameError,
    dump,
    load,
)
from agentsandbox.session.handshake import greet
from agentsandbox.session.loss import told
from agentsandbox.session.pulse import watching
from agentsandbox.session.retrying import REATTACH_ATTEMPTS, Worth, attempts, pause
from agentsandbox.session.streams import CLOSE, STREAM_ERRORS, close

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from anyio.abc import TaskGroup, TaskStatus

    from agentsandbox.session.pulse import Pulse
    from agentsandbox.transport import ByteStream

__all__ = ["Link"]

DRAIN = 1.0
"""Seconds in which what is on its way may still arrive after writing has failed."""

MAX_PONGS = 1000
"""Answers to pings that may wait while the other side does not read."""


class Link:
    """
    The numbered connection to one runner over as many streams as it takes.

    Args:
        stream: The first stream.
        nonce: The secret that the runner expects.
        reopen: Opens another stream to the same runner, if that is possible.
        heartbeat: Seconds without a byte from the runner after which it is asked for one.
        heartbeat_timeout: Seconds it has to answer.
        deliver: Takes each frame of a command; raises :exc:`FrameError` if it does not fit.
        on_lost: Called once when the runner is lost for good.
        pulse: What watches the clock for it; ``None`` is a task of its own.

    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        nonce: str,
        reopen: Callable[[], Awaitable[ByteStream]] | None,
        heartbeat: float,
        heartbeat_timeout: float,
        deliver: Callable[[Frame], None],
        on_lost: Callable[[], None],
        pulse: Pulse | None = None,
    ) -> None:
        self._stream = stream
        self._nonce = nonce
        self._reopen = reopen
        self._heartbeat = heartbeat
        self._heartbeat_timeout = heartbeat_timeout
        self._deliver = deliver
        self._on_lost = on_lost
        self._pulse = pulse
        self._connection = Connection(TO_DRIVER)
        self._group: TaskGroup | None = None
        self._writing = False
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._pings: dict[bytes, anyio.Event] = {}
        self._ping_count = 0
        self._pongs = 0
        self._asked: tuple[float, float] | None = None  # when the last byte had arrived by then, and when that was
        self._broken = ""
        self._worth = Worth()
        self.facts: Mapping[str, Any] = MappingProxyType({})
        """What the runner said about itself."""
        self.lost: SandboxLost | None = None
        """Why it is lost, once it is."""
        self.violation: FrameError | None = None
        """How the runner broke the protocol, if it did."""
        self.streams = 0
        """How many streams it took so far."""
        self.last_received = 0.0
        """When the last byte arrived."""
        self.attached_at = 0.0
        """When the present stream was attached."""

    def __repr__(self) -> str:
        state = (
            self.lost.reason if self.lost else
            "attached" if self._connection.attached else
            "attaching" if self.streams else "new"
        )  # fmt: skip
        return f"<Link [{state}, stream {self.streams}, {self._connection.unacknowledged} bytes unacknowledged]>"

    @property
    def attached(self) -> bool:
        """Whether a stream is there now."""
        return self._connection.attached

    @property
    def unacknowledged(self) -> int:
        """Bytes that are kept in case they have to be sent again."""
        return self._connection.unacknowledged

    def send(self, kind: int, command: int, payload: bytes = b"") -> None:
        """Queue a frame. It goes out as soon as the stream takes it, in the order of the calls."""
        self._connection.send(kind, command, payload)
        self._flush()

    def lose(self, error: SandboxLost) -> None:
        """Give the runner up: nothing that it says counts any more."""
        if self.lost is None:
            self.lost = error
            self._on_lost()
            for event in self._pings.values():
                event.set()
        if self._scope is not None:
            self._scope.cancel()

    def violate(self, error: FrameError) -> None:
        """Give the runner up because it broke the protocol."""
        self.violation = self.violation or error
        self.lose(SandboxLost("protocol", str(error)))

    def loss(self, stdout: bytes = b"", stderr: bytes = b"") -> InfrastructureError:
        """Return the exception for a caller whose command the loss hit, with what the command had printed."""
        if self.violation is not None:
            return ProtocolError(str(self.violation))
        assert self.lost is not None
        return told(self.lost, stdout, stderr)

    async def ping(self, timeout: float) -> float:
        """Return how many seconds an answer took; :exc:`TimeoutError` if none came within *timeout* seconds."""
        if self.lost is not None:
            raise self.loss()
        self._ping_count += 1
        token = b"%d" % self._ping_count
        event = self._pings[token] = anyio.Event()
        begin = anyio.current_time()
        try:
            with anyio.fail_after(timeout):
                if self.attached:
                    self.send(PING, 0, token)
                await event.wait()
        finally:
            del self._pings[token]
        if self.lost is not None:
            raise self.loss()
        return anyio.current_time() - begin

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """
        Attach, then serve until the link is closed or lost for good.

        Raises:
            SandboxLost: If the first stream could not be attached; later losses only show in :attr:`lost`.
            ProtocolError: Likewise.

        """
        attached = False
        try:
            with anyio.CancelScope() as self._scope:
                if self.lost is None:  # else closed before it began
                    await self._first()
                    attached = True
                    task_status.started()
                    while await self._serve() and await self._reattach():
                        pass
        finally:
            self.lose(StreamBroken("closed", "the session was closed"))
            self._connection.detach()
            await close(self._stream)
            self._ended.set()
        if not attached:
            raise self.loss()

    async def shutdown(self, code: int = 0) -> None:
        """Ask the runner to end, with an exit code, and give it a second to do so."""
        self._reopen = None
        if self.attached:
            self.send(SHUTDOWN, 0, dump({"code": code}) if code else b"")
            with anyio.move_on_after(DRAIN, shield=True):
                await self._ended.wait()

    async def aclose(self) -> None:
        """Close the stream and wait until :meth:`run` has ended. Idempotent."""
        started = self._scope is not None
        self.lose(StreamBroken("closed", "the session was closed"))
        with anyio.move_on_after(CLOSE, shield=True):
            await (self._ended.wait() if started else self._stream.aclose())

    # Attaching.

    async def _first(self) -> None:
        try:
            with anyio.fail_after(self._heartbeat_timeout):
                await self._attach(self._stream)
        except FrameError as error:
            self.violate(error)
            raise self.loss() from error
        except STREAM_ERRORS as error:
            self.lose(StreamBroken("handshake", f"the runner did not answer ({type(error).__name__})"))
            raise self.loss() from error
        except SandboxLost as error:
            self.lose(error)
            raise

    async def _attach(self, stream: ByteStream) -> None:
        connection = self._connection
        welcome = await greet(stream, connection, self._nonce)
        if self.streams and welcome.facts != self.facts:
            raise SandboxLost("replaced", "another runner answers than before")
        connection.attach(welcome.received)  # it checks
        now = anyio.current_time()
        self._worth.attached((welcome.received, connection.received), now)
        self.streams += 1
        self.facts = MappingProxyType(welcome.facts)
        self.last_received = self.attached_at = now
        self._broken, self._pongs, self._asked = "", 0, None
        for frame in welcome.rest:
            self._dispatch(frame)
        for token in self._pings:
            connection.send(PING, 0, token)

    async def _reattach(self) -> bool:
        """Open a new stream to the same runner; return whether that worked."""
        if self._reopen is None or self._worth.fruitless >= REATTACH_ATTEMPTS:
            self.lose(StreamBroken("stream_ended", self._broken))
            return False
        await pause(self._worth.fruitless)
        try:
            async for attempt in attempts():
                with attempt:
                    await self._open(self._reopen)
        except FrameError as error:
            self.violate(error)
        except SandboxLost as error:
            self.lose(error)
        except Exception as error:  # noqa: BLE001  kept as the cause, and never thrown at whoever else is in the task group
            cause = str(error) or type(error).__name__
            lost = StreamBroken("stream_ended", f"{self._broken}; not attached again: {cause}")
            lost.__cause__ = error
            self.lose(lost)
        return self.lost is None

    async def _open(self, reopen: Callable[[], Awaitable[ByteStream]]) -> None:
        with anyio.fail_after(self._heartbeat_timeout):
            stream = await reopen()
            try:
                await self._attach(stream)
            except BaseException:
                self._connection.detach()
                await close(stream)
                raise
            self._stream = stream

    # Serving.

    async def _serve(self) -> bool:
        """Read, write and watch one stream until it ends; return whether another one may follow."""
        stream = self._stream
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                try:
                    self._flush()
                    with watching(self, self._pulse, group):
                        await self._read(stream)
                finally:
                    self._group = None  # a group that ends takes no task, and whoever sends now is not to be blamed
                group.cancel_scope.cancel()
        finally:
            self._writing = False
        self._connection.detach()
        await close(stream)
        return self.lost is None

    async def _read(self, stream: ByteStream) -> None:
        connection = self._connection
        while self.lost is None:
            try:
                data = await stream.receive()
            except STREAM_ERRORS as error:
                self._broken = self._broken or f"reading failed ({type(error).__name__})"
                return
            self.last_received = anyio.current_time()
            try:
                for frame in connection.receive_data(data):
                    self._dispatch(frame)
            except FrameError as error:
                self.violate(error)
                return
            except Exception as error:  # noqa: BLE001  whatever a hostile runner finds ends its own session only
                violation = FrameError(f"{type(error).__name__}: {error}")
                violation.__cause__ = error
                self.violate(violation)
                return
            self._flush()

    def _dispatch(self, frame: Frame) -> None:
        kind = frame.type
        if kind == PONG:
            if event := self._pings.get(frame.payload):
                event.set()
        elif kind == PING:
            self._pongs += 1
            if self._pongs > MAX_PONGS:
                raise FrameError("the runner sends without reading")
            self.send(PONG, 0, frame.payload)
        elif kind == REFUSED:
            self.lose(SandboxLost("refused", str(load(frame.payload).get("reason"))))
        elif kind == WELCOME:
            raise FrameError("a second welcome")
        else:
            self._deliver(frame)

    def _flush(self) -> None:
        """Have what is queued written, by a task that lasts only for as long as there is something."""
        if self._group is not None and not self._writing and self._connection.pending:
            self._writing = True
            self._group.start_soon(self._write, self._stream, self._group.cancel_scope)

    async def _write(self, stream: ByteStream, scope: anyio.CancelScope) -> None:
        try:
            while chunks := self._connection.data_to_send():
                await stream.send(chunks)
                self._pongs = 0
        except STREAM_ERRORS as error:
            # The last words of the runner may be on their way: let the reader find the end of them.
            self._broken = self._broken or f"writing failed ({type(error).__name__})"
            scope.deadline = anyio.current_time() + DRAIN
        else:
            self._writing = False

    def beat(self, now: float) -> float:
        """Ask the runner for an answer if it was silent for too long, and give the stream up if there is none."""
        if self._asked is None or self._asked[0] != self.last_received:
            due = self.last_received + self._heartbeat
            if now < due:
                return due
            self._asked = self.last_received, now
            self._connection.acknowledge()
            self.send(PING, 0, b"heartbeat")
        due = self._asked[1] + self._heartbeat_timeout
        if now < due:
            return min(due, now + self._heartbeat)
        self._broken = f"no answer to a heartbeat within {self._heartbeat_timeout:g} s"
        if self._group is not None:
            self._group.cancel_scope.cancel()
        return math.inf
