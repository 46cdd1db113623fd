# SPDX-License-Identifier: Apache-2.0
"""The numbered link: nothing lost, nothing twice, and bounded memory, whatever happens to the stream."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentsandbox.protocol import frames
from agentsandbox.protocol.connection import ACK_BYTES, ACK_FRAMES, Connection
from agentsandbox.protocol.frames import COUNT, HEADER, Frame, FrameError, encode

ACCEPTS = {**frames.TO_RUNNER, **frames.TO_DRIVER}


def attached() -> Connection:
    connection = Connection(ACCEPTS)
    connection.attach(0)
    return connection


def sent(connection: Connection) -> bytes:
    return b"".join(connection.data_to_send())


def ack(count: int) -> bytes:
    payload = COUNT.pack(count)
    return encode(frames.ACK, 0, payload) + payload


messages = st.tuples(
    st.sampled_from([frames.STDOUT, frames.STDERR, frames.PING]), st.integers(0, 2**32 - 1), st.binary(max_size=40)
)


@given(st.lists(messages, max_size=6))
def test_every_chunk_boundary(batch: list[tuple[int, int, bytes]]) -> None:
    """
    Frames arrive the same wherever the stream is cut into two chunks, and byte by byte.
    """
    expected = [Frame(*message) for message in batch]
    sender = attached()
    for message in batch:
        sender.send(*message)
    wire = sent(sender)

    for cut in range(len(wire) + 1):
        reader = attached()
        assert expected == reader.receive_data(wire[:cut]) + reader.receive_data(wire[cut:])
    reader = attached()
    assert expected == [frame for byte in wire for frame in reader.receive_data(bytes([byte]))]


@given(st.binary(max_size=200))
def test_noise_raises_frame_errors_only(noise: bytes) -> None:
    """
    Bytes that mean nothing are a frame error or wait for more; they never raise anything else.
    """
    reader = attached()

    with suppress(FrameError):
        reader.receive_data(noise)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER.pack(0, 0, 0), "unknown type 0"),
        (HEADER.pack(255, 0, 0), "unknown type 255"),
        (HEADER.pack(frames.STDOUT, 1, frames.MAX_DATA + 1), "exceeds its limit of 262144"),
        (HEADER.pack(frames.EXIT, 1, 2**32 - 1), "exceeds its limit"),
        (HEADER.pack(frames.STDIN_END, 1, 1), "exceeds its limit of 0"),
        (HEADER.pack(frames.ACK, 0, COUNT.size - 1), "instead of 8"),
        (HEADER.pack(frames.ACK, 0, 0), "instead of 8"),
        (HEADER.pack(frames.ACK, 0, COUNT.size + 1), "exceeds its limit of 8"),
        (HEADER.pack(frames.CREDIT, 1, 0), "instead of 4"),
        (HEADER.pack(frames.CREDIT, 1, 3), "instead of 4"),
    ],
)
def test_hostile_headers(header: bytes, message: str) -> None:
    """
    A header that breaks the rules is refused before its payload arrives.
    """
    with pytest.raises(FrameError, match=message):
        attached().receive_data(header)


def test_largest_frame_is_accepted() -> None:
    """
    The limit itself is allowed.
    """
    payload = bytes(frames.MAX_DATA)

    assert [Frame(frames.STDOUT, 1, payload)] == attached().receive_data(encode(frames.STDOUT, 1, payload) + payload)


def test_types_of_the_other_direction_are_refused() -> None:
    """
    A driver does not take what only a driver says.
    """
    driver = Connection(frames.TO_DRIVER)

    with pytest.raises(FrameError, match="unknown type 16"):
        driver.receive_data(HEADER.pack(frames.START, 1, 0))


def test_frames_are_not_read_twice_after_an_error() -> None:
    """
    What came before a malformed frame is never handed on a second time.
    """
    reader = attached()
    good = encode(frames.STDOUT, 1, b"a") + b"a"
    reader.receive_data(good[:3])

    with pytest.raises(FrameError):
        reader.receive_data(good[3:] + HEADER.pack(0, 0, 0))
    with pytest.raises(FrameError):
        reader.receive_data(b"")
    assert 1 == reader.received


@pytest.mark.parametrize("count", [2, 2**64 - 1])
def test_acknowledging_what_was_never_sent(count: int) -> None:
    """
    A claim beyond what was sent is refused.
    """
    sender = attached()
    sender.send(frames.STDOUT, 1, b"a")

    with pytest.raises(FrameError, match=f"claims {count} frames of 0 to 1"):
        sender.receive_data(ack(count))


def test_acknowledging_less_than_before() -> None:
    """
    A claim below an earlier one is refused: what was forgotten cannot be sent again.
    """
    sender = attached()
    for _ in range(2):
        sender.send(frames.STDOUT, 1, b"a")
    sender.receive_data(ack(2))

    with pytest.raises(FrameError, match="claims 1 frames of 2 to 2"):
        sender.receive_data(ack(1))


@pytest.mark.parametrize("count", ["1", 1.5, 1.0, True, None, [], {}], ids=repr)
def test_counts_that_are_none(count: object) -> None:
    """
    What a handshake gives as a count is an integer or a frame error, and changes nothing in the latter case.
    """
    connection = Connection(ACCEPTS)
    connection.send(frames.STDOUT, 1, b"a")

    with pytest.raises(FrameError, match="counts"):
        connection.attach(count)  # type: ignore[arg-type]
    assert not connection.attached
    assert 1 + HEADER.size == connection.unacknowledged


def test_attaching_twice() -> None:
    """
    A new stream without the end of the old one would send frames twice.
    """
    with pytest.raises(RuntimeError, match="detach"):
        attached().attach(0)


def test_acknowledges_in_time_by_frames() -> None:
    """
    The last of a run of frames is acknowledged with all others.
    """
    reader = attached()
    wire = encode(frames.STDIN_END, 1)

    reader.receive_data(wire * (ACK_FRAMES - 1))
    assert not reader.pending
    assert b"" == sent(reader)
    reader.receive_data(wire)
    assert reader.pending
    assert ack(ACK_FRAMES) == sent(reader)
    assert not reader.pending


def test_acknowledges_in_time_by_bytes() -> None:
    """
    Large frames are acknowledged before there are many of them.
    """
    reader = attached()
    payload = bytes(frames.MAX_DATA)
    wire = encode(frames.STDOUT, 1, payload) + payload

    for _ in range(ACK_BYTES // frames.MAX_DATA):
        reader.receive_data(wire)

    assert ack(ACK_BYTES // frames.MAX_DATA) == sent(reader)


def test_acknowledgements_do_not_pile_up() -> None:
    """
    A peer that sends and never reads costs one acknowledgement, with the newest count.
    """
    reader = attached()
    wire = encode(frames.STDIN_END, 1) * ACK_FRAMES

    for _ in range(100):
        reader.receive_data(wire)

    assert ack(100 * ACK_FRAMES) == sent(reader)


def test_acknowledges_on_demand() -> None:
    """
    Asked for, an acknowledgement goes out if there is something to tell, and only once.
    """
    reader = attached()
    reader.acknowledge()
    assert b"" == sent(reader)

    reader.receive_data(encode(frames.STDIN_END, 1))
    reader.acknowledge()
    reader.acknowledge()

    assert ack(1) == sent(reader)


def test_link_frames_are_not_counted() -> None:
    """
    Pings are neither numbered nor kept, and go out before a stream is attached, as the handshake must.
    """
    connection = Connection(ACCEPTS)
    connection.send(frames.PING, 0, b"1")
    connection.receive_data(encode(frames.PONG, 0))

    assert encode(frames.PING, 0, b"1") + b"1" == sent(connection)
    assert 0 == connection.unacknowledged
    assert 0 == connection.received


def test_frames_wait_for_a_stream() -> None:
    """
    Numbered frames are kept while nothing is attached, and go out in order afterwards.
    """
    connection = Connection(ACCEPTS)
    connection.send(frames.STDOUT, 1, b"a")
    connection.send(frames.STDIN_END, 1)
    assert b"" == sent(connection)

    connection.attach(0)

    assert encode(frames.STDOUT, 1, b"a") + b"a" + encode(frames.STDIN_END, 1) == sent(connection)


def test_sends_again_what_did_not_arrive() -> None:
    """
    After a new stream only what the other side lacks goes out.
    """
    connection = attached()
    for letter in (b"a", b"b", b"c"):
        connection.send(frames.STDOUT, 1, letter)
    sent(connection)
    connection.detach()
    connection.attach(2)

    assert encode(frames.STDOUT, 1, b"c") + b"c" == sent(connection)


def test_detaching_drops_half_a_frame() -> None:
    """
    The beginning of a frame from the old stream is not completed by the new one.
    """
    reader = attached()
    wire = encode(frames.STDOUT, 1, b"abc") + b"abc"
    reader.receive_data(wire[:-1])
    reader.detach()
    reader.attach(0)

    assert [Frame(frames.STDOUT, 1, b"abc")] == reader.receive_data(wire)


def test_detaching_drops_acknowledgements_and_link_frames() -> None:
    """
    What was about to be said on the old stream is not said on the new one: the handshake says it.
    """
    reader = attached()
    reader.send(frames.PING, 0, b"1")
    reader.receive_data(encode(frames.STDIN_END, 1) * ACK_FRAMES)
    reader.detach()

    assert not reader.pending
    reader.attach(0)
    assert b"" == sent(reader)


def test_repr() -> None:
    """
    One line shows the state.
    """
    connection = attached()
    connection.send(frames.STDOUT, 1, b"abc")
    assert "<Connection [attached, 0 received, 1 kept, 12 bytes]>" == repr(connection)

    connection.detach()
    assert "<Connection [detached, 0 received, 1 kept, 12 bytes]>" == repr(connection)


class CutStreams(RuleBasedStateMachine):
    """
    Two ends talk over streams that break at any byte: every numbered frame arrives once and in order.
    """

    @initialize()
    def begin(self) -> None:
        self.ends = [Connection(ACCEPTS), Connection(ACCEPTS)]
        self.wires = [b"", b""]  # on their way to the end of that index
        self.expected: list[list[bytes]] = [[], []]
        self.arrived: list[list[bytes]] = [[], []]
        self.attach()

    def attach(self) -> None:
        counts = [end.received for end in self.ends]
        for end, received in zip(self.ends, reversed(counts), strict=True):
            end.attach(received)

    def flush(self, index: int) -> None:
        self.wires[1 - index] += b"".join(self.ends[index].data_to_send())

    @rule(index=st.integers(0, 1), size=st.sampled_from([0, 1, 100, 60_000]), count=st.integers(1, 80))
    def send(self, index: int, size: int, count: int) -> None:
        for _ in range(count if size < 1000 else 1):
            payload = struct.pack(">I", len(self.expected[1 - index])) + bytes(size)
            self.expected[1 - index].append(payload)
            self.ends[index].send(frames.STDOUT, 1, payload)

    @rule(index=st.integers(0, 1))
    def ping(self, index: int) -> None:
        if self.ends[index].attached:
            self.ends[index].send(frames.PING, 0, b"?")

    @rule(index=st.integers(0, 1))
    def acknowledge(self, index: int) -> None:
        self.ends[index].acknowledge()

    @rule(index=st.integers(0, 1), share=st.floats(0, 1))
    def deliver(self, index: int, share: float) -> None:
        self.flush(1 - index)
        wire = self.wires[index]
        size = round(len(wire) * share)
        self.wires[index] = wire[size:]
        for frame in self.ends[index].receive_data(wire[:size]):
            if frame.type == frames.STDOUT:
                self.arrived[index].append(frame.payload)

    @rule()
    def cut(self) -> None:
        self.wires = [b"", b""]
        for end in self.ends:
            end.detach()

    @precondition(lambda self: not self.ends[0].attached)
    @rule()
    def reattach(self) -> None:
        self.attach()

    @invariant()
    def once_and_in_order(self) -> None:
        for arrived, expected in zip(self.arrived, self.expected, strict=True):
            assert arrived == expected[: len(arrived)]

    @invariant()
    def bounded(self) -> None:
        for index, end in enumerate(self.ends):
            lacking = self.expected[1 - index][len(self.arrived[1 - index]) :]
            unsaid = ACK_BYTES + ACK_FRAMES * HEADER.size + frames.MAX_DATA
            if end.attached and not self.wires[index] and not self.ends[1 - index].pending:
                assert end.unacknowledged <= sum(map(len, lacking)) + len(lacking) * HEADER.size + unsaid

    def teardown(self) -> None:
        if not hasattr(self, "ends"):
            return
        self.cut()
        self.attach()
        for _ in range(3):
            for index in (0, 1):
                self.deliver(index, 1.0)
                self.ends[index].acknowledge()
        assert self.expected == self.arrived
        assert [0, 0] == [end.unacknowledged for end in self.ends]


CutStreams.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCutStreams = CutStreams.TestCase
