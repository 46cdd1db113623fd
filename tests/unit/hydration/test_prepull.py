# SPDX-License-Identifier: Apache-2.0
"""Carrying a plan out, with lanes that a test can stop and fail."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager

import anyio
import pytest
from trio.testing import MockClock

from agentsandbox.errors import ApiUnavailable, ImagePullFailed, Throttled
from agentsandbox.hydration import NodePlan, Plan, Wave
from agentsandbox.hydration.prepull import Hydration
from agentsandbox.testing.virtualtime import VirtualTimeLoop

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time on both."""
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualTimeLoop}
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Nodes:
    """Each pull takes ten seconds, and fails as often as it is told to."""

    def __init__(self, **errors):
        self.errors = {image: list(raised) for image, raised in errors.items()}
        self.asked = []
        self.lanes = Counter()
        self.most = Counter()

    @asynccontextmanager
    async def lane(self, node):
        self.lanes[node] += 1
        self.most[node] = max(self.most[node], self.lanes[node])
        try:
            yield Lane(self, node)
        finally:
            self.lanes[node] -= 1


class Lane:
    def __init__(self, nodes, node):
        self.nodes, self.node = nodes, node

    async def pull(self, image):
        self.nodes.asked.append((anyio.current_time(), self.node, image))
        await anyio.sleep(10)
        if self.nodes.errors.get(image):
            raise self.nodes.errors[image].pop(0)


def planned(**nodes):
    """Node → the images of each of its waves."""
    return Plan(
        nodes=tuple(
            NodePlan(
                node=node,
                waves=tuple(Wave(images=tuple(wave), size=1, pull_seconds=1.0, run_seconds=1.0) for wave in waves),
            )
            for node, waves in nodes.items()
        ),
        placement={image: node for node, waves in nodes.items() for wave in waves for image in wave},
    )


async def test_each_node_fetches_in_its_order_and_so_many_at_a_time():
    """Two lanes a node; all nodes at once; nothing twice; no lane is left."""
    nodes, arrived = Nodes(), []
    hydration = Hydration(
        planned(n=["abcd"], m=["x"]), nodes, lanes=2, report=lambda node, image: arrived.append((node, image))
    )

    await hydration.run()

    assert [(0.0, "m", "x"), (0.0, "n", "a"), (0.0, "n", "b"), (10.0, "n", "c"), (10.0, "n", "d")] == sorted(
        nodes.asked
    )
    assert {"n": 2, "m": 1} == nodes.most
    assert {"n": 0, "m": 0} == dict(nodes.lanes)
    assert 5 == len(arrived) == hydration.pulled


async def test_p50_what_is_there_is_not_fetched_and_what_vanished_is():
    """Whether an image is there is asked when its turn comes, and not when the plan was made."""
    nodes, there = Nodes(), {"a", "b"}

    def have(node, image):
        there.discard("b")  # collected meanwhile
        return image in there

    await Hydration(planned(n=["abc"]), nodes, lanes=1, have=have).run()

    assert ["b", "c"] == [image for _, _, image in nodes.asked]


async def test_a_wave_waits_until_the_one_before_the_last_is_used():
    """Two are on the disk at a time: the third is fetched when everything of the first has been used."""
    nodes = Nodes()
    hydration = Hydration(planned(n=["ab", "c", "d"]), nodes, lanes=1)

    async with anyio.create_task_group() as group:
        group.start_soon(hydration.run)
        await anyio.sleep(100)
        assert ["a", "b", "c"] == [image for _, _, image in nodes.asked]
        hydration.used("a")
        hydration.used("a")
        hydration.used("nobody's")
        await anyio.sleep(100)
        assert 3 == len(nodes.asked)
        hydration.used("b")

    assert (200.0, "n", "d") == nodes.asked[-1]


async def test_only_so_many_waves_if_that_is_said():
    """What fits beforehand."""
    nodes = Nodes()

    await Hydration(planned(n=["a", "b", "c"]), nodes, lanes=3).run(waves=1)

    assert ["a"] == [image for _, _, image in nodes.asked]


@pytest.mark.parametrize(
    "error",
    [Throttled("slow down", retry_after=60.0), ImagePullFailed("429 Too Many Requests - toomanyrequests: pull rate")],
    ids=["control plane", "registry"],
)
async def test_p49_a_registry_that_asks_to_slow_down_slows_the_whole_plan(error):
    """Nothing is asked for on any node until the pause is over; refused pulls count, too."""
    nodes = Nodes(a=[error])

    hydration = Hydration(planned(n=["ab"], m=["xy"]), nodes, lanes=1, pause=60.0)
    await hydration.run()

    times = {(round(at), image) for at, _, image in nodes.asked}
    # What was under way ends; what follows waits for a minute after the refusal at 10 s.
    assert {(0, "a"), (0, "x"), (70, "a"), (80, "b")} < times
    assert {at for at, image in times if image == "y"} <= {10, 70}
    assert not {at for at, _ in times} & set(range(11, 70))
    assert {} == hydration.failed


async def test_p49_an_image_that_does_not_exist_fails_alone():
    """It is not tried again, and its wave does not wait for it."""
    nodes = Nodes(a=[ImagePullFailed("not found", permanent=True)])
    hydration = Hydration(planned(n=["a", "b", "c"]), nodes, lanes=1)

    await hydration.run()

    assert {"a": "ImagePullFailed: not found"} == hydration.failed
    assert ["a", "b", "c"] == [image for _, _, image in nodes.asked]


async def test_what_fails_for_a_while_is_tried_again():
    """With longer pauses each time, and then given up."""
    nodes = Nodes(a=[ApiUnavailable("gone")] * 9, b=[ApiUnavailable("gone")])
    hydration = Hydration(planned(n=["ab"]), nodes, lanes=1, attempts=3, pause=5.0)

    await hydration.run()

    assert [0.0, 15.0, 35.0] == [at for at, _, image in nodes.asked if image == "a"]
    assert ["a"] == list(hydration.failed)
    assert 1 == hydration.pulled
    assert "<Hydration [1 of 2 images fetched, 1 failed]>" == repr(hydration)
