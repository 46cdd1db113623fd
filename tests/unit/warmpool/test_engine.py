# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from random import Random

import anyio
import anyio.lowlevel
import pytest

from agentsandbox.errors import (
    AcquireTimeout,
    ApiUnavailable,
    ImagePullFailed,
    PoolClosed,
    ProvisionError,
    QuotaExceeded,
    SandboxLost,
    UsageError,
)
from agentsandbox.models.events import Event
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.models.timing import StartKind
from agentsandbox.warmpool.book import PoolBook
from agentsandbox.warmpool.engine import Engine
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.replenisher import Replenisher

from .fake_backend import FakeBackend

pytestmark = pytest.mark.anyio


def build(backend, *, images=None, spares=0, cap=100, rate=None, sinks=(), grace=30.0, create_timeout=300.0):
    images = images or {"host": 2}
    targets = {image: size + spares for image, size in images.items()}
    replenisher = Replenisher(
        targets=targets,
        cap=cap,
        creates_in_flight=backend.default_creates_in_flight,
        limiter=AdaptiveLimiter(rate=rate, burst=1 if rate else None, random=Random(0), now=anyio.current_time()),
    )
    book = PoolBook(images=images, replenisher=replenisher)
    specs = {image: SandboxSpec(image=image) for image in images}
    return Engine(
        backend, specs=specs, targets=targets, book=book, sinks=sinks, grace=grace, create_timeout=create_timeout
    )


@asynccontextmanager
async def running(backend, *, settle=True, **options):
    """An engine at work, and afterwards nothing left and every sandbox accounted for."""
    engine = build(backend, **options)
    async with engine.running():
        if settle:
            await anyio.wait_all_tasks_blocked()
        yield engine
    assert set() == backend.alive
    assert 0 == backend.in_flight
    assert 0 == engine.statistics().alive


async def test_warm_acquire_takes_no_time():
    """A ready sandbox is granted at once, and is warm."""
    async with running(FakeBackend()) as engine:
        assert "<Engine [fake | 0 leased, 2 ready, 0 creating | 0 waiting]>" == repr(engine)
        began = anyio.current_time()
        tenure = await engine.acquire("host", timeout=1.0)

        assert anyio.current_time() == began == tenure.requested_at == tenure.granted_at
        assert StartKind.WARM is tenure.start
        assert 1 == tenure.sandbox.checks
        assert "<Engine [fake | 1 leased, 1 ready, 0 creating | 0 waiting]>" == repr(engine)


async def test_cold_acquire_waits_for_the_sandbox_to_be_made():
    """Nothing is ready: the time until it is made is waited, and it is cold."""
    backend = FakeBackend()
    backend.create_delay = 5.0
    async with running(backend, settle=False) as engine:
        tenure = await engine.acquire("host", timeout=None)

        assert 5.0 == pytest.approx(tenure.granted_at - tenure.requested_at)
        assert StartKind.COLD is tenure.start


async def test_with_a_spare_acquire_after_release_does_not_wait():
    """Creation takes ten seconds, and nobody notices: the spare is there, its own replacement is on the way."""
    backend = FakeBackend()
    backend.create_delay = 10.0
    async with running(backend, images={"host": 1}, spares=1) as engine:
        await anyio.sleep(11)
        first = await engine.acquire("host", timeout=1.0)
        engine.release(first)
        began = anyio.current_time()
        second = await engine.acquire("host", timeout=1.0)

        assert began == anyio.current_time()
        assert first.sandbox.name != second.sandbox.name
        assert "<Engine [fake | 1 leased, 0 ready, 1 creating, 1 deleting | 0 waiting]>" == repr(engine)
        await anyio.sleep(11)
        assert "<Engine [fake | 1 leased, 1 ready, 0 creating | 0 waiting]>" == repr(engine)


async def test_waiters_are_served_in_their_order():
    """Twenty wait for one sandbox, one after the other: first come, first served."""
    served = []
    async with running(FakeBackend(), images={"host": 1}) as engine:

        async def episode(number):
            tenure = await engine.acquire("host", timeout=None)
            served.append(number)
            await anyio.sleep(1)
            engine.release(tenure)

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(episode, number)
                await anyio.wait_all_tasks_blocked()

    assert list(range(20)) == served


async def test_p39_a_flood_of_waiters_creates_no_more_than_the_limits_allow():
    """Creations hang and 200 wait: four are asked for, and no more as time goes by."""
    backend = FakeBackend()
    backend.create_block = anyio.Event()
    async with (
        running(backend, images={"host": 50}, cap=20, settle=False) as engine,
        anyio.create_task_group() as group,
    ):

        async def wait():
            with pytest.raises(AcquireTimeout):
                await engine.acquire("host", timeout=100.0)

        for _ in range(200):
            group.start_soon(wait)
        await anyio.sleep(99)
        assert 4 == len(backend.attempts) == backend.most_in_flight
        assert 200 == engine.statistics().waiting


async def test_p39_the_cap_holds_through_a_storm():
    """300 episodes on 50 places with a cap of 20: never more than 20 alive, removals included, and all are served."""
    backend = FakeBackend()
    backend.create_delay = 1.0
    served = 0
    async with running(backend, images={"a": 25, "b": 25}, cap=20) as engine, anyio.create_task_group() as group:

        async def episode(image):
            nonlocal served
            tenure = await engine.acquire(image, timeout=None)
            await anyio.sleep(3)
            engine.release(tenure)
            served += 1

        for number in range(300):
            group.start_soon(episode, "ab"[number % 2])

    assert 300 == served
    assert 20 == backend.most_alive
    assert 4 == backend.most_in_flight


async def test_p43_two_sandboxes_three_waiters():
    """Two distinct ids; the third waits until a release and gets another one."""
    async with running(FakeBackend()) as engine:
        first = await engine.acquire("host", timeout=1.0)
        second = await engine.acquire("host", timeout=1.0)
        assert first.sandbox.name != second.sandbox.name
        with pytest.raises(AcquireTimeout):
            await engine.acquire("host", timeout=1.0)

        engine.release(first)
        third = await engine.acquire("host", timeout=1.0)
        assert third.sandbox.name not in {first.sandbox.name, second.sandbox.name}


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("situation", ["warm", "cold", "slow check", "full"])
async def test_p42_acquire_cancelled_at_any_point_leaks_nothing(situation, steps):
    """Cancelled after any number of steps of the event loop: the sandbox it may have had is there for the next."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}, settle=situation != "cold") as engine:
        holder = await engine.acquire("host", timeout=None) if situation == "full" else None
        if situation == "slow check":
            for sandbox in backend.sandboxes.values():
                sandbox.check_block = anyio.Event()
        got = []

        async def acquire():
            got.append(await engine.acquire("host", timeout=None))

        async with anyio.create_task_group() as group:
            group.start_soon(acquire)
            for step in range(steps):
                if holder is not None and step == 2:
                    engine.release(holder)
                    holder = None
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        if holder is not None:
            engine.release(holder)
        for sandbox in backend.sandboxes.values():
            sandbox.check_block = None
        for tenure in got:
            engine.release(tenure)
        await anyio.wait_all_tasks_blocked()

        assert "<Engine [fake | 0 leased, 1 ready, 0 creating | 0 waiting]>" == repr(engine)
        await engine.acquire("host", timeout=1.0)


async def test_p42_granted_and_cancelled_in_the_same_tick():
    """The release grants the waiter, which is cancelled before it runs: the next in line gets that sandbox."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}, spares=1) as engine, anyio.create_task_group() as group:
        holder = await engine.acquire("host", timeout=None)
        backend.create_block = anyio.Event()
        scope = anyio.CancelScope()
        got = []

        async def unlucky():
            with scope:
                got.append(await engine.acquire("host", timeout=None))

        async def lucky():
            got.append(await engine.acquire("host", timeout=None))

        group.start_soon(unlucky)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(lucky)
        await anyio.wait_all_tasks_blocked()
        (spare,) = [sandbox for sandbox in backend.sandboxes.values() if sandbox is not holder.sandbox]
        spare.check_block = anyio.Event()
        engine.release(holder)
        assert 1 == engine.statistics().leased
        scope.cancel()
        spare.check_block.set()
        await anyio.wait_all_tasks_blocked()

        assert 1 == len(got) == engine.statistics().leased
        assert 2 == got[0].grant.generation
        assert 2 == engine.granted_total


@pytest.mark.parametrize("steps", range(8))
async def test_p41_closing_while_sandboxes_are_made_leaves_nothing(steps):
    """However far creation had come when the pool ended, nothing is alive afterwards."""
    backend = FakeBackend()
    backend.create_delay = 3.0
    async with running(backend, images={"host": 4}, settle=False):
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(steps - 1 if steps > 4 else 0)


async def test_p41_a_pool_that_is_cancelled_removes_everything():
    """Cancelled from outside while leased, ready, being made and waiting: all gone, and removal was not cut short."""
    backend = FakeBackend()
    backend.destroy_block = anyio.Event()
    with anyio.CancelScope() as scope:
        async with running(backend, images={"host": 2}) as engine, anyio.create_task_group() as group:
            await engine.acquire("host", timeout=None)
            tenure = await engine.acquire("host", timeout=None)
            engine.release(tenure)
            await engine.acquire("host", timeout=None)
            group.start_soon(lambda: engine.acquire("host", timeout=None))
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            backend.destroy_block.set()
            await anyio.sleep_forever()

    assert scope.cancelled_caught
    assert set() == backend.alive
    assert sorted(backend.sandboxes) == sorted(backend.destroy_calls)


async def test_a_cancelled_pool_makes_nothing_new_while_its_user_cleans_up():
    """Creations end by cancellation while the body is shielded: they are not started again and again."""
    backend = FakeBackend()
    backend.create_block = anyio.Event()
    with anyio.CancelScope() as scope:
        async with running(backend, images={"host": 2}):
            scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(10)
            await anyio.sleep_forever()

    assert 2 == len(backend.attempts)


async def test_p44_dead_on_arrival_is_replaced_without_the_caller_noticing():
    """The first two sandboxes die before they are granted: the caller gets the third."""
    backend = FakeBackend()
    backend.born_dead = {1, 2}
    async with running(backend, images={"host": 1}, spares=1) as engine:
        tenure = await engine.acquire("host", timeout=10.0)
        await anyio.wait_all_tasks_blocked()

        assert tenure.sandbox is backend.sandboxes["sb-000003"] or tenure.sandbox is backend.sandboxes["sb-000004"]
        assert {"sb-000001", "sb-000002"}.isdisjoint(backend.alive)
        assert 1 == engine.granted_total


async def test_p44_dead_on_arrival_keeps_the_place_in_the_queue():
    """Who was first stays first, although its sandbox turned out dead."""
    backend = FakeBackend()
    backend.born_dead = {1}
    order = []
    async with running(backend, images={"host": 1}) as engine, anyio.create_task_group() as group:

        async def episode(number):
            tenure = await engine.acquire("host", timeout=None)
            order.append(number)
            engine.release(tenure)

        for number in range(3):
            group.start_soon(episode, number)
            await anyio.lowlevel.checkpoint()

    assert [0, 1, 2] == order


async def test_sandboxes_that_are_always_dead_on_arrival_are_reported():
    """It does not go round for ever: the error says how many were dead and why."""
    backend = FakeBackend()
    backend.born_dead = set(range(100))
    async with running(backend, images={"host": 1}) as engine:
        with pytest.raises(ProvisionError, match=r"^5 sandboxes of image 'host' in a row were dead on arrival: died"):
            await engine.acquire("host", timeout=None)


async def test_p60_destroy_that_fails_once_is_tried_exactly_twice():
    """500 then success: two calls, and nothing is left."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=1.0)
        backend.destroy_errors.append(ApiUnavailable("500"))
        engine.release(tenure)
        await anyio.sleep(60)

        assert ["sb-000001", "sb-000001"] == backend.destroy_calls
        assert {"sb-000002"} == backend.alive
        assert 1 == engine.statistics().deleted_total


async def test_p60_a_sandbox_that_resists_is_kept_reported_and_tried_again(caplog):
    """Five tries; then it counts as stuck and alive, is named in the log once, and is tried again at a slow pace."""
    backend = FakeBackend()
    events = []
    async with running(backend, images={"host": 1}, cap=1, sinks=[events.append]) as engine:
        tenure = await engine.acquire("host", timeout=1.0)
        backend.destroy_errors.extend([ApiUnavailable("500")] * 7)
        engine.release(tenure)
        await anyio.sleep(14)
        assert ["sb-000001"] * 5 == backend.destroy_calls
        assert "<Engine [fake | 0 leased, 0 ready, 0 creating, 1 deleting, 1 stuck | 0 waiting]>" == repr(engine)
        assert repr(engine._performer).endswith("| <Removals [0 under way, 1 stuck]>]>")
        assert 1 == len(backend.attempts)

        await anyio.sleep(6 + 30)
        assert 7 == len(backend.destroy_calls)
        assert 1 == engine.statistics().stuck
        await anyio.sleep(60)
        assert 8 == len(backend.destroy_calls)
        assert "<Engine [fake | 0 leased, 1 ready, 0 creating | 0 waiting]>" == repr(engine)

    assert ["sandbox sb-000001 could not be removed (ApiUnavailable: 500); it still counts as alive"] == caplog.messages
    assert [1, 2, 3] == [event.data["rounds"] for event in events if event.name == "sandbox.stuck"]


async def test_p60_what_still_resists_is_tried_again_at_the_end():
    """The end of the pool does not wait for its turn."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}, cap=1) as engine:
        tenure = await engine.acquire("host", timeout=1.0)
        backend.destroy_errors.extend([ApiUnavailable("500")] * 5)
        engine.release(tenure)
        await anyio.sleep(10)
        assert 1 == engine.statistics().stuck
    assert 6 == len(backend.destroy_calls)


async def test_a_stuck_sandbox_that_gives_no_answer_is_tried_ever_more_seldom():
    """Each round takes as long as it may, and the pause doubles up to five minutes."""
    backend = FakeBackend()
    events = []
    async with running(backend, images={"host": 1}, cap=1, grace=20.0, sinks=[events.append]) as engine:
        tenure = await engine.acquire("host", timeout=1.0)
        backend.destroy_block = anyio.Event()
        began = anyio.current_time()
        engine.release(tenure)
        await anyio.sleep(1200)
        backend.destroy_block.set()

    stuck = [(event.at - began, event.data["error"]) for event in events if event.name == "sandbox.stuck"]
    assert [20.0, 55.0, 105.0, 185.0, 325.0, 585.0, 905.0] == pytest.approx([at for at, _ in stuck])
    assert {"no answer"} == {why for _, why in stuck}


async def test_so_many_are_removed_at_a_time_and_their_time_begins_with_their_turn():
    """Two hundred at once: never more than 64 under way, and none gives up because it had to wait."""
    backend = FakeBackend()
    backend.default_creates_in_flight = 200
    under_way = most = 0
    destroy = backend.destroy

    async def slow(sandbox):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await anyio.sleep(15)
        await destroy(sandbox)
        under_way -= 1

    async with running(backend, images={"host": 200}, cap=200) as engine:
        tenures = [await engine.acquire("host", timeout=1.0) for _ in range(200)]
        backend.destroy = slow
        for tenure in tenures:
            engine.release(tenure)
        await anyio.sleep(61)
        backend.destroy = destroy

        assert 64 == most
        assert (200, 0) == (engine.statistics().deleted_total, engine.statistics().stuck)


@pytest.mark.parametrize("stage", ["the backend had not made it", "its baseline was not taken"])
async def test_what_takes_too_long_to_make_is_given_up(stage):
    """The error names image and stage, nothing half-made stays, and the next one is tried."""
    backend = FakeBackend()
    prepared = anyio.Event()
    async with running(backend, images={"host": 1}, settle=False, create_timeout=50.0) as engine:
        if stage.startswith("its"):
            engine.resets.prepare = lambda _sandbox: prepared.wait()
        else:
            backend.create_block = anyio.Event()
        with pytest.raises(AcquireTimeout, match=f"ProvisionError: no sandbox of image 'host' within 50 s: {stage}$"):
            await engine.acquire("host", timeout=60.0)
        assert (1, 1) == (engine.statistics().failed_total, engine.statistics().creating)
        assert 1 == backend.in_flight + len(backend.alive)
        word = "0 being made, 1 being prepared" if stage.startswith("its") else "1 being made, 0 being prepared"
        assert f"<Maker [{word}]>" in repr(engine._performer)


async def test_p45_a_removal_without_an_answer_counts_as_stuck(caplog):
    """After the grace time it is given up, and still counts against the cap."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}, cap=1, grace=20.0) as engine:
        tenure = await engine.acquire("host", timeout=1.0)
        backend.destroy_block = anyio.Event()
        engine.release(tenure)
        await anyio.sleep(19)
        assert 0 == engine.statistics().stuck

        await anyio.sleep(2)
        assert 1 == engine.statistics().stuck == engine.statistics().alive
        backend.destroy_block = None

    assert "no answer" in caplog.text


async def test_closing_ends_in_time_though_the_backend_does_not_answer(caplog):
    """The end has a deadline of its own; what is left is the backend's, and is said."""
    backend = FakeBackend()
    backend.destroy_block = anyio.Event()
    engine = build(backend, grace=15.0)
    async with engine.running():
        await anyio.wait_all_tasks_blocked()
        began = anyio.current_time()

    assert 15.0 == pytest.approx(anyio.current_time() - began)
    assert ["2 sandboxes are left to the backend to remove"] == caplog.messages
    assert 2 == len(backend.left_at_exit)


async def test_closing_refuses_who_waits():
    """Waiters get PoolClosed, and so does who asks afterwards; a release afterwards is quiet."""
    backend = FakeBackend()
    errors = []
    async with anyio.create_task_group() as group:
        async with running(backend, images={"host": 1}) as engine:
            holder = await engine.acquire("host", timeout=None)

            async def wait():
                try:
                    await engine.acquire("host", timeout=None)
                except PoolClosed as error:
                    errors.append(error)

            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
        assert engine.closed
        await anyio.wait_all_tasks_blocked()

    assert 1 == len(errors)
    with pytest.raises(PoolClosed):
        await engine.acquire("host", timeout=None)
    engine.release(holder)


async def test_what_the_user_raises_arrives_as_it_is():
    """No exception group around it, and everything is removed."""
    with pytest.raises(KeyError, match="mine") as caught:
        async with running(FakeBackend()):
            raise KeyError("mine")

    assert KeyError is type(caught.value)


async def test_the_rate_limits_creation():
    """Five sandboxes at two a second, one at once: done after two seconds and not before."""
    backend = FakeBackend()
    async with running(backend, images={"host": 5}, rate=2.0) as engine:
        counts = []
        await anyio.sleep(0.25)
        for _ in range(6):
            counts.append(len(backend.attempts))
            await anyio.sleep(0.5)

        assert [1, 2, 3, 4, 5, 5] == counts
        assert 5 == engine.statistics().ready


async def test_p48_quota_errors_are_waited_out():
    """Refused three times for a quota, then there is room: the waiter gets its sandbox and sees no error."""
    backend = FakeBackend()
    backend.create_errors.extend([QuotaExceeded("exceeded quota: sandboxes")] * 3)
    async with running(backend, images={"host": 1}, settle=False) as engine:
        tenure = await engine.acquire("host", timeout=None)

        assert "sb-000004" == tenure.sandbox.name
        assert 1.5 <= tenure.granted_at - tenure.requested_at <= 11


async def test_p48_an_image_that_cannot_be_made_fails_its_waiters_and_no_others():
    """Three failures in a row: its waiters fail at once with the reason; another image is served; it recovers later."""
    backend = FakeBackend()
    backend.create_errors.extend([ProvisionError("CreateContainerConfigError")] * 3)
    async with running(backend, images={"bad": 1}, settle=False) as engine:
        began = anyio.current_time()
        for _ in range(2):
            with pytest.raises(ProvisionError, match=r"^CreateContainerConfigError"):
                await engine.acquire("bad", timeout=None)
        assert anyio.current_time() - began < 1
        assert 3 == len(backend.attempts)
        assert "ProvisionError: CreateContainerConfigError" == engine.statistics().last_error

        await anyio.sleep(31)
        assert "sb-000004" == (await engine.acquire("bad", timeout=1.0)).sandbox.name


async def test_p49_an_image_that_does_not_exist_is_tried_once():
    """Not found is for good: one attempt, and every waiter learns it."""
    backend = FakeBackend()
    backend.create_errors.append(ImagePullFailed("manifest unknown", permanent=True))
    async with running(backend, images={"bad": 1}, settle=False) as engine:
        for _ in range(3):
            with pytest.raises(ImagePullFailed, match=r"^manifest unknown") as caught:
                await engine.acquire("bad", timeout=None)
            assert not caught.value.retryable
        await anyio.sleep(10_000)
        assert 1 == len(backend.attempts)


async def test_a_bug_in_a_backend_fails_its_image_and_not_the_pool():
    """What create() raises on no purpose becomes a ProvisionError with its cause."""
    backend = FakeBackend()
    backend.create_errors.extend([KeyError("oops")] * 3)
    async with running(backend, images={"host": 1}, settle=False) as engine:
        with pytest.raises(ProvisionError, match=r"^KeyError: 'oops'") as caught:
            await engine.acquire("host", timeout=None)

        assert isinstance(caught.value.__cause__.__cause__, KeyError)


async def test_the_timeout_says_what_it_waited_for():
    """Image, counts and the last creation error."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}) as engine:
        await engine.acquire("host", timeout=1.0)
        began = anyio.current_time()
        expected = "^no sandbox of image 'host' within 2.5 s: 1 leased, 0 ready, 0 creating, 0 others waiting$"
        with pytest.raises(AcquireTimeout, match=expected):
            await engine.acquire("host", timeout=2.5)
        assert 2.5 == pytest.approx(anyio.current_time() - began)


async def test_the_timeout_names_the_last_creation_error():
    """Whoever reads it sees why nothing came."""
    backend = FakeBackend()
    backend.create_errors.append(QuotaExceeded("exceeded quota"))
    async with running(backend, images={"host": 1}, settle=False) as engine:
        with pytest.raises(AcquireTimeout, match=r"0 creating.*; last creation error: QuotaExceeded: exceeded quota$"):
            await engine.acquire("host", timeout=0.4)


async def test_replace_keeps_the_place_and_gives_a_fresh_one():
    """Others wait, and still the holder is next."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}) as engine, anyio.create_task_group() as group:
        tenure = await engine.acquire("host", timeout=None)
        got = []

        async def wait():
            got.append(await engine.acquire("host", timeout=None))

        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        fresh = await engine.replace(tenure, timeout=None)
        assert [] == got
        assert "sb-000002" == fresh.sandbox.name

        engine.release(fresh)
        await anyio.wait_all_tasks_blocked()
        assert ["sb-000003"] == [tenure.sandbox.name for tenure in got]


async def test_a_replacement_that_does_not_come_gives_up_the_place():
    """After the timeout the old one is gone, nothing is held, and the next is served."""
    backend = FakeBackend()
    async with running(backend, images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=None)
        backend.create_delay = 10.0
        with pytest.raises(AcquireTimeout):
            await engine.replace(tenure, timeout=1.0)
        assert 0 == engine.statistics().leased

        engine.release(tenure)
        await engine.acquire("host", timeout=20.0)


async def test_what_the_backend_says_is_lost_is_replaced():
    """A ready sandbox whose loss is announced is never granted; a leased one tells its holder why."""
    backend = FakeBackend()
    events = []
    async with running(backend, sinks=[events.append]) as engine:
        tenure = await engine.acquire("host", timeout=None)
        held = tenure.sandbox.name
        for name in (*backend.sandboxes, "unknown"):
            data = {"reason": "evicted", "detail": "node pressure"}
            backend.sink(Event(name="sandbox.lost", at=anyio.current_time(), sandbox=name, data=data))
            backend.sink(Event(name="other", at=anyio.current_time(), sandbox=name))
        await anyio.wait_all_tasks_blocked()

        assert {held, "sb-000003"} == backend.alive
        assert ("evicted", "node pressure") == (tenure.lost.reason, tenure.lost.detail)
        assert "<Engine [fake | 0 leased, 1 ready, 0 creating, 1 lost | 0 waiting]>" == repr(engine)
        engine.lose(tenure, SandboxLost("died"))
        assert "evicted" == tenure.lost.reason
        engine.release(tenure)
        await anyio.wait_all_tasks_blocked()
        assert {"sb-000003", "sb-000004"} == backend.alive


async def test_a_failing_sink_is_reported_once_and_breaks_nothing(caplog):
    """The other sinks hear everything; the log has one line about the failing one."""
    heard = []

    def bad(event):
        raise RuntimeError("disk full")

    async with running(FakeBackend(), images={"host": 1}, sinks=[bad, heard.append]) as engine:
        engine.release(await engine.acquire("host", timeout=None))
        await anyio.wait_all_tasks_blocked()

    names = [event.name for event in heard]
    assert ["sandbox.created", "sandbox.opened", "sandbox.ready"] == names[:3]
    assert 2 == names.count("sandbox.deleted") == names.count("sandbox.ready")
    assert 1 == len(caplog.records)
    assert logging.ERROR == caplog.records[0].levelno
    assert "disk full" in caplog.text


async def test_what_is_dropped_is_given_back_and_said():
    """From wherever the garbage collector runs: the sandbox comes back in the event loop, once."""
    async with running(FakeBackend(), images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=None)
        with pytest.warns(ResourceWarning, match=r"^the lease of sandbox sb-000001 was never released"):
            engine.abandon(tenure)
        engine.release(tenure)
        await anyio.wait_all_tasks_blocked()

        assert "<Engine [fake | 0 leased, 1 ready, 0 creating | 0 waiting]>" == repr(engine)
        assert 1 == engine.statistics().deleted_total


async def test_the_end_of_a_loop_is_no_problem_for_what_is_dropped():
    """The loop ended without the pool being closed: it is said, and nothing is raised. After the end, not even that."""
    async with running(FakeBackend(), images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=None)

        def closed(callback):
            raise RuntimeError("Event loop is closed")

        engine._call_soon = closed
        with pytest.warns(ResourceWarning, match=r"was never released"):
            engine.abandon(tenure)
        assert not engine._abandoned

    engine.abandon(tenure)
    assert not engine._abandoned


async def test_releasing_twice_does_nothing():
    """The engine knows who holds what: a second release is no release of the next holder's sandbox."""
    async with running(FakeBackend(), images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=None)
        engine.release(tenure)
        engine.release(tenure)
        await anyio.wait_all_tasks_blocked()

        assert 1 == engine.statistics().deleted_total


async def test_replacing_what_was_released_is_a_usage_error():
    """There is no place left to keep."""
    async with running(FakeBackend(), images={"host": 1}) as engine:
        tenure = await engine.acquire("host", timeout=None)
        engine.release(tenure)
        with pytest.raises(UsageError, match="not held"):
            await engine.replace(tenure, timeout=None)


async def test_hosts_are_counted_by_their_identity():
    """Two sandboxes on one host are one host."""
    backend = FakeBackend()
    async with running(backend, images={"host": 3}) as engine:
        for sandbox in list(backend.sandboxes.values())[:2]:
            sandbox.identity = list(backend.sandboxes.values())[2].identity

        assert (1, 3) == (engine.statistics().hosts, engine.statistics().ready)
