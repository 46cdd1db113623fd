# SPDX-License-Identifier: Apache-2.0
"""
The pool's books: every sandbox, every waiter, and what to do about them next.

All that happens is told to the book in one synchronous call, which returns what has to be done. It performs nothing.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from agentsandbox.errors import ImagePullFailed, PoolClosed, ProvisionError, SandboxError, UsageError
from agentsandbox.warmpool.lease import Action, Input, SandboxLife, State
from agentsandbox.warmpool.matching import Matcher
from agentsandbox.warmpool.replenisher import Breaker, Demand, Evict, Make, Replenisher

__all__ = ["Create", "Decision", "Destroy", "Grant", "PoolBook", "Recycle", "Refuse", "Waiter"]


@attrs.define(eq=False, repr=False)
class Waiter:
    """
    Somebody who wants a sandbox.

    Args:
        image: Of which image.
        requested_at: Since when, in seconds.

    """

    image: str
    """Of which image."""
    requested_at: float
    """Since when."""
    grant: Grant | None = None
    """What it was given."""
    error: BaseException | None = None
    """Why it will be given nothing."""
    wake: Any = None
    """For the engine: what to call when either is set."""

    def __repr__(self) -> str:
        state = "granted" if self.grant else "refused" if self.error else "waiting"
        return f"<Waiter for {self.image!r} [{state}]>"


@attrs.frozen(eq=False)
class Grant:
    """A waiter has its sandbox from now on."""

    waiter: Waiter
    """Who."""
    name: str
    """Which sandbox."""
    generation: int
    """Which grant of it this is: what the holder shows when it gives it back."""
    ready_at: float
    """Since when the sandbox had been ready."""
    reused: bool = False
    """Whether its place had served somebody before."""


@attrs.frozen
class Refuse:
    """A waiter gets nothing."""

    waiter: Waiter
    """Who."""
    error: BaseException
    """Why; an exception of its own, to be raised."""


@attrs.frozen
class Create:
    """Have a sandbox made."""

    name: str
    """Under which name."""
    image: str
    """From what."""


@attrs.frozen
class Destroy:
    """Have a sandbox removed."""

    name: str
    """Which."""


@attrs.frozen
class Recycle:
    """Have a sandbox become a fresh one in the same place."""

    name: str
    """Which."""
    image: str | None
    """Of what; ``None`` is for :meth:`PoolBook.decide` to say in a moment: who released it may be about to ask."""


Decision = Grant | Refuse | Create | Destroy | Recycle
"""Something to be done."""


class PoolBook:
    """
    Decide everything that a pool decides.

    Args:
        images: Image → how many sandboxes of it may be leased at once.
        replenisher: What decides what to make.
        prefix: Beginning of every sandbox's name; unique for this run.

    """

    def __init__(self, *, images: Mapping[str, int], replenisher: Replenisher, prefix: str = "sb") -> None:
        self.replenisher = replenisher
        self.matcher: Matcher[Waiter] = Matcher(images)
        self.lives: dict[str, SandboxLife] = {}
        """Every sandbox that is not verified gone."""
        self.counts: Counter[State] = Counter()
        """How many are in which state; ``gone`` counts all that ever were."""
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
        self.closed = False
        """Whether nobody is granted anything any more."""
        self._images = {image: Counter[State]() for image in images}
        self._prefix = prefix
        self._number = 0
        self._stuck: set[str] = set()
        self._undecided: set[str] = set()

    @property
    def wake_at(self) -> float:
        """When to call :meth:`wake` even if nothing happens; infinite for never."""
        return math.inf if self.closed else self.replenisher.wake_at

    @property
    def stuck(self) -> int:
        """How many sandboxes resisted their removal."""
        return len(self._stuck)

    def start(self, now: float) -> list[Decision]:
        """Begin to make what should be ready."""
        for image in self._images:
            self._update(image)
        return self._plan(now)

    def wake(self, now: float) -> list[Decision]:
        """Do what had to wait for its time."""
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
        if life.state is State.RECYCLING and not self.closed and self._reassign(life):
            return [Recycle(name, life.image), *self._settle(before, now)]
        return [*self._apply(life, Input.REMOVE), *self._settle(before, now)]

    def recycled(self, name: str, now: float) -> list[Decision]:
        """Note that a sandbox became a fresh one."""
        life = self.lives[name]
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
        self.matcher.add(life.image, waiter, holding=True)
        return [*done, *self._settle(life.image, now)]

    def created(self, name: str, now: float) -> list[Decision]:
        """Note that the backend made a sandbox."""
        life = self.lives[name]
        self.created_total += 1
        self.replenisher.created(life.image, now)
        life.ready_at = now
        return [*self._apply(life, Input.CREATED), *self._settle(life.image, now)]

    def failed(self, name: str, error: BaseException | None, now: float) -> list[Decision]:
        """Note that the backend could not make a sandbox, and why; ``None`` if it was told to stop."""
        life = self.lives[name]
        self.failed_total += 1
        if error is not None:
            self.replenisher.failed(life.image, error, now)
        return [*self._apply(life, Input.FAILED), *self._settle(life.image, now)]

    def lost(self, name: str, now: float) -> list[Decision]:
        """Note that a sandbox is not what it was. One that is verified gone, or unknown, is no news."""
        if (life := self.lives.get(name)) is None:
            return []
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
            for image in self._images
            for waiter in self.matcher.dismiss(image)
        ]

    def sweep(self) -> list[str]:
        """Mark everything that is still there for removal; whatever its holder thinks. Names in order of creation."""
        for life in self.lives.values():
            if life.state in (State.LEASED, State.RESETTING):
                self._apply(life, Input.RELEASE)
            elif life.state is State.READY:
                self._apply(life, Input.EVICT)
            elif life.state in (State.LOST, State.RECYCLING):
                self._apply(life, Input.REMOVE)
        return [name for name, life in self.lives.items() if life.state is State.DELETING]

    def count(self, image: str, state: State) -> int:
        """How many sandboxes of an image are in a state."""
        return self._images[image][state]

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
        self._count(life.image, before, life.state)
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
        return decisions

    def _count(self, image: str, before: State | None, after: State | None) -> None:
        for counts in (self.counts, self._images[image]):
            if before is not None:
                counts[before] -= 1
            if after is not None:
                counts[after] += 1

    def _reassign(self, life: SandboxLife) -> bool:
        """Give a sandbox that becomes a fresh one the image that is wanted most; whether any is wanted."""
        self._count(life.image, State.RECYCLING, None)
        self._update(life.image)
        changes = self.recycles(life.name)
        image = self.replenisher.reuse(life.image) if changes else self.replenisher.keep(life.image)
        life.image = life.image if image is None else image
        self._count(life.image, None, State.RECYCLING)
        self._update(life.image)
        return image is not None

    def _settle(self, image: str, now: float) -> list[Decision]:
        if self.closed:
            return []
        decisions: list[Decision] = []
        for waiter, name in self.matcher.match(image):
            life = self.lives[name]
            self._apply(life, Input.GRANT)
            waiter.grant = Grant(waiter, name, life.generation, life.ready_at or 0.0, life.recycled > 0)
            decisions.append(waiter.grant)
        if (breaker := self.replenisher.refusal(image)) is not None and not self.matcher.ready(image):
            decisions += [self._refuse(waiter, _why(image, breaker, now)) for waiter in self.matcher.dismiss(image)]
        self._update(image)
        return [*decisions, *self._plan(now)]

    def _update(self, image: str) -> None:
        counts = self._images[image]
        self.replenisher.update(
            image,
            Demand(
                held=counts[State.LEASED] + counts[State.RESETTING] + counts[State.LOST],
                creating=counts[State.CREATING] + counts[State.HYDRATING] + counts[State.RECYCLING],
                ready=counts[State.READY],
                servable=self.matcher.servable(image),
                waiting=self.matcher.waiting(image),
            ),
        )

    def _plan(self, now: float) -> list[Decision]:
        if self.closed:
            return []
        counts = self.counts
        plan = self.replenisher.plan(
            now,
            alive=len(self.lives),
            creating=counts[State.CREATING] + counts[State.HYDRATING],
            going=counts[State.DELETING] - len(self._stuck) + len(self._undecided),
        )
        decisions: list[Decision] = []
        for action in plan:
            if isinstance(action, Make):
                decisions.append(self._create(action.image))
            else:
                decisions += self._evict(action)
        return decisions

    def _create(self, image: str) -> Create:
        self._number += 1
        name = f"{self._prefix}-{self._number:06d}"
        self.lives[name] = SandboxLife(name, image)
        self._count(image, None, State.CREATING)
        self._update(image)
        return Create(name, image)

    def _evict(self, action: Evict) -> list[Decision]:
        life = self.lives[self.matcher.oldest(action.image)]
        if self.recycles(life.name):
            self._apply(life, Input.RECYCLE)
            self._reassign(life)
            return [Recycle(life.name, life.image)]
        decisions = self._apply(life, Input.EVICT)
        self._update(action.image)
        return decisions

    def _refuse(self, waiter: Waiter, error: BaseException) -> Refuse:
        waiter.error = error
        return Refuse(waiter, error)

    def __repr__(self) -> str:
        states = ", ".join(f"{n} {state}" for state, n in self.counts.items() if n and state is not State.GONE)
        return f"<PoolBook [{states or 'empty'} | {self.matcher.waiting()} waiting]>"


def _why(image: str, breaker: Breaker, now: float) -> BaseException:
    """Make each waiter an exception of its own, of the same type, so that tracebacks do not grow into each other."""
    last = breaker.error
    try:
        error = copy.copy(last)
    except TypeError:
        error = None
    if not isinstance(error, BaseException) or error is last:
        error = ProvisionError(f"{type(last).__name__}: {last}")
    when = "it will not be tried again" if breaker.until == math.inf else f"next try in {breaker.until - now:.0f} s"
    times = "once" if breaker.failures == 1 else f"{breaker.failures} times in a row"
    error.add_note(f"a sandbox of image {image!r} could not be made {times}; {when}")
    error.__cause__ = last
    return error
