# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from agentsandbox.warmpool.matching import Matcher


def test_first_come_first_served():
    """Waiters of one image get sandboxes in the order in which they came, the oldest sandbox first."""
    matcher = Matcher({"a": 9})
    for waiter in "xyz":
        matcher.add("a", waiter)
    matcher.offer("a", "s1")
    matcher.offer("a", "s2")

    assert [("x", "s1"), ("y", "s2")] == matcher.match("a")
    assert 1 == matcher.waiting("a") == matcher.waiting()
    assert 0 == matcher.ready("a")


def test_p43_one_sandbox_is_never_matched_twice():
    """Two sandboxes, three waiters: two distinct pairs, and the third gets what comes next."""
    matcher = Matcher({"a": 3})
    for waiter in "xyz":
        matcher.add("a", waiter)
    matcher.offer("a", "s1")
    matcher.offer("a", "s2")

    assert [("x", "s1"), ("y", "s2")] == matcher.match("a")
    assert [] == matcher.match("a")

    matcher.offer("a", "s3")
    assert [("z", "s3")] == matcher.match("a")


def test_the_lease_limit_of_an_image_holds():
    """A ready sandbox beyond the limit is kept until a place is left."""
    matcher = Matcher({"a": 1})
    for waiter, sandbox in (("x", "s1"), ("y", "s2")):
        matcher.add("a", waiter)
        matcher.offer("a", sandbox)

    assert [("x", "s1")] == matcher.match("a")
    assert [] == matcher.match("a")
    assert 0 == matcher.servable("a")

    matcher.leave("a")
    assert 1 == matcher.servable("a")
    assert [("y", "s2")] == matcher.match("a")
    assert 1 == matcher.places("a")


def test_images_do_not_take_from_each_other():
    """A sandbox goes to waiters of its own image, however long others wait."""
    matcher = Matcher({"a": 1, "b": 1})
    matcher.add("a", "x")
    matcher.add("b", "y")
    matcher.offer("b", "s1")

    assert [] == matcher.match("a")
    assert [("y", "s1")] == matcher.match("b")


def test_who_holds_a_place_goes_first_and_takes_no_second_one():
    """A waiter whose sandbox is being replaced is served before the others, also when the limit is reached."""
    matcher = Matcher({"a": 1})
    matcher.add("a", "x")
    matcher.offer("a", "s1")
    matcher.match("a")
    matcher.add("a", "y")
    matcher.add("a", "x", holding=True)
    matcher.offer("a", "s2")
    matcher.offer("a", "s3")

    assert 1 == matcher.servable("a")
    assert [("x", "s2")] == matcher.match("a")
    assert 1 == matcher.places("a")
    assert 1 == matcher.waiting("a")


def test_a_cancelled_waiter_is_passed_over():
    """A waiter that left is not served, and those behind it keep their order."""
    matcher = Matcher({"a": 9})
    for waiter in "xyz":
        matcher.add("a", waiter)

    assert matcher.cancel("a", "y")
    assert not matcher.cancel("a", "y")

    for sandbox in ("s1", "s2"):
        matcher.offer("a", sandbox)
    assert [("x", "s1"), ("z", "s2")] == matcher.match("a")


def test_a_waiter_that_was_served_cannot_be_cancelled():
    """Cancelling after the match says no: whoever asks must hand the sandbox back."""
    matcher = Matcher({"a": 1})
    matcher.add("a", "x")
    matcher.offer("a", "s1")
    matcher.match("a")

    assert not matcher.cancel("a", "x")
    assert 1 == matcher.places("a")


def test_cancelling_who_holds_a_place_leaves_it():
    """Its place is free for the next."""
    matcher = Matcher({"a": 1})
    matcher.add("a", "x")
    matcher.offer("a", "s1")
    matcher.match("a")
    matcher.add("a", "x", holding=True)
    matcher.add("a", "y")

    assert matcher.cancel("a", "x")
    assert 0 == matcher.places("a")
    matcher.offer("a", "s2")
    assert [("y", "s2")] == matcher.match("a")


def test_withdrawn_sandboxes_are_not_matched():
    """A sandbox that was taken back is gone from the queue; taking it back twice says so."""
    matcher = Matcher({"a": 1})
    matcher.offer("a", "s1")
    matcher.offer("a", "s2")
    assert "s1" == matcher.oldest("a")

    assert matcher.withdraw("a", "s1")
    assert not matcher.withdraw("a", "s1")
    matcher.add("a", "x")
    assert [("x", "s2")] == matcher.match("a")


def test_dismissing_empties_the_queue_and_frees_held_places():
    """Everybody who waited is named once, those who held a place first."""
    matcher = Matcher({"a": 1})
    matcher.add("a", "x")
    matcher.offer("a", "s1")
    matcher.match("a")
    matcher.add("a", "y")
    matcher.add("a", "x", holding=True)

    assert ["x", "y"] == matcher.dismiss("a")
    assert (0, 0) == (matcher.waiting(), matcher.places("a"))


def test_repr_shows_the_state():
    """One line: images, ready sandboxes, waiters."""
    matcher = Matcher({"a": 1, "b": 1})
    matcher.offer("a", "s1")
    matcher.add("b", "x")

    assert "<Matcher [2 images | 1 ready | 1 waiting]>" == repr(matcher)


def test_the_cost_of_a_match_does_not_depend_on_how_many_wait():
    """Adding, cancelling and matching look at one queue's ends: 50,000 waiters are served without a rescan."""

    class Counted(str):
        hashed = 0

        def __hash__(self):
            Counted.hashed += 1
            return super().__hash__()

    n = 50_000
    matcher = Matcher({"a": n})
    waiters = [Counted(i) for i in range(n)]
    for waiter in waiters:
        matcher.add("a", waiter)
    for waiter in waiters[::2]:
        matcher.cancel("a", waiter)
    for i in range(n // 2):
        matcher.offer("a", f"s{i}")
        assert 1 == len(matcher.match("a"))

    assert Counted.hashed <= 4 * n
