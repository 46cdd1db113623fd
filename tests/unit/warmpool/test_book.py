# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from random import Random

import pytest

from agentsandbox.errors import (
    ConfigurationError,
    ImagePullFailed,
    PoolClosed,
    ProvisionError,
    SandboxLost,
    Throttled,
    UsageError,
)
from agentsandbox.warmpool.book import Create, Destroy, Grant, PoolBook, Recycle, Refuse, Waiter
from agentsandbox.warmpool.lease import Input, SandboxLife, State
from agentsandbox.warmpool.outlook import Announcement
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.replenisher import Replenisher


def make_book(images, *, spares=0, cap=100, in_flight=100, **options):
    replenisher = Replenisher(
        targets={image: size + spares for image, size in images.items()},
        cap=cap,
        creates_in_flight=in_flight,
        limiter=AdaptiveLimiter(random=Random(0)),
    )
    return PoolBook(images=images, replenisher=replenisher, **options)


def make_ready(book, now=0.0):
    """Start it and let everything that it asks for succeed."""
    todo = book.start(now)
    while todo:
        decision = todo.pop(0)
        if isinstance(decision, Create):
            todo += book.created(decision.name, now)


def ask(book, image="host", now=0.0):
    waiter = Waiter(image, now)
    return waiter, book.request(waiter, now)


def kinds(decisions):
    return [type(decision) for decision in decisions]


def test_it_starts_by_making_what_should_be_ready():
    """Names are unique and numbered; nothing is asked for twice."""
    book = make_book({"host": 2})

    assert [Create("sb-000001", "host"), Create("sb-000002", "host")] == book.start(0.0)
    assert [] == book.wake(1.0)
    assert "<PoolBook [2 creating | 0 waiting]>" == repr(book)


def test_a_ready_sandbox_is_granted_in_the_same_step():
    """The request itself returns the grant."""
    book = make_book({"host": 1})
    make_ready(book, 1.0)

    waiter, decisions = ask(book, now=2.0)

    assert [waiter.grant] == decisions
    assert ("sb-000001", 1, 1.0) == (waiter.grant.name, waiter.grant.generation, waiter.grant.ready_at)
    assert "<Waiter for 'host' [granted]>" == repr(waiter)


def test_p43_two_sandboxes_three_waiters():
    """Two distinct sandboxes; the third waits until one is released, and gets a fresh one."""
    book = make_book({"host": 2})
    make_ready(book)
    waiters = [ask(book)[0] for _ in range(3)]
    assert [True, True, False] == [waiter.grant is not None for waiter in waiters]
    assert waiters[0].grant.name != waiters[1].grant.name
    assert "<Waiter for 'host' [waiting]>" == repr(waiters[2])

    decisions = book.release(waiters[0].grant, 1.0)
    assert [Destroy(waiters[0].grant.name), Create("sb-000003", "host")] == decisions
    decisions = book.created("sb-000003", 2.0)
    assert [waiters[2].grant] == decisions
    assert "sb-000003" == waiters[2].grant.name


def test_with_a_spare_the_next_waiter_does_not_wait():
    """The release itself grants the spare; its replacement is made in the background."""
    book = make_book({"host": 1}, spares=1)
    make_ready(book)
    first, _ = ask(book)
    second, decisions = ask(book)
    assert [] == decisions

    assert [Destroy, Grant, Create] == kinds(book.release(first.grant, 1.0))
    assert second.grant is not None


def test_p42_served_and_cancelled_in_the_same_tick_hands_it_back():
    """The waiter was granted and cancelled before it woke: its sandbox is ready again and goes to the next."""
    book = make_book({"host": 1})
    make_ready(book)
    first, _ = ask(book)
    second, _ = ask(book)

    decisions = book.withdraw(first, 1.0)

    assert [second.grant] == decisions
    assert (first.grant.name, 2) == (second.grant.name, second.grant.generation)
    with pytest.raises(UsageError, match="not held by generation 1"):
        book.release(first.grant, 1.0)
    assert 1 == book.counts[State.LEASED]


def test_p42_a_cancelled_waiter_leaks_nothing():
    """Cancelled while it waited: it is forgotten, and cancelling again is no news."""
    book = make_book({"host": 1})
    book.start(0.0)
    waiter, _ = ask(book)

    assert [] == book.withdraw(waiter, 0.0)
    assert [] == book.withdraw(waiter, 0.0)
    assert [] == book.created("sb-000001", 1.0)
    assert (0, 1) == (book.matcher.waiting(), book.counts[State.READY])


def test_a_stale_claim_releases_nothing():
    """A second release, and a release by a former holder, are usage errors and change nothing."""
    book = make_book({"host": 1})
    make_ready(book)
    waiter, _ = ask(book)
    book.release(waiter.grant, 1.0)

    with pytest.raises(UsageError, match="is not held"):
        book.release(waiter.grant, 1.0)
    book.deleted(waiter.grant.name, 2.0)
    with pytest.raises(UsageError, match="is not held"):
        book.give_back(waiter.grant, 2.0)


def test_replacing_keeps_the_place():
    """Its holder is served before those who waited longer, and the limit is not exceeded."""
    book = make_book({"host": 1})
    make_ready(book)
    holder, _ = ask(book)
    other, _ = ask(book)
    again = Waiter("host", 1.0)

    assert [Destroy("sb-000001"), Create("sb-000002", "host")] == book.replace(holder.grant, again, 1.0)
    decisions = book.created("sb-000002", 2.0)
    assert [again.grant] == decisions
    assert other.grant is None
    assert 1 == book.matcher.places("host")


def test_replacing_in_a_closed_pool_is_refused():
    """There is nothing to wait for any more; the old sandbox is removed all the same."""
    book = make_book({"host": 1})
    make_ready(book)
    holder, _ = ask(book)
    book.close()

    again = Waiter("host", 1.0)
    assert [Destroy, Refuse] == kinds(book.replace(holder.grant, again, 1.0))
    assert isinstance(again.error, PoolClosed)
    assert 0 == book.matcher.places("host")


def test_a_lost_ready_sandbox_is_replaced():
    """It is never granted; another is made; a loss of something unknown is no news."""
    book = make_book({"host": 1})
    make_ready(book)

    assert [Destroy("sb-000001"), Create("sb-000002", "host")] == book.lost("sb-000001", 1.0)
    assert 1 == book.counts[State.DELETING]
    assert [] == book.lost("nobody", 1.0)
    waiter, decisions = ask(book)
    assert [] == decisions
    assert waiter.grant is None


def test_a_lost_leased_sandbox_stays_its_holders_until_the_release():
    """The holder must learn of it first; then it is removed."""
    book = make_book({"host": 1})
    make_ready(book)
    waiter, _ = ask(book)

    assert [] == book.lost("sb-000001", 1.0)
    assert 1 == book.counts[State.LOST]
    assert [Destroy("sb-000001"), Create("sb-000002", "host")] == book.release(waiter.grant, 2.0)


def test_p48_waiters_fail_fast_with_the_reason_once_the_breaker_opens():
    """Three failures in a row: everybody who waits is refused with the cause, and who comes later too."""
    book = make_book({"bad": 2, "good": 1}, in_flight=1)
    waiters = [ask(book, "bad")[0] for _ in range(2)]
    error = ProvisionError("CreateContainerConfigError: secret missing")
    for number in range(1, 4):
        assert [None, None] == [waiter.error for waiter in waiters]
        decisions = book.failed(f"sb-{number:06d}", error, 0.0)

    refused = [d for d in decisions if isinstance(d, Refuse)]
    late, _ = ask(book, "bad", 1.0)
    assert waiters == [refusal.waiter for refusal in refused]
    for waiter in (*waiters, late):
        assert ProvisionError is type(waiter.error)
        assert "CreateContainerConfigError: secret missing" == str(waiter.error)
        assert error is waiter.error.__cause__
    assert 3 == len({id(waiter.error) for waiter in (*waiters, late)} | {id(error)}) - 1
    assert ["a sandbox of image 'bad' could not be made 3 times in a row; next try in 29 s"] == late.error.__notes__
    assert "<Waiter for 'bad' [refused]>" == repr(late)
    assert 30.0 == book.wake_at
    assert 3 == book.failed_total


def test_p48_a_permanent_failure_keeps_its_type():
    """The image does not exist: one attempt, and the error says that it is for good."""
    book = make_book({"bad": 1})
    waiter, _ = ask(book, "bad")
    book.failed("sb-000001", ImagePullFailed("manifest unknown", permanent=True), 0.0)

    assert isinstance(waiter.error, ImagePullFailed)
    assert not waiter.error.retryable
    assert ["a sandbox of image 'bad' could not be made once; it will not be tried again"] == waiter.error.__notes__
    assert [] == book.wake(1e9)


def test_an_error_that_cannot_be_copied_is_told_in_words():
    """Its constructor needs more than its message: the text is kept, and the error itself is the cause."""

    class Odd(ConfigurationError):
        def __init__(self, *, code):
            super().__init__(f"code {code}")

    book = make_book({"bad": 1})
    waiter, _ = ask(book, "bad")
    book.failed("sb-000001", Odd(code=7), 0.0)

    assert ProvisionError is type(waiter.error)
    assert "Odd: code 7" == str(waiter.error)
    assert isinstance(waiter.error.__cause__, Odd)


def test_an_error_that_copies_to_itself_is_told_in_words():
    """Two waiters must never share one exception."""

    class Single(ConfigurationError):
        def __copy__(self):
            return self

    book = make_book({"bad": 1})
    waiter, _ = ask(book, "bad")
    book.failed("sb-000001", Single("once"), 0.0)

    assert "Single: once" == str(waiter.error)


def test_an_open_breaker_does_not_withhold_what_is_ready():
    """Sandboxes that are there are granted; only who would have to wait for a new one is refused."""
    book = make_book({"host": 2}, spares=1)
    make_ready(book)
    holder, _ = ask(book)
    created = book.release(holder.grant, 0.0)[-1]
    for _ in range(3):
        (created,) = [d for d in book.failed(created.name, ProvisionError("x"), 0.0) if isinstance(d, Create)] or [None]

    assert [Grant] == kinds(ask(book)[1])
    assert [Grant] == kinds(ask(book)[1])
    assert [Refuse] == kinds(ask(book)[1])


def test_congestion_refuses_nobody():
    """Throttled: the waiter goes on waiting, and the book says when it wants to try again."""
    book = make_book({"host": 1})
    waiter, _ = ask(book)
    assert [] == book.failed("sb-000001", Throttled("429", retry_after=5.0), 0.0)

    assert waiter.error is None
    assert 5.0 <= book.wake_at <= 6.0
    assert [Create("sb-000002", "host")] == book.wake(book.wake_at)


def test_the_cap_counts_what_is_being_removed():
    """P45: a removal that is not confirmed keeps its room; so does one that was given up."""
    book = make_book({"host": 1}, cap=1)
    make_ready(book)
    waiter, _ = ask(book)
    assert [Destroy("sb-000001")] == book.release(waiter.grant, 0.0)

    book.resists("sb-000001")
    assert [] == book.wake(100.0)
    assert 1 == book.stuck

    assert [Create("sb-000002", "host")] == book.deleted("sb-000001", 200.0)
    assert (0, 1) == (book.stuck, book.deleted_total)


def test_room_is_made_for_another_image():
    """At the cap: the idle sandbox of one image goes, then one of the other is made."""
    book = make_book({"a": 1, "b": 1}, cap=1)
    make_ready(book)
    assert 1 == book.count("a", State.READY)

    waiter, decisions = ask(book, "b")
    assert [Destroy("sb-000001")] == decisions
    assert [] == book.wake(1.0)
    assert [Create("sb-000002", "b")] == book.deleted("sb-000001", 2.0)
    decisions = book.created("sb-000002", 3.0)
    assert [waiter.grant] == decisions


def test_closing_refuses_who_waits_and_makes_nothing_more():
    """Waiters get PoolClosed, creations that end become no new ones, and late calls are refused."""
    book = make_book({"host": 1})
    book.start(0.0)
    waiter, _ = ask(book)

    assert [Refuse] == kinds(book.close())
    assert isinstance(waiter.error, PoolClosed)
    assert [] == book.failed("sb-000001", None, 1.0)
    assert [] == book.wake(1.0)
    assert math.inf == book.wake_at
    late, decisions = ask(book)
    assert [Refuse] == kinds(decisions)
    assert isinstance(late.error, PoolClosed)


def test_the_sweep_names_everything_that_is_left():
    """Ready, leased, resetting, lost and already deleting sandboxes alike; what is being made is not there yet."""
    book = make_book({"host": 5}, spares=1)
    decisions = book.start(0.0)
    for create in decisions[:5]:
        book.created(create.name, 0.0)
    holders = [ask(book)[0].grant for _ in range(4)]
    book.lost(holders[0].name, 0.0)
    book.release(holders[1], 0.0)
    book.lives[holders[2].name].apply(Input.RESET)
    book.close()

    assert [create.name for create in decisions[:5]] == book.sweep()
    assert {State.DELETING, State.CREATING} == {life.state for life in book.lives.values()}


def test_a_cancelled_creation_is_no_failure_of_its_image():
    """Told to stop: counted, but neither breaker nor pause."""
    book = make_book({"host": 1})
    book.start(0.0)
    assert [Create("sb-000002", "host")] == book.failed("sb-000001", None, 0.0)
    assert book.replenisher.last_error is None


def test_a_lost_holder_that_is_cancelled_gives_it_to_nobody():
    """Handing back what was lost meanwhile removes it."""
    book = make_book({"host": 1})
    make_ready(book)
    waiter, _ = ask(book)
    book.lost("sb-000001", 0.0)

    assert Destroy("sb-000001") in book.withdraw(waiter, 0.0)
    assert SandboxLost is not type(waiter.error)
    assert 0 == book.matcher.ready("host")


def perform(book, decisions, now=0.0):
    """Let everything that is asked for succeed; return which images were made, and what became of whom."""
    made, turned = [], []
    todo = list(decisions)
    while todo:
        decision = todo.pop(0)
        if isinstance(decision, Create):
            made.append(decision.image)
            todo += book.created(decision.name, now)
        elif isinstance(decision, Recycle):
            turned.append((decision.name, decision.image))
            todo += book.recycled(decision.name, now) if decision.image else book.decide(decision.name, now)
        elif isinstance(decision, Destroy):
            todo += book.deleted(decision.name, now)
    return made, turned


def test_what_is_announced_is_made_ready():
    """Images that were never heard of are known from then on; leases use the announcement up."""
    book = make_book({})
    announcement = Announcement({"a": 2, "b": 1})

    made, _ = perform(book, book.announce(announcement, 0.0))
    assert ["a", "a", "b"] == made
    assert "<PoolBook [3 ready | 0 waiting, 3 announced]>" == repr(book)

    waiter, decisions = ask(book, "a")
    assert [Grant] == kinds(decisions)
    assert {"a": 1, "b": 1} == announcement.left
    assert waiter.grant is not None


def test_a_replacement_uses_up_no_announcement():
    """Who gets a fresh sandbox for a used one is the same rollout."""
    book = make_book({})
    announcement = Announcement({"a": 3})
    perform(book, book.announce(announcement, 0.0))
    waiter, _ = ask(book, "a")
    again = Waiter("a", 1.0)
    book.replace(waiter.grant, again, 1.0)

    assert again.grant is not None
    assert {"a": 2} == announcement.left


def test_as_many_of_an_announced_image_are_leased_at_once_as_are_to_come():
    """And so many more as may burst; what is announced later may raise that, and never lowers it."""
    book = make_book({}, burst=1)
    made, _ = perform(book, book.announce(Announcement({"a": 2}), 0.0))
    assert ["a", "a"] == made
    first = [ask(book, "a") for _ in range(4)]
    made, _ = perform(book, first[2][1])
    assert ["a"] == made
    assert [True, True, True, False] == [waiter.grant is not None for waiter, _ in first]

    made, _ = perform(book, book.announce(Announcement({"a": 3}), 0.0))
    assert ["a"] == made
    assert 4 == book.matcher.limit("a")
    assert first[3][0].grant is not None


def test_who_waited_for_a_place_is_served_as_soon_as_there_is_one():
    """A ready sandbox and a waiter, and no place: a later announcement makes one, and the grant comes with it."""
    book = make_book({})
    perform(book, book.announce(Announcement({"a": 1}), 0.0))
    holder, _ = ask(book, "a")
    waiter, _ = ask(book, "a")
    book.matcher.offer("a", "sb-000002")
    book.lives["sb-000002"] = SandboxLife("sb-000002", "a", State.READY)
    book._census.move("a", None, State.READY)
    assert waiter.grant is None

    decisions = book.announce(Announcement({"a": 2}), 1.0)
    assert waiter.grant in decisions
    assert holder.grant is not None


def test_a_declared_image_is_never_made_beyond_its_target():
    """Hundreds of rollouts are announced, and as many sandboxes kept as was said."""
    book = make_book({"host": 2}, spares=1)
    made, _ = perform(book, [*book.start(0.0), *book.announce(Announcement({"host": 500}), 0.0)])

    assert ["host"] * 3 == made
    assert 2 == book.matcher.limit("host")


def test_stock_becomes_what_is_announced():
    """At the cap, an idle sandbox becomes what comes next in its place; nothing is made or removed."""
    book = make_book({"idle": 3}, cap=3)
    make_ready(book)
    book.recycles = lambda _name: True

    made, turned = perform(book, book.announce(Announcement({"next": 2}), 1.0))
    assert ([], [("sb-000001", "next"), ("sb-000002", "next")]) == (made, turned)
    assert (2, 1) == (book.count("next", State.READY), book.count("idle", State.READY))


def test_what_was_withdrawn_becomes_what_is_wanted_before_anything_is_made():
    """Its sandboxes stay until somebody has use for their place."""
    book = make_book({})
    book.recycles = lambda _name: True
    announcement = Announcement({"old": 2})
    perform(book, book.announce(announcement, 0.0))
    assert [] == book.retract(announcement, 1.0)
    assert 2 == book.counts[State.READY]

    made, turned = perform(book, book.announce(Announcement({"new": 3}), 2.0))
    assert (["new"], [("sb-000001", "new"), ("sb-000002", "new")]) == (made, turned)
    assert [] == book.retract(announcement, 3.0)


def test_what_was_withdrawn_and_cannot_change_is_removed_when_somebody_wants_another():
    """It is of no use to anybody, and would stand in the way later."""
    book = make_book({})
    announcement = Announcement({"old": 2})
    perform(book, book.announce(announcement, 0.0))
    book.retract(announcement, 1.0)

    decisions = book.announce(Announcement({"new": 1}), 2.0)
    assert [Destroy("sb-000001"), Create("sb-000003", "new")] == decisions


def test_a_batch_that_begins_is_not_counted_twice():
    """Announced before, it is the same rollouts; what is left of it at the end is withdrawn."""
    book = make_book({})
    book.announce(Announcement({"a": 4}), 0.0)
    batch = Announcement({"a": 4, "b": 1})
    book.announce(batch, 0.0, begins=True)
    assert 5 == book.outlook.total

    book.retract(batch, 1.0)
    assert 0 == book.outlook.total


def test_nothing_is_announced_to_a_closed_pool():
    """It is as if it had been withdrawn."""
    book = make_book({"host": 1})
    book.close()
    announcement = Announcement({"host": 1, "other": 2})

    assert [] == book.announce(announcement, 0.0)
    assert {} == announcement.left
    assert [] == book.retract(announcement, 0.0)
    assert 0 == book.outlook.total


def test_the_cost_of_an_event_does_not_depend_on_how_many_images_there_are():
    """Two thousand images are announced and waited for: an event tells of the images that it is about, and no other."""
    looked = []

    class Counting(Replenisher):
        def update(self, image, demand):
            looked.append(image)
            super().update(image, demand)

    images = [f"image-{number}" for number in range(2_000)]
    replenisher = Counting(targets={}, cap=8, creates_in_flight=8, limiter=AdaptiveLimiter(random=Random(0)))
    book = PoolBook(images={}, replenisher=replenisher)
    book.recycles = lambda _name: True
    book.announce(Announcement(dict.fromkeys(images, 4)), 0.0)
    waiters = [Waiter(image, 0.0) for image in images]
    for waiter in waiters:
        book.request(waiter, 0.0)

    looked.clear()
    perform(book, book.created("sb-000001", 1.0))
    assert waiters[0].grant is not None
    assert len(looked) <= 4
    looked.clear()
    decisions = book.release(waiters[0].grant, 2.0)
    assert [Recycle("sb-000001", None)] == decisions
    (recycle,) = book.decide("sb-000001", 2.1)
    book.recycled("sb-000001", 3.0)
    assert "image-2" == recycle.image
    assert waiters[2].grant is not None
    assert len(looked) <= 8


def test_what_is_decided_already_is_not_decided_again():
    """The moment to decide may come after the sandbox was lost, or for one that nobody knows."""
    book = make_book({"host": 1})
    make_ready(book)

    assert [] == book.decide("sb-000001", 1.0)
    assert [] == book.decide("nobody", 1.0)
    assert State.READY is book.lives["sb-000001"].state
