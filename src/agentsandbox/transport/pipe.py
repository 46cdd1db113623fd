# SPDX-License-Identifier: Apache-2.0
"""Streams that the operating system carries: a connected socket, or two pipes such as those of a child process."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["PipeStream", "SocketStream"]

SMALL_READ = 64 * 1024
"""Bytes to ask for in a read while little arrives …"""

LARGE_READ = 512 * 1024
"""… and while much does: two of the largest data frames."""

BUFFER_SIZE = 1024 * 1024
"""Bytes of kernel buffer to ask for, so that bulk data needs few turns of the event loop; Linux may give less."""

MAX_CHUNKS = 512
"""Chunks given to one system call; Linux takes 1024."""


class _DescriptorStream(ABC):
    """
    What sockets and pipes have in common.

    The descriptors are waited for and then read directly: the streams of anyio read at most 64 KiB at a time and join
    what is to be written.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._reads = reads
        self._writes = writes
        self._size = SMALL_READ
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"fd {self._reads}"
        return f"<{type(self).__name__} [{state}]>"

    async def receive(self) -> bytes:
        """Return the next bytes; see :meth:`agentsandbox.transport.ByteStream.receive`."""
        while True:
            await self._wait(anyio.wait_readable, self._reads)
            try:
                data = self._read(self._size)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise anyio.BrokenResourceError from error
            if not data:
                raise anyio.EndOfStream
            self._size = LARGE_READ if len(data) == self._size else SMALL_READ if len(data) < SMALL_READ else self._size
            return data

    async def send(self, chunks: Sequence[bytes]) -> None:
        """Write *chunks* in order; see :meth:`agentsandbox.transport.ByteStream.send`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        start, index = 0, 0  # bytes of chunks[index] that are written already
        while index < len(chunks):
            if self._closed:
                raise anyio.ClosedResourceError
            batch: list[bytes | memoryview] = list(chunks[index : index + MAX_CHUNKS])
            if start:
                batch[0] = memoryview(batch[0])[start:]
            try:
                written = self._write(batch)
            except (BlockingIOError, InterruptedError):
                await self._wait(anyio.wait_writable, self._writes)
                continue
            except OSError as error:
                raise anyio.BrokenResourceError from error
            written += start
            while index < len(chunks) and written >= len(chunks[index]):
                written -= len(chunks[index])
                index += 1
            start = written

    async def aclose(self) -> None:
        """Close the descriptors. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for descriptor in {self._reads, self._writes}:
            anyio.notify_closing(descriptor)
        self._close()
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def _wait(self, wait: Callable[[int], Awaitable[None]], descriptor: int) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        await wait(descriptor)  # raises the same when another task closes it meanwhile

    @abstractmethod
    def _read(self, size: int) -> bytes: ...

    @abstractmethod
    def _write(self, chunks: list[bytes | memoryview]) -> int: ...

    @abstractmethod
    def _close(self) -> None: ...


class SocketStream(_DescriptorStream):
    """
    A stream over one connected stream socket, such as an end of a :func:`socket.socketpair`.

    Args:
        sock: The socket. It belongs to the stream from now on and is made non-blocking.

    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)  # noqa: FBT003  it has no name
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_SIZE)
        self._socket = sock
        super().__init__(sock.fileno(), sock.fileno())

    def _read(self, size: int) -> bytes:
        return self._socket.recv(size)

    def _write(self, chunks: list[bytes | memoryview]) -> int:
        return self._socket.sendmsg(chunks, (), socket.MSG_NOSIGNAL)

    def _close(self) -> None:
        # Who inherited a copy of the descriptor must not keep the connection open.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class PipeStream(_DescriptorStream):
    """
    A stream over two pipes, such as standard output and standard input of a child process.

    Args:
        reads: Descriptor to read from. It belongs to the stream from now on and is made non-blocking.
        writes: Descriptor to write to, likewise.

    """

    def __init__(self, reads: int, writes: int) -> None:
        os.set_blocking(reads, False)
        os.set_blocking(writes, False)
        super().__init__(reads, writes)

    def _read(self, size: int) -> bytes:
        return os.read(self._reads, size)

    def _write(self, chunks: list[bytes | memoryview]) -> int:
        return os.writev(self._writes, chunks)

    def _close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)
