# SPDX-License-Identifier: Apache-2.0
"""What a pool looks like at one instant."""

from __future__ import annotations

import attrs

__all__ = ["PoolStatistics"]


@attrs.frozen(kw_only=True)
class PoolStatistics:
    """What a pool looks like at one instant."""

    backend: str
    """The backend's name."""
    leased: int = 0
    """Sandboxes that attempts hold."""
    ready: int = 0
    """Sandboxes waiting for an attempt."""
    creating: int = 0
    """Sandboxes being made."""
    resetting: int = 0
    """Sandboxes being made like new."""
    quarantined: int = 0
    """Sandboxes that could not be shown to be like new."""
    lost: int = 0
    """Sandboxes that are gone or broken while somebody still holds them."""
    deleting: int = 0
    """Sandboxes whose removal is not confirmed yet."""
    stuck: int = 0
    """Those of them that resisted every try."""
    waiting: int = 0
    """Calls of ``acquire()`` that wait."""
    announced: int = 0
    """Rollouts that were announced and have no sandbox yet."""
    hosts: int = 0
    """Hosts that the sandboxes are on: Pods; locally parent processes."""
    created_total: int = 0
    """Sandboxes that were made, ever."""
    failed_total: int = 0
    """Sandboxes that could not be made, ever."""
    deleted_total: int = 0
    """Sandboxes that are verified gone."""
    recycled_total: int = 0
    """Times that a sandbox became a fresh one in the same place, ever."""
    granted_total: int = 0
    """Leases that were granted, ever."""
    last_error: str | None = None
    """Why the last sandbox that could not be made could not."""

    @property
    def alive(self) -> int:
        """Everything that counts against ``max_sandboxes``."""
        held = self.leased + self.resetting + self.lost
        return held + self.ready + self.creating + self.quarantined + self.deleting

    def __str__(self) -> str:
        always = f"{self.leased} leased, {self.ready} ready, {self.creating} creating"
        rest = "".join(
            f", {count} {name}"
            for name, count in (
                ("resetting", self.resetting),
                ("quarantined", self.quarantined),
                ("lost", self.lost),
                ("deleting", self.deleting),
                ("stuck", self.stuck),
            )
            if count
        )
        announced = f", {self.announced} announced" if self.announced else ""
        return f"{self.backend} | {always}{rest} | {self.waiting} waiting{announced}"
