# SPDX-License-Identifier: Apache-2.0
"""The API server and the scheduler, as far as they make others wait or refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentsandbox.errors import Throttled

if TYPE_CHECKING:
    from agentsandbox.backends.simulated.model import ClusterModel
    from agentsandbox.backends.simulated.node import Node

__all__ = ["ApiServer", "Scheduler", "choose"]

_LEAST, _MOST = 23e6, 1000e6
"""Image sizes between which the scheduler's plugin ImageLocality gives 0 to 100 points (its constants)."""


class ApiServer:
    """
    Takes writes at a rate. What has to wait too long is refused.

    Args:
        model: What it is like.

    """

    def __init__(self, model: ClusterModel) -> None:
        self._model = model
        self._free_at = 0.0
        self.writes = 0
        """Writes taken, ever, those of the cluster's own components included."""
        self.refused = 0
        """Writes refused with 429, ever."""
        self._by_second: Counter[int] = Counter()

    @property
    def peak(self) -> int:
        """The most writes in one second."""
        return max(self._by_second.values(), default=0)

    def write(self, now: float, count: int) -> float:
        """
        Ask for something that leads to a number of writes; ours is the first of them.

        Returns:
            When it is answered.

        Raises:
            Throttled: If too many wait already.

        """
        begins = max(now, self._free_at)
        if begins - now > self._model.api_patience:
            self.refused += 1
            raise Throttled("too many requests", retry_after=self._model.retry_after)
        self.count(begins, count)
        return begins + self._model.api_latency

    def count(self, now: float, count: int) -> None:
        """Let the cluster itself write something: it waits like everybody else, and is never refused."""
        begins = max(now, self._free_at)
        self._free_at = begins + count / self._model.api_writes
        self.writes += count
        # Writes that wait are made later: what is counted is when they are taken.
        second, left = int(begins), count
        while left > 0:
            taken = min(left, max(1, int((second + 1 - begins) * self._model.api_writes)))
            self._by_second[second] += taken
            left -= taken
            second, begins = second + 1, float(second + 1)

    def __repr__(self) -> str:
        return f"<ApiServer [{self.writes} writes, {self.peak} in the busiest second, {self.refused} refused]>"


class Scheduler:
    """
    Binds Pods one after another.

    Args:
        model: What it is like.

    """

    def __init__(self, model: ClusterModel) -> None:
        self._model = model
        self._free_at = 0.0

    def next_at(self, now: float) -> float:
        """Queue a Pod; return when it is its turn."""
        self._free_at = max(now, self._free_at) + 1 / self._model.scheduler_rate
        return self._free_at

    def __repr__(self) -> str:
        return f"<Scheduler [busy until {self._free_at:.3f} s]>"


def choose(nodes: Sequence[Node], image: str, size: int, now: float) -> Node | None:
    """
    Choose a node as the default scheduler does: the emptier the better, and better where the image is known to be.

    Args:
        nodes: All of them.
        image: What the Pod is made from.
        size: Bytes of it on disk.
        now: The present.

    Returns:
        The node, or ``None`` if none has room.

    """
    having = [node.tells_of(image, now) for node in nodes]
    share = sum(having) / len(nodes)
    points = 100 * min(1.0, max(0.0, (size * share - _LEAST) / (_MOST - _LEAST)))
    best, most = None, -1.0
    for node, has in zip(nodes, having, strict=True):
        if node.room > 0:
            score = 100 * node.room / (node.room + node.pods) + (points if has else 0.0)
            if score > most:
                best, most = node, score
    return best
