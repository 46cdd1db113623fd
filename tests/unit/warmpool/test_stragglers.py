# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that take too long to be made: nobody counts on them, and what they were for gets another one."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.placement import Placement
from agentsandbox.warmpool.book import Create, Destroy, Grant, PoolBook, Recycle, Waiter
from agentsandbox.warmpool.lease import State
from agentsandbox.warmpool.outlook import Announcement
from agentsandbox.warmpool.replenisher import Demand, Make, Replenisher
from agentsandbox.warmpool.stragglers import StragglerPolicy, Stragglers

POLICY = StragglerPolicy(quantile=0.5, times=2.0, share=0.5, min_delay=0.0, min_samples=2)


def learned(policy=POLICY, seconds=1.0, count=10):
    """Return one that has seen so many sandboxes made in so many seconds each, until 100 s."""
    stragglers = Stragglers(policy)
    for number in range(count):
        stragglers.begin(f"old-{number}", "a", "create", 100.0 - seconds)
        stragglers.end(f"old-{number}", 100.0)
    return stragglers


def test_one_is_late_when_it_has_taken_a_multiple_of_what_most_take():
    """At that moment, and not before; whoever asks is told of its image."""
    stragglers = learned()
    stragglers.begin("x", "b", "create", 100.0)

    assert 102.0 == stragglers.wake_at
    assert [] == stragglers.due(101.9, 10)
    assert ["b"] == stragglers.due(102.0, 10)
    assert (1, 0) == (stragglers.late("b"), stragglers.late("a"))
    assert (1, math.inf) == (len(stragglers), stragglers.wake_at)
    assert "<Stragglers [1 of 1 being made, 1 ever]>" == repr(stragglers)


def test_one_that_comes_is_late_no_more():
    """Made or not; what nobody knows of is no news."""
    stragglers = learned()
    for name in "xy":
        stragglers.begin(name, "b", "create", 100.0)
    assert ["b", "b"] == stragglers.due(103.0, 10)

    stragglers.end("x", 104.0)
    stragglers.end("y", 104.0, made=False)
    stragglers.end("z", 104.0)

    assert (0, 0, 2) == (stragglers.late("b"), len(stragglers), stragglers.total)


def test_nothing_is_late_before_enough_were_made():
    """Of each way of making them: nobody knows how long it takes."""
    stragglers = learned(count=1)
    stragglers.begin("x", "b", "create", 100.0)
    assert (math.inf, 0) == (stragglers.wake_at, stragglers.possible(10))
    assert [] == stragglers.due(9999.0, 10)

    stragglers = learned()
    stragglers.begin("x", "b", "change", 100.0)
    assert [] == stragglers.due(9999.0, 10)


def test_no_more_than_a_share_of_all_are_late():
    """And one at least; when one of them comes, the next oldest is late."""
    stragglers = learned()
    for name in "wxyz":
        stragglers.begin(name, name, "create", 100.0)

    assert ["w", "x"] == stragglers.due(150.0, 4)
    assert (0, math.inf) == (stragglers.possible(4), stragglers.wake_at)
    assert ["y"] == stragglers.due(151.0, 6)

    stragglers.end("w", 152.0)
    assert 152.0 >= stragglers.wake_at
    assert ["z"] == stragglers.due(152.0, 6)
    assert ["a"] == one_late(share=0.0001)


def one_late(share):
    stragglers = learned(StragglerPolicy(quantile=0.5, times=2.0, share=share, min_delay=0.0, min_samples=2))
    for name in "xy":
        stragglers.begin(name, "a", "create", 100.0)
    return stragglers.due(200.0, 2)


def test_without_a_share_nothing_is_ever_late():
    """Nor is anything noted."""
    assert [] == one_late(share=0)


def test_nothing_is_late_before_the_least_delay():
    """Warm sandboxes differ by milliseconds, and none of them is a straggler."""
    stragglers = learned(StragglerPolicy(min_samples=2, min_delay=5.0), seconds=0.01, count=30)
    stragglers.begin("x", "b", "create", 100.0)

    assert [] == stragglers.due(104.9, 10)
    assert ["b"] == stragglers.due(105.0, 10)


def test_if_everything_is_slow_the_delay_grows():
    """What has outlasted the others counts: as many slow ones as quick ones, and none of them is late."""
    stragglers = learned(StragglerPolicy(quantile=0.9, times=1.0, share=1.0, min_delay=0.0, min_samples=2))
    for number in range(10):
        stragglers.begin(f"slow-{number}", "b", "create", 100.0)

    assert [] == stragglers.due(1000.0, 20)


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=40), st.floats(0.01, 1))
def test_the_share_holds_whatever_happens(steps, share):
    """However sandboxes begin and end, and whenever it is asked."""
    stragglers = learned(StragglerPolicy(quantile=0.5, times=1.0, share=share, min_delay=0.0, min_samples=2))
    now, names = 100.0, []
    for number, (seconds, ends) in enumerate(steps):
        now += seconds
        if ends and names:
            stragglers.end(names.pop(0), now, made=bool(number % 3))
        else:
            names.append(f"n{number}")
            stragglers.begin(names[-1], "b", "create", now)
        stragglers.due(now, len(names))
        assert stragglers.late("b") == len(stragglers) <= len(names)
        assert stragglers.wake_at > now or stragglers.wake_at == math.inf
    for name in names:
        stragglers.end(name, now)
    assert 0 == len(stragglers)


@pytest.mark.parametrize(
    "options", [{"quantile": 1.0}, {"times": 0.9}, {"share": 1.1}, {"min_delay": -1.0}, {"min_samples": 0}]
)
def test_a_policy_that_makes_no_sense_is_refused(options):
    """Each setting has its range."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        StragglerPolicy(**options)


def replenisher(cap=4, placement=None):
    return Replenisher(targets={}, cap=cap, creates_in_flight=10, placement=placement)


def test_another_one_is_made_for_each_rollout_and_no_more():
    """One in the stead of a straggler; none for it in turn, and none for stock."""
    made = replenisher(cap=100)
    made.update("a", Demand(creating=2, late=2, servable=2, waiting=2))
    assert [Make("a"), Make("a")] == made.plan(0.0, alive=2, creating=2, going=0)

    made.update("a", Demand(creating=4, late=4, servable=2, waiting=2))
    assert [] == made.plan(0.0, alive=4, creating=4, going=0)

    made.targets["b"] = 1
    made.update("b", Demand(creating=1, late=1))
    assert [] == made.plan(0.0, alive=5, creating=5, going=0)

    made.update("b", Demand(creating=1, late=1, servable=1, waiting=1))
    assert [Make("b")] == made.plan(0.0, alive=5, creating=5, going=0)


@pytest.mark.parametrize("placement", [None, Placement(nodes={"a": "n", "b": "n"}, room={"n": 10})])
def test_what_a_straggler_was_for_comes_first(placement):
    """It has waited for longest: before what was announced before it."""
    made = replenisher(placement=placement)
    made.update("a", Demand(announced=2))
    made.update("b", Demand(creating=1, late=1, announced=1))

    assert "b" == made.reuse("c", "n")
    assert 3 == made.short


def test_none_is_made_where_nobody_waits_yet():
    """What is announced gets one that is let go, so that there are no more sandboxes than without stragglers."""
    made = replenisher(cap=100)
    made.update("a", Demand(creating=1, late=1, announced=1))

    assert [] == made.plan(0.0, alive=1, creating=1, going=0)
    assert ("a", "a") == (made.reuse("b"), made.keep("a"))


class Pool:
    """A book, and who performs what it decides: at once if it is made in no time."""

    def __init__(self, *, cap=3, on=lambda _name: None, recycles=True, placement=None):
        self.book = PoolBook(images={}, replenisher=replenisher(cap, placement), stragglers=POLICY)
        self.book.recycles = lambda _name: recycles
        self.book.keeps = lambda _name: False
        self.book.node = on
        self.done = []

    def act(self, decisions):
        self.done += decisions
        return decisions

    def learn(self):
        """Have two sandboxes made and two images changed, each within a second; nothing of them is left over."""
        book = self.book
        self.act(book.announce(Announcement({"old": 2}), 0.0))
        for name in list(book.lives):
            self.act(book.created(name, 1.0))
        waiters = [Waiter("old", 1.0) for _ in range(2)]
        for waiter in waiters:
            self.act(book.request(waiter, 1.0))
        self.act(book.announce(Announcement({"next": 2}), 1.0))
        for waiter in waiters:
            self.act(book.release(waiter.grant, 1.0))
            self.act(book.decide(waiter.grant.name, 1.0))
        for name, life in list(book.lives.items()):
            if life.state is State.RECYCLING:
                self.act(book.recycled(name, 2.0))
        for name, life in list(book.lives.items()):
            if life.state is State.CREATING:
                self.act(book.created(name, 2.0))
        waiters = [Waiter("next", 2.0) for _ in range(2)]
        for waiter in waiters:
            self.act(book.request(waiter, 2.0))
        return waiters

    def let_go(self, waiter, now):
        self.act(self.book.release(waiter.grant, now))
        return self.act(self.book.decide(waiter.grant.name, now))


def straggling(**options):
    """Return a pool of two sandboxes: one becomes "a" and straggles, the other is in use until 10 s."""
    pool = Pool(cap=2, **options)
    first, second = pool.learn()
    pool.act(pool.book.announce(Announcement({"a": 1}), 5.0))
    pool.let_go(first, 5.0)
    assert "a" == pool.book.lives[first.grant.name].image
    return pool, first.grant.name, second


def test_a_rollout_gets_another_sandbox_while_its_own_straggles():
    """The one that is let go of next; the straggler serves whoever comes when it is there."""
    pool, late, second = straggling()
    assert 7.0 == pool.book.wake_at
    pool.act(pool.book.wake(7.0))

    decided = pool.let_go(second, 10.0)

    assert Recycle(second.grant.name, "a") in decided
    pool.act(pool.book.recycled(second.grant.name, 11.0))
    waiter = Waiter("a", 11.0)
    assert any(isinstance(done, Grant) for done in pool.act(pool.book.request(waiter, 11.0)))
    pool.act(pool.book.recycled(late, 60.0))
    again = Waiter("a", 60.0)
    pool.act(pool.book.announce(Announcement({"a": 2}), 60.0))
    pool.act(pool.book.request(again, 60.0))
    assert late == again.grant.name


def test_one_that_nobody_needs_is_kept_while_one_straggles_perhaps():
    """It becomes what is needed as soon as that is known, without a Pod more; there is no other for it meanwhile."""
    pool, _, second = straggling()

    assert [] == [done for done in pool.let_go(second, 6.0) if isinstance(done, (Recycle, Destroy)) and done.name == ""]
    assert State.RECYCLING is pool.book.lives[second.grant.name].state

    assert [Recycle(second.grant.name, "a")] == pool.act(pool.book.wake(7.0))
    assert not any(isinstance(done, Create) for done in pool.done[4:])


def test_one_that_was_kept_is_removed_when_nothing_straggles():
    """As soon as what it was kept for is there."""
    pool, late, second = straggling()
    pool.let_go(second, 6.0)

    assert Destroy(second.grant.name) in pool.act(pool.book.recycled(late, 6.5))


def test_one_that_was_kept_becomes_what_is_announced_next():
    """It is there, and fresh in a moment."""
    pool, _, second = straggling()
    pool.let_go(second, 6.0)

    assert Recycle(second.grant.name, "b") in pool.act(pool.book.announce(Announcement({"b": 1}), 6.2))


def test_one_that_was_kept_gives_way_where_it_is_of_no_use():
    """On another node than what is wanted: all room is taken, so it is removed, and one is made there."""
    nodes = Placement(nodes={"b": "far"}, room={"far": 5})
    pool, _, second = straggling(on=lambda _name: "near", placement=nodes)
    pool.let_go(second, 6.0)

    assert Destroy(second.grant.name) in pool.act(pool.book.announce(Announcement({"b": 1}), 6.2))
    assert any(isinstance(done, Create) for done in pool.act(pool.book.deleted(second.grant.name, 6.3)))


def test_one_that_was_kept_and_is_lost_is_removed():
    """Nobody sees it through but the book."""
    pool, _, second = straggling()
    pool.let_go(second, 6.0)

    assert Destroy(second.grant.name) in pool.act(pool.book.lost(second.grant.name, 6.1))


def test_nothing_that_was_kept_is_left_at_the_end():
    """A sweep names it like all others."""
    pool, late, second = straggling()
    pool.let_go(second, 6.0)
    pool.act(pool.book.close())

    assert {late, second.grant.name} == set(pool.book.sweep())
