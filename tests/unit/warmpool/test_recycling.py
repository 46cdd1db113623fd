# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that become fresh ones in the same place, of the same or of another image."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from agentsandbox.errors import ImagePullFailed, ProvisionError, SandboxLost
from agentsandbox.models.events import Event
from agentsandbox.models.timing import StartKind

from .fake_backend import FakeBackend
from .test_engine import running

pytestmark = pytest.mark.anyio


@pytest.fixture
def backend():
    """Make a backend that can."""
    backend = FakeBackend()
    backend.recycling = True
    return backend


async def settled(backend, count):
    """Wait until so many sandboxes were asked to become fresh ones, and whoever can act has acted."""
    with anyio.fail_after(10):
        while len(backend.recycled) < count:  # noqa: ASYNC110 - a short pause of the engine's own
            await anyio.sleep(0.005)
        await anyio.wait_all_tasks_blocked()


async def test_a_released_sandbox_becomes_a_fresh_one(backend):
    """Nothing is removed and nothing made; the next lease has another identity and says that it is reused."""
    async with running(backend, images={"host": 1}) as engine:
        first = await engine.acquire("host", timeout=5)
        old = first.sandbox
        engine.release(first)
        await settled(backend, 1)
        second = await engine.acquire("host", timeout=5)

        assert old is not second.sandbox
        assert (old.name, old.identity.uid) == (second.sandbox.name, second.sandbox.identity.uid)
        assert old.identity != second.sandbox.identity
        assert (StartKind.WARM, StartKind.REUSED) == (first.start, second.start)
        assert [] == backend.destroy_calls
        statistics = engine.statistics()
        assert (1, 1) == (statistics.created_total, statistics.recycled_total)
        engine.release(second)


async def test_who_releases_may_ask_for_another_image_at_once(backend):
    """A sandbox becomes what is asked for right after its release, not what it was."""
    async with running(backend, images={"a": 1, "b": 1}, cap=1) as engine:
        one = await engine.acquire("a", timeout=5)
        engine.release(one)
        two = await engine.acquire("b", timeout=5)

        assert [(one.sandbox.name, "b")] == backend.recycled
        assert "b" == two.sandbox.spec.image
        assert 1 == engine.statistics().created_total
        engine.release(two)


async def test_a_ready_sandbox_gives_way_in_place(backend):
    """Where all room is taken by what nobody wants, it becomes what somebody waits for."""
    async with running(backend, images={"a": 1, "b": 1}, cap=1) as engine:
        assert 1 == engine.statistics().ready
        tenure = await engine.acquire("b", timeout=5)
        other = await engine_of_image(engine, "a", tenure)

        assert ["b", "a"] == [image for _, image in backend.recycled]
        assert 1 == engine.statistics().created_total
        assert [] == backend.destroy_calls
        engine.release(other)


async def engine_of_image(engine, image, held):
    """Give back what is held and take a sandbox of an image."""
    engine.release(held)
    return await engine.acquire(image, timeout=5)


async def test_what_cannot_become_fresh_is_removed_and_made_anew(backend):
    """A failure costs the sandbox and nobody's turn."""
    backend.recycle_errors.append(ProvisionError("back-off"))
    async with running(backend, images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=5)
        engine.release(tenure)
        again = await engine.acquire("host", timeout=5)

        assert tenure.sandbox.name != again.sandbox.name
        assert [tenure.sandbox.name] == backend.destroy_calls
        engine.release(again)


async def test_a_bad_image_is_not_tried_for_ever(backend):
    """An image that turns out not to exist when a sandbox is to become one of it is refused to whoever waits."""
    backend.recycle_errors.append(ImagePullFailed("no such image", permanent=True))
    async with running(backend, images={"a": 1, "b": 1}, cap=1) as engine:
        with pytest.raises(ImagePullFailed, match="no such image"):
            await engine.acquire("b", timeout=5)
        engine.release(await engine.acquire("a", timeout=5))


@pytest.mark.parametrize("how", ["discarded", "lost"])
async def test_what_must_not_be_used_again_is_removed(backend, how):
    """A sandbox that its holder does not trust, or that was lost, is never recycled."""
    async with running(backend, images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=5)
        if how == "lost":
            engine.lose(tenure, SandboxLost("died"))
        engine.release(tenure, discard=how == "discarded")
        again = await engine.acquire("host", timeout=5)

        assert [] == backend.recycled
        assert [tenure.sandbox.name] == backend.destroy_calls
        engine.release(again)


async def test_a_sandbox_that_is_lost_while_it_changes_is_removed(backend):
    """Even if the backend calls it a success."""
    backend.recycle_block = anyio.Event()
    async with running(backend, images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=5)
        engine.release(tenure)
        await settled(backend, 1)
        backend.sink(Event(name="sandbox.lost", at=anyio.current_time(), sandbox=tenure.sandbox.name))
        backend.recycle_block.set()
        again = await engine.acquire("host", timeout=5)

        assert tenure.sandbox.name != again.sandbox.name
        engine.release(again)


async def test_closing_in_the_middle_leaves_nothing(backend):
    """A pool that is closed while a sandbox changes removes it."""
    backend.recycle_block = anyio.Event()
    async with running(backend, images={"host": 1}) as engine:
        engine.release(await engine.acquire("host", timeout=5))
        await settled(backend, 1)
        assert 1 == engine.statistics().resetting


async def test_there_are_never_more_than_allowed(backend):
    """Images take turns in what may be alive, and every lease has its own image."""
    images = {f"i{number}": 2 for number in range(6)}
    async with running(backend, images=images, cap=3) as engine:

        async def use(number):
            image = f"i{number % 6}"
            tenure = await engine.acquire(image, timeout=30)
            assert image == tenure.sandbox.spec.image
            await anyio.lowlevel.checkpoint()
            engine.release(tenure)

        async with anyio.create_task_group() as group:
            for number in range(36):
                group.start_soon(use, number)
        assert backend.most_alive <= 3
        assert 3 == engine.statistics().created_total
