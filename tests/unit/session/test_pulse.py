# SPDX-License-Identifier: Apache-2.0
"""One clock for many links."""

from __future__ import annotations

import anyio
import pytest
import trio.testing

from agentsandbox.session.pulse import AT_ONCE, Pulse, watching
from agentsandbox.testing.virtualtime import VirtualTimeLoop

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time: nothing here uses sockets, threads or processes."""
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualTimeLoop}
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Counting:
    """Notes when it was looked at."""

    def __init__(self, again=10.0):
        self.at = []
        self.again = again

    def beat(self, now):
        self.at.append(now)
        return now + self.again


async def test_every_link_is_looked_at_in_every_round():
    """Also those that come late; those that left are looked at no more."""
    pulse, first, late = Pulse(2.0), Counting(), Counting()
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(pulse.run)
        with watching(first, pulse, group):
            await anyio.sleep(5)
            pulse.add(late)
            assert "<Pulse [2 links, every 2 s]>" == repr(pulse)
            await anyio.sleep(2)
        await anyio.sleep(2)
        pulse.remove(late)
        pulse.remove(late)
        await anyio.sleep(4)
        group.cancel_scope.cancel()

    assert [2.0, 4.0, 6.0] == [at - began for at in first.at]
    assert [6.0, 8.0] == [at - began for at in late.at]


async def test_thousands_of_links_do_not_hold_up_the_event_loop():
    """Others have their turn between them; one that leaves in the middle of a round is not looked at."""
    pulse, links = Pulse(1.0), [Counting() for _ in range(3 * AT_ONCE)]
    for link in links:
        pulse.add(link)
    seen = []

    async def other():
        await anyio.sleep(1.0)
        while not links[-2].at:
            seen.append(sum(bool(link.at) for link in links))
            pulse.remove(links[-1])
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(pulse.run)
        group.start_soon(other)
        await anyio.sleep(1.5)
        group.cancel_scope.cancel()
    assert any(0 < count < len(links) - 1 for count in seen)
    assert [] == links[-1].at


async def test_without_a_pulse_a_link_has_a_task_of_its_own():
    """It is looked at when it says so, for as long as the context lasts."""
    link = Counting(again=7.0)
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        with watching(link, None, group):
            await anyio.sleep(20)
        group.cancel_scope.cancel()
    assert [0.0, 7.0, 14.0] == [at - began for at in link.at]
