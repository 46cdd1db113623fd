# SPDX-License-Identifier: Apache-2.0
"""The pool's books under any sequence of events, against an independent model."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentsandbox.errors import ImagePullFailed, PoolClosed, ProvisionError, Throttled, UsageError
from agentsandbox.warmpool.book import Create, Destroy, Grant, PoolBook, Recycle, Refuse, Waiter
from agentsandbox.warmpool.lease import State
from agentsandbox.warmpool.outlook import Announcement
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.replenisher import Replenisher
from agentsandbox.warmpool.stragglers import StragglerPolicy

DECLARED = ("a", "b", "c")
LATER = ("d", "e")
EAGER = StragglerPolicy(quantile=0.5, times=1.0, share=0.5, min_delay=0.0, min_samples=1)
IMAGES = DECLARED + LATER


class PoolMachine(RuleBasedStateMachine):
    """
    The model knows what the outside sees: what was asked for, what was made, who was given what.

    Never two owners, never above a limit, first come first served, nobody forgotten, nothing leaked.
    """

    @initialize(
        sizes=st.lists(st.integers(1, 3), min_size=3, max_size=3),
        spares=st.integers(0, 2),
        cap=st.integers(1, 12),
        in_flight=st.integers(1, 5),
        rate=st.sampled_from([None, 1.0]),
        reuse=st.booleans(),
        stragglers=st.sampled_from([None, EAGER]),
    )
    def open(self, sizes, spares, cap, in_flight, rate, reuse, stragglers):
        self.now = 0.0
        self.all_images = {}
        self.images = dict(zip(DECLARED, sizes, strict=True))
        self.targets = {image: size + spares for image, size in self.images.items()}
        self.cap, self.in_flight, self.closed = cap, in_flight, False
        self.book = PoolBook(
            images=self.images,
            replenisher=Replenisher(
                targets=self.targets,
                cap=cap,
                creates_in_flight=in_flight,
                limiter=AdaptiveLimiter(rate=rate, random=Random(0)),
            ),
            stragglers=stragglers,
        )
        self.eager = stragglers is not None
        self.parked: set[str] = set()
        self.book.recycles = lambda _name: reuse
        self.undecided: set[str] = set()
        self.recycling: dict[str, str] = {}
        self.lost_meanwhile: set[str] = set()
        self.recycled = 0
        self.creating: dict[str, str] = {}
        self.free: dict[str, str] = {}
        self.owners: dict[str, Waiter] = {}
        self.lost: set[str] = set()
        self.deleting: dict[str, str] = {}
        self.stuck: set[str] = set()
        self.queues: dict[str, list[Waiter]] = {image: [] for image in IMAGES}
        self.returning: dict[str, list[Waiter]] = {image: [] for image in IMAGES}
        self.announced: list[tuple[Announcement, dict[str, int]]] = []
        self.names: set[str] = set()
        self.made = self.failed = self.gone = 0
        self.perform(self.book.start(self.now))

    def perform(self, decisions):
        for decision in decisions:
            if isinstance(decision, Create):
                assert not self.closed
                assert decision.name not in self.names
                self.names.add(decision.name)
                self.creating[decision.name] = decision.image
            elif isinstance(decision, Destroy):
                assert decision.name not in self.owners
                assert decision.name not in self.deleting
                self.deleting[decision.name] = self.image_of[decision.name]
                self.free.pop(decision.name, None)
                self.undecided.discard(decision.name)
                self.parked.discard(decision.name)
            elif isinstance(decision, Recycle):
                assert not self.closed
                assert decision.name not in self.owners
                assert decision.name not in self.recycling
                self.free.pop(decision.name, None)
                self.undecided.discard(decision.name)
                self.parked.discard(decision.name)
                if decision.image is None:
                    self.undecided.add(decision.name)
                else:
                    self.recycling[decision.name] = decision.image
            elif isinstance(decision, Grant):
                self.granted(decision)
            else:
                assert isinstance(decision, Refuse)
                self.refused(decision)

    def granted(self, grant):
        image = grant.waiter.image
        queue = self.returning[image] or self.queues[image]
        assert grant.waiter is queue.pop(0), "not first come, first served"
        assert self.free.pop(grant.name) == image
        assert grant.name not in self.owners, "two owners"
        assert grant.waiter.grant is grant
        self.owners[grant.name] = grant.waiter
        if not grant.waiter.returning:
            for _, left in self.announced:
                if left.get(image):
                    left[image] -= 1
                    break

    def ahead(self, image):
        return sum(left.get(image, 0) for _, left in self.announced)

    def refused(self, refusal):
        assert refusal.waiter.grant is None
        assert refusal.waiter.error is refusal.error
        for queue in (self.returning[refusal.waiter.image], self.queues[refusal.waiter.image]):
            if refusal.waiter in queue:
                queue.remove(refusal.waiter)

    @property
    def image_of(self):
        owned = {name: waiter.image for name, waiter in self.owners.items()}
        return self.all_images | owned

    def remember(self, name, image):
        self.all_images = {**self.all_images, name: image}

    def pick(self, data, options):
        return data.draw(st.sampled_from(sorted(options)))

    @rule(counts=st.dictionaries(st.sampled_from(IMAGES), st.integers(0, 4)), begins=st.booleans())
    def announce(self, counts, begins):
        announcement = Announcement(counts)
        if not self.closed:
            if begins:
                for image, count in counts.items():
                    replaced = 0
                    for _, left in self.announced:
                        less = min(left.get(image, 0), count - replaced)
                        replaced += less
                        left[image] = left.get(image, 0) - less
            self.announced.insert(0 if begins else len(self.announced), (announcement, dict(counts)))
            for image in LATER:
                if counts.get(image):
                    self.images[image] = max(self.images.get(image, 0), self.ahead(image))
                    self.targets[image] = self.images[image]
        self.perform(self.book.announce(announcement, self.now, begins=begins))

    @precondition(lambda self: self.announced)
    @rule(data=st.data())
    def withdraw(self, data):
        announcement, _ = self.announced.pop(data.draw(st.integers(0, len(self.announced) - 1)))
        self.perform(self.book.retract(announcement, self.now))
        assert {} == announcement.left

    @rule(image=st.sampled_from(IMAGES), count=st.integers(1, 4))
    def ask(self, image, count):
        for _ in range(count if image in self.images else 0):
            waiter = Waiter(image, self.now)
            self.queues[image].append(waiter)
            self.perform(self.book.request(waiter, self.now))
            if self.closed:
                assert isinstance(waiter.error, PoolClosed)

    @precondition(lambda self: any(self.queues.values()) or any(self.returning.values()))
    @rule(data=st.data())
    def cancel_a_waiter(self, data):
        queue = data.draw(st.sampled_from([q for q in (*self.queues.values(), *self.returning.values()) if q]))
        waiter = queue.pop(data.draw(st.integers(0, len(queue) - 1)))
        self.perform(self.book.withdraw(waiter, self.now))
        assert waiter.grant is None

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def cancel_who_was_just_served(self, data):
        name = self.pick(data, self.owners)
        waiter = self.owners.pop(name)
        if name in self.lost:
            self.remember(name, waiter.image)
        else:
            self.free[name] = waiter.image
        self.remember(name, waiter.image)
        self.perform(self.book.withdraw(waiter, self.now))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        name = self.pick(data, self.owners)
        waiter = self.owners.pop(name)
        self.remember(name, waiter.image)
        self.perform(self.book.release(waiter.grant, self.now))
        assert name in self.deleting or name in self.undecided
        with pytest.raises(UsageError):
            self.book.release(waiter.grant, self.now)

    @precondition(lambda self: self.undecided and not self.closed)
    @rule(data=st.data())
    def it_is_decided_what_becomes_of_a_released_one(self, data):
        name = self.pick(data, self.undecided)
        self.let(name)
        assert name in self.deleting or name in self.recycling or name in self.parked
        assert [] == self.book.decide(name, self.now)

    def let(self, name):
        """Have it decided what it becomes; it is kept if neither happens, which only eager pools do here."""
        self.undecided.discard(name)
        self.parked.add(name)
        self.lost_meanwhile.discard(name)
        self.perform(self.book.decide(name, self.now))
        assert self.eager or name not in self.parked

    @precondition(lambda self: self.recycling)
    @rule(data=st.data())
    def recycling_ends_well(self, data):
        self.renew(self.pick(data, self.recycling))

    def renew(self, name):
        image = self.recycling.pop(name)
        self.remember(name, image)
        if name in self.lost_meanwhile:
            self.lost_meanwhile.discard(name)
        else:
            self.free[name] = image
            self.recycled += 1
        self.perform(self.book.recycled(name, self.now))

    @precondition(lambda self: self.recycling)
    @rule(data=st.data(), error=st.sampled_from([ProvisionError("x"), ImagePullFailed("no"), None]))
    def recycling_ends_badly(self, data, error):
        name = self.pick(data, self.recycling)
        self.remember(name, self.recycling.pop(name))
        self.lost_meanwhile.discard(name)
        self.perform(self.book.not_recycled(name, error, self.now))
        assert name in self.deleting

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def lose_what_is_kept(self, data):
        name = self.pick(data, self.parked)
        self.perform(self.book.lost(name, self.now))
        assert name in self.deleting

    @precondition(lambda self: self.recycling or self.undecided)
    @rule(data=st.data())
    def lose_what_nobody_holds(self, data):
        name = self.pick(data, [*self.recycling, *self.undecided])
        self.lost_meanwhile.add(name)
        self.perform(self.book.lost(name, self.now))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def replace(self, data):
        name = self.pick(data, self.owners)
        waiter = self.owners.pop(name)
        self.remember(name, waiter.image)
        again = Waiter(waiter.image, self.now)
        self.returning[waiter.image].append(again)
        self.perform(self.book.replace(waiter.grant, again, self.now))

    @precondition(lambda self: self.creating)
    @rule(data=st.data())
    def creation_ends_well(self, data):
        self.make(self.pick(data, self.creating))

    @precondition(lambda self: self.creating or self.deleting)
    @rule()
    def all_goes_well_for_a_while(self):
        """The backend catches up with everything that was asked of it."""
        for _ in range(100):
            for name in list(self.deleting):
                self.confirm(name)
            for name in list(self.creating):
                self.make(name)
            for name in list(self.undecided) if not self.closed else ():
                self.let(name)
            for name in list(self.recycling):
                self.renew(name)
            if not self.creating and not self.deleting and not self.recycling:
                break

    def make(self, name):
        image = self.creating.pop(name)
        self.remember(name, image)
        self.free[name] = image
        self.made += 1
        self.perform(self.book.created(name, self.now))

    @precondition(lambda self: self.creating)
    @rule(
        data=st.data(),
        error=st.sampled_from([ProvisionError("x"), Throttled("429", retry_after=2.0), None]),
    )
    def creation_ends_badly(self, data, error):
        name = self.pick(data, self.creating)
        del self.creating[name]
        self.failed += 1
        self.perform(self.book.failed(name, error, self.now))

    @precondition(lambda self: self.creating and len(self.names) > 10)
    @rule(data=st.data())
    def an_image_turns_out_not_to_exist(self, data):
        name = self.pick(data, self.creating)
        image = self.creating.pop(name)
        self.failed += 1
        self.perform(self.book.failed(name, ImagePullFailed("none", permanent=True), self.now))
        assert not self.queues[image] or image in self.free.values()

    @precondition(lambda self: self.free or self.owners or self.deleting)
    @rule(data=st.data())
    def lose(self, data):
        name = self.pick(data, [*self.free, *self.owners, *self.deleting])
        if name in self.owners:
            self.lost.add(name)
        self.perform(self.book.lost(name, self.now))
        assert name in self.deleting or name in self.owners

    @precondition(lambda self: self.deleting)
    @rule(data=st.data())
    def removal_is_confirmed(self, data):
        self.confirm(self.pick(data, self.deleting))

    def confirm(self, name):
        del self.deleting[name]
        self.stuck.discard(name)
        self.gone += 1
        self.perform(self.book.deleted(name, self.now))

    @precondition(lambda self: self.deleting)
    @rule(data=st.data())
    def removal_is_refused(self, data):
        name = self.pick(data, self.deleting)
        self.stuck.add(name)
        self.book.resists(name)

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds):
        self.now += seconds
        self.perform(self.book.wake(self.now))

    @precondition(lambda self: len(self.names) > 20 and not self.closed)
    @rule()
    def close(self):
        self.closed = True
        decisions = self.book.close()
        assert all(isinstance(decision, Refuse) for decision in decisions)
        self.perform(decisions)
        assert not any(self.queues.values())
        assert not any(self.returning.values())

    @invariant()
    def nothing_is_lost_or_doubled(self):
        counts = self.book.counts
        becoming = len(self.undecided) + len(self.recycling) + len(self.parked)
        assert len(self.book.lives) == sum(
            map(len, (self.creating, self.free, self.owners, self.deleting, self.undecided, self.recycling))
        ) + len(self.parked)
        assert counts[State.RECYCLING] == becoming - len(self.lost_meanwhile)
        assert self.recycled == self.book.recycled_total
        assert len(self.names) == len(self.book.lives) + self.gone + self.failed
        assert (self.made, self.failed, self.gone) == (
            self.book.created_total,
            self.book.failed_total,
            self.book.deleted_total,
        )
        assert counts[State.LEASED] + counts[State.LOST] == len(self.owners) + len(self.lost_meanwhile)
        assert counts[State.READY] == len(self.free)
        assert counts[State.DELETING] == len(self.deleting)
        assert self.book.stuck == len(self.stuck)

    @invariant()
    def what_straggles_is_a_share_and_being_made(self):
        late = len(self.book.stragglers)
        assert late == sum(self.book.stragglers.late(image) for image in IMAGES)
        assert late <= len(self.creating) + len(self.recycling)
        assert self.eager or not late
        assert not self.parked or late < len(self.creating) + len(self.recycling)

    @invariant()
    def limits_hold(self):
        assert len(self.book.lives) <= self.cap
        assert len(self.creating) <= self.in_flight
        for image, size in self.images.items():
            owned = sum(waiter.image == image for waiter in self.owners.values())
            usable = owned + sum(i == image for i in (*self.creating.values(), *self.free.values()))
            assert owned + len(self.returning[image]) <= size
            assert self.book.matcher.places(image) == owned + len(self.returning[image])
            # One more for each rollout that could use it, where those that are being made straggle.
            assert usable <= self.targets[image] * (2 if self.eager else 1)

    @invariant()
    def announcements_are_used_up_by_leases_alone(self):
        assert self.book.outlook.total == sum(self.ahead(image) for image in IMAGES)
        for announcement, left in self.announced:
            assert announcement.left == {image: count for image, count in left.items() if count}

    @invariant()
    def what_comes_next_is_prepared(self):
        """As far as there is room: nothing is held back that could be made now."""
        if self.closed or self.book.wake_at < float("inf"):
            return
        if len(self.creating) >= self.in_flight or len(self.book.lives) >= self.cap:
            return
        for image in self.images:
            if image in self.book.replenisher._breakers:
                continue
            held = sum(waiter.image == image for waiter in self.owners.values())
            coming = sum(i == image for i in (*self.creating.values(), *self.free.values(), *self.recycling.values()))
            assert coming >= min(self.ahead(image), self.targets[image] - held) or self.undecided

    @invariant()
    def nobody_waits_for_what_is_there(self):
        if self.closed:
            return
        for image, size in self.images.items():
            free = sum(i == image for i in self.free.values())
            assert self.book.matcher.waiting(image) == len(self.queues[image]) + len(self.returning[image])
            assert not (free and self.returning[image])
            assert not (free and self.queues[image] and self.book.matcher.places(image) < size)

    @invariant()
    def somebody_is_making_what_is_waited_for(self):
        """Nobody can be forgotten: something is under way, or a time is set, or a limit holds."""
        if self.closed:
            return
        for image in self.images:
            if not self.book.matcher.servable(image):
                continue
            busy = len(self.creating) >= self.in_flight or image in self.creating.values()
            busy = busy or image in self.recycling.values() or bool(self.undecided)
            full = len(self.book.lives) >= self.cap and (
                bool(self.deleting) or not any(not self.queues[i] and not self.returning[i] for i in self.free.values())
            )
            assert busy or full or self.book.wake_at < float("inf")

    def teardown(self):
        if not hasattr(self, "book"):
            return
        if not self.closed:
            self.closed = True
            self.perform(self.book.close())
        for name in list(self.creating):
            self.book.failed(name, None, self.now)
        left = self.book.sweep()
        assert set(left) == {*self.free, *self.owners, *self.deleting, *self.undecided, *self.recycling, *self.parked}
        for name in left:
            self.book.deleted(name, self.now)
        assert {} == self.book.lives


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
