# SPDX-License-Identifier: Apache-2.0
"""Which events tell of a reset, and a sink that counts them by rung."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.metrics.quantiles import quantile

if TYPE_CHECKING:
    from agentsandbox.models.events import Event

__all__ = ["Reset", "ResetTally", "reset_of"]

NO_RUNG = "none"
"""The rung of a sandbox that none could make like new."""


@attrs.frozen(kw_only=True)
class Reset:
    """One try to make a used sandbox like new."""

    rung: str
    """The rung that was applied; ``none`` if there was none that worked, so that the sandbox was removed."""
    outcome: str
    """``verified``, ``unverified`` (it was applied, and its effect could not be shown) or ``failed``."""
    seconds: float | None = None
    """How long it took, in seconds, where that is known."""
    changed: int = 0
    """How many paths had changed."""
    killed: int = 0
    """How many processes were left and were killed."""


def reset_of(event: Event) -> Reset | None:
    """Return the reset that an event tells of, if it is one; each reset is told of once."""
    data = event.data
    if event.name == "sandbox.reset":
        return Reset(
            rung=str(data.get("rung")),
            outcome="verified" if data.get("verified") else "unverified",
            seconds=data.get("seconds"),
            changed=int(data.get("changed", 0)),
            killed=int(data.get("killed", 0)),
        )
    if event.name == "sandbox.not_recycled":
        return Reset(rung=NO_RUNG, outcome="failed")
    # What was done to the sandbox that the lease already had was told of as the reset of that sandbox.
    if event.name == "lease.reset" and data.get("rung") in ("jail", "replace"):
        return Reset(rung=str(data["rung"]), outcome="verified", seconds=data.get("seconds"))
    return None


@attrs.define(eq=False, repr=False)
class ResetTally:
    """A sink that counts resets by rung and outcome, for a report. Hand it to a client or a pool as ``sink=``."""

    _seconds: dict[tuple[str, str], list[float]] = attrs.field(factory=dict, init=False)
    _counts: dict[tuple[str, str], int] = attrs.field(factory=dict, init=False)

    def __call__(self, event: Event) -> None:
        """Count *event* if it tells of a reset."""
        if (reset := reset_of(event)) is not None:
            key = reset.rung, reset.outcome
            self._counts[key] = self._counts.get(key, 0) + 1
            if reset.seconds is not None:
                self._seconds.setdefault(key, []).append(reset.seconds)

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """How many resets there were, by rung and outcome, in order of first appearance."""
        return dict(self._counts)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a rung and outcome, for JSON: ``count``, and ``p50``, ``p99`` and ``max`` in seconds."""
        rows = []
        for (rung, outcome), count in self._counts.items():
            seconds = self._seconds.get((rung, outcome), ())
            p50, p99 = (quantile(seconds, q) if seconds else None for q in (0.50, 0.99))
            figures = {"p50": p50, "p99": p99, "max": max(seconds, default=None)}
            rows.append({"rung": rung, "outcome": outcome, "count": count, **figures})
        return rows

    def __repr__(self) -> str:
        inner = ", ".join(f"{rung} {outcome}: {count}" for (rung, outcome), count in self._counts.items())
        return f"<ResetTally [{inner or 'no resets'}]>"
