# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import anyio
import pytest

from agentsandbox.models.episode import Attempt, Episode
from agentsandbox.models.events import Event
from agentsandbox.rollouts.accounting import Ledger, Outcome
from agentsandbox.rollouts.admission import Admission
from agentsandbox.rollouts.gather import gather_rollouts

from .fakes import FakeSource

pytestmark = pytest.mark.anyio


def ready(sandbox, image):
    return Event(name="sandbox.ready", at=0.0, sandbox=sandbox, data={"image": image})


def ledger_of(*images):
    ledger = Ledger()
    for number, image in enumerate(images):
        ledger.submit(Episode(id=f"{number}", image=image))
    return ledger


async def test_an_episode_whose_sandbox_is_ready_is_admitted_first():
    """The order of the batch gives way to what is ready; each sandbox is promised once."""
    admission, ledger = Admission(patience=10.0), ledger_of("a", "a", "b", "c")
    for event in (ready("s1", "c"), ready("s2", "b"), ready("s3", "b")):
        admission(event)

    taken = [await admission.take(ledger) for _ in range(2)]

    assert ["c", "b"] == [ticket.episode.image for ticket in taken]
    assert 0.0 == anyio.current_time()
    assert "<Admission [3 ready, 2 admitted | 0 waiting]>" == repr(admission)

    # Nothing else is ready that anybody waits for: in the end the first in the order of the batch is admitted.
    assert "a" == (await admission.take(ledger)).episode.image
    assert 10.0 == anyio.current_time()


async def test_a_sandbox_that_becomes_ready_wakes_one_who_waits():
    """At once, and for its image."""
    admission, ledger = Admission(), ledger_of("a", "b")
    taken = []

    async def work():
        taken.append((await admission.take(ledger)).episode.image)

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(work)
        await anyio.sleep(5)
        assert [] == taken
        admission(ready("s1", "b"))
        await anyio.sleep(0.1)
        assert ["b"] == taken
        admission(ready("s2", "a"))

    assert 5.1 == pytest.approx(anyio.current_time())


async def test_whoever_finds_nothing_left_does_not_wait():
    """The last episode is admitted: the others are told that there is nothing more."""
    admission, ledger = Admission(), ledger_of("a")
    taken = []

    async def work():
        taken.append(await admission.take(ledger))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(work)
        await anyio.sleep(1)
        admission(ready("s1", "a"))

    assert 1.0 == anyio.current_time()
    assert [True, True, False] == sorted((ticket is None for ticket in taken), reverse=True)
    assert await admission.take(ledger) is None


@pytest.mark.parametrize("name", ["lease.granted", "sandbox.lost", "sandbox.deleted", "sandbox.not_recycled"])
async def test_what_is_not_ready_any_more_admits_nobody(name):
    """It was granted to somebody else, or is gone."""
    admission, ledger = Admission(patience=3.0), ledger_of("a")
    admission(ready("s1", "a"))
    admission(Event(name=name, at=0.0, sandbox="s1"))
    admission(Event(name=name, at=0.0, sandbox="unknown"))

    await admission.take(ledger)

    assert 3.0 == anyio.current_time()


async def test_a_claim_ends_with_the_grant_or_the_attempt():
    """Two sandboxes of an image, two episodes: the claim of the first is not counted twice."""
    admission, ledger = Admission(patience=3.0), ledger_of("a", "a", "a")
    admission(ready("s1", "a"))
    first = await admission.take(ledger)
    granted = {"sandbox": "s1", "episode": first.episode.id, "attempt": first.number}
    admission(Event(name="lease.granted", at=0.0, **granted))
    admission(Event(name="attempt.granted", at=0.0, **granted))
    admission(ready("s2", "a"))

    await admission.take(ledger)

    assert 0.0 == anyio.current_time()
    assert "<Admission [1 ready, 1 admitted | 0 waiting]>" == repr(admission)


async def test_a_ticket_of_named_images_only():
    """The ledger gives what may run of the first of them, and keeps its books right."""
    ledger = ledger_of("a", "b", "b")
    ticket = ledger.take(["x", "b", "a"])

    assert ("b", "1") == (ticket.episode.image, ticket.episode.id)
    assert ledger.take(["x"]) is None
    assert ["0", "2"] == [ledger.take().episode.id for _ in range(2)]
    assert ledger.take() is None
    ledger.end(ticket, Outcome(attempt=Attempt(number=1, reward=1.0)))
    assert "<Ledger [3 submitted: 1 rewarded, 0 failed, 0 retryable, 0 cancelled | 2 running, 0 queued]>" == repr(
        ledger
    )


class Source:
    """Grants at once what was said to be ready."""

    def __init__(self, inner):
        self.inner = inner
        self.asked = []

    async def acquire(self, image, **options):
        self.asked.append(image)
        return await self.inner.acquire(image, **options)


async def rollout(sandbox, episode):
    await sandbox.exec("true")
    return 1.0


async def test_a_batch_is_admitted_as_its_sandboxes_become_ready():
    """The order in which sandboxes are asked for is that in which they are ready; the records stay in input order."""
    admission, source = Admission(patience=100.0), Source(FakeSource())
    batch = [Episode(id=image, image=image) for image in "abc"]

    async with anyio.create_task_group() as group:

        async def make():
            for image in "cab":
                await anyio.sleep(1)
                admission(ready(f"s-{image}", image))

        group.start_soon(make)
        result = await gather_rollouts(source, batch, rollout, parallelism=3, admission=admission)

    assert ["c", "a", "b"] == source.asked
    assert ["a", "b", "c"] == [record.episode.id for record in result.records]
    assert (3, 3.0) == (result.counts.rewarded, anyio.current_time())


async def test_a_batch_whose_sandboxes_never_become_ready_ends_with_its_deadline():
    """Waiting to be admitted is part of the batch's time."""
    batch = [Episode(id=f"{n}", image="a") for n in range(3)]

    result = await gather_rollouts(object(), batch, rollout, admission=Admission(patience=1000.0), deadline=7.0)

    assert 7.0 == anyio.current_time()
    assert 3 == result.counts.retryable


async def test_two_batches_share_what_is_ready():
    """A sandbox wakes one of each batch, and whichever has an episode of its image takes it."""
    admission = Admission()
    first, second = ledger_of("a"), ledger_of("b")
    taken = []

    async def work(ledger):
        taken.append((await admission.take(ledger)).episode.image)

    async with anyio.create_task_group() as group:
        group.start_soon(work, first)
        group.start_soon(work, second)
        await anyio.sleep(1)
        admission(ready("s1", "b"))
        await anyio.sleep(1)
        assert ["b"] == taken
        admission(ready("s2", "a"))

    assert ["b", "a"] == taken
    assert 2.0 == anyio.current_time()


async def test_whoever_is_cancelled_takes_no_wake_up_along():
    """The sandbox that it was woken for wakes the next one."""
    admission, ledger = Admission(), ledger_of("a")
    taken = []

    async def work():
        taken.append(await admission.take(ledger))

    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def cancelled():
            with scope:
                await work()

        group.start_soon(cancelled)
        await anyio.sleep(1)
        group.start_soon(work)
        await anyio.sleep(1)
        admission(ready("s1", "a"))
        scope.cancel()

    assert ["a"] == [ticket.episode.image for ticket in taken if ticket is not None]
    assert 2.0 == anyio.current_time()
    assert "<Admission [1 ready, 1 admitted | 0 waiting]>" == repr(admission)
