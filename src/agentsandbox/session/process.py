# SPDX-License-Identifier: Apache-2.0
"""A command with live streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import anyio

from agentsandbox.protocol.frames import STDERR, STDOUT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from agentsandbox.models.command import Command, ExecResult
    from agentsandbox.session.call import Call
    from agentsandbox.session.calls import Calls

__all__ = ["Closing", "InputStream", "OutputStream", "Pieces", "Process"]


class Pieces(ABC):
    """What gives pieces of bytes until it ends: iterate over it."""

    @abstractmethod
    async def receive(self) -> bytes:
        """Return the next bytes, at least one."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class Closing(ABC):
    """What is closed when its context is left."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class OutputStream(Pieces):
    """
    One output stream of a live command: iterate over it for pieces of bytes.

    Both streams of a command share one window: who reads one of them only should start the command with ``merge=True``,
    or a full other one stops the command, as it does with pipes.
    """

    def __init__(self, calls: Calls, call: Call, kind: int) -> None:
        self._calls = calls
        self._call = call
        self._kind = kind

    async def receive(self) -> bytes:
        """
        Return the next bytes, at least one.

        Raises:
            anyio.EndOfStream: If the command has ended and everything was read.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        call = self._call
        assert call.queues is not None
        queue = call.queues[self._kind]
        await anyio.lowlevel.checkpoint_if_cancelled()
        while not queue:
            if call.done.is_set():
                if call.lost:
                    raise self._calls.loss()
                raise anyio.EndOfStream
            await self._calls.wait(call, call.changed)
        data = queue.pop()[1]
        call.consumed(len(data))
        return data


class InputStream:
    """Standard input of a live command."""

    def __init__(self, calls: Calls, call: Call) -> None:
        self._calls = calls
        self._call = call

    async def send(self, data: bytes) -> None:
        """
        Write *data*; return when all of it is under way.

        Raises:
            anyio.ClosedResourceError: If standard input was closed.
            anyio.BrokenResourceError: If the command has ended.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        call = self._call
        await anyio.lowlevel.checkpoint_if_cancelled()
        rest = memoryview(data)
        while True:
            if call.done.is_set():
                raise self._calls.loss() if call.lost else anyio.BrokenResourceError
            if not call.input_open:
                raise anyio.ClosedResourceError
            rest = rest[call.feed(rest) :]
            if not rest:
                return
            if not call.input_size():
                await self._calls.wait(call, call.changed)

    async def aclose(self) -> None:
        """Let the command see the end of its standard input. Idempotent."""
        self._call.end_input()
        await anyio.lowlevel.checkpoint_if_cancelled()


class Process(Closing):
    """
    A command with live streams. Use it as an async context manager: leaving it kills what still runs.

    Made by :meth:`Session.open_process`.
    """

    def __init__(self, calls: Calls, call: Call, command: Command) -> None:
        self._calls = calls
        self._call = call
        self._command = command
        self.stdin = InputStream(calls, call)
        """Standard input."""
        self.stdout = OutputStream(calls, call, STDOUT)
        """Standard output."""
        self.stderr = OutputStream(calls, call, STDERR)
        """Standard error; empty when it is merged."""

    def __repr__(self) -> str:
        return f"<Process [pid {self.pid}, {self._call!r}]>"

    @property
    def pid(self) -> int:
        """The process id inside the sandbox."""
        assert self._call.pid is not None
        return self._call.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet, as far as is known."""
        return not self._call.done.is_set()

    @property
    def report(self) -> Mapping[str, Any]:
        """What a builtin had to say when it ended; empty until then."""
        return self._call.exit.report if self._call.exit is not None else {}

    async def wait(self) -> ExecResult:
        """
        Wait until the command ends. Somebody must read its output meanwhile, or a full window stops it.

        Returns:
            The result with its output empty and its sizes true.

        Raises:
            CommandTimeout: If one of its time limits fired.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        await self._calls.wait(self._call, self._call.done)
        return self._calls.outcome(self._call, self._command)

    async def kill(self) -> None:
        """
        Kill the command and everything it started, and return when that is verified. Unread output is dropped.

        If it is not confirmed in time, the sandbox counts as lost.
        """
        await self._calls.kill(self._call)

    async def end(self, within: float) -> None:
        """
        Close standard input, drop unread output, and wait for the command to end by itself; kill it if it does not.

        Args:
            within: How long it may take, in seconds.

        """
        if not self._call.done.is_set():
            self._call.end_input()
            self._call.abandon()
            with anyio.move_on_after(within, shield=True):
                await self._call.done.wait()
        await self.kill()

    async def aclose(self) -> None:
        """Kill the command if it still runs. Idempotent."""
        await self.kill()
