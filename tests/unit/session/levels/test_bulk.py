# SPDX-License-Identifier: Apache-2.0
"""Transfers over a connection of their own: what counts as their end, and what does not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest
from test_direct import HANG, Scripted

from agentsandbox.errors import StreamBroken
from agentsandbox.session.levels import bulk
from agentsandbox.transport.websocket import ExecStatus

pytestmark = pytest.mark.anyio

Connect = Callable[..., Awaitable[Any]]


def server(*pieces: tuple[int, bytes], code: int | None = 0, breaks: bool = False) -> tuple[Connect, Scripted]:
    """Return what connects to a command that writes these pieces and ends so, and the connection."""
    end = None if code is None else ExecStatus(exit_code=code)
    connection = Scripted(pieces, end, "v5.channel.k8s.io")
    connection.breaks = breaks

    async def connect(_: Sequence[str], *, stdin: bool = False) -> Scripted:
        assert stdin
        return connection

    return connect, connection


async def test_what_ends_properly_is_whole() -> None:
    """With an end and a status, what came is all that there was; our code goes first, with its dot."""
    connect, connection = server((1, b"one "), (2, b"warning"), (1, b"two"), code=3)
    outcome = await bulk.run(connect, "sh", "cat", read=bulk.reader(b"input"), timeout=5)
    assert outcome == bulk.Outcome(exit_code=3, stdout=b"one two", stderr=b"warning")
    assert connection.sent == b"exec 7>&2\ncat\n.\ninput"
    assert connection.closed


@pytest.mark.parametrize("code", [0, 1])
async def test_p01_what_breaks_is_not_whole_whatever_its_status(code: int) -> None:
    """A connection that breaks is no end of a transfer, also when the command's exit code is known by then."""
    taken = b""

    async def take(piece: bytes) -> None:
        nonlocal taken
        taken += piece
        await anyio.sleep(0)

    connect, connection = server((1, b"the beginning"), code=code, breaks=True)
    with pytest.raises(StreamBroken, match="the connection of a transfer ended") as caught:
        await bulk.run(connect, "sh", "cat", take=take, timeout=5)
    assert bulk.passing(caught.value), "it is to be tried again"
    assert taken == b"the beginning"
    assert connection.status == ExecStatus(exit_code=code)
    assert connection.closed


async def test_p01_what_ends_without_a_status_is_not_whole() -> None:
    """A connection that ends without a word about the command is no end of a transfer."""
    connect, _ = server((1, b"the beginning"), code=None)
    with pytest.raises(StreamBroken, match="the connection of a transfer ended"):
        await bulk.run(connect, "sh", "cat", timeout=5)


async def test_what_the_ends_on_this_side_raise_is_passed_on() -> None:
    """What reading or taking raises reaches the caller as it is, and the connection is closed."""

    async def fail(*_: bytes) -> bytes:
        raise LookupError("mine")

    for options, pieces in (({"read": fail}, (HANG,)), ({"take": fail}, ((1, b"x"), HANG))):
        connect, connection = server(*pieces)
        with pytest.raises(LookupError, match="mine"):
            await bulk.run(connect, "sh", "cat", timeout=5, **options)  # type: ignore[arg-type]
        assert connection.closed
        assert connection.sent == b"exec 7>&2\ncat\n.\n", "nothing is sent twice"


async def test_p05_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that does not end is given up in time, as something that may be tried again; it is kept alive."""
    monkeypatch.setattr(bulk, "KEEP_ALIVE", 0.01)
    connect, connection = server((1, b"x"), HANG)
    with pytest.raises(StreamBroken, match=r"longer than 0\.1 s") as caught:
        await bulk.run(connect, "sh", "cat", timeout=0.1)
    assert bulk.passing(caught.value)
    assert connection.kept_alive > 0
    assert connection.closed
