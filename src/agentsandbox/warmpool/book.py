# SPDX-License-Identifier: Apache-2.0
"""
The pool's books: every sandbox, every waiter, and what to do about them next.

All that happens is told to the book in one synchronous call, which returns what has to be done. It performs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from agentsandbox.errors import ImagePullFailed, PoolClosed, SandboxError, UsageError
from agentsandbox.warmpool.census import Census
from agentsandbox.warmpool.decisions import Create, Decision, Destroy, Grant, Recycle, Refuse, Waiter
from agentsandbox.warmpool.lease import Action, Input, SandboxLife, State
from agentsandbox.warmpool.matching import Matcher
from agentsandbox.warmpool.outlook import Announcement, Outlook
from agentsandbox.warmpool.replenisher import Demand, Evict, Make, Replenisher
from agentsandbox.warmpool.stragglers import StragglerPolicy, Stragglers

__all__ = ["Create", "Decision", "Destroy", "Grant", "PoolBook", "Recycle", "Refuse", "Waiter"]


class PoolBook:
    """
    Decide everything that a pool decides.

    Args:
        images: Image → how many sandboxes of it may be leased at once.
        replenisher: What decides what to make.
        prefix: Beginning of every sandbox's name; unique for this run.
        burst: How many sandboxes of an image that is only announced may be leased beyond the rollouts to come.
        stragglers: Which of the sandboxes being made nobody should count on.

    """

    def __init__(
        self,
        *,
        images: Mapping[str, int],
        replenisher: Replenisher,
        prefix: str = "sb",
        burst: int = 0,
        stragglers: StragglerPolicy | None = None,
    ) -> None:
        self.replenisher = replenisher
        self.stragglers = Stragglers(stragglers or StragglerPolicy())
        self.matcher: Matcher[Waiter] = Matcher(images)
        self.outlook = Outlook()
        self.lives: dict[str, SandboxLife] = {}
        """Every sandbox that is not verified gone."""
        self.created_total = 0
        """Sandboxes that the backend made."""
        self.failed_total = 0
        """Sandboxes that it could not make."""
        self.deleted_total = 0
        """Sandboxes that are verified gone."""
        self.recycled_total = 0
        """Sandboxes that became fresh ones in the same place."""
        self.recycles: Callable[[str], bool] = lambda _name: False
        """Whether a sandbox can become a fresh one in the same place; set by whoever knows the backend."""
        self.keeps: Callable[[str], bool] = lambda _name: False
        """Whether a used sandbox can be made like new; likewise."""
        self.node: Callable[[str], str | None] = lambda _name: None
        """Where a sandbox is; likewise."""
        self.closed = False
        """Whether nobody is granted anything any more."""
        self._census = Census(images)
        self.counts = self._census.counts
        """How many are in which state; ``gone`` counts all that ever were."""
        self._prefix = prefix
        self._burst = burst
        self._number = 0
        self._stuck: set[str] = set()
        self._undecided: set[str] = set()
        # Let go of while nothing was wanted, and kept in case that one of those being made straggles.
        self._parked: dict[str, None] = {}

    @property
    def wake_at(self) -> float:
        """When to call :meth:`wake` even if nothing happens; infinite for never."""
        return math.inf if self.closed else min(self.replenisher.wake_at, self.stragglers.wake_at)

    @property
    def stuck(self) -> int:
        """How many sandboxes resisted their removal."""
        return len(self._stuck)

    def start(self, now: float) -> list[Decision]:
        """Begin to make what should be ready."""
        for image in self._census.images:
            self._update(image)
        return self._plan(now)

    def wake(self, now: float) -> list[Decision]:
        """Do what had to wait for its time."""
        return self._plan(now)

    def announce(self, announcement: Announcement, now: float, *, begins: bool = False) -> list[Decision]:
        """
        Count on rollouts that are to come: have sandboxes ready for them as far as there is room.

        Args:
            announcement: What is to come. Images that were never heard of are known from then on, and as many sandboxes
                of them may be leased at once as there are rollouts to come.
            now: The present.
            begins: Whether these rollouts begin now, and were announced before as far as any were.

        """
        images = list(announcement.left)
        if self.closed:
            announcement.left.clear()
            return []
        decisions: list[Decision] = []
        (self.outlook.begin if begins else self.outlook.add)(announcement)
        for image in images:
            if image not in self.replenisher.targets:
                self._census.know(image)
                self.matcher.allow(image, self.outlook.ahead(image) + self._burst)
            decisions += self._match(image)  # some may have waited for a place
            self._update(image)
        return [*decisions, *self._plan(now)]

    def retract(self, announcement: Announcement, now: float) -> list[Decision]:
        """Count on what is left of an announcement no longer."""
        for image in self.outlook.withdraw(announcement):
            self._update(image)
        return self._plan(now)

    def request(self, waiter: Waiter, now: float) -> list[Decision]:
        """Let somebody wait for a sandbox; it may be granted or refused at once."""
        if self.closed:
            return [self._refuse(waiter, PoolClosed("the pool is closed"))]
        self.matcher.add(waiter.image, waiter)
        return self._settle(waiter.image, now)

    def withdraw(self, waiter: Waiter, now: float) -> list[Decision]:
        """Let somebody go who was cancelled. What it was granted in the meantime, it hands back untouched."""
        if waiter.grant is not None:
            return self.give_back(waiter.grant, now)
        if self.matcher.cancel(waiter.image, waiter):
            return self._settle(waiter.image, now)
        return []

    def give_back(self, grant: Grant, now: float) -> list[Decision]:
        """Take back a sandbox that its holder never touched."""
        return self._let_go(grant, Input.HAND_BACK, now)

    def release(self, grant: Grant, now: float, *, discard: bool = False) -> list[Decision]:
        """Take back a sandbox from its holder; *discard* has it removed even if it could become a fresh one."""
        life = self._held(grant)
        renews = self.recycles(life.name) or self.keeps(life.name)
        if discard or self.closed or life.state is not State.LEASED or not renews:
            return self._let_go(grant, Input.RELEASE, now)
        done = self._apply(life, Input.RECYCLE)
        self._undecided.add(life.name)
        self.matcher.leave(life.image)
        return [*done, Recycle(life.name, None), *self._settle(life.image, now)]

    def decide(self, name: str, now: float) -> list[Decision]:
        """Say what a released sandbox becomes."""
        if name not in self._undecided:
            return []
        self._undecided.discard(name)
        life = self.lives[name]
        before = life.image
        if life.state is State.RECYCLING and not self.closed:
            if self._reassign(life, now):
                return [Recycle(name, life.image), *self._settle(before, now)]
            if len(self._parked) < self.stragglers.possible(len(self.lives)):
                self._parked[name] = None
                return self._settle(before, now)
        return [*self._apply(life, Input.REMOVE), *self._settle(before, now)]

    def recycled(self, name: str, now: float) -> list[Decision]:
        """Note that a sandbox became a fresh one."""
        life = self.lives[name]
        self.stragglers.end(name, now)
        if life.state is not State.RECYCLING:  # lost meanwhile, or the pool was closed
            done = self._apply(life, Input.REMOVE) if life.state is State.LOST else []
            return [*done, *self._settle(life.image, now)]
        self.recycled_total += 1
        life.recycled += 1
        life.ready_at = now
        return [*self._apply(life, Input.VERIFIED), *self._settle(life.image, now)]

    def not_recycled(self, name: str, error: BaseException | None, now: float) -> list[Decision]:
        """Note that a sandbox did not become a fresh one, and why; it is removed."""
        life = self.lives[name]
        self.stragglers.end(name, now, made=False)
        if isinstance(error, SandboxError) and (isinstance(error, ImagePullFailed) or not error.retryable):
            self.replenisher.failed(life.image, error, now)  # the image's fault, not the place's
        event = {State.RECYCLING: Input.UNVERIFIED, State.LOST: Input.REMOVE}.get(life.state)
        return [*(self._apply(life, event) if event else ()), *self._settle(life.image, now)]

    def replace(self, grant: Grant, waiter: Waiter, now: float) -> list[Decision]:
        """Take back a sandbox from its holder, who keeps its place and waits for a fresh one before everybody else."""
        life = self._held(grant)
        done = self._apply(life, Input.RELEASE)
        if self.closed:
            self.matcher.leave(life.image)
            return [*done, self._refuse(waiter, PoolClosed("the pool is closed"))]
        waiter.returning = True
        self.matcher.add(life.image, waiter, holding=True)
        return [*done, *self._settle(life.image, now)]

    def created(self, name: str, now: float) -> list[Decision]:
        """Note that the backend made a sandbox."""
        life = self.lives[name]
        self.created_total += 1
        self.stragglers.end(name, now)
        self.replenisher.created(life.image, now)
        life.ready_at = now
        return [*self._apply(life, Input.CREATED), *self._settle(life.image, now)]

    def failed(self, name: str, error: BaseException | None, now: float) -> list[Decision]:
        """Note that the backend could not make a sandbox, and why; ``None`` if it was told to stop."""
        life = self.lives[name]
        self.failed_total += 1
        self.stragglers.end(name, now, made=False)
        if error is not None:
            self.replenisher.failed(life.image, error, now)
        return [*self._apply(life, Input.FAILED), *self._settle(life.image, now)]

    def lost(self, name: str, now: float) -> list[Decision]:
        """Note that a sandbox is not what it was. One that is verified gone, or unknown, is no news."""
        if (life := self.lives.get(name)) is None:
            return []
        self.stragglers.end(name, now, made=False)
        if name in self._parked:
            del self._parked[name]
            return [*self._apply(life, Input.REMOVE), *self._settle(life.image, now)]
        return [*self._apply(life, Input.LOSE), *self._settle(life.image, now)]

    def deleted(self, name: str, now: float) -> list[Decision]:
        """Note that the backend confirmed that a sandbox is gone."""
        life = self.lives[name]
        self.deleted_total += 1
        self._stuck.discard(name)
        return [*self._apply(life, Input.DELETED), *self._settle(life.image, now)]

    def resists(self, name: str) -> None:
        """Note that a sandbox could not be removed. It counts against the cap until it is."""
        self._stuck.add(name)

    def close(self) -> list[Decision]:
        """Grant nothing any more, make nothing any more."""
        self.closed = True
        return [
            self._refuse(waiter, PoolClosed("the pool was closed while the call waited for a sandbox"))
            for image in self._census.images
            for waiter in self.matcher.dismiss(image)
        ]

    def sweep(self) -> list[str]:
        """Mark everything that is still there for removal; whatever its holder thinks. Names in order of creation."""
        for life in self.lives.values():
            if (event := _AT_THE_END.get(life.state)) is not None:
                self._apply(life, event)
        return [name for name, life in self.lives.items() if life.state is State.DELETING]

    def count(self, image: str, state: State) -> int:
        """How many sandboxes of an image are in a state."""
        return self._census.count(image, state)

    def _held(self, grant: Grant) -> SandboxLife:
        life = self.lives.get(grant.name)
        if life is None or not life.held_by(grant.generation):
            raise UsageError(f"sandbox {grant.name} is not held by generation {grant.generation} any more")
        return life

    def _let_go(self, grant: Grant, event: Input, now: float) -> list[Decision]:
        life = self._held(grant)
        done = self._apply(life, event)
        self.matcher.leave(life.image)
        return [*done, *self._settle(life.image, now)]

    def _apply(self, life: SandboxLife, event: Input) -> list[Decision]:
        before = life.state
        decisions: list[Decision] = []
        actions = life.apply(event)
        self._census.move(life.image, before, life.state)
        for action in actions:
            if action is Action.OFFER:
                self.matcher.offer(life.image, life.name)
            elif action is Action.WITHDRAW:
                self.matcher.withdraw(life.image, life.name)
            elif action is Action.REMOVE:
                decisions += self._apply(life, Input.REMOVE)
            elif action is Action.DESTROY:
                decisions.append(Destroy(life.name))
            else:
                del self.lives[life.name]
                self.replenisher.gone(life.made_for)
        return decisions

    def _reassign(self, life: SandboxLife, now: float) -> bool:
        """Give a sandbox that becomes a fresh one the image that is wanted most; whether any is wanted."""
        self._census.move(life.image, State.RECYCLING, None)
        self._update(life.image)
        image = self._next_of(life)
        self._census.move(life.image, None, State.RECYCLING)
        if image is None:
            self._update(life.image)
        else:
            self._begin(life, image, now)
        return image is not None

    def _next_of(self, life: SandboxLife) -> str | None:
        """Say what a sandbox becomes that is not in the counts, if anything is wanted that it can become."""
        if self.recycles(life.name):
            return self.replenisher.reuse(life.image, self.node(life.name))
        return self.replenisher.keep(life.image)

    def _begin(self, life: SandboxLife, image: str, now: float) -> None:
        self.stragglers.begin(life.name, image, "renew" if image == life.image else "change", now)
        self._census.move(life.image, State.RECYCLING, None)
        self._census.move(image, None, State.RECYCLING)
        life.image = image
        self._update(image)

    def _settle(self, image: str, now: float) -> list[Decision]:
        if self.closed:
            return []
        decisions = self._match(image)
        if (breaker := self.replenisher.refusal(image)) is not None and not self.matcher.ready(image):
            decisions += [self._refuse(waiter, breaker.explain(image, now)) for waiter in self.matcher.dismiss(image)]
        self._update(image)
        return [*decisions, *self._plan(now)]

    def _match(self, image: str) -> list[Decision]:
        grants: list[Decision] = []
        for waiter, name in self.matcher.match(image):
            life = self.lives[name]
            self._apply(life, Input.GRANT)
            if not waiter.returning:
                self.outlook.fulfil(image)
            waiter.grant = Grant(waiter, name, life.generation, life.ready_at or 0.0, life.recycled > 0)
            grants.append(waiter.grant)
        return grants

    def _update(self, image: str) -> None:
        count = self._census.count
        held = count(image, State.LEASED, State.RESETTING, State.LOST)
        making = count(image, State.CREATING, State.HYDRATING, State.RECYCLING)
        most = self.replenisher.targets.get(image) or self.matcher.limit(image) - self._burst
        self.replenisher.update(
            image,
            Demand(
                held=held,
                creating=making - sum(self.lives[name].image == image for name in self._parked),
                late=self.stragglers.late(image),
                ready=count(image, State.READY),
                servable=self.matcher.servable(image),
                waiting=self.matcher.waiting(image),
                announced=max(0, min(self.outlook.ahead(image), most - held)),
            ),
        )

    def _plan(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        evicting = not self.closed
        for image in self.stragglers.due(now, len(self.lives)):
            self._update(image)
        if self._parked and evicting:
            decisions += self._unpark(now)
        while evicting:
            counts = self.counts
            plan = self.replenisher.plan(
                now,
                alive=len(self.lives),
                creating=counts[State.CREATING] + counts[State.HYDRATING],
                going=counts[State.DELETING] - len(self._stuck) + len(self._undecided),
            )
            evicting = False
            for action in plan:
                if isinstance(action, Make):
                    decisions.append(self._create(action.image, now))
                else:
                    decisions += self._evict(action, now)
                    evicting = True
        return decisions

    def _unpark(self, now: float) -> list[Decision]:
        """Make something of sandboxes that were kept in case that something is wanted; let go of those beyond that."""
        decisions: list[Decision] = []
        wanted, alive = self.replenisher, len(self.lives)
        for name in [*self._parked] if wanted.short else ():
            life = self.lives[name]
            if (image := self._next_of(life)) is not None:
                del self._parked[name]
                self._begin(life, image, now)
                decisions.append(Recycle(name, image))
        in_the_way = wanted.short if alive >= wanted.cap else 0
        most = min(self.stragglers.possible(alive), len(self._parked) - in_the_way)
        while len(self._parked) > max(0, most):
            name = next(iter(self._parked))
            del self._parked[name]
            decisions += self._apply(self.lives[name], Input.REMOVE)
            self._update(self.lives[name].image)
        return decisions

    def _create(self, image: str, now: float) -> Create:
        self._number += 1
        name = f"{self._prefix}-{self._number:06d}"
        self.lives[name] = SandboxLife(name, image, made_for=image)
        self.stragglers.begin(name, image, "create", now)
        self._census.move(image, None, State.CREATING)
        self._update(image)
        return Create(name, image)

    def _evict(self, action: Evict, now: float) -> list[Decision]:
        life = self.lives[self.matcher.oldest(action.image)]
        if self.recycles(life.name):
            done = self._apply(life, Input.RECYCLE)
            if self._reassign(life, now) and life.image != action.image:
                return [*done, Recycle(life.name, life.image)]
            return [*done, *self._apply(life, Input.REMOVE)]  # it is in the wrong place for what is wanted
        decisions = self._apply(life, Input.EVICT)
        self._update(action.image)
        return decisions

    def _refuse(self, waiter: Waiter, error: BaseException) -> Refuse:
        waiter.error = error
        return Refuse(waiter, error)

    def __repr__(self) -> str:
        announced = f", {self.outlook.total} announced" if self.outlook.total else ""
        stuck = f", {self.stuck} stuck" if self._stuck else ""
        return f"<PoolBook [{self._census!r}{stuck} | {self.matcher.waiting()} waiting{announced}]>"


_AT_THE_END = {
    State.LEASED: Input.RELEASE,
    State.RESETTING: Input.RELEASE,
    State.READY: Input.EVICT,
    State.LOST: Input.REMOVE,
    State.RECYCLING: Input.REMOVE,
}
