# SPDX-License-Identifier: Apache-2.0
"""Head and tail of a stream, and what waits for a slow consumer."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsandbox.protocol.frames import STDERR, STDOUT
from agentsandbox.session.call import MAX_PIECES, Chunks
from agentsandbox.session.output import HeadTail


@given(st.integers(1, 40), st.lists(st.binary(max_size=60), max_size=12))
def test_head_and_tail(limit: int, pieces: list[bytes]) -> None:
    """
    Up to the limit everything is kept, beyond it exactly the first half and the last, however it came.
    """
    whole = b"".join(pieces)
    kept = HeadTail(limit)
    for piece in pieces:
        kept.append(piece)
    half = limit // 2
    expected = whole if len(whole) <= limit else whole[: limit - half] + whole[len(whole) - half :]

    assert (len(whole), len(whole) > limit) == (kept.size, kept.truncated)
    assert f"<HeadTail [{len(expected)} of {len(whole)} bytes kept]>" == repr(kept)
    assert expected == kept.take()
    assert b"" == kept.take()


@pytest.mark.parametrize("total", [8, 30])
def test_memory_stays_at_the_limit(total: int) -> None:
    """
    Memory stays near the limit while output comes in and when the result is taken.
    """
    limit, piece = 8 * 1024 * 1024, bytes(100_000)
    kept = HeadTail(limit)
    tracemalloc.start()
    try:
        for _ in range(total * 10):
            kept.append(piece)
        result = kept.take()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert min(limit, total * 1_000_000) == len(result)
    assert peak < limit * 1.3


@given(st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), st.binary(min_size=1, max_size=50_000)), max_size=30))
def test_chunks_keep_order_and_content(pieces: list[tuple[int, bytes]]) -> None:
    """
    Pieces come out in the order in which they went in; only neighbours of one stream are joined.
    """
    chunks = Chunks()
    for kind, data in pieces:
        chunks.push(kind, data)
    out = []
    while chunks:
        out.append(chunks.pop())

    for kind in (STDOUT, STDERR):
        assert b"".join(d for k, d in pieces if k == kind) == b"".join(d for k, d in out if k == kind)
    assert [k for i, (k, _) in enumerate(pieces) if i == 0 or pieces[i - 1][0] != k] == [
        k for i, (k, _) in enumerate(out) if i == 0 or out[i - 1][0] != k
    ]
    assert len(out) <= len(pieces)


def test_chunks_are_bounded_by_bytes() -> None:
    """
    A million bytes that come one by one from alternating streams take few pieces, and none is lost.
    """
    chunks = Chunks()
    for number in range(1_000_000):
        chunks.push(STDERR if number % 2 else STDOUT, b"x")

    assert len(chunks) < MAX_PIECES + 50
    assert 500_000 == sum(len(data) for kind, data in [chunks.pop() for _ in range(len(chunks))] if kind == STDERR)


def test_chunks_can_be_forgotten() -> None:
    """
    What nobody wants any more is gone, and what comes later is not appended to it.
    """
    chunks = Chunks()
    chunks.push(STDOUT, b"a")
    chunks.clear()
    assert 0 == len(chunks)

    chunks.push(STDOUT, b"b")
    assert (STDOUT, b"b") == chunks.pop()
