# SPDX-License-Identifier: Apache-2.0
"""
Carry a plan out: fetch images node by node, ahead of the sandboxes that will need them.

A few lanes a node, each of which holds one place there and changes its image in place: no DaemonSet on all nodes, no
Pod an image. A wave is fetched while the episodes of the one before run; the one after that has to wait, because the
disk holds two. With several batches a wave ends where an image has to make room, and what follows waits until the
episodes of that image are over.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
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
    A plan that is being carried out, for all its batches.

    Args:
        plan: The plan.
        puller: Who fetches.
        lanes: Images that a node fetches at a time.
        attempts: How often an image is tried.
        pause: Seconds to wait before another try when nothing else is asked for; doubled each time.
        have: Says whether an image is on a node already, at the moment when its turn comes: what was there when the
            plan was made may have been removed since. Without it everything is fetched but what a plan of several
            batches keeps.
        evict: Removes an image from a node, if there is something that can. Without it that is left to the kubelet,
            which removes what was used least recently, and not what the plan says.
        report: Told the node and the image of whatever has arrived.

    """

    plan: Plan
    puller: Puller
    lanes: int = 3
    attempts: int = 4
    pause: float = 5.0
    have: Callable[[str, str], bool] | None = None
    evict: Callable[[str, str], Awaitable[None]] | None = None
    report: Callable[[str, str], None] = lambda _node, _image: None
    failed: dict[str, str] = attrs.field(factory=dict, init=False)
    """Image → why it could not be had."""
    pulled: int = attrs.field(default=0, init=False)
    """Images that were fetched."""
    _used: Counter[str] = attrs.field(factory=Counter, init=False)
    _refused: dict[str, int] = attrs.field(factory=dict, init=False)
    """Image → the last of its batches in which it could not be had."""
    _resume_at: float = attrs.field(default=-math.inf, init=False)
    _news: defaultdict[str, anyio.Event] = attrs.field(factory=lambda: defaultdict(anyio.Event), init=False)

    async def run(self, *, waves: int | None = None) -> None:
        """
        Fetch everything, and return when that is done.

        What cannot be had is in :attr:`failed`, and the rest is fetched all the same.

        Args:
            waves: Only so many waves of each node; all of them if not given, as they are told to be :meth:`used`. With
                several batches the first wave is what fits before anything has to make room.

        """
        async with anyio.create_task_group() as group:
            for node, turns in _turns(self.plan).items():
                queue = deque(turn for turn in turns if waves is None or turn.wave < waves)
                for _ in range(min(self.lanes, len(queue))):
                    group.start_soon(self._work, node, queue)

    def used(self, image: str) -> None:
        """
        Note that nobody needs an image any more in a batch, so that something else may take its room.

        With several batches it is said once for each that has the image, whatever became of its episodes.
        """
        self._used[image] += 1
        self._tell(image)

    def _tell(self, image: str) -> None:
        if (news := self._news.pop(image, None)) is not None:
            news.set()

    async def _work(self, node: str, queue: deque[_Turn]) -> None:
        async with self.puller.lane(node) as lane:
            while queue:
                turn = queue[0]
                await self._room(turn)
                if queue and queue[0] is turn:
                    queue.popleft()
                    await self._take(node, turn, lane)

    async def _room(self, turn: _Turn) -> None:
        """Wait until what makes room for an image has been used, in as many batches as it was needed for before."""
        for image, times in turn.after:
            while max(self._used[image], self._refused.get(image, 0)) < times:
                await self._news[image].wait()

    async def _take(self, node: str, turn: _Turn, lane: Lane) -> None:
        if self.evict is not None:
            for image, _ in turn.after:
                await self.evict(node, image)
        there = turn.kept if self.have is None else self.have(node, turn.image)
        if not there or turn.image in self.failed:
            await self._pull(lane, turn.image)
        if turn.image not in self.failed:
            self.report(node, turn.image)
        else:
            self._refused[turn.image] = turn.time
            self._tell(turn.image)

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
                elif attempt + 1 < self.attempts:
                    await anyio.sleep(pause)
            else:
                self.pulled += 1
                self.failed.pop(image, None)
                return
        self.failed[image] = why

    def __repr__(self) -> str:
        wanted = sum(not turn.kept for turns in _turns(self.plan).values() for turn in turns)
        return f"<Hydration [{self.pulled} of {wanted} images fetched, {len(self.failed)} failed]>"


@attrs.frozen
class _Turn:
    """An image that a node has to have, after those before it."""

    image: str
    time: int
    """For which of the batches that have it: the first, the second, …"""
    wave: int
    after: tuple[tuple[str, int], ...] = ()
    """Images that make room, and in how many batches they have been used by then."""
    kept: bool = False
    """Whether it is there from a batch before."""


def _turns(plan: Plan) -> dict[str, list[_Turn]]:
    """Return what each node has to have, in order."""
    if not plan.ahead:
        return {node.node: list(_by_waves(node)) for node in plan.nodes}
    turns: dict[str, list[_Turn]] = {node.node: [] for node in plan.nodes}
    times: Counter[str] = Counter()
    used: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for batch in plan.batches:
        times.update(batch.placement.keys())
        for node in batch.nodes:
            pulled = {step.pull for step in node.steps}
            todo = deque(node.steps)
            mine = turns[node.node]
            for image in node.images:
                gone = []
                while image in pulled and (step := todo.popleft()).evict is not None:
                    gone.append((step.evict, used[node.node][step.evict]))
                wave = (mine[-1].wave if mine else 0) + bool(gone)
                mine.append(_Turn(image, times[image], wave, tuple(gone), image not in pulled))
                used[node.node][image] = times[image]
    return turns


def _by_waves(node: NodePlan) -> Iterator[_Turn]:
    for number, wave in enumerate(node.waves):
        # The disk holds two waves.
        gone = tuple((image, 1) for image in node.waves[number - 2].images) if number > 1 else ()
        for at, image in enumerate(wave.images):
            yield _Turn(image, 1, number, gone if at == 0 else ())
