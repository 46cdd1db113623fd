# SPDX-License-Identifier: Apache-2.0
"""Two ends of a stream in memory, with the faults that real ones have at a place of the test's choosing."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MemoryStream", "memory_pair"]


class _Direction:
    """The bytes on their way from one end to the other."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.chunks: deque[bytes] = deque()
        self.size = 0
        self.carried = 0
        self.cut_at: int | None = None
        self.stalled = False
        self.ended = False
        self.broken = False
        self.closed_by_reader = False
        self._changed = anyio.Event()

    def wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        await self._changed.wait()


class MemoryStream:
    """
    One end of a pair; see :func:`memory_pair`.

    The faults are those of what this end sends.
    """

    def __init__(self, incoming: _Direction, outgoing: _Direction) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "broken" if self._outgoing.broken else "open"
        return f"<MemoryStream [{state}, {self._outgoing.carried} bytes sent]>"

    @property
    def sent(self) -> int:
        """How many bytes this end has sent."""
        return self._outgoing.carried

    async def receive(self) -> bytes:
        """Return the next bytes; see :meth:`agentsandbox.transport.ByteStream.receive`."""
        await anyio.lowlevel.checkpoint()
        way = self._incoming
        while True:
            if self._closed:
                raise anyio.ClosedResourceError
            if way.chunks and not way.stalled:
                data = way.chunks.popleft()
                way.size -= len(data)
                way.wake()
                return data
            if way.broken:
                raise anyio.BrokenResourceError
            if way.ended and not way.chunks:
                raise anyio.EndOfStream
            await way.change()

    async def send(self, chunks: Sequence[bytes]) -> None:
        """Write *chunks* in order; see :meth:`agentsandbox.transport.ByteStream.send`."""
        await anyio.lowlevel.checkpoint()
        way = self._outgoing
        for chunk in chunks:
            while way.size >= way.capacity and not (self._closed or way.broken or way.closed_by_reader):
                await way.change()
            if self._closed:
                raise anyio.ClosedResourceError
            if way.broken or way.closed_by_reader:
                raise anyio.BrokenResourceError
            room = len(chunk) if way.cut_at is None else way.cut_at - way.carried
            data = chunk[:room]
            if data:
                way.chunks.append(data)
                way.size += len(data)
                way.carried += len(data)
                way.wake()
            if way.carried == way.cut_at:
                self.cut()
                raise anyio.BrokenResourceError

    async def aclose(self) -> None:
        """End the stream; what was sent can still be received by the other end. Idempotent."""
        self._closed = True
        self._outgoing.ended = True
        self._incoming.closed_by_reader = True
        self._outgoing.wake()
        self._incoming.wake()
        await anyio.lowlevel.checkpoint_if_cancelled()

    def cut(self) -> None:
        """Break the stream now, both ways. What was sent before can still be received."""
        for way in (self._incoming, self._outgoing):
            way.broken = True
            way.wake()

    def cut_after(self, size: int) -> None:
        """Break the stream when this end has sent *size* bytes in all, in the middle of a chunk if it comes to that."""
        self._outgoing.cut_at = size

    def stall(self) -> None:
        """Let nothing of what this end sends arrive any more: the stream goes silent without ending."""
        self._outgoing.stalled = True

    def resume(self) -> None:
        """Let what was held back arrive."""
        self._outgoing.stalled = False
        self._outgoing.wake()


def memory_pair(capacity: int = 1024 * 1024) -> tuple[MemoryStream, MemoryStream]:
    """
    Make two connected ends.

    Args:
        capacity: Bytes on their way in one direction before a sender has to wait.

    """
    there, back = _Direction(capacity), _Direction(capacity)
    return MemoryStream(back, there), MemoryStream(there, back)
