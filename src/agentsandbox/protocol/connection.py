# SPDX-License-Identifier: Apache-2.0
"""
One end of the link between a driver and a runner: bytes in, frames out, and nothing lost when the stream is.

Every frame but those of the link itself is counted on both ends. The sender keeps it until the receiver's count has
passed it. When a stream breaks, both ends tell each other on the next one how many frames they have, and send the
rest again: nothing is lost, and nothing arrives twice. That is why a command is executed at most once.

What is kept is bounded by those who send: output and standard input travel under credit, and a sender stops reading its
source while :attr:`Connection.unacknowledged` is above its limit.

This module runs on both sides, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Mapping, Tuple

from .frames import ACK, COUNT, EXACT, HEADER, LINK_FRAMES, Frame, FrameError, encode

ACK_FRAMES = 64
"""Acknowledge at the latest after so many numbered frames …"""

ACK_BYTES = 512 * 1024
"""… or after so many bytes of them, so that the other side can forget what it keeps."""

Chunks = Tuple[bytes, bytes]


class Connection:
    """
    The state of one end.

    Args:
        accepts: Frame types that may arrive, with their largest payload in bytes.

    """

    def __init__(self, accepts: Mapping[int, int]) -> None:
        self._accepts: Dict[int, int] = dict(accepts)
        self._buffer = bytearray()
        self._out: List[bytes] = []
        self._kept: Deque[Chunks] = deque()
        self._forgotten = 0  # how many numbered frames the other side has for certain
        self._unreported_frames = 0
        self._unreported_bytes = 0
        self._acknowledge = False
        self.attached = False
        """Whether numbered frames go out now; they are only kept while this is false."""
        self.received = 0
        """How many numbered frames have arrived since the beginning."""
        self.unacknowledged = 0
        """Bytes of numbered frames that the other side has not acknowledged."""

    def __repr__(self) -> str:
        return "<Connection [%s, %d received, %d kept, %d bytes]>" % (
            "attached" if self.attached else "detached",
            self.received,
            len(self._kept),
            self.unacknowledged,
        )

    def send(self, kind: int, command: int, payload: bytes = b"") -> None:
        """Queue a frame. Numbered frames are kept until acknowledged, and wait while no stream is attached."""
        header = encode(kind, command, payload)
        if kind not in LINK_FRAMES:
            self._kept.append((header, payload))
            self.unacknowledged += len(header) + len(payload)
            if not self.attached:
                return
        self._out.append(header)
        if payload:
            self._out.append(payload)

    @property
    def pending(self) -> bool:
        """Whether :meth:`data_to_send` has something to give."""
        return bool(self._out) or self._acknowledge

    def data_to_send(self) -> List[bytes]:
        """Take the chunks that are to be written to the stream now, in order."""
        chunks, self._out = self._out, []
        if self._acknowledge:
            # Made here and not when it fell due: a peer that sends without reading cannot make them pile up.
            self._acknowledge = False
            count = COUNT.pack(self.received)
            chunks.append(encode(ACK, 0, count) + count)
        return chunks

    def receive_data(self, data: bytes) -> List[Frame]:
        """
        Take bytes from the stream.

        Returns:
            The frames that are complete now, acknowledgements taken out.

        Raises:
            FrameError: If a frame is of an unknown type, of a wrong size, or acknowledges what was never sent.

        """
        buffer = self._buffer
        if buffer:
            buffer += data
        source = buffer or data
        frames: List[Frame] = []
        offset, size = 0, len(source)
        try:
            with memoryview(source) as view:
                while size - offset >= HEADER.size:
                    kind, command, length = HEADER.unpack_from(view, offset)
                    self._check(kind, length)
                    begin = offset + HEADER.size
                    if begin + length > size:
                        break
                    payload = view[begin : begin + length].tobytes()
                    offset = begin + length
                    if kind == ACK:
                        self._forget(COUNT.unpack(payload)[0])
                        continue
                    if kind not in LINK_FRAMES:
                        self._count(HEADER.size + length)
                    frames.append(Frame(kind, command, payload))
        finally:
            if source is buffer:
                del buffer[:offset]
            elif offset < size:
                buffer += source[offset:]
        return frames

    def acknowledge(self) -> None:
        """Tell the other side now what has arrived, if it does not know already."""
        if self._unreported_frames and self.attached:
            self._unreported_frames = self._unreported_bytes = 0
            self._acknowledge = True

    def detach(self) -> None:
        """Drop what was half read and half written, because the stream is gone; numbered frames stay."""
        self.attached = False
        self._buffer.clear()
        self._out.clear()
        self._unreported_frames = self._unreported_bytes = 0
        self._acknowledge = False

    def attach(self, received: int) -> None:
        """
        Queue again what the other side lacks, because a new stream is there and it has *received* numbered frames.

        Raises:
            FrameError: If it claims frames that were never sent, or lacks frames that it had acknowledged.
            RuntimeError: If the stream before it was not detached; frames would arrive twice.

        """
        if self.attached:
            raise RuntimeError("detach the old stream first")
        if type(received) is not int:  # it comes from JSON, and neither 1.5 nor True is a count
            raise FrameError("the other side counts %r frames" % (received,))
        self._forget(received)
        self.attached = True
        for header, payload in self._kept:
            self._out.append(header)
            if payload:
                self._out.append(payload)

    def _check(self, kind: int, length: int) -> None:
        limit = self._accepts.get(kind)
        if limit is None:
            raise FrameError("frame of unknown type %d" % kind)
        if length > limit:
            raise FrameError("frame of type %d with %d bytes exceeds its limit of %d" % (kind, length, limit))
        if EXACT.get(kind, length) != length:
            raise FrameError("frame of type %d with %d bytes instead of %d" % (kind, length, EXACT[kind]))

    def _count(self, size: int) -> None:
        self.received += 1
        self._unreported_frames += 1
        self._unreported_bytes += size
        if self._unreported_frames >= ACK_FRAMES or self._unreported_bytes >= ACK_BYTES:
            self.acknowledge()

    def _forget(self, received: int) -> None:
        if not self._forgotten <= received <= self._forgotten + len(self._kept):
            raise FrameError(
                "the other side claims %d frames of %d to %d"
                % (received, self._forgotten, self._forgotten + len(self._kept))
            )
        while self._forgotten < received:
            header, payload = self._kept.popleft()
            self.unacknowledged -= len(header) + len(payload)
            self._forgotten += 1
