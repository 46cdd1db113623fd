# SPDX-License-Identifier: Apache-2.0
"""The tasks behind a session, in the moments in which they begin and end."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agentsandbox.models.command import Command
from agentsandbox.protocol import frames
from agentsandbox.session.retrying import LASTING, Worth

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("ending", ["end", "break"])
async def test_sending_while_the_stream_ends(connected: Any, ending: str) -> None:
    """
    Whoever sends in the moment in which a stream ends is not to blame, and no writer is made that never runs.
    """

    async def script(command: Any) -> None:
        command.started()
        command.exit()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with connected(script, resumable=True) as (session, peer):
            for turns in (*range(12), *range(12)):
                ours, theirs = peer.streams[-1]
                if ending == "end":
                    await theirs.aclose()
                else:
                    ours.cut()
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                if session._link.attached:
                    session._link.send(frames.PING, 0, b"now")
                assert (await session.exec(Command(command=["true"]))).ok
            assert session.streams == 25
        gc.collect()

    assert [str(warning.message) for warning in caught if "never awaited" in str(warning.message)] == []


async def test_writers_are_cancelled_wherever_they_are(connected: Any) -> None:
    """
    A session that is closed right after something was queued leaves no coroutine behind that never ran.
    """

    async def script(command: Any) -> None:
        command.started()
        await anyio.sleep_forever()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for turns in range(12):
            async with connected(script) as (session, _), anyio.create_task_group() as group:
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                session._link.send(frames.PING, 0, b"last")
                group.start_soon(session.aclose)
        gc.collect()

    assert [str(warning.message) for warning in caught if "never awaited" in str(warning.message)] == []


def test_what_streams_are_worth() -> None:
    """
    A stream on which something got through, or that lasted, was worth having; the others are counted.
    """
    worth = Worth()
    worth.attached((0, 0), 100.0)
    assert worth.fruitless == 0
    for number in (1, 2, 3):
        worth.attached((0, 0), 100.0 + number)
        assert worth.fruitless == number
    assert repr(worth) == "<Worth [3 fruitless streams in a row]>"
    worth.attached((0, 1), 104.0)
    assert worth.fruitless == 0
    worth.attached((0, 1), 105.0)
    assert worth.fruitless == 1
    worth.attached((0, 1), 105.0 + LASTING)
    assert worth.fruitless == 0
