# SPDX-License-Identifier: Apache-2.0
"""
Carry a plan out: fetch images node by node, ahead of the sandboxes that will need them.

A few lanes a node, each of which holds one place there and changes its image in place: no DaemonSet on all nodes, no
Pod an image. A wave is fetched while the episodes of the one before run; the one after that has to wait, because the
disk holds two.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import anyio
import attrs

from agentsandbox.errors import InfrastructureError, Throttled

if TYPE_CHECKING:
    from agentsandbox.hydration.records import NodePlan, Plan

__all__ = ["Hydration", "Lane", "Puller"]

_THROTTLED = re.compile("toomanyrequests|too many requests|rate limit|qps exceeded", re.IGNORECASE)
"""What registries and kubelets say when they are asked too often."""


class Lane(Protocol):
    """One place on a node that fetches one image after another."""

    async def pull(self, image: str) -> None:
        """
        Have an image on the node.

        Raises:
            ImagePullFailed: If it cannot be had.
            Throttled: If the registry, or the control plane, asks to be left alone for a while.

        """


class Puller(Protocol):
    """Whatever has nodes."""

    def lane(self, node: str) -> AbstractAsyncContextManager[Lane]:
        """Hold a place on a node for as long as the context lasts."""


@attrs.define(eq=False, repr=False)
class Hydration:
    """
    A plan that is being carried out.

    Args:
        plan: The plan.
        puller: Who fetches.
        lanes: Images that a node fetches at a time.
        attempts: How often an image is tried.
        pause: Seconds to wait before another try when nothing else is asked for; doubled each time.
        have: Says whether an image is on a node already, at the moment when its turn comes: what was there when the
            plan was made may have been removed since.
        report: Told the node and the image of whatever has arrived.

    """

    plan: Plan
    puller: Puller
    lanes: int = 3
    attempts: int = 4
    pause: float = 5.0
    have: Callable[[str, str], bool] = lambda _node, _image: False
    report: Callable[[str, str], None] = lambda _node, _image: None
    failed: dict[str, str] = attrs.field(factory=dict, init=False)
    """Image → why it could not be had."""
    pulled: int = attrs.field(default=0, init=False)
    """Images that were fetched."""
    _resume_at: float = attrs.field(default=-math.inf, init=False)
    _left: Counter[tuple[str, int]] = attrs.field(factory=Counter, init=False)
    _wave_of: dict[str, tuple[str, int]] = attrs.field(factory=dict, init=False)
    _news: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    async def run(self, *, waves: int | None = None) -> None:
        """
        Fetch everything, and return when that is done.

        What cannot be had is in :attr:`failed`, and the rest is fetched all the same.

        Args:
            waves: Only so many waves of each node; all of them if not given, as they are told to be :meth:`used`.

        """
        async with anyio.create_task_group() as group:
            for node in self.plan.nodes:
                queue = deque(
                    (number, image) for number, wave in enumerate(node.waves[:waves]) for image in wave.images
                )
                self._expect(node)
                for _ in range(min(self.lanes, len(queue))):
                    group.start_soon(self._work, node.node, queue)

    def used(self, image: str) -> None:
        """Note that nobody needs an image any more, so that a later wave may take its room."""
        if (wave := self._wave_of.pop(image, None)) is not None:
            self._left[wave] -= 1
            if not self._left[wave]:
                self._news.set()

    def _expect(self, node: NodePlan) -> None:
        for number, wave in enumerate(node.waves):
            self._left[node.node, number] = len(wave.images)
            self._wave_of.update(dict.fromkeys(wave.images, (node.node, number)))

    async def _work(self, node: str, queue: deque[tuple[int, str]]) -> None:
        async with self.puller.lane(node) as lane:
            while queue:
                number, image = queue.popleft()
                while number > 1 and self._left[node, number - 2]:
                    self._news = anyio.Event() if self._news.is_set() else self._news
                    await self._news.wait()
                if not self.have(node, image):
                    await self._pull(lane, image)
                if image not in self.failed:
                    self.report(node, image)

    async def _pull(self, lane: Lane, image: str) -> None:
        why = ""
        for attempt in range(self.attempts):
            await anyio.sleep_until(max(anyio.current_time(), self._resume_at))
            try:
                await lane.pull(image)
            except InfrastructureError as error:
                why = f"{type(error).__name__}: {error}"
                pause = self.pause * 2**attempt
                if isinstance(error, Throttled) or _THROTTLED.search(why):
                    # The registry counts refused pulls, too: everybody waits.
                    least = getattr(error, "retry_after", None) or pause
                    self._resume_at = max(self._resume_at, anyio.current_time() + least)
                elif not error.retryable:
                    break
                else:
                    await anyio.sleep(pause)
            else:
                self.pulled += 1
                return
        self.failed[image] = why
        self.used(image)

    def __repr__(self) -> str:
        return f"<Hydration [{self.pulled} of {len(self.plan.placement)} images fetched, {len(self.failed)} failed]>"
