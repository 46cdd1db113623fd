# SPDX-License-Identifier: Apache-2.0
"""
The one connection over which a shell in the sandbox serves requests, made again when it is lost.

Every request may be repeated: what must happen once is guarded in the sandbox, not here.
"""

from __future__ import annotations

import secrets
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import ProtocolError, SandboxLost, StreamBroken
from agentsandbox.session.levels.asking import Ask, Reply
from agentsandbox.session.levels.ending import ended, final
from agentsandbox.session.levels.scripts import BOOT, PLACES, PROGRAM, quote
from agentsandbox.session.loss import told
from agentsandbox.session.retrying import attempts, pause
from agentsandbox.session.streams import CLOSE, STREAM_ERRORS, close
from agentsandbox.transport.exec import STDOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from agentsandbox.transport.exec import Connect, ExecConnection
    from agentsandbox.transport.websocket import ExecStatus

__all__ = ["Control"]

FRUITLESS = 6
"""How many connections in a row may answer nothing, or end over the same request, until the sandbox counts as lost."""

ATTACH_WAIT = 2.0
"""The longest pause before a connection is made again, in seconds."""

MAX_REPLY = 64 * 1024 * 1024
"""Bytes that an answer may have: nothing asks for so much, so whoever sends it is not the program that we started."""

MAX_LINE = 16 * 1024
"""Bytes of a line on standard error; what is longer is none of ours."""


class Control:
    """
    Requests to the shell in a sandbox.

    Args:
        connect: Starts a command there over a new connection.
        shell: The shell to start.
        workdir: Where commands start, if not in the directory that the shell does.
        heartbeat: Seconds of silence after which it is asked for an answer.
        heartbeat_timeout: Seconds it has to give one.
        tell: Takes each line about a command, as words.
        on_attached: Called whenever a connection was made again: what was told meanwhile is lost.
        on_lost: Called once when the sandbox is lost for good.

    """

    def __init__(
        self,
        connect: Connect,
        *,
        shell: str,
        workdir: str | None,
        heartbeat: float,
        heartbeat_timeout: float,
        tell: Callable[[list[str]], None],
        on_attached: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.connect = connect
        self.shell = shell
        self._workdir = workdir
        self._heartbeat = heartbeat
        self._heartbeat_timeout = heartbeat_timeout
        self._tell = tell
        self._on_attached = on_attached
        self._on_lost = on_lost
        self._key = secrets.token_hex(8)
        self._queue: deque[Ask] = deque()
        self._waiting: deque[Ask] = deque()
        self._wakeup = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._heard = 0.0
        self._said = b""
        self._why = ""
        self._answered = 0
        self._fruitless = 0
        self.facts: dict[str, str] = {}
        """What the sandbox is like."""
        self.missing: set[str] = set()
        """Small programs that it does not have."""
        self.lost: SandboxLost | None = None
        """Why it is lost, once it is."""
        self.attached = False
        """Whether a connection is there now."""
        self.connections = 0
        """How many it took so far."""

    def __repr__(self) -> str:
        state = self.lost.reason if self.lost else "attached" if self.attached else "detached"
        return f"<Control [{state}, connection {self.connections}, {len(self._waiting)} requests waiting]>"

    async def request(self, code: str, data: bytes = b"") -> Reply:
        """
        Have *code* run, and return what came of it. It may run twice if a connection is lost.

        Args:
            code: A few lines of shell. It may leave a line of result in ``_ar``.
            data: What it reads from its standard input, and all of it.

        Raises:
            SandboxLost: If the sandbox is or gets lost.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        interrupted = 0
        while True:
            if self.lost is not None:
                raise self.loss()
            ask = Ask(self._key, code, data)
            self._queue.append(ask)
            self._wakeup.set()
            try:
                await ask.done.wait()
            finally:
                if not ask.sent and ask in self._queue:
                    self._queue.remove(ask)
            if ask.reply is not None:
                return ask.reply
            # A shell that finds no process for a request ends, every time.
            interrupted += ask.interrupted
            if interrupted >= FRUITLESS:
                self.lose(StreamBroken("stream_ended", f"{self._why}, {interrupted} times over the same request"))
            elif interrupted > 1:
                await pause(interrupted, ATTACH_WAIT)

    def lose(self, error: SandboxLost) -> None:
        """Give the sandbox up: nothing that it says counts any more."""
        if self.lost is None:
            self.lost = error
            self._fail_all()
            for ask in self._queue:
                ask.done.set()
            self._on_lost()
        if self._scope is not None:
            self._scope.cancel()

    def loss(self, stdout: bytes = b"", stderr: bytes = b"") -> SandboxLost:
        """Return the exception for a caller whom the loss hit."""
        assert self.lost is not None
        return told(self.lost, stdout, stderr)

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """
        Connect, then serve until closed or lost for good.

        Raises:
            SandboxLost: If the first connection could not be made; later losses only show in :attr:`lost`.

        """
        try:
            with anyio.CancelScope() as self._scope:
                connection = await self._connected() if self.lost is None else None
                while connection is not None:
                    await self._serve(connection, None if self.connections else task_status)
                    connection = await self._connected() if self.lost is None else None
        finally:
            self.lose(StreamBroken("closed", "the session was closed"))
            self._ended.set()
        if not self.connections:
            raise self.loss()

    async def aclose(self) -> None:
        """Close the connection and wait until :meth:`run` has ended. Idempotent."""
        running = self._scope is not None
        self.lose(StreamBroken("closed", "the session was closed"))
        if running:
            with anyio.move_on_after(CLOSE, shield=True):
                await self._ended.wait()

    # Connecting.

    async def _connected(self) -> ExecConnection | None:
        if self._fruitless >= FRUITLESS:
            self.lose(StreamBroken("stream_ended", self._why))
            return None
        await pause(self._fruitless, ATTACH_WAIT)
        try:
            async for attempt in attempts(most=None, longest=ATTACH_WAIT):
                with attempt, anyio.fail_after(self._heartbeat_timeout):
                    return await self.connect([self.shell, "-c", BOOT, "sh"], stdin=True)
        except SandboxLost as error:
            self.lose(error)
        except Exception as error:  # noqa: BLE001  kept as the cause, and never thrown at whoever else is in the task group
            words = str(error) or type(error).__name__
            lost = StreamBroken("stream_ended", f"{self._why}; not connected again: {words}".removeprefix("; "))
            lost.__cause__ = error
            self.lose(lost)
        return None

    def _hello(self) -> Ask:
        state = self.facts.get("state")
        code = f"_aresume {quote(state)}" if state else f"_ainit {' '.join(map(quote, PLACES))}"
        ask = Ask(self._key, code, b"")
        ask.code = f"_ak={self._key}\n_ash={quote(self.shell)}{PROGRAM}.\n".encode() + ask.code
        return ask

    async def _serve(self, connection: ExecConnection, task_status: TaskStatus[None] | None) -> None:
        """Use one connection until it ends. What was asked and not answered is for the next one."""
        self._heard = anyio.current_time()
        self._said = b""
        status: ExecStatus | None = None
        hello = self._hello()
        self._waiting.append(hello)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write, connection, hello)
                group.start_soon(self._watch, connection, group.cancel_scope)
                group.start_soon(self._attach, hello, task_status)
                status = await self._read(connection)
                group.cancel_scope.cancel()
        finally:
            self.attached = False
            self._fail_all()
            await close(connection)
        self._fruitless = 0 if self._answered > 1 else self._fruitless + 1
        self._answered = 0
        if not self._why:
            self._why = "the connection ended"
        if status is not None:
            self._why = ended(status)
            if status.exit_code is None and not self.facts:
                self.lose(SandboxLost("no_shell", status.message))
            elif not self.facts:
                self.lose(SandboxLost("no_shell", f"{self._why}: {self._said.decode('utf-8', 'replace')[-300:]}"))

    async def _attach(self, hello: Ask, task_status: TaskStatus[None] | None) -> None:
        await hello.done.wait()
        if hello.reply is None:
            return
        if hello.reply.result != "ok":
            again = bool(self.facts)
            detail = "the directory with the state of commands is gone" if again else "no directory can be written"
            self.lose(SandboxLost("no_state", detail))
            return
        if not self.facts:
            for line in hello.reply.data.decode("utf-8", "replace").splitlines():
                name, _, value = line.partition("=")
                if name == "missing":
                    self.missing.add(value)
                elif name:
                    self.facts[name] = value
            if self._workdir is not None:
                self.facts["workdir"] = self._workdir
        self.connections += 1
        self.attached = True
        self._wakeup.set()
        if task_status is not None:
            task_status.started()
        else:
            self._on_attached()

    def _fail_all(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for position, ask in enumerate(waiting):
            ask.interrupted = position == 0
            ask.done.set()

    # One connection.

    async def _write(self, connection: ExecConnection, hello: Ask) -> None:
        try:
            await connection.send(hello.code)
            await hello.done.wait()
            while True:
                if self.attached and self._queue:
                    ask = self._queue.popleft()
                    ask.sent = True
                    self._waiting.append(ask)
                    await connection.send(ask.code + ask.data)
                else:
                    self._wakeup = anyio.Event()
                    await self._wakeup.wait()
        except STREAM_ERRORS as error:
            # The reader finds the end of it, after what was still on its way.
            self._why = f"writing failed ({type(error).__name__})"

    async def _read(self, connection: ExecConnection) -> ExecStatus | None:
        """Take answers until there are no more; return how the shell ended, if it did."""
        buffer = bytearray()
        looked = 0
        while True:
            try:
                channel, data = await connection.receive()
            except STREAM_ERRORS as error:
                self._why = self._why or f"reading failed ({type(error).__name__})"
                return final(connection, error)
            self._heard = anyio.current_time()
            if channel != STDOUT:
                self._listen(data)
                continue
            buffer += data
            while self._waiting:
                ask = self._waiting[0]
                at = buffer.find(ask.marker, max(0, looked - len(ask.marker)))
                end = buffer.find(b"\n", at + len(ask.marker)) if at >= 0 else -1
                if end < 0:
                    looked = at if at >= 0 else len(buffer)
                    break
                result = bytes(buffer[at + len(ask.marker) : end])
                ask.reply = Reply(data=bytes(buffer[:at]), result=result.decode("utf-8", "replace"))
                del buffer[: end + 1]
                looked = 0
                self._waiting.popleft()
                self._answered += 1
                ask.done.set()
            if len(buffer) > MAX_REPLY:
                violation = SandboxLost("protocol", "an answer without end")
                violation.__cause__ = ProtocolError("an answer without end")
                self.lose(violation)
                return None

    def _listen(self, data: bytes) -> None:
        *lines, self._said = (self._said + data).split(b"\n")
        self._said = self._said[-MAX_LINE:]
        for line in lines:
            words = line.decode("utf-8", "replace").split()
            if words and words[0] == self._key:
                self._tell(words[1:])

    async def _watch(self, connection: ExecConnection, scope: anyio.CancelScope) -> None:
        while True:
            seen = self._heard
            await anyio.sleep(max(0.0, seen + self._heartbeat - anyio.current_time()))
            if self._heard != seen:
                continue
            with anyio.move_on_after(self._heartbeat_timeout) as limit:
                with suppress(*STREAM_ERRORS):
                    await connection.keep_alive()
                ask = Ask(self._key, ":", b"")
                self._queue.append(ask)
                self._wakeup.set()
                await ask.done.wait()
            if limit.cancelled_caught and self._heard == seen:
                self._why = f"no answer to a heartbeat within {self._heartbeat_timeout:g} s"
                scope.cancel()
                return
