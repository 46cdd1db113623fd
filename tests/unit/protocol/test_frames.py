# SPDX-License-Identifier: Apache-2.0
"""The wire format, byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsandbox.protocol import frames
from agentsandbox.protocol.connection import Connection
from agentsandbox.protocol.frames import Frame, FrameError, dump, encode, load

GOLDEN = [
    (frames.START, 1, b'{"argv":["true"]}', b'\x10\x00\x00\x00\x01\x00\x00\x00\x11{"argv":["true"]}'),
    (frames.STDIN, 2, b"\x00\xff", b"\x11\x00\x00\x00\x02\x00\x00\x00\x02\x00\xff"),
    (frames.STDIN_END, 2, b"", b"\x12\x00\x00\x00\x02\x00\x00\x00\x00"),
    (frames.KILL, 3, b"{}", b"\x13\x00\x00\x00\x03\x00\x00\x00\x02{}"),
    (frames.SHUTDOWN, 0, b"", b"\x14\x00\x00\x00\x00\x00\x00\x00\x00"),
    (frames.CREDIT, 4, b"\x00\x10\x00\x00", b"\x30\x00\x00\x00\x04\x00\x00\x00\x04\x00\x10\x00\x00"),
    (frames.HELLO, 0, b"{}", b"\x01\x00\x00\x00\x00\x00\x00\x00\x02{}"),
    (frames.PING, 0, b"7", b"\x04\x00\x00\x00\x00\x00\x00\x00\x017"),
    (frames.PONG, 0, b"7", b"\x05\x00\x00\x00\x00\x00\x00\x00\x017"),
    (frames.WELCOME, 0, b"{}", b"\x02\x00\x00\x00\x00\x00\x00\x00\x02{}"),
    (frames.REFUSED, 0, b"{}", b"\x06\x00\x00\x00\x00\x00\x00\x00\x02{}"),
    (frames.STARTED, 1, b'{"pid":7}', b'\x20\x00\x00\x00\x01\x00\x00\x00\x09{"pid":7}'),
    (frames.FAILED, 1, b"{}", b"\x21\x00\x00\x00\x01\x00\x00\x00\x02{}"),
    (frames.STDOUT, 0xFFFFFFFF, b"out", b"\x22\xff\xff\xff\xff\x00\x00\x00\x03out"),
    (frames.STDERR, 1, b"err", b"\x23\x00\x00\x00\x01\x00\x00\x00\x03err"),
    (frames.EXIT, 1, b"{}", b"\x24\x00\x00\x00\x01\x00\x00\x00\x02{}"),
]


@pytest.mark.parametrize(("kind", "command", "payload", "wire"), GOLDEN, ids=[str(case[0]) for case in GOLDEN])
def test_golden(kind: int, command: int, payload: bytes, wire: bytes) -> None:
    """
    Each frame is written, and read, as exactly these bytes.
    """
    reader = Connection({**frames.TO_RUNNER, **frames.TO_DRIVER})

    assert wire == encode(kind, command, payload) + payload
    assert [Frame(kind, command, payload)] == reader.receive_data(wire)


def test_golden_covers_every_type() -> None:
    """
    No frame type is without a golden frame, but the acknowledgement, which no reader hands on.
    """
    assert ({*frames.TO_RUNNER, *frames.TO_DRIVER} - {frames.ACK}) == {case[0] for case in GOLDEN}


def test_directions() -> None:
    """
    What only one side may say is not accepted from the other.
    """
    both = set(frames.TO_RUNNER) & set(frames.TO_DRIVER)

    assert {frames.ACK, frames.PING, frames.PONG, frames.CREDIT} == both


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values))
def test_payloads_round_trip(value: dict[str, object]) -> None:
    """
    Any JSON object arrives as it was sent.
    """
    assert value == load(dump(value))


@given(st.binary())
def test_file_names_round_trip(name: bytes) -> None:
    """
    File names that are not UTF-8 survive.
    """
    text = name.decode("utf-8", "surrogateescape")

    assert name == load(dump({"path": text}))["path"].encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_not_sent(value: float) -> None:
    """
    What the other side would refuse is refused where the mistake is.
    """
    with pytest.raises(ValueError, match="JSON"):
        dump({"timeout": value})


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff{}", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a":NaN}', "not JSON"),
        (b'{"a":-Infinity}', "not JSON"),
        (b"1", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"[" * 200_000, "nested too deeply"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_hostile_payloads(payload: bytes, message: str) -> None:
    """
    Whatever is no JSON object is a frame error, and nothing else.
    """
    with pytest.raises(FrameError, match=message):
        load(payload)
