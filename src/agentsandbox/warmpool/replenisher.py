# SPDX-License-Identifier: Apache-2.0
"""
Which sandbox to make next, and which to give up: one budget over all images.

The counts of an image are told when they change (:meth:`Replenisher.update`), so that a plan looks at the images that
lack something and at no other.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from agentsandbox.errors import ControlPlaneError, QuotaExceeded, Throttled, Unschedulable
from agentsandbox.warmpool.breaker import Breaker
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.turns import Turns

if TYPE_CHECKING:
    from agentsandbox.models.placement import Placement

__all__ = ["Breaker", "Demand", "Evict", "Make", "Replenisher", "congested"]


@attrs.frozen(kw_only=True)
class Demand:
    """What there is of one image, and what is asked of it."""

    held: int = 0
    """Sandboxes that attempts hold."""
    creating: int = 0
    """Sandboxes being made."""
    late: int = 0
    """Those of them that take so long that nobody should count on them: rollouts that need one get another one."""
    ready: int = 0
    """Sandboxes nobody holds."""
    servable: int = 0
    """Waiters that only a sandbox keeps waiting, not their image's lease limit."""
    waiting: int = 0
    """All waiters."""
    announced: int = 0
    """Sandboxes that rollouts to come could use at the same time, beyond those that are held; some may wait already."""


@attrs.frozen
class Make:
    """Make a sandbox."""

    image: str
    """From what."""


@attrs.frozen
class Evict:
    """Give up the sandbox of an image that has been ready for longest, to make room."""

    image: str
    """Of what."""


def _lacking(demand: Demand, wanted: int) -> int:
    """How many more to make for so many rollouts: instead of stragglers too, but no more than one for each rollout."""
    return min(wanted - demand.creating + demand.late, 2 * wanted - demand.creating)


def congested(error: BaseException) -> bool:
    """Whether an error says that there are too many requests or sandboxes, as against that this image is bad."""
    return isinstance(error, (ControlPlaneError, QuotaExceeded, Unschedulable)) and error.retryable


class Replenisher:
    """
    Keep every image at its target, images that somebody waits for first, and never more alive than allowed.

    Sandboxes are made for those who wait, then for rollouts that are announced, in that order, then for stock. Where
    all room is taken, what nobody needs goes first, then stock, and last what is needed latest.

    Args:
        targets: Image → how many sandboxes of it there should be, held, being made and ready together, whatever is
            announced. Of any other image there should be none.
        cap: Most sandboxes alive over all images, those being removed included.
        creates_in_flight: Most sandboxes being made at once.
        limiter: How fast they may be asked for.
        breaker_threshold: Failures in a row that stop an image.
        breaker_cooldown: For how long, in seconds.
        placement: Where images belong, if that matters.

    """

    def __init__(
        self,
        *,
        targets: Mapping[str, int],
        cap: int,
        creates_in_flight: int,
        limiter: AdaptiveLimiter | None = None,
        breaker_threshold: int = 3,
        breaker_cooldown: float = 30.0,
        placement: Placement | None = None,
    ) -> None:
        self.targets = dict(targets)
        """Image → how many sandboxes of it there should be."""
        self.cap = cap
        """Most sandboxes alive."""
        self._in_flight = creates_in_flight
        self._limiter = limiter or AdaptiveLimiter()
        self._threshold = breaker_threshold
        self._cooldown = breaker_cooldown
        self._demand: dict[str, Demand] = {}
        # What is to be made …
        self._placement = placement
        self._alive_on: Counter[str] = Counter()
        self._full: set[str] = set()
        self._closed: dict[str, None] = {}  # in the order in which they were closed, so that a run repeats
        nodes = None if placement is None else placement.nodes
        self._urgent = Turns(nodes, closed=self._closed)
        self._instead = Turns(nodes, rotating=False, closed=self._closed)
        self._soon = Turns(nodes, rotating=False, closed=self._closed)
        self._lacking = Turns(nodes, closed=self._closed)
        # … and what is there that nobody holds and nobody waits for.
        self._unneeded = Turns()
        self._stock = Turns(nodes)
        self._promised = Turns(nodes, rotating=False)
        self._breakers: dict[str, Breaker] = {}
        self._cooling: list[tuple[float, int, str]] = []
        self._order = itertools.count()
        self.wake_at = math.inf
        """When :meth:`plan` wants to be called even if nothing has happened."""
        self.last_error: BaseException | None = None
        """Why the last sandbox that could not be made could not."""

    @property
    def short(self) -> int:
        """How many more sandboxes should be made."""
        return self._urgent.total + self._instead.total + self._soon.total + self._lacking.total

    def update(self, image: str, demand: Demand) -> None:
        """Learn the counts of an image."""
        self._demand[image] = demand
        room = self._in_flight
        if (breaker := self._breakers.get(image)) is not None and breaker.tripped:
            room = max(0, 1 - demand.creating) if breaker.half_open else 0
        missing = self.targets.get(image, 0) - demand.held - demand.creating
        urgent = max(0, min(room, _lacking(demand, demand.servable)))
        soon = max(0, min(room, demand.announced - demand.creating - demand.ready) - urgent)
        # Nobody waits for these yet: one that is let go becomes it, and none is made.
        instead = max(0, min(room, _lacking(demand, demand.announced) - demand.ready) - urgent - soon)
        self._urgent.put(image, urgent, first=demand.late > 0)
        self._instead.put(image, instead)
        self._soon.put(image, soon)
        self._lacking.put(image, min(room, missing - demand.ready) - urgent - soon)
        free = 0 if demand.waiting else demand.ready
        promised = min(free, demand.announced)
        stock = max(0, min(free, missing) - promised)
        self._promised.put(image, promised)
        self._stock.put(image, stock)
        self._unneeded.put(image, free - promised - stock)

    def plan(self, now: float, *, alive: int, creating: int, going: int) -> list[Make | Evict]:
        """
        Decide what to make and what to give up now.

        Args:
            now: The present, in seconds.
            alive: Sandboxes that count against the cap, those in the other two arguments included.
            creating: Sandboxes being made.
            going: Sandboxes whose removal is under way, so that their room is about to be free.

        Returns:
            What to do, in order. It is taken as done: call :meth:`update` with the new counts. If anything is given up,
            call this again then: it may have become what is wanted, so that less has to be made.

        """
        self._cool(now)
        room = self._in_flight - creating
        if self._unneeded and (evictions := self._give_up(min(self.short, room) - going, self._unneeded)):
            return evictions
        actions: list[Make | Evict] = []
        while room > 0 and (self._urgent or self._soon or self._lacking):
            queue, image = self._next()
            if alive >= self.cap or image is None:
                actions += self._make_room(room, going, capped=alive >= self.cap)
                break
            if not self._limiter.take(now):
                self.wake_at = min(self.wake_at, self._limiter.next_at(now))
                break
            queue.take(image)
            self._settle_on(image)
            actions.append(Make(image))
            alive += 1
            room -= 1
        return actions

    def gone(self, image: str) -> None:
        """Note that a sandbox that was made for an image is gone, whatever it has become since."""
        if self._placement is not None and (node := self._placement.nodes.get(image)) is not None:
            self._alive_on[node] -= 1
            self._full.discard(node)

    def close(self, node: str) -> None:
        """Let images be anywhere that belong on a node: it takes no sandboxes any more. Call :meth:`plan` then."""
        self._closed[node] = None

    def open(self, node: str) -> None:
        """Have images on their node again. Call :meth:`plan` then."""
        self._closed.pop(node, None)

    def reuse(self, image: str, node: str | None = None) -> str | None:
        """
        Choose what a sandbox that can become any other one becomes; it must not be in the counts any more.

        Args:
            image: What it was. It stays that if it is wanted as much as another one.
            node: Where it is, if that matters.

        Returns:
            An image, or ``None`` if there are enough of all of them that it can become.

        """
        for queue in (self._urgent, self._instead, self._soon, self._lacking):
            if queue.suits(image, node):
                return image
            if (other := queue.first_on(node)) is not None:
                return other
        return None

    def keep(self, image: str) -> str | None:
        """Return the image if another sandbox of it is wanted: for one that can be made like new, and nothing else."""
        queues = (self._urgent, self._instead, self._soon, self._lacking)
        return image if any(image in queue for queue in queues) else None

    def created(self, image: str, now: float) -> None:
        """Note that a sandbox was made."""
        self._limiter.succeeded(now)
        if (breaker := self._breakers.pop(image, None)) is not None:
            breaker.succeeded()

    def failed(self, image: str, error: BaseException, now: float) -> None:
        """Note that a sandbox could not be made: too fast, or a bad image."""
        self.last_error = error
        if congested(error):
            self._limiter.refused(now, error.retry_after if isinstance(error, Throttled) else None)
            return
        breaker = self._breakers.setdefault(image, Breaker(self._threshold, self._cooldown))
        breaker.failed(error, now)
        if breaker.open and breaker.until < math.inf:
            heapq.heappush(self._cooling, (breaker.until, next(self._order), image))

    def refusal(self, image: str) -> Breaker | None:
        """Return the breaker of an image if nothing of it may be made."""
        breaker = self._breakers.get(image)
        return breaker if breaker is not None and breaker.open else None

    def _make_room(self, room: int, going: int, *, capped: bool) -> list[Make | Evict]:
        """Give up what nobody waits for: anything where the cap is in the way, and on a full node what is there."""
        full = self._filled
        urgent = min(self._urgent.total - sum(self._urgent.on[node] for node in full), room)
        soon = min(self._soon.total - sum(self._soon.on[node] for node in full), room - urgent)
        actions: list[Make | Evict] = []
        if capped:
            actions += self._give_up(urgent - going, self._stock, self._promised)
            actions += self._give_up(soon - max(0, going - urgent), self._stock)
            going = max(0, going - urgent - soon)
        for node in sorted(full):
            left = room - len(actions)
            actions += self._give_up(min(self._urgent.on[node], left) - going, self._stock, self._promised, node=node)
            left = room - len(actions)
            actions += self._give_up(min(self._soon.on[node], left) - going, self._stock, node=node)
        return actions

    @property
    def _filled(self) -> set[str]:
        return self._full.difference(self._closed) if self._closed else self._full

    def _next(self) -> tuple[Turns, str | None]:
        full = self._filled
        for queue in (self._urgent, self._soon, self._lacking):
            if (image := queue.first(full)) is not None:
                return queue, image
        return self._lacking, None

    def _settle_on(self, image: str) -> None:
        if self._placement is not None and (node := self._placement.nodes.get(image)) is not None:
            self._alive_on[node] += 1
            if self._alive_on[node] >= self._placement.room[node]:
                self._full.add(node)

    def _give_up(self, wanted: int, *stocks: Turns, node: str | None = None) -> list[Make | Evict]:
        """Take so many from the first of *stocks* that has any; of what is promised, what is needed last."""
        evictions: list[Make | Evict] = []
        for stock in stocks:
            while len(evictions) < wanted and (image := self._spare(stock, node)) is not None:
                stock.take(image)
                evictions.append(Evict(image))
        return evictions

    def _spare(self, stock: Turns, node: str | None) -> str | None:
        if stock is self._promised:
            return stock.last(node)
        return stock.first() if node is None else stock.first_of(node)

    def _cool(self, now: float) -> None:
        """Let images be tried again whose time has come."""
        self.wake_at = math.inf
        while self._cooling:
            until, _, image = self._cooling[0]
            breaker = self._breakers.get(image)
            if breaker is not None and breaker.open and breaker.until == until:  # else it is of the past
                if not breaker.reopen(now):
                    self.wake_at = until
                    return
                self.update(image, self._demand[image])
            heapq.heappop(self._cooling)

    def __repr__(self) -> str:
        soon = f"{self._soon.total} announced, " if self._soon else ""
        return (
            f"<Replenisher [{self._urgent.total} waited for, {soon}{len(self._lacking)} images short, "
            f"{len(self._breakers)} failing | cap {self.cap}]>"
        )
