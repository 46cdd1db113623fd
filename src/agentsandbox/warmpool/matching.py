# SPDX-License-Identifier: Apache-2.0
"""
Who gets which sandbox: one synchronous step, so that no two can get the same.

Every operation costs the same however many wait: each image has its own queues, and only the queues that something
happened to are looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Generic, TypeVar

import attrs

__all__ = ["Matcher"]

W = TypeVar("W")
"""A waiter: anything that can be hashed and told apart."""


@attrs.define(eq=False, repr=False)
class _Queues(Generic[W]):
    limit: int
    places: int = 0
    # OrderedDict and not dict: taking the first of a dict again and again is quadratic.
    returning: OrderedDict[W, None] = attrs.field(factory=OrderedDict)
    waiting: OrderedDict[W, None] = attrs.field(factory=OrderedDict)
    ready: OrderedDict[str, None] = attrs.field(factory=OrderedDict)


class Matcher(Generic[W]):
    """
    Waiters and ready sandboxes, image by image, first come, first served.

    A lease takes one of an image's *places* until it is left. A waiter that holds a place already, because its sandbox
    is being replaced, goes before everybody who holds none.

    Args:
        limits: Image → how many places it has.

    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._queues: dict[str, _Queues[W]] = {image: _Queues(limit) for image, limit in limits.items()}
        self._waiting = 0

    def allow(self, image: str, places: int) -> None:
        """Let an image have as many places at least; one that was never heard of is known from then on."""
        queues = self._queues.setdefault(image, _Queues(places))
        queues.limit = max(queues.limit, places)

    def limit(self, image: str) -> int:
        """How many places an image has."""
        return self._queues[image].limit

    def offer(self, image: str, sandbox: str) -> None:
        """Put a sandbox up for assignment."""
        self._queues[image].ready[sandbox] = None

    def withdraw(self, image: str, sandbox: str) -> bool:
        """Take a sandbox back; whether it was there."""
        return self._queues[image].ready.pop(sandbox, self) is None

    def oldest(self, image: str) -> str:
        """Name the sandbox that has been ready for longest."""
        return next(iter(self._queues[image].ready))

    def add(self, image: str, waiter: W, *, holding: bool = False) -> None:
        """
        Let somebody wait.

        Args:
            image: For a sandbox of which image.
            waiter: Who.
            holding: Whether the waiter holds a place already.

        """
        queues = self._queues[image]
        (queues.returning if holding else queues.waiting)[waiter] = None
        self._waiting += 1

    def cancel(self, image: str, waiter: W) -> bool:
        """
        Let somebody wait no longer; a place that was held is left.

        Returns:
            Whether it waited. If not, and it was granted a sandbox, the caller hands that back.

        """
        queues = self._queues[image]
        if queues.waiting.pop(waiter, self) is None:
            self._waiting -= 1
            return True
        if queues.returning.pop(waiter, self) is None:
            self._waiting -= 1
            queues.places -= 1
            return True
        return False

    def leave(self, image: str) -> None:
        """Give up a place."""
        self._queues[image].places -= 1

    def match(self, image: str) -> list[tuple[W, str]]:
        """
        Assign what can be assigned. Each pair has left both queues and holds a place when this returns.

        Returns:
            Waiter and sandbox, in the order of the queue.

        """
        queues = self._queues[image]
        pairs = []
        while queues.ready:
            if queues.returning:
                waiter, _ = queues.returning.popitem(last=False)
            elif queues.waiting and queues.places < queues.limit:
                waiter, _ = queues.waiting.popitem(last=False)
                queues.places += 1
            else:
                break
            sandbox, _ = queues.ready.popitem(last=False)
            pairs.append((waiter, sandbox))
            self._waiting -= 1
        return pairs

    def dismiss(self, image: str) -> list[W]:
        """Let nobody wait for an image any longer; who waited, in the order of the queue."""
        queues = self._queues[image]
        waiters = [*queues.returning, *queues.waiting]
        for waiter in waiters:
            self.cancel(image, waiter)
        return waiters

    def servable(self, image: str) -> int:
        """How many waiters could be granted a sandbox at once if there were enough."""
        queues = self._queues[image]
        return len(queues.returning) + min(len(queues.waiting), max(0, queues.limit - queues.places))

    def waiting(self, image: str | None = None) -> int:
        """How many wait, for one image or for any."""
        if image is None:
            return self._waiting
        queues = self._queues[image]
        return len(queues.returning) + len(queues.waiting)

    def ready(self, image: str) -> int:
        """How many sandboxes are up for assignment."""
        return len(self._queues[image].ready)

    def places(self, image: str) -> int:
        """How many places are taken."""
        return self._queues[image].places

    def __repr__(self) -> str:
        ready = sum(len(queues.ready) for queues in self._queues.values())
        return f"<Matcher [{len(self._queues)} images | {ready} ready | {self._waiting} waiting]>"
