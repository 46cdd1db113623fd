# SPDX-License-Identifier: Apache-2.0
"""
The wire format between the driver and the runner.

A frame is a header of 9 bytes, ``type:u8 command:u32 length:u32`` in network order, and ``length`` bytes of payload.
``command`` names the command that the frame belongs to; 0 is the link itself. Payloads of :data:`DATA_FRAMES` are raw
bytes, :data:`Frame.CREDIT` carries a ``u32``, all others a JSON object in UTF-8.

This module runs on both sides, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

VERSION = 1

HEADER = struct.Struct(">BII")
COUNT = struct.Struct(">Q")
AMOUNT = struct.Struct(">I")

# The link. These are never numbered: they describe the numbering.
HELLO = 1  # driver → runner {"version", "nonce", "received"}
WELCOME = 2  # runner → driver {"version", "received", "facts"}
ACK = 3  # how many numbered frames have arrived: u64
PING = 4  # anything; comes back as PONG
PONG = 5
REFUSED = 6  # runner → driver {"reason"}: wrong nonce or version, the stream ends

# Driver → runner.
START = 16  # {"argv" | "script" | "builtin", "cwd", "env", "user", "stdin", "merge", "timeout", …}
STDIN = 17  # bytes
STDIN_END = 18  # end of standard input
KILL = 19  # {"grace"}: end the whole process tree of the command
SHUTDOWN = 20  # nothing, or {"code"}: end the runner and everything it started, exit code 0 or that

# Runner → driver.
STARTED = 32  # {"pid"}
FAILED = 33  # {"kind", "errno", "message", "subject"}: nothing ran
STDOUT = 34  # bytes
STDERR = 35  # bytes
EXIT = 36  # {"code", "limit", "wall", "cpu", "memory", "stdout", "stderr", "leftovers", "survivors", "report"}

# Both ways: how many more bytes the other side may send on this command.
CREDIT = 48  # u32

LINK_FRAMES = frozenset((HELLO, WELCOME, ACK, PING, PONG, REFUSED))
DATA_FRAMES = frozenset((STDIN, STDOUT, STDERR, PING, PONG))

MAX_DATA = 256 * 1024
"""The largest payload of a data frame, in bytes."""

MAX_START = 16 * 1024 * 1024
"""The largest START payload, in bytes: room for the largest argument list that Linux takes (6 MiB), escaped."""

MAX_REPORT = 1024 * 1024
"""The largest payload of any other frame, in bytes."""

TO_RUNNER = {
    HELLO: MAX_REPORT,
    ACK: COUNT.size,
    PING: 64,
    PONG: 64,
    START: MAX_START,
    STDIN: MAX_DATA,
    STDIN_END: 0,
    KILL: MAX_REPORT,
    SHUTDOWN: 64,
    CREDIT: AMOUNT.size,
}
"""What a runner accepts: frame types and their largest payload. A security limit, like :data:`TO_DRIVER`."""

TO_DRIVER = {
    WELCOME: MAX_REPORT,
    ACK: COUNT.size,
    PING: 64,
    PONG: 64,
    REFUSED: MAX_REPORT,
    STARTED: MAX_REPORT,
    FAILED: MAX_REPORT,
    STDOUT: MAX_DATA,
    STDERR: MAX_DATA,
    EXIT: MAX_REPORT,
    CREDIT: AMOUNT.size,
}
"""What a driver accepts: frame types and their largest payload."""


EXACT = {ACK: COUNT.size, CREDIT: AMOUNT.size}
"""Frame types whose payload has one size only."""


class FrameError(Exception):
    """The other side broke the rules of this module. The session is over."""


class Frame(NamedTuple):
    """One frame."""

    type: int
    command: int
    payload: bytes


def encode(kind: int, command: int, payload: bytes = b"") -> bytes:
    """Return the header of a frame with this payload, for a caller that sends both one after the other."""
    return HEADER.pack(kind, command, len(payload))


def _constant(name: str) -> None:
    raise ValueError(name)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=_constant).decode


def dump(value: dict[str, Any]) -> bytes:
    """
    Serialise the payload of a JSON frame. File names that are not UTF-8 travel as lone surrogates.

    Raises:
        ValueError: If it holds a number that JSON does not have, such as infinity.

    """
    return _encode(value).encode("ascii")


def load(payload: bytes) -> dict[str, Any]:
    """
    Parse the payload of a JSON frame.

    Raises:
        FrameError: If it is not a JSON object.

    """
    try:
        value = _decode(payload.decode("utf-8"))
    except ValueError as error:
        raise FrameError("payload is not JSON") from error
    except RecursionError as error:
        raise FrameError("payload is nested too deeply") from error
    if not isinstance(value, dict):
        raise FrameError("payload is not a JSON object")
    return value
