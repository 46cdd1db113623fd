# SPDX-License-Identifier: Apache-2.0
"""The runner's ends of a command's pipes."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import termios
from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Optional

from agentsandbox.protocol import frames

if TYPE_CHECKING:
    from .loop import Runner

PIPE = 64 * 1024
"""How much a pipe holds when it is made, in bytes."""

LARGE_PIPE = 1024 * 1024
"""How much it holds once it was found full, if the kernel agrees."""

F_SETPIPE_SZ = 1031

STDIN_WINDOW = 1024 * 1024
"""How much standard input may be on its way to a command, in bytes. Both sides know it."""

STDIN_CREDIT = 256 * 1024
"""Give credit back in steps of at least this, in bytes."""

MAX_CHUNKS = 64
"""How many chunks one system call writes."""


class Output:
    """The reading end of a pipe that a command writes to."""

    __slots__ = ("chunk", "fd", "kind", "owed", "polled", "total")

    def __init__(self, fd: int, kind: int) -> None:
        self.fd = fd
        self.kind = kind
        self.total = 0
        self.owed = 0
        """Bytes that were in the pipe when the main process ended: its own words, never dropped."""
        self.chunk = PIPE
        self.polled = False


class Input:
    """
    The writing end of a command's standard input.

    Args:
        runner: Whose command it is.
        number: The command's number.
        fd: The pipe; ``None`` if it has no standard input.

    """

    def __init__(self, runner: Runner, number: int, fd: Optional[int]) -> None:
        self._runner = runner
        self._number = number
        self._fd = fd
        self._queue: Deque[Any] = deque()
        self._size = 0
        self._ended = False
        self._polled = False
        self._granted = STDIN_WINDOW
        self._consumed = 0

    def __repr__(self) -> str:
        return "<Input [%s, %d bytes waiting]>" % ("closed" if self._fd is None else "open", self._size)

    def feed(self, data: bytes) -> None:
        """Pass bytes on; what nobody reads any more is swallowed."""
        self._granted -= len(data)
        if self._granted < 0:
            raise frames.FrameError("standard input of command %d exceeds its credit" % self._number)
        if self._fd is None or self._ended:
            self._give_credit(len(data))
            return
        self._queue.append(data)
        self._size += len(data)
        self._write()

    def end(self) -> None:
        """No more comes."""
        self._ended = True
        if not self._queue:
            self.close()

    def close(self) -> None:
        """Let the command see the end now, and drop what it has not read."""
        self._queue.clear()
        self._size = 0
        if self._fd is not None:
            if self._polled:
                self._polled = False
                self._runner.poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = None

    def _write(self) -> None:
        fd, queue, written = self._fd, self._queue, 0
        if fd is None:
            return
        try:
            while queue:
                batch = list(queue) if len(queue) <= MAX_CHUNKS else [queue[i] for i in range(MAX_CHUNKS)]
                size = os.writev(fd, batch)
                written += size
                while queue and size >= len(queue[0]):
                    size -= len(queue.popleft())
                if size:
                    queue[0] = memoryview(queue[0])[size:]
        except BlockingIOError:
            pass
        except OSError:  # the command has closed it
            written = self._size
            self.close()
        self._size = max(0, self._size - written)
        if written:
            self._give_credit(written)
        if self._fd is None:
            return
        if queue and not self._polled:
            self._polled = True
            if self._size > PIPE:
                enlarge(fd)
            self._runner.poller.watch(fd, select.EPOLLOUT, lambda _events: self._write())
        elif not queue:
            if self._polled:
                self._polled = False
                self._runner.poller.unwatch(fd)
            if self._ended:
                self.close()

    def _give_credit(self, size: int) -> None:
        self._consumed += size
        if self._consumed >= STDIN_CREDIT:
            self._granted += self._consumed
            self._runner.send(frames.CREDIT, self._number, frames.AMOUNT.pack(self._consumed))
            self._consumed = 0


def enlarge(fd: int) -> None:
    """Give a pipe that was found full more room, if the kernel agrees."""
    try:
        fcntl.fcntl(fd, F_SETPIPE_SZ, LARGE_PIPE)
    except OSError:
        pass


def readable_bytes(fd: int) -> int:
    """Return how many bytes are in a pipe."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])
