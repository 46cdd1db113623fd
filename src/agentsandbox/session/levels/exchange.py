# SPDX-License-Identifier: Apache-2.0
"""One command over a connection of its own: its output, its input, its time limits."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING

import anyio

from agentsandbox.session.levels.bulk import PIECE
from agentsandbox.session.levels.ending import final
from agentsandbox.session.levels.limits import due
from agentsandbox.session.output import HeadTail
from agentsandbox.session.streams import STREAM_ERRORS, close, closing
from agentsandbox.transport.exec import STDERR, STDOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.models.command import Command
    from agentsandbox.transport.exec import ExecConnection
    from agentsandbox.transport.websocket import ExecStatus

__all__ = ["Exchange"]

MAX_QUEUED = 32 * 1024 * 1024
"""Bytes of output that may wait for a slow callback; then the connection is not read any further."""

NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Exchange:
    """
    A command that was started over *connection*.

    Args:
        connection: Its connection.
        command: What it is.
        keep_alive: Seconds of silence after which idle timers on the way are reset.
        queue: Whether somebody takes the output piece by piece.

    """

    def __init__(self, connection: ExecConnection, command: Command, *, keep_alive: float, queue: bool) -> None:
        self.connection = connection
        self.kept = HeadTail(command.output_limit), HeadTail(command.output_limit)
        self.done = anyio.Event()
        """Set when nothing more will come, or nobody waits any longer."""
        self.status: ExecStatus | None = None
        """How the command ended, once all that it wrote has arrived."""
        self.limit: str | None = None
        """Which time limit fired."""
        self.on_started: Callable[[], None] | None = None
        self.raised: Exception | None = None
        """What the caller's own code raised."""
        self._command = command
        self._keep_alive = keep_alive
        self._queue: deque[tuple[str, bytes]] | None = deque() if queue else None
        self._queued = 0
        self._changed = anyio.Event()
        self._heard = self._began = anyio.current_time()

    def __repr__(self) -> str:
        sizes = f"{self.kept[0].size} + {self.kept[1].size} bytes"
        return f"<Exchange [{'done' if self.done.is_set() else 'running'}, {sizes}]>"

    async def run(self) -> None:
        """Read until the end, beside a clock."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._clock)
            await self._read()
            group.cancel_scope.cancel()

    async def feed(self, data: bytes | AsyncIterable[bytes]) -> None:
        """Send standard input, and its end."""
        try:
            if isinstance(data, bytes):
                view = memoryview(data)
                for at in range(0, len(view), PIECE):
                    await self.connection.send(bytes(view[at : at + PIECE]))
            else:
                async with closing(data):
                    async for piece in data:
                        await self.connection.send(piece)
            await self.connection.end_stdin()
        except STREAM_ERRORS:
            return  # the reader finds the end, and whether there is a status
        except Exception as error:  # noqa: BLE001  the caller's, and passed on to it
            self.fail(error)

    async def next_piece(self) -> tuple[str, bytes] | None:
        """Return the next piece of output and its stream; ``None`` when there is no more."""
        assert self._queue is not None
        while not self._queue:
            if self.done.is_set():
                return None
            await self._changed.wait()
        name, data = self._queue.popleft()
        self._queued -= len(data)
        self._notify()
        return name, data

    def fail(self, error: Exception) -> None:
        """Note what the caller's own code raised: nobody waits for the command any longer."""
        self.raised = self.raised or error
        self._finish()

    def started(self) -> None:
        """Say so, once: the first output shows it, or the status."""
        callback, self.on_started = self.on_started, None
        if callback is not None:
            try:
                callback()
            except Exception as error:  # noqa: BLE001  the caller's, and passed on to it
                self.raised = error

    async def aclose(self) -> None:
        """Close the connection, with its handshake."""
        await close(self.connection)

    async def _read(self) -> None:
        while not self.done.is_set():
            try:
                channel, data = await self.connection.receive()
            except STREAM_ERRORS as error:
                self.status = final(self.connection, error)
                break
            self._heard = anyio.current_time()
            self.started()
            self.kept[0 if channel == STDOUT else 1].append(data)
            if self._queue is not None:
                self._queue.append((NAMES[channel], data))
                self._queued += len(data)
                self._notify()
                while self._queued > MAX_QUEUED and not self.done.is_set():
                    await self._changed.wait()
        self._finish()

    async def _clock(self) -> None:
        while not self.done.is_set():
            now = anyio.current_time()
            fires, limit = due(self._command, self._began, self._heard)
            if now >= fires:
                self.limit = limit
                self._finish()
                return
            await anyio.sleep(min(fires, now + self._keep_alive) - now)
            if anyio.current_time() >= now + self._keep_alive:
                try:
                    await self.connection.keep_alive()
                except STREAM_ERRORS:
                    return

    def _finish(self) -> None:
        self.done.set()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
