# SPDX-License-Identifier: Apache-2.0
"""When a kubelet starts a container again. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.clock import Timing

__all__ = ["BackOff"]


@attrs.define(eq=False)
class BackOff:
    """
    The back-off of one Pod's container, by image.

    The first restart is free, then the wait doubles. When the kubelet itself ends a container in order to change its
    image, it decides by what it knew before: the end of that very container does not count yet.
    """

    _timing: Timing
    _waits: dict[str, float] = attrs.field(factory=dict, init=False)
    _started: float = attrs.field(default=-math.inf, init=False)
    _finished: float = attrs.field(default=-math.inf, init=False)
    _known: float = attrs.field(default=-math.inf, init=False)
    _unseen: float | None = attrs.field(default=None, init=False)

    def nominal(self, image: str) -> float:
        """Return the present wait of an image, in the kubelet's seconds."""
        return self._waits.get(image, 0.0)

    def left(self, image: str, now: float) -> float:
        """Return how long to wait before an image is started."""
        if self._unseen is not None:
            return 0.0
        return self._left(image, now, self._finished)

    def exited(self, now: float) -> None:
        """Note that a container has ended by itself, or could not be started."""
        self._finished = self._known = now
        self._unseen = None

    def change(self, image: str, now: float) -> float:
        """Note that a container was ended for *image*; return how long that has to wait."""
        wait = self._left(image, now, self._known)
        self._finished = now
        if wait:
            self._known = now
        else:
            self._unseen = now
        return wait

    def started(self, image: str, now: float) -> None:
        """Note that a container of an image starts."""
        if self._known > -math.inf:
            if self._finished - self._started > self._timing.reset_back_off:
                self._waits.clear()
            before = self._waits.get(image)
            wait = self._timing.back_off if before is None else before * 2
            self._waits[image] = min(wait, self._timing.back_off_max)
        if self._unseen is not None:
            self._known, self._unseen = self._unseen, None
        self._started = now

    def forget(self) -> None:
        """Note that nothing is left of earlier containers, as when all of them are restarted in place."""
        self._finished = self._known = -math.inf
        self._unseen = None

    def _left(self, image: str, now: float, since: float) -> float:
        known = self._waits.get(image)
        return 0.0 if known is None else max(0.0, known * self._timing.second - (now - since))
