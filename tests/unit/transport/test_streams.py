# SPDX-License-Identifier: Apache-2.0
"""What a session may expect of every stream, and the faults of the one in memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from agentsandbox.transport.memory import memory_pair
from agentsandbox.transport.pipe import PipeStream, SocketStream

pytestmark = pytest.mark.anyio


def sockets() -> tuple[SocketStream, SocketStream]:
    """Return both ends of a socket pair."""
    one, other = socket.socketpair()
    return SocketStream(one), SocketStream(other)


def pipes() -> tuple[PipeStream, PipeStream]:
    """Return both ends of two pipes."""
    reads, writes = os.pipe()
    more_reads, more_writes = os.pipe()
    return PipeStream(reads, more_writes), PipeStream(more_reads, writes)


PAIRS = {"socket": sockets, "pipe": pipes, "memory": memory_pair}
Pair = tuple[Any, Any]


@pytest.fixture(params=PAIRS)
def make(request: pytest.FixtureRequest) -> Callable[[], Pair]:
    """Return a function that makes a pair of connected ends."""
    return PAIRS[request.param]  # type: ignore[no-any-return]


async def receive(stream: Any, size: int) -> bytes:
    """Receive so many bytes."""
    data = b""
    while len(data) < size:
        piece = await stream.receive()
        assert piece
        data += piece
    return data


async def test_bytes_arrive_in_order_both_ways(make: Callable[[], Pair]) -> None:
    """
    Whatever the sizes and the number of chunks, empty ones included, the bytes arrive in order.
    """
    chunks = [bytes([number % 251]) * size for number, size in enumerate([0, 1, 9, 300_000, 0, 2_000_000, *[3] * 2000])]
    whole = b"".join(chunks)
    one, other = make()

    async with anyio.create_task_group() as group:
        group.start_soon(one.send, chunks)
        group.start_soon(other.send, chunks)
        assert whole == await receive(other, len(whole))
        assert whole == await receive(one, len(whole))
    await one.send([])
    await one.aclose()
    await other.aclose()


async def test_the_end(make: Callable[[], Pair]) -> None:
    """
    What was sent before the end still arrives; then the end is told, every time.
    """
    one, other = make()
    await one.send([b"last"])
    await one.aclose()

    assert b"last" == await receive(other, 4)
    for _ in range(2):
        with pytest.raises(anyio.EndOfStream):
            await other.receive()
    with pytest.raises(anyio.BrokenResourceError):
        await other.send([b"x"])
    await other.aclose()


async def test_closed_ends(make: Callable[[], Pair]) -> None:
    """
    A closed end can be closed again, and refuses everything else.
    """
    one, other = make()
    await one.aclose()
    await one.aclose()

    with pytest.raises(anyio.ClosedResourceError):
        await one.receive()
    with pytest.raises(anyio.ClosedResourceError):
        await one.send([b"x"])
    assert "closed" in repr(one)
    assert "closed" not in repr(other)
    await other.aclose()


async def test_closing_wakes_who_waits(make: Callable[[], Pair]) -> None:
    """
    Closing ends a receive and a send that wait, on this side.
    """
    one, other = make()
    ended = []

    async def wait(call: Callable[[], Any]) -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await call()
        ended.append(call)

    async with anyio.create_task_group() as group:
        group.start_soon(wait, one.receive)
        group.start_soon(wait, lambda: one.send([bytes(20_000_000)] * 2))
        await anyio.wait_all_tasks_blocked()
        await one.aclose()

    assert 2 == len(ended)
    await other.aclose()


async def test_the_other_side_goes_while_sending(make: Callable[[], Pair]) -> None:
    """
    A send that waits for room ends when nobody will ever make any.
    """
    one, other = make()

    async with anyio.create_task_group() as group:

        async def send() -> None:
            with pytest.raises(anyio.BrokenResourceError):
                await one.send([bytes(20_000_000)] * 2)

        group.start_soon(send)
        await anyio.wait_all_tasks_blocked()
        await other.aclose()
    await one.aclose()


async def test_a_cancelled_receive_loses_nothing(make: Callable[[], Pair]) -> None:
    """
    After a receive that was cancelled the next one gets everything.
    """
    one, other = make()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await other.receive()
    assert scope.cancelled_caught
    await one.send([b"abc"])

    assert b"abc" == await receive(other, 3)
    await one.aclose()
    await other.aclose()


async def test_a_connection_reset() -> None:
    """
    A peer that closes with data unread breaks the stream.
    """
    one, other = sockets()
    await one.send([b"unread"])
    await other.aclose()

    with pytest.raises(anyio.BrokenResourceError):
        await one.receive()
    await one.aclose()


async def test_reads_grow_with_what_arrives() -> None:
    """
    Little data costs small buffers, much data few reads.
    """
    one, other = sockets()
    async with anyio.create_task_group() as group:
        group.start_soon(one.send, [bytes(5_000_000)])
        sizes, left = [], 5_000_000
        while left:
            sizes.append(len(await other.receive()))
            left -= sizes[-1]

    assert max(sizes) > 64 * 1024
    await one.aclose()
    await other.aclose()


async def test_cut_after() -> None:
    """
    The stream breaks at exactly that byte, both ways, in the middle of a chunk.
    """
    one, other = memory_pair()
    one.cut_after(5)
    with pytest.raises(anyio.BrokenResourceError):
        await one.send([b"abc", b"defg"])

    assert b"abcde" == await receive(other, 5)
    assert 5 == one.sent
    assert "<MemoryStream [broken, 5 bytes sent]>" == repr(one)
    for end in (one, other):
        with pytest.raises(anyio.BrokenResourceError):
            await end.receive()
        with pytest.raises(anyio.BrokenResourceError):
            await end.send([b"x"])


async def test_stall_and_resume() -> None:
    """
    What is held back arrives later, whole.
    """
    one, other = memory_pair()
    one.stall()
    await one.send([b"abc"])
    with anyio.move_on_after(0.01) as scope:
        await other.receive()
    assert scope.cancelled_caught
    one.resume()

    assert b"abc" == await other.receive()
    assert "<MemoryStream [open, 3 bytes sent]>" == repr(one)
