# SPDX-License-Identifier: Apache-2.0
"""A duplex byte stream over one socket or two pipes, without blocking."""

from __future__ import annotations

import os
from collections import deque
from typing import Any, Deque, Iterable, Optional

MAX_READ = 256 * 1024 + 4096
"""How much is read in one turn, in bytes: a full data frame and something beside it."""

MAX_CHUNKS = 512
"""How many chunks one system call writes (the kernel takes 1,024)."""


class Stream:
    """
    A stream that somebody attached.

    Args:
        reader: Where bytes come from.
        writer: Where they go to; the same descriptor for a socket.
        relay: A connection to whoever handed them over, who leaves when it is closed.

    """

    def __init__(self, reader: int, writer: int, relay: Optional[int] = None) -> None:
        self.reader = reader
        self.writer = writer
        self.relay = relay
        self.pending = 0
        """Bytes that the other side has not taken yet."""
        self.polled = False
        """Whether the loop waits until more can be written."""
        self._chunks: Deque[Any] = deque()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def __repr__(self) -> str:
        return "<Stream [%d → %d, %d bytes pending]>" % (self.reader, self.writer, self.pending)

    def read(self) -> Optional[bytes]:
        """Return what is there, ``b""`` at the end, or ``None`` if nothing is there yet."""
        try:
            return os.read(self.reader, MAX_READ)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def write(self, chunks: Iterable[bytes]) -> bool:
        """Write what can be written now, and keep the rest; false if the other side is gone."""
        queue = self._chunks
        for chunk in chunks:
            queue.append(chunk)
            self.pending += len(chunk)
        try:
            while queue:
                batch = list(queue) if len(queue) <= MAX_CHUNKS else [queue[i] for i in range(MAX_CHUNKS)]
                size = os.writev(self.writer, batch)
                self.pending -= size
                while queue and size >= len(queue[0]):
                    size -= len(queue.popleft())
                if size:
                    queue[0] = memoryview(queue[0])[size:]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reader)
        if self.writer != self.reader:
            os.close(self.writer)
        if self.relay is not None:
            os.close(self.relay)
