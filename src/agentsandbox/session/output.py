# SPDX-License-Identifier: Apache-2.0
"""What is kept of a command's output: the head and the tail of each stream."""

from __future__ import annotations

from io import BytesIO

__all__ = ["HeadTail", "halves"]


def halves(limit: int) -> tuple[int, int]:
    """Return how many bytes of the head and of the tail of a stream are kept, together so many."""
    return limit - limit // 2, limit // 2


class HeadTail:
    """
    Keep all of a stream up to a limit; beyond it, the first half of the limit and the last.

    Memory stays at the limit plus an eighth: the head and a ring for the tail share one buffer, whose bytes become the
    result without being copied.

    Args:
        limit: Bytes to keep.

    """

    __slots__ = ("_buffer", "_head", "_limit", "_next", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = halves(limit)[0]
        self._buffer: BytesIO | None = None
        self._next = self._head  # where the oldest byte of the ring is, once it is full
        self.size = 0
        """Bytes seen, whether kept or not."""

    def __repr__(self) -> str:
        return f"<HeadTail [{min(self.size, self._limit)} of {self.size} bytes kept]>"

    @property
    def truncated(self) -> bool:
        """Whether the middle is missing."""
        return self.size > self._limit

    def append(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._buffer is None:
            self._buffer = BytesIO()
        room = self._limit - self.size
        self.size += len(data)
        if len(data) <= room:
            self._buffer.write(data)
            return
        rest = memoryview(data)
        if room > 0:
            self._buffer.write(rest[:room])
            rest = rest[room:]
        self._wrap(self._buffer, rest)

    def _wrap(self, buffer: BytesIO, rest: memoryview) -> None:
        ring = self._limit - self._head
        if not ring:
            return
        # Of more than the ring holds only the end matters, but the place of each byte stays what it would have been.
        if len(rest) > ring:
            skip = len(rest) - ring
            self._next = self._head + (self._next - self._head + skip) % ring
            rest = rest[skip:]
        while rest:
            part = rest[: self._limit - self._next]
            buffer.seek(self._next)
            buffer.write(part)
            self._next += len(part)
            if self._next == self._limit:
                self._next = self._head
            rest = rest[len(part) :]

    def take(self) -> bytes:
        """Return what was kept, in order, and forget it."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return b""
        if self.truncated and self._next != self._head:
            with buffer.getbuffer() as view:
                _rotate(view[self._head : self._limit], self._next - self._head)
        return buffer.getvalue()


def _rotate(view: memoryview, count: int) -> None:
    """Move the first *count* bytes to the end in place, with a copy of the smaller part only."""
    rest = len(view) - count
    if count <= rest:
        part = bytes(view[:count])
        view[:rest] = view[count:]
        view[rest:] = part
    else:
        part = bytes(view[count:])
        view[rest:] = view[:count]
        view[:rest] = part
