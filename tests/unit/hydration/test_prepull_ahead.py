# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan of several batches, with nodes whose pulls take ten seconds each."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest
from trio.testing import MockClock

from agentsandbox.errors import ImagePullFailed
from agentsandbox.hydration import ImageUse, NodeFacts, plan
from agentsandbox.hydration.prepull import Hydration
from agentsandbox.models.image import ImageManifest, Layer
from agentsandbox.testing.virtualtime import VirtualTimeLoop

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time on both."""
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualTimeLoop}
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Nodes:
    """Nodes that note what they fetch and remove; an image is refused as often as it is named missing."""

    def __init__(self, *missing):
        self.missing = list(missing)
        self.did = []

    @asynccontextmanager
    async def lane(self, node):
        yield self

    async def pull(self, image):
        self.did.append((anyio.current_time(), f"+{image}"))
        await anyio.sleep(10)
        if image in self.missing:
            self.missing.remove(image)
            raise ImagePullFailed("not found", permanent=True)

    async def evict(self, node, image):
        self.did.append((anyio.current_time(), f"-{image}"))

    @property
    def order(self):
        return " ".join(what for _, what in self.did)


def planned(*batches, holds):
    """A plan for one node whose disk holds so many images at once; each batch runs in the order given."""
    node = NodeFacts(name="n", disk=200 * holds, headroom=0.5, room=1, unpack_rate=100.0, pull_overhead=0.0)
    uses = [
        [
            ImageUse(
                image=ImageManifest(name=name, layers=(Layer(digest=name, size=100, unpacked=100),)), seconds=9.0 - at
            )
            for at, name in enumerate(batch)
        ]
        for batch in batches
    ]
    return plan(uses[0], [node], ahead=uses[1:], advise=False)


async def test_the_next_batches_are_fetched_while_one_runs():
    """What there is room for is fetched in the order of the batches, whatever has been used."""
    nodes = Nodes()

    hydration = Hydration(planned("ab", "c", "da", holds=4), nodes, lanes=1)
    await hydration.run()

    assert [(0.0, "+a"), (10.0, "+b"), (20.0, "+c"), (30.0, "+d")] == nodes.did
    assert "<Hydration [4 of 4 images fetched, 0 failed]>" == repr(hydration)


async def test_an_image_is_fetched_when_what_makes_room_was_used():
    """One image at a time: each waits for the one before it, and the one that returns for its second time."""
    nodes = Nodes()
    hydration = Hydration(planned("a", "b", "a", "c", holds=1), nodes, evict=nodes.evict)

    async with anyio.create_task_group() as group:
        group.start_soon(hydration.run)
        for image in "abac":
            await anyio.sleep(100)
            hydration.used(image)

    assert [
        (0.0, "+a"),
        *((100.0, what) for what in ("-a", "+b")),
        *((200.0, what) for what in ("-b", "+a")),
        *((300.0, what) for what in ("-a", "+c")),
    ] == nodes.did


async def test_nothing_overtakes_an_image_that_waits_for_room():
    """With several lanes, too: the room that comes free is for the one that waits for it."""
    nodes = Nodes()
    hydration = Hydration(planned("ab", "cd", holds=2), nodes, lanes=3)

    async with anyio.create_task_group() as group:
        group.start_soon(hydration.run)
        await anyio.sleep(100)
        hydration.used("b")
        await anyio.sleep(100)
        assert [(0.0, "+a"), (0.0, "+b")] == sorted(nodes.did)
        hydration.used("a")

    assert [(200.0, "+c"), (200.0, "+d")] == sorted(nodes.did[2:])


async def test_p50_what_a_plan_keeps_is_fetched_again_only_if_it_vanished():
    """Without a look at the node the plan is trusted; with one, what the kubelet has removed comes back in its turn."""
    made = planned("ab", "ac", holds=3)
    trusting, looking = Nodes(), Nodes()
    there = set()

    def have(node, image):
        if image == "a" and there:
            there.clear()  # collected after the first batch
            return False
        there.add(image)
        return False

    await Hydration(made, trusting, lanes=1).run()
    await Hydration(made, looking, lanes=1, have=have).run()

    assert "+a +b +c" == trusting.order
    assert "+a +b +a +c" == looking.order


async def test_only_the_first_window_if_that_is_said():
    """All that fits before anything has to make room."""
    nodes = Nodes()

    await Hydration(planned("ab", "cd", holds=3), nodes, lanes=1).run(waves=1)

    assert "+a +b +c" == nodes.order


async def test_p49_an_image_that_cannot_be_had_holds_nothing_up():
    """What needs its room is fetched without waiting for it, and it is tried again for the next batch that needs it."""
    nodes, arrived = Nodes("a"), []
    made = planned("a", "b", "a", holds=1)
    hydration = Hydration(made, nodes, lanes=1, report=lambda _, image: arrived.append(image))

    async with anyio.create_task_group() as group:
        group.start_soon(hydration.run)
        await anyio.sleep(100)
        assert [(0.0, "+a"), (10.0, "+b")] == nodes.did
        assert {"a": "ImagePullFailed: not found"} == hydration.failed
        hydration.used("a")
        await anyio.sleep(100)
        assert 2 == len(nodes.did)
        hydration.used("b")

    assert (200.0, "+a") == nodes.did[-1]
    assert ["b", "a"] == arrived
    assert {} == hydration.failed
