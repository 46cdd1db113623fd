# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from random import Random

import pytest

from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    Conflict,
    ImagePullFailed,
    PermissionDenied,
    ProvisionError,
    QuotaExceeded,
    Throttled,
    Unschedulable,
)
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.replenisher import Breaker, Demand, Evict, Make, Replenisher, congested


def make(targets, *, cap=100, in_flight=100, rate=None, **options):
    limiter = AdaptiveLimiter(rate=rate, burst=1 if rate else None, random=Random(0))
    return Replenisher(targets=targets, cap=cap, creates_in_flight=in_flight, limiter=limiter, **options)


def makes(plan):
    return [action.image for action in plan if isinstance(action, Make)]


def test_every_image_is_brought_to_its_target_in_turn():
    """Nobody waits: images take turns, so that none is ready in full before another has its first."""
    replenisher = make({"a": 3, "b": 1})
    replenisher.update("a", Demand())
    replenisher.update("b", Demand())

    assert ["a", "b", "a", "a"] == makes(replenisher.plan(0.0, alive=0, creating=0, going=0))


def test_held_and_ready_and_creating_count_towards_the_target():
    """The target is for all that is usable: 6 − 2 − 1 − 1 = 2 are missing."""
    replenisher = make({"a": 6})
    replenisher.update("a", Demand(held=2, ready=1, creating=1))

    assert ["a", "a"] == makes(replenisher.plan(0.0, alive=4, creating=1, going=0))


def test_nothing_is_made_at_the_target():
    """An image that has what it should have is left alone."""
    replenisher = make({"a": 2})
    replenisher.update("a", Demand(held=1, ready=1))

    assert [] == replenisher.plan(0.0, alive=2, creating=0, going=0)
    assert math.inf == replenisher.wake_at


def test_images_that_somebody_waits_for_come_first():
    """Stock for later waits until everybody who waits has a sandbox on the way; those take turns too."""
    replenisher = make({"stock": 3, "a": 9, "b": 9}, in_flight=4)
    replenisher.update("stock", Demand())
    replenisher.update("a", Demand(servable=3, waiting=3))
    replenisher.update("b", Demand(servable=1, waiting=1))

    assert ["a", "b", "a", "a"] == makes(replenisher.plan(0.0, alive=0, creating=0, going=0))


def test_p39_creates_in_flight_are_counted():
    """A sandbox on the way serves its waiter: no second one is asked for, however often a plan is made."""
    replenisher = make({"a": 1})
    replenisher.update("a", Demand(servable=1, waiting=1))
    assert ["a"] == makes(replenisher.plan(0.0, alive=0, creating=0, going=0))

    replenisher.update("a", Demand(creating=1, servable=1, waiting=1))
    assert all([] == replenisher.plan(float(t), alive=1, creating=1, going=0) for t in range(100))


def test_p39_never_more_in_flight_than_allowed():
    """At most so many are being made at once."""
    replenisher = make({"a": 50}, in_flight=8)
    replenisher.update("a", Demand(creating=5))

    assert 3 == len(replenisher.plan(0.0, alive=5, creating=5, going=0))


def test_p39_never_more_alive_than_the_cap():
    """The cap is for everything alive, whatever its state."""
    replenisher = make({"a": 50}, cap=10)
    replenisher.update("a", Demand(held=2))

    assert 3 == len(replenisher.plan(0.0, alive=7, creating=0, going=5))
    assert [] == replenisher.plan(0.0, alive=10, creating=0, going=5)


def test_the_rate_holds_and_says_when_to_come_back():
    """One token at the start, then one every half second."""
    replenisher = make({"a": 3}, rate=2.0)
    replenisher.update("a", Demand())

    assert 1 == len(replenisher.plan(0.0, alive=0, creating=0, going=0))
    assert 0.5 == replenisher.wake_at
    assert 0 == len(replenisher.plan(0.4, alive=1, creating=1, going=0))
    assert 1 == len(replenisher.plan(0.5, alive=1, creating=1, going=0))


def test_room_is_made_for_an_image_that_somebody_waits_for():
    """At the cap, an idle sandbox of an image that nobody waits for goes; as many as are waited for."""
    replenisher = make({"idle": 3, "other": 2, "a": 2}, cap=5)
    replenisher.update("idle", Demand(ready=3))
    replenisher.update("other", Demand(ready=2))
    replenisher.update("a", Demand(servable=2, waiting=2))

    assert [Evict("idle"), Evict("other")] == replenisher.plan(0.0, alive=5, creating=0, going=0)


def test_room_that_is_coming_anyway_is_not_made_twice():
    """Two removals are under way for two waiters: nothing more is given up."""
    replenisher = make({"idle": 3, "a": 2}, cap=5)
    replenisher.update("idle", Demand(ready=3))
    replenisher.update("a", Demand(servable=2, waiting=2))

    assert [] == replenisher.plan(0.0, alive=5, creating=0, going=2)
    assert [Evict("idle")] == replenisher.plan(0.0, alive=5, creating=0, going=1)


def test_nothing_is_evicted_for_stock():
    """At the cap with nobody waiting, everything stays as it is."""
    replenisher = make({"idle": 3, "a": 2}, cap=3)
    replenisher.update("idle", Demand(ready=3))
    replenisher.update("a", Demand())

    assert [] == replenisher.plan(0.0, alive=3, creating=0, going=0)


def test_what_somebody_waits_for_is_not_evicted():
    """Both images have waiters: neither gives up its ready sandboxes."""
    replenisher = make({"b": 1, "a": 2}, cap=1)
    replenisher.update("b", Demand(ready=1, waiting=1))
    replenisher.update("a", Demand(servable=2, waiting=2))

    assert [] == replenisher.plan(0.0, alive=1, creating=0, going=0)


def test_several_of_one_image_are_evicted_if_there_are_no_others():
    """Evictions take turns, and go on with one image if it is the only one; never beyond what it has."""
    replenisher = make({"idle": 2, "a": 5}, cap=2)
    replenisher.update("idle", Demand(ready=2))
    replenisher.update("a", Demand(servable=5, waiting=5))

    assert [Evict("idle"), Evict("idle")] == replenisher.plan(0.0, alive=2, creating=0, going=0)


def test_p48_the_breaker_opens_after_failures_in_a_row_and_tries_once_later():
    """Three in a row stop the image; after 30 s one is tried; its failure doubles the pause, its success ends it."""
    replenisher = make({"bad": 2, "good": 1})
    error = ProvisionError("CreateContainerConfigError")
    for _ in range(2):
        replenisher.failed("bad", error, 0.0)
    assert replenisher.refusal("bad") is None

    replenisher.failed("bad", error, 0.0)
    replenisher.update("bad", Demand(servable=1, waiting=1))
    replenisher.update("good", Demand())
    assert replenisher.refusal("bad").error is error
    assert ["good"] == makes(replenisher.plan(0.0, alive=0, creating=0, going=0))
    assert 30.0 == replenisher.wake_at

    assert ["bad"] == makes(replenisher.plan(30.0, alive=1, creating=0, going=0))
    assert replenisher.refusal("bad") is None
    replenisher.update("bad", Demand(creating=1, servable=2, waiting=2))
    assert [] == replenisher.plan(30.0, alive=1, creating=1, going=0)

    replenisher.failed("bad", error, 31.0)
    replenisher.update("bad", Demand(servable=1, waiting=1))
    assert [] == replenisher.plan(90.0, alive=1, creating=0, going=0)
    assert 91.0 == replenisher.wake_at

    assert ["bad"] == makes(replenisher.plan(91.0, alive=1, creating=0, going=0))
    replenisher.created("bad", 92.0)
    replenisher.update("bad", Demand(ready=1))
    assert ["bad"] == makes(replenisher.plan(92.0, alive=2, creating=0, going=0))
    assert math.inf == replenisher.wake_at


@pytest.mark.parametrize(
    "error",
    [
        ConfigurationError("no such directory"),
        ImagePullFailed("not found", permanent=True),
        PermissionDenied('cannot create resource "pods"'),
    ],
    ids=lambda error: type(error).__name__,
)
def test_p48_what_can_never_work_stops_at_once_and_for_good(error):
    """One failure is enough, and no time passes that would try again."""
    replenisher = make({"bad": 1})
    replenisher.failed("bad", error, 0.0)
    replenisher.update("bad", Demand(servable=1, waiting=1))

    assert replenisher.refusal("bad").error is error
    assert [] == replenisher.plan(1e9, alive=0, creating=0, going=0)
    assert math.inf == replenisher.wake_at

    replenisher.failed("bad", ProvisionError("late"), 1e9)
    assert math.inf == replenisher.refusal("bad").until


@pytest.mark.parametrize(
    "error",
    [
        Throttled("429"),
        ApiUnavailable("503"),
        Conflict("409"),
        QuotaExceeded("exceeded quota"),
        Unschedulable("no room"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_p48_congestion_slows_everything_down_and_blames_no_image(error):
    """Any number of refusals: no breaker, but a pause over all images; then it works."""
    replenisher = make({"a": 1})
    replenisher.update("a", Demand())
    now = 0.0
    for _ in range(10):
        replenisher.failed("a", error, now)
        assert [] == replenisher.plan(now, alive=0, creating=0, going=0)
        assert now < replenisher.wake_at <= now + 90
        now = replenisher.wake_at

    assert congested(error)
    assert replenisher.refusal("a") is None
    assert ["a"] == makes(replenisher.plan(now, alive=0, creating=0, going=0))
    assert error is replenisher.last_error


def test_p40_retry_after_is_honoured_over_all_images():
    """One image was throttled: none is made before the time that was named."""
    replenisher = make({"a": 1, "b": 1})
    replenisher.failed("a", Throttled("429", retry_after=7.0), 0.0)
    replenisher.update("b", Demand(servable=1, waiting=1))

    assert [] == replenisher.plan(6.99, alive=0, creating=0, going=0)
    assert 7.0 <= replenisher.wake_at <= 8.0
    assert ["b"] == makes(replenisher.plan(replenisher.wake_at, alive=0, creating=0, going=0))


def test_failures_that_are_not_in_a_row_open_nothing():
    """A success in between starts the count anew."""
    replenisher = make({"a": 1})
    for _ in range(5):
        replenisher.failed("a", ProvisionError("once"), 0.0)
        replenisher.failed("a", ProvisionError("twice"), 0.0)
        replenisher.created("a", 0.0)

    assert replenisher.refusal("a") is None


def test_breaker_shows_its_state():
    """Closed, open, half open, and closed again; a failure that comes late does not shorten the pause."""
    breaker = Breaker(threshold=2, cooldown=10.0, cooldown_max=15.0)
    error = ProvisionError("x")
    breaker.failed(error, 0.0)
    assert "<Breaker [closed, 1 failures in a row]>" == repr(breaker)
    assert not breaker.reopen(100.0)

    breaker.failed(error, 0.0)
    assert "<Breaker [open, 2 failures in a row]>" == repr(breaker)
    breaker.failed(error, 0.0)
    assert 15.0 == breaker.until
    assert not breaker.reopen(14.9)
    assert breaker.reopen(15.0)
    assert not breaker.reopen(15.0)
    assert "<Breaker [half open, 3 failures in a row]>" == repr(breaker)

    breaker.succeeded()
    assert "<Breaker [closed, 0 failures in a row]>" == repr(breaker)


def test_replenisher_shows_its_state():
    """One line: waiters without a sandbox, images short of their target, images failing, the cap."""
    replenisher = make({"a": 3, "b": 1, "c": 1}, cap=7)
    replenisher.update("a", Demand(servable=2, waiting=2))
    replenisher.update("b", Demand())
    replenisher.failed("c", ProvisionError("x"), 0.0)

    assert "<Replenisher [2 waited for, 2 images short, 1 failing | cap 7]>" == repr(replenisher)


def test_a_plan_looks_at_the_images_that_lack_something_and_at_no_other():
    """10,000 images at their target cost nothing: the one that lacks a sandbox is found at once."""
    targets = {f"image-{i}": 1 for i in range(10_000)}
    replenisher = make(targets, cap=20_000)
    for image in targets:
        replenisher.update(image, Demand(ready=1))
    replenisher.update("image-777", Demand(servable=1, waiting=1))

    assert [Make("image-777")] == replenisher.plan(0.0, alive=9_999, creating=0, going=0)
    assert not replenisher._lacking
    assert not replenisher._urgent


def test_a_sandbox_to_be_recycled_becomes_what_is_wanted_most():
    """It stays what it was if that is wanted, becomes what somebody lacks, or is needed no more."""
    replenisher = make({"a": 1, "b": 1})
    replenisher.update("a", Demand(ready=1))
    replenisher.update("b", Demand(ready=1))
    assert (None, None) == (replenisher.reuse("a"), replenisher.keep("a"))

    replenisher.update("b", Demand())
    assert ("b", None, "b") == (replenisher.reuse("a"), replenisher.keep("a"), replenisher.keep("b"))

    replenisher.update("a", Demand())
    assert ("a", "a") == (replenisher.reuse("a"), replenisher.keep("a"))


def test_announced_rollouts_come_after_waiters_and_before_stock():
    """In the order of the announcement, each image in full before the next one; nothing twice for who waits already."""
    replenisher = make({"stock": 1})
    replenisher.update("stock", Demand())
    replenisher.update("soon", Demand(announced=3, servable=1, waiting=1))
    replenisher.update("later", Demand(announced=2))

    expected = "<Replenisher [1 waited for, 4 announced, 1 images short, 0 failing | cap 100]>"
    assert expected == repr(replenisher)
    plan = makes(replenisher.plan(0.0, alive=0, creating=0, going=0))
    assert ["soon", "soon", "soon", "later", "later", "stock"] == plan


def test_what_is_there_or_on_its_way_counts_for_what_is_announced():
    """Four are announced, one is being made and two are ready: one is missing, and none of the stock."""
    replenisher = make({"a": 3})
    replenisher.update("a", Demand(announced=4, creating=1, ready=2))

    assert ["a"] == makes(replenisher.plan(0.0, alive=3, creating=1, going=0))


def test_stock_gives_way_to_what_is_announced():
    """At the cap, what nobody announced makes room; what is announced does not, and no more goes than is needed."""
    replenisher = make({"idle": 3, "busy": 2}, cap=5)
    replenisher.update("idle", Demand(ready=3))
    replenisher.update("busy", Demand(ready=2, announced=2))
    replenisher.update("soon", Demand(announced=2))

    assert [Evict("idle")] * 2 == replenisher.plan(0.0, alive=5, creating=0, going=0)
    replenisher.update("idle", Demand(ready=3))
    assert [Evict("idle")] == replenisher.plan(0.0, alive=5, creating=0, going=1)
    replenisher.update("idle", Demand())
    assert [] == replenisher.plan(0.0, alive=5, creating=0, going=0)


def test_who_waits_gets_the_room_of_what_is_needed_last():
    """Stock first; then the sandbox of the image that was announced last."""
    replenisher = make({"idle": 1}, cap=4)
    replenisher.update("idle", Demand(ready=1))
    replenisher.update("next", Demand(ready=1, announced=1))
    replenisher.update("last", Demand(ready=2, announced=2))
    replenisher.update("now", Demand(servable=2, waiting=2))

    assert [Evict("idle"), Evict("last")] == replenisher.plan(0.0, alive=4, creating=0, going=0)


def test_room_that_is_coming_anyway_goes_to_who_waits_first():
    """Of two that are going, one is for the waiter and one for the announced: nothing more is given up."""
    replenisher = make({"idle": 3}, cap=5)
    replenisher.update("idle", Demand(ready=3))
    replenisher.update("now", Demand(servable=1, waiting=1))
    replenisher.update("soon", Demand(announced=1))

    assert [] == replenisher.plan(0.0, alive=5, creating=0, going=2)
    assert [Evict("idle")] == replenisher.plan(0.0, alive=5, creating=0, going=1)


def test_what_nobody_needs_any_more_goes_before_anything_is_made():
    """A sandbox beyond target and announcements becomes what is wanted, though there is room for another one."""
    replenisher = make({"a": 1})
    replenisher.update("old", Demand(ready=2))
    assert [] == replenisher.plan(0.0, alive=2, creating=0, going=0)

    replenisher.update("a", Demand())
    assert [Evict("old")] == replenisher.plan(0.0, alive=2, creating=0, going=0)
    replenisher.update("old", Demand(ready=1))
    assert ["a"] == makes(replenisher.plan(0.0, alive=2, creating=0, going=1))


def test_a_used_sandbox_becomes_what_is_announced_before_what_is_stock():
    """Who waits first, then what comes next, then stock."""
    replenisher = make({"stock": 1})
    replenisher.update("stock", Demand())
    replenisher.update("soon", Demand(announced=1))
    assert ("soon", "soon") == (replenisher.reuse("stock"), replenisher.keep("soon"))

    replenisher.update("now", Demand(servable=1, waiting=1))
    assert "now" == replenisher.reuse("soon")


def test_an_image_that_fails_is_not_made_for_who_comes_later():
    """Its breaker holds for announcements too."""
    replenisher = make({})
    replenisher.failed("bad", ImagePullFailed("not found", permanent=True), 0.0)
    replenisher.update("bad", Demand(announced=4))

    assert [] == replenisher.plan(0.0, alive=0, creating=0, going=0)


def test_ten_thousand_images_that_cool_down_cost_nothing():
    """A plan looks at the one whose time comes first, and at those whose time has come; old entries are dropped."""
    replenisher = make({}, breaker_threshold=1)
    for number in range(10_000):
        image = f"image-{number}"
        replenisher.update(image, Demand(servable=1, waiting=1))
        replenisher.failed(image, ProvisionError("x"), float(number))
        replenisher.update(image, Demand(servable=1, waiting=1))
    looked = []
    breakers = replenisher._breakers

    class Counting(dict):
        def get(self, key, default=None):
            looked.append(key)
            return super().get(key, default)

    replenisher._breakers = Counting(breakers)
    assert [] == replenisher.plan(0.0, alive=0, creating=0, going=0)
    assert 30.0 == replenisher.wake_at
    assert ["image-0"] == looked

    replenisher.created("image-0", 30.0)
    looked.clear()
    assert ["image-1"] == makes(replenisher.plan(31.0, alive=0, creating=0, going=0))
    assert 32.0 == replenisher.wake_at
    assert len(looked) <= 4
