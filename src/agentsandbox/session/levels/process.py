# SPDX-License-Identifier: Apache-2.0
"""A live command of a shell session: its streams are files in the sandbox that grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from agentsandbox.errors import SandboxLost
from agentsandbox.session.levels.results import outcome
from agentsandbox.session.process import Closing, Pieces

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agentsandbox.models.command import ExecResult
    from agentsandbox.session.levels.call import Call
    from agentsandbox.session.levels.commands import Commands

__all__ = ["Feed", "ShellInput", "ShellOutput", "ShellProcess", "Tail"]

CHUNK = 1024 * 1024
"""Bytes of standard input in one file."""

AHEAD = 4
"""Files of standard input that may wait for being read."""

FIRST_POLL, LAST_POLL = 0.01, 0.2
"""Seconds between two looks: the shortest, after something came, and the longest."""


class Tail:
    """The output of a command from the beginning on, as far as it is there."""

    def __init__(self, commands: Commands, call: Call, name: str) -> None:
        self._commands = commands
        self._call = call
        self._name = f"{call.number}.{name}"
        self._end: int | None = None
        self.offset = 0
        """Bytes read."""

    async def read(self) -> bytes:
        """Return what follows, or nothing; what leftovers of a command that has ended write later is nothing."""
        if self._call.done.is_set() and self._end is None:
            self._end = await self.size()
        if self._end is not None and self.offset >= self._end:
            return b""
        data = await self._commands.store.read_some(self._name, self.offset)
        if self._end is not None:
            data = data[: self._end - self.offset]
        self.offset += len(data)
        return data

    async def size(self) -> int:
        """Return how much there is in all."""
        return await self._commands.store.size(self._name)


class Feed:
    """Standard input of a command, as a row of small files that a process in the sandbox passes on one by one."""

    def __init__(self, commands: Commands, call: Call) -> None:
        self._commands = commands
        self._call = call
        self._next = 0
        self._ended = False

    async def send(self, data: bytes) -> None:
        """
        Pass *data* on; return when all of it is under way.

        Raises:
            anyio.ClosedResourceError: If the input was ended.
            anyio.BrokenResourceError: If the command has ended or reads no more.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data)
        for at in range(0, len(view), CHUNK):
            if self._ended:
                raise anyio.ClosedResourceError
            await self._room()
            number = self._next
            # The name appears when it is complete, so that no half is passed on.
            name = f"{self._call.number}.in.{number}"
            await self._commands.store.stage(f"{name}.new", bytes(view[at : at + CHUNK]))
            await self._commands.control.request(f'[ ! -e "$_aS/{name}.new" ]||mv "$_aS/{name}.new" "$_aS/{name}"')
            self._next += 1

    async def end(self) -> None:
        """Let the command see the end of its input. Idempotent."""
        if not self._ended and not self._call.done.is_set():
            self._ended = True
            await self._commands.control.request(f"printf '' >\"$_aS/{self._call.number}.in.{self._next}.end\"")

    async def _room(self) -> None:
        pause = FIRST_POLL
        while not self._call.done.is_set():
            oldest = f"{self._call.number}.in.{self._next - AHEAD}"
            reply = await self._commands.control.request(
                f'_ar=room;[ ! -e "$_aS/{oldest}" ]||_ar=full;[ ! -e "$_aS/{self._call.number}.fed" ]||_ar=fed'
            )
            if reply.result == "room":
                return
            if reply.result == "fed":
                break
            with anyio.move_on_after(pause):
                await self._call.done.wait()
            pause = min(pause * 1.5, LAST_POLL)
        raise anyio.BrokenResourceError


class ShellInput:
    """Standard input of a live command."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def send(self, data: bytes) -> None:
        """
        Write *data*; return when all of it is under way.

        Raises:
            anyio.ClosedResourceError: If standard input was closed.
            anyio.BrokenResourceError: If the command has ended or reads no more.
            SandboxLost: If the sandbox was lost.

        """
        await self._feed.send(bytes(data))

    async def aclose(self) -> None:
        """Let the command see the end of its standard input. Idempotent."""
        try:
            await self._feed.end()
        except SandboxLost:
            return


class ShellOutput(Pieces):
    """One output stream of a live command: iterate over it for pieces of bytes."""

    def __init__(self, commands: Commands, call: Call, tail: Tail) -> None:
        self._commands = commands
        self._call = call
        self._tail = tail

    async def receive(self) -> bytes:
        """
        Return the next bytes, at least one.

        Raises:
            anyio.EndOfStream: If the command has ended and everything was read.
            SandboxLost: If the sandbox was lost.

        """
        pause = FIRST_POLL
        while True:
            if self._commands.control.lost is not None:
                raise self._commands.control.loss()
            done = self._call.done.is_set()
            if data := await self._tail.read():
                return data
            if done:
                raise anyio.EndOfStream
            with anyio.move_on_after(pause):
                await self._call.done.wait()
            pause = min(pause * 1.5, LAST_POLL)


class ShellProcess(Closing):
    """
    A command with live streams. Use it as an async context manager: leaving it kills what still runs.

    Made by :meth:`ShellSession.open_process`; it has the interface of :class:`agentsandbox.session.Process`.
    """

    def __init__(self, commands: Commands, call: Call, clean: Callable[[Call], Awaitable[None]]) -> None:
        self._commands = commands
        self._call = call
        self._clean = clean
        self._closed = False
        self.stdin = ShellInput(Feed(commands, call))
        """Standard input."""
        self._result: ExecResult | None = None
        self._tails = Tail(commands, call, "out"), Tail(commands, call, "err")
        self.stdout = ShellOutput(commands, call, self._tails[0])
        """Standard output."""
        self.stderr = ShellOutput(commands, call, self._tails[1])
        """Standard error; empty when it is merged."""

    def __repr__(self) -> str:
        return f"<ShellProcess [pid {self.pid}, {self._call!r}]>"

    @property
    def pid(self) -> int:
        """The process id inside the sandbox."""
        assert self._call.pid is not None
        return self._call.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet, as far as is known."""
        return not self._call.done.is_set()

    async def wait(self) -> ExecResult:
        """
        Wait until the command ends.

        Returns:
            The result with its output empty and its sizes true.

        Raises:
            CommandTimeout: If one of its time limits fired.
            SandboxLost: If the sandbox was lost.

        """
        await self._commands.wait(self._call)
        if self._result is None:
            sizes = (0, 0)
            if self._commands.control.lost is None:
                sizes = await self._tails[0].size(), await self._tails[1].size()
            self._result = await outcome(self._commands.store, self._call, (b"", b""), sizes)
        return self._result

    async def kill(self) -> None:
        """
        Kill the command and everything it started, and return when that is verified.

        If it is not confirmed in time, the sandbox counts as lost.
        """
        await self._commands.kill(self._call)

    async def aclose(self) -> None:
        """Kill the command if it still runs. Idempotent."""
        try:
            await self.kill()
        finally:
            if not self._closed:
                self._closed = True
                self._commands.release(self._call)
                await self._clean(self._call)
