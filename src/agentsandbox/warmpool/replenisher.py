# SPDX-License-Identifier: Apache-2.0
"""
Which sandbox to make next, and which to give up: one budget over all images.

The counts of an image are told when they change (:meth:`Replenisher.update`), so that a plan looks at the images that
lack something and at no other.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

import attrs

from agentsandbox.errors import ControlPlaneError, QuotaExceeded, SandboxError, Throttled, Unschedulable
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter

__all__ = ["Breaker", "Demand", "Evict", "Make", "Replenisher", "congested"]


@attrs.frozen(kw_only=True)
class Demand:
    """What there is of one image, and what is asked of it."""

    held: int = 0
    """Sandboxes that attempts hold."""
    creating: int = 0
    """Sandboxes being made."""
    ready: int = 0
    """Sandboxes nobody holds."""
    servable: int = 0
    """Waiters that only a sandbox keeps waiting, not their image's lease limit."""
    waiting: int = 0
    """All waiters."""


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


def congested(error: BaseException) -> bool:
    """Whether an error says that there are too many requests or sandboxes, as against that this image is bad."""
    return isinstance(error, (ControlPlaneError, QuotaExceeded, Unschedulable)) and error.retryable


def _put(queue: OrderedDict[str, int], image: str, count: int) -> None:
    if count > 0:
        queue[image] = count
    else:
        queue.pop(image, None)


@attrs.define(eq=False, repr=False)
class Breaker:
    """
    Stop making sandboxes of an image that cannot be made.

    Args:
        threshold: Failures in a row that open it.
        cooldown: How long it stays open at first, in seconds; each further failure doubles that.
        cooldown_max: How long it stays open at most, in seconds.

    """

    threshold: int = 3
    cooldown: float = 30.0
    cooldown_max: float = 600.0
    failures: int = attrs.field(default=0, init=False)
    """Failures in a row."""
    error: BaseException | None = attrs.field(default=None, init=False)
    """The last one."""
    until: float = attrs.field(default=-math.inf, init=False)
    """Until when it is open; infinite for good."""
    half_open: bool = attrs.field(default=False, init=False)
    """Whether one sandbox is tried to see if the cause has passed."""

    def succeeded(self) -> None:
        """Note that a sandbox was made."""
        self.failures, self.error, self.until, self.half_open = 0, None, -math.inf, False

    def failed(self, error: BaseException, now: float) -> None:
        """Note that a sandbox could not be made, and why."""
        self.failures += 1
        self.error = error
        if isinstance(error, SandboxError) and not error.retryable:
            self.until = math.inf
        elif self.failures >= self.threshold and self.until != math.inf:
            pause = self.cooldown * 2.0 ** min(self.failures - self.threshold, 30)
            self.until = max(self.until, now + min(self.cooldown_max, pause))
        self.half_open = False

    def reopen(self, now: float) -> bool:
        """Allow one attempt if the time has come; whether that changed anything."""
        if not self.open or now < self.until:
            return False
        self.half_open = True
        return True

    @property
    def tripped(self) -> bool:
        """Whether it stopped the image and no sandbox was made since."""
        return self.until != -math.inf

    @property
    def open(self) -> bool:
        """Whether nothing may be made."""
        return self.tripped and not self.half_open

    def __repr__(self) -> str:
        state = "half open" if self.half_open else "open" if self.open else "closed"
        return f"<Breaker [{state}, {self.failures} failures in a row]>"


class Replenisher:
    """
    Keep every image at its target, images that somebody waits for first, and never more alive than allowed.

    Args:
        targets: Image → how many sandboxes of it there should be, held, being made and ready together.
        cap: Most sandboxes alive over all images, those being removed included.
        creates_in_flight: Most sandboxes being made at once.
        limiter: How fast they may be asked for.
        breaker_threshold: Failures in a row that stop an image.
        breaker_cooldown: For how long, in seconds.

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
    ) -> None:
        self._targets = dict(targets)
        self._cap = cap
        self._in_flight = creates_in_flight
        self._limiter = limiter or AdaptiveLimiter()
        self._threshold = breaker_threshold
        self._cooldown = breaker_cooldown
        self._demand: dict[str, Demand] = {}
        self._urgent: OrderedDict[str, int] = OrderedDict()
        self._urgent_total = 0
        self._lacking: OrderedDict[str, int] = OrderedDict()
        self._evictable: OrderedDict[str, int] = OrderedDict()
        self._breakers: dict[str, Breaker] = {}
        self._cooling: set[str] = set()
        self.wake_at = math.inf
        """When :meth:`plan` wants to be called even if nothing has happened."""
        self.last_error: BaseException | None = None
        """Why the last sandbox that could not be made could not."""

    def update(self, image: str, demand: Demand) -> None:
        """Learn the counts of an image."""
        self._demand[image] = demand
        room = self._in_flight
        if (breaker := self._breakers.get(image)) is not None and breaker.tripped:
            room = max(0, 1 - demand.creating) if breaker.half_open else 0
        lacking = min(room, self._targets[image] - demand.held - demand.creating - demand.ready)
        urgent = max(0, min(room, demand.servable - demand.creating))
        self._urgent_total += urgent - self._urgent.get(image, 0)
        _put(self._urgent, image, urgent)
        _put(self._lacking, image, lacking - urgent)
        _put(self._evictable, image, 0 if demand.waiting else demand.ready)

    def plan(self, now: float, *, alive: int, creating: int, going: int) -> list[Make | Evict]:
        """
        Decide what to make and what to give up now.

        Args:
            now: The present, in seconds.
            alive: Sandboxes that count against the cap, those in the other two arguments included.
            creating: Sandboxes being made.
            going: Sandboxes whose removal is under way, so that their room is about to be free.

        Returns:
            What to do, in order. It is taken as done: call :meth:`update` with the new counts.

        """
        self._cool(now)
        actions: list[Make | Evict] = []
        while (image := self._next()) is not None and creating < self._in_flight:
            if alive >= self._cap:
                actions += self._make_room(min(self._urgent_total, self._in_flight - creating) - going)
                break
            if not self._limiter.take(now):
                self.wake_at = min(self.wake_at, self._limiter.next_at(now))
                break
            self._count_made(image)
            alive += 1
            creating += 1
            actions.append(Make(image))
        return actions

    def reuse(self, image: str) -> str | None:
        """
        Choose what a sandbox that can become any other one becomes; it must not be in the counts any more.

        Args:
            image: What it was. It stays that if it is wanted as much as another one.

        Returns:
            An image, or ``None`` if there are enough of all of them.

        """
        for queue in (self._urgent, self._lacking):
            if queue:
                return image if image in queue else next(iter(queue))
        return None

    def keep(self, image: str) -> str | None:
        """Return the image if another sandbox of it is wanted: for one that can be made like new, and nothing else."""
        return image if image in self._urgent or image in self._lacking else None

    def created(self, image: str, now: float) -> None:
        """Note that a sandbox was made."""
        self._limiter.succeeded(now)
        if (breaker := self._breakers.pop(image, None)) is not None:
            breaker.succeeded()
            self._cooling.discard(image)

    def failed(self, image: str, error: BaseException, now: float) -> None:
        """Note that a sandbox could not be made: too fast, or a bad image."""
        self.last_error = error
        if congested(error):
            self._limiter.refused(now, error.retry_after if isinstance(error, Throttled) else None)
            return
        breaker = self._breakers.setdefault(image, Breaker(self._threshold, self._cooldown))
        breaker.failed(error, now)
        if breaker.open and breaker.until < math.inf:
            self._cooling.add(image)

    def refusal(self, image: str) -> Breaker | None:
        """Return the breaker of an image if nothing of it may be made."""
        breaker = self._breakers.get(image)
        return breaker if breaker is not None and breaker.open else None

    def _next(self) -> str | None:
        queue = self._urgent or self._lacking
        return next(iter(queue)) if queue else None

    def _count_made(self, image: str) -> None:
        queue = self._urgent or self._lacking
        if queue is self._urgent:
            self._urgent_total -= 1
        queue[image] -= 1
        if queue[image]:
            queue.move_to_end(image)
        else:
            del queue[image]

    def _make_room(self, wanted: int) -> list[Make | Evict]:
        evictions: list[Make | Evict] = []
        while wanted > 0 and self._evictable:
            image = next(iter(self._evictable))
            self._evictable[image] -= 1
            if self._evictable[image]:
                self._evictable.move_to_end(image)
            else:
                del self._evictable[image]
            evictions.append(Evict(image))
            wanted -= 1
        return evictions

    def _cool(self, now: float) -> None:
        self.wake_at = math.inf
        for image in tuple(self._cooling):
            breaker = self._breakers[image]
            if breaker.reopen(now):
                self._cooling.discard(image)
                self.update(image, self._demand[image])
            else:
                self.wake_at = min(self.wake_at, breaker.until)

    def __repr__(self) -> str:
        return (
            f"<Replenisher [{self._urgent_total} waited for, {len(self._lacking)} images short, "
            f"{len(self._breakers)} failing | cap {self._cap}]>"
        )
