# SPDX-License-Identifier: Apache-2.0
"""
What one decision of the pool costs, by how many images and waiters there are: it must not depend on either.

``python benchmarks/book_scale.py`` plays batches through the books without any backend: everything is announced, asked
for, made, leased, released and turned into the next image. Prints microseconds of processor time an event as JSON. Exit
code 1 if the largest pool costs more than ``--most`` times as much an event as the smallest.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque
from typing import Any

from agentsandbox.errors import ProvisionError
from agentsandbox.warmpool.book import PoolBook
from agentsandbox.warmpool.decisions import Create, Decision, Destroy, Grant, Recycle, Waiter
from agentsandbox.warmpool.outlook import Announcement
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.replenisher import Replenisher

SHAPES = ((100, 400), (1_000, 4_000), (5_000, 20_000), (25_000, 100_000))
"""Images and rollouts."""


class Play:
    """A batch from beginning to end, event by event."""

    def __init__(self, images: int, rollouts: int, *, cap: int, recycles: bool) -> None:
        self.images = [f"registry.example/task-{number}" for number in range(images)]
        self.rollouts = rollouts
        replenisher = Replenisher(targets={}, cap=cap, creates_in_flight=64, limiter=AdaptiveLimiter(rate=1000.0))
        self.book = PoolBook(images={}, replenisher=replenisher)
        self.book.recycles = lambda _name: recycles
        self.events = 0
        self.now = 0.0
        self._todo: deque[Decision] = deque()

    def act(self, decisions: list[Decision]) -> None:
        """Take in what an event brought about."""
        self.events += 1
        self._todo.extend(decisions)

    def run(self) -> dict[str, Any]:
        """Play it and return figures."""
        per_image = -(-self.rollouts // len(self.images))
        began = time.process_time()
        bad = self.images[0]
        self.act(self.book.announce(Announcement({bad: 1}), self.now))
        for _ in range(3):  # one image that fails for a while, so that the breaker is in play
            self.book.replenisher.failed(bad, ProvisionError("not now"), self.now)
        self.act(self.book.announce(Announcement(dict.fromkeys(self.images, per_image)), self.now))
        announced = time.process_time()
        for image in self.images:
            for _ in range(per_image):
                self.act(self.book.request(Waiter(image, self.now), self.now))
        asked = time.process_time()
        while self._todo or self.book.wake_at < math.inf:
            if self._todo:
                self.perform(self._todo.popleft())
            else:
                self.now = max(self.now, self.book.wake_at)
                self.act(self.book.wake(self.now))
        ended = time.process_time()
        return {
            "images": len(self.images),
            "rollouts": per_image * len(self.images),
            "events": self.events,
            "announce_us_an_image": round(1e6 * (announced - began) / len(self.images), 1),
            "request_us": round(1e6 * (asked - announced) / (per_image * len(self.images)), 1),
            "event_us": round(1e6 * (ended - asked) / max(1, self.events), 1),
            "seconds": round(ended - began, 2),
            "sandboxes_made": self.book.created_total,
            "left": repr(self.book),
        }

    def perform(self, decision: Decision) -> None:
        """Let it succeed, a thousandth of a second later."""
        self.now += 0.001
        if isinstance(decision, Create):
            self.act(self.book.created(decision.name, self.now))
        elif isinstance(decision, Grant):
            self.act(self.book.release(decision, self.now))
        elif isinstance(decision, Recycle):
            if decision.image is None:
                self.act(self.book.decide(decision.name, self.now))
            else:
                self.act(self.book.recycled(decision.name, self.now))
        elif isinstance(decision, Destroy):
            self.act(self.book.deleted(decision.name, self.now))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=int, default=256, help="most sandboxes alive")
    parser.add_argument("--most", type=float, default=3.0, help="how much more an event may cost in the largest pool")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    for name, recycles in (("recycling", True), ("replacing", False)):
        report[name] = [Play(*shape, cap=options.cap, recycles=recycles).run() for shape in SHAPES]
    ratios = {name: round(rows[-1]["event_us"] / rows[0]["event_us"], 2) for name, rows in report.items()}
    print(json.dumps({**report, "largest_to_smallest": ratios}, indent=2))
    sys.exit(max(ratios.values()) > options.most)


if __name__ == "__main__":
    main()
