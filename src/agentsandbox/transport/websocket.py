# SPDX-License-Identifier: Apache-2.0
"""
A stream over the websocket of ``pods/exec``, as Kubernetes frames it.

Each message begins with a channel byte: 0 standard input, 1 standard output, 2 standard error, 3 the final status, 4
terminal size, and in ``v5.channel.k8s.io`` 255 for the end of the channel that follows. Messages are cut anywhere. The
server closes with 1006 right after the status, so that only the status says how a command ended; and it closes without
one when nobody in the sandbox holds the command's standard error any more. asyncio only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import attrs

if TYPE_CHECKING:
    import aiohttp

__all__ = ["MAX_MESSAGE", "PROTOCOLS", "ExecSocket", "ExecStatus", "ExecStream"]

V5 = "v5.channel.k8s.io"
V4 = "v4.channel.k8s.io"
PROTOCOLS = (V5, V4)
"""What to offer, best first: v5 can end standard input, v4 cannot."""

MAX_MESSAGE = 16 * 1024 * 1024
"""The largest message to accept, in bytes. Servers send some 32 KiB; proxies on the way may join them."""

STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255

SEND_SIZE = 256 * 1024
"""Bytes of standard input in one message."""

STATUS_LIMIT = 64 * 1024
"""Bytes of a status that are read; a server that sends more is broken."""

STDERR_KEPT = 4096
"""Bytes of standard error that are kept to explain why a stream ended."""

TLS_BUFFER = 32 * 1024
"""Bytes that a TLS connection reads at once: two of its records."""

KEEPALIVE_SIZE = json.dumps({"Width": 80, "Height": 24}).encode()


@attrs.frozen(kw_only=True)
class ExecStatus:
    """How the server says that a command ended."""

    exit_code: int | None
    """The exit code; ``None`` if the command could not be started or its end is not known."""
    reason: str = ""
    """The reason of the status, such as ``NonZeroExitCode`` or ``InternalError``."""
    message: str = ""
    """Its words."""

    @classmethod
    def parse(cls, raw: bytes) -> ExecStatus | None:
        """Read the JSON of channel 3; ``None`` as long as it is not whole."""
        try:
            value = json.loads(raw)
        except ValueError:
            return None
        if not isinstance(value, dict):
            return cls(exit_code=None, reason="Malformed", message=repr(value)[:200])
        reason, message = str(value.get("reason", "")), str(value.get("message", ""))
        if value.get("status") == "Success":
            return cls(exit_code=0)
        return cls(exit_code=_exit_code(value) if reason == "NonZeroExitCode" else None, reason=reason, message=message)


def _exit_code(value: dict[str, Any]) -> int | None:
    details = value.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    for cause in causes if isinstance(causes, list) else ():
        if isinstance(cause, dict) and cause.get("reason") == "ExitCode":
            with suppress(ValueError):
                return int(str(cause.get("message")))
    return None


def _slim(socket: Any) -> None:
    """
    Let go of most of what asyncio sets aside to read from a TLS connection: 256 KiB each, which is most of a sandbox.

    Nothing public leads there. Where the way is another one, as with other event loops, the memory is kept.
    """
    transport = getattr(getattr(getattr(socket, "_response", None), "connection", None), "transport", None)
    protocol: Any = getattr(transport, "_ssl_protocol", None)
    if getattr(protocol, "max_size", 0) > TLS_BUFFER and isinstance(getattr(protocol, "_ssl_buffer", None), bytearray):
        protocol.max_size = TLS_BUFFER
        protocol._ssl_buffer = bytearray(TLS_BUFFER)  # noqa: SLF001
        protocol._ssl_buffer_view = memoryview(protocol._ssl_buffer)  # noqa: SLF001


class ExecSocket:
    """
    The channels of one exec websocket.

    Args:
        socket: The open websocket. It belongs to this object from now on.

    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        _slim(socket)
        self._status_bytes = b""
        self.protocol: str = socket.protocol or V4
        """The protocol that was agreed on. A server that names none speaks the older one."""
        self.status: ExecStatus | None = None
        """How the command ended, once the server has said so. Without it the outcome is unknown."""
        self.close_code: int | None = None
        """The code of the server's close, once it has closed."""

    def __repr__(self) -> str:
        return f"<ExecSocket [{self.protocol}, {self.status or 'open'}]>"

    async def receive(self) -> tuple[int, bytes]:
        """
        Return the next piece of output, its channel first.

        Raises:
            anyio.EndOfStream: If the server ended the stream; whether with a :attr:`status` decides what that means.
            anyio.BrokenResourceError: If the connection broke.

        """
        import aiohttp

        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.BINARY or message.type is aiohttp.WSMsgType.TEXT:
                data = message.data if isinstance(message.data, bytes) else message.data.encode()
                if len(data) < 2:  # nothing but the channel: the server opens each with one
                    continue
                if data[0] == STATUS:
                    self._status_bytes = (self._status_bytes + data[1:])[:STATUS_LIMIT]
                    self.status = ExecStatus.parse(self._status_bytes)
                elif data[0] in (STDOUT, STDERR):
                    return data[0], data[1:]
            elif message.type is aiohttp.WSMsgType.ERROR:
                self.close_code = self._socket.close_code
                raise anyio.BrokenResourceError from message.data
            elif message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
                self.close_code = self._socket.close_code
                raise anyio.EndOfStream

    async def send(self, data: bytes) -> None:
        """Send a piece of standard input; cut into messages of bearable size."""
        view = memoryview(data)
        for start in range(0, len(view), SEND_SIZE):
            await self._send(b"\0" + view[start : start + SEND_SIZE])

    async def end_stdin(self) -> bool:
        """End standard input; ``False`` if the agreed protocol cannot."""
        if self.protocol != V5:
            return False
        await self._send(bytes((CLOSE, STDIN)))
        return True

    async def keep_alive(self) -> None:
        """
        Send something harmless that counts as traffic everywhere on the path.

        Pings reset no timer behind a proxy that ends the websocket; a terminal size for a command without a terminal is
        ignored by the kubelet.
        """
        await self._send(bytes((RESIZE,)) + KEEPALIVE_SIZE)

    async def aclose(self) -> None:
        """Close with a handshake: some runtimes leak what is only cut off. Idempotent."""
        await self._socket.close()

    async def _send(self, message: bytes) -> None:
        try:
            await self._socket.send_bytes(message)
        except (ConnectionError, RuntimeError) as error:  # aiohttp raises either, by how it learnt of the end
            raise anyio.BrokenResourceError from error


class ExecStream:
    """
    The stream to a runner through an exec websocket: a :class:`agentsandbox.transport.ByteStream`.

    Args:
        socket: The websocket of a command that carries the runner's stream on its standard input and output.

    """

    def __init__(self, socket: ExecSocket) -> None:
        self._socket = socket
        self._closed = False
        self.stderr = b""
        """What the command wrote to standard error, its end: the reason if it is not a runner that answers."""

    def __repr__(self) -> str:
        return f"<ExecStream over {self._socket!r}>"

    @property
    def status(self) -> ExecStatus | None:
        """How the command that carries the stream ended, if the server said so."""
        return self._socket.status

    async def receive(self) -> bytes:
        """Return the next bytes; see :meth:`agentsandbox.transport.ByteStream.receive`."""
        while not self._closed:
            try:
                channel, data = await self._socket.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                if self._closed:
                    break
                raise
            if channel == STDOUT:
                return data
            self.stderr = (self.stderr + data)[-STDERR_KEPT:]
        raise anyio.ClosedResourceError

    async def send(self, chunks: Sequence[bytes]) -> None:
        """Write *chunks* in order; see :meth:`agentsandbox.transport.ByteStream.send`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise anyio.ClosedResourceError
        batch: list[bytes] = []
        size = 0
        for chunk in chunks:
            if size + len(chunk) > SEND_SIZE and batch:
                await self._socket.send(b"".join(batch))
                batch, size = [], 0
            batch.append(chunk)
            size += len(chunk)
        if batch:
            await self._socket.send(b"".join(batch))

    async def aclose(self) -> None:
        """Close it at once. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._socket.aclose()
