# SPDX-License-Identifier: Apache-2.0
"""Streams that want to be attached: they say HELLO with the nonce, or they are turned away."""

from __future__ import annotations

import array
import hmac
import os
import select
import socket
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from agentsandbox.protocol import frames

from .stream import Stream

if TYPE_CHECKING:
    from .loop import Runner
    from .timers import Timer

MAX_HELLO = 4096
"""The largest HELLO, in bytes: it comes from somebody who has not shown the nonce yet."""

MAX_WAITING = 16
"""How many streams may wait to say HELLO; the oldest gives way."""

HELLO_WITHIN = 10.0
"""How long an accepted stream may take to say it, in seconds."""

HANDED_WITHIN = 1.0
"""How long who connects may take to hand over a stream, in seconds."""

GREETING = b"runner\n"
"""What a stream that was handed over is told first: here is a runner, and it needs no program any more."""

BREATH = 0.1
"""How long not to accept when there are no descriptors left, in seconds."""


class Door:
    """
    The streams that have not said who they are.

    Args:
        runner: Whom they want to be attached to.
        nonce: What they must know.
        accept: A listening socket, if more than the first stream may come.
        handed: Whether who connects hands over a stream, and waits for :data:`GREETING` before it says HELLO.

    """

    def __init__(self, runner: Runner, nonce: str, accept: Optional[int], *, handed: bool = False) -> None:
        self._runner = runner
        self._nonce = nonce.encode()
        self._waiting: Dict[Stream, bytearray] = {}
        self._timers: Dict[Stream, Timer] = {}
        self._handed = handed
        self._listener = None if accept is None else socket.socket(fileno=accept)
        if self._listener is not None:
            self._listener.setblocking(False)
            self._listen()

    def __repr__(self) -> str:
        return "<Door [%d waiting]>" % len(self._waiting)

    def greet(self, stream: Stream, *, within: Optional[float] = None) -> None:
        """Wait for a stream to say HELLO."""
        if len(self._waiting) >= MAX_WAITING:
            self._dismiss(next(iter(self._waiting)))
        self._waiting[stream] = bytearray()
        if within is not None:
            self._timers[stream] = self._runner.timers.after(within, lambda: self._dismiss(stream))
        self._runner.poller.watch(stream.reader, select.EPOLLIN, lambda _events: self._read(stream))

    def close(self) -> None:
        """Turn everybody away."""
        for stream in list(self._waiting):
            self._forget(stream)
            self._runner.close(stream)

    def _listen(self) -> None:
        assert self._listener is not None
        self._runner.poller.watch(self._listener.fileno(), select.EPOLLIN, self._knock)

    def _knock(self, _events: int) -> None:
        assert self._listener is not None
        try:
            connection = self._listener.accept()[0]
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._runner.poller.unwatch(self._listener.fileno())
            self._runner.timers.after(BREATH, self._listen)
            return
        if self._handed:
            self._expect(connection)
            return
        fd = connection.detach()
        self.greet(Stream(fd, fd), within=HELLO_WITHIN)

    def _expect(self, connection: socket.socket) -> None:
        connection.setblocking(False)

        def arrived(_events: int) -> None:
            timer.cancel()
            self._runner.poller.unwatch(connection.fileno())
            stream = take_over(connection)
            if stream is not None:
                stream.write([GREETING])
                self.greet(stream, within=HELLO_WITHIN)

        def late() -> None:
            self._runner.poller.unwatch(connection.fileno())
            connection.close()

        timer = self._runner.timers.after(HANDED_WITHIN, late)
        self._runner.poller.watch(connection.fileno(), select.EPOLLIN, arrived)

    def _read(self, stream: Stream) -> None:
        data = stream.read()
        if data is None:
            return
        if not data:
            self._dismiss(stream)
            return
        buffer = self._waiting[stream]
        buffer += data
        if len(buffer) < frames.HEADER.size:
            return
        kind, _, length = frames.HEADER.unpack_from(buffer)
        if kind != frames.HELLO or length > MAX_HELLO:
            self._dismiss(stream, "the stream does not begin with HELLO")
            return
        end = frames.HEADER.size + length
        if len(buffer) < end:
            return
        try:
            hello = frames.load(bytes(buffer[frames.HEADER.size : end]))
        except frames.FrameError as error:
            self._dismiss(stream, str(error))
            return
        received = hello.get("received")
        if not hmac.compare_digest(str(hello.get("nonce")).encode("utf-8", "replace"), self._nonce):
            self._dismiss(stream, "wrong nonce")
        elif hello.get("version") != frames.VERSION:
            self._dismiss(stream, "version %r is not spoken here, only %d" % (hello.get("version"), frames.VERSION))
        elif not isinstance(received, int) or isinstance(received, bool) or received < 0:
            self._dismiss(stream, "HELLO without a count of received frames")
        else:
            rest = bytes(buffer[end:])
            self._forget(stream)
            self._runner.attach(stream, received)
            if rest:
                self._runner.received(rest)

    def _forget(self, stream: Stream) -> None:
        del self._waiting[stream]
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()

    def _dismiss(self, stream: Stream, reason: str = "") -> None:
        self._forget(stream)
        if reason:
            stream.write(refusal(reason))
        self._runner.close(stream)
        self._runner.turned_away()


def refusal(reason: str) -> List[Any]:
    """Return the chunks of a REFUSED frame."""
    payload = frames.dump({"reason": reason[:1000]})
    return [frames.encode(frames.REFUSED, 0, payload), payload]


def take_over(connection: socket.socket) -> Optional[Stream]:
    """Return the stream that a relay hands over; ``None`` if it is no relay. The connection is used up either way."""
    size = array.array("i").itemsize
    numbers = array.array("i")
    try:
        ancillary = connection.recvmsg(1, socket.CMSG_SPACE(2 * size), socket.MSG_CMSG_CLOEXEC)[1]
    except OSError:
        ancillary = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % size])
    if len(numbers) == 2:
        return Stream(numbers[0], numbers[1], connection.detach())
    for number in numbers:
        os.close(number)
    connection.close()
    return None
