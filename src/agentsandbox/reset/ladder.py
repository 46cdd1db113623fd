# SPDX-License-Identifier: Apache-2.0
"""Which rung of the reset ladder comes next."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from agentsandbox.models.reset import RUNGS, ResetPolicy

__all__ = ["Ladder", "next_rung"]

FIRST_REST, LONGEST_REST = 1.0, 300.0
"""How long a rung is left alone after it failed for several sandboxes in a row, in seconds; doubled each time."""

PATIENCE = 3
"""How many failures in a row are taken for chance: an episode may have done what cannot be restored."""

WEIGHT = 0.2
"""Weight of the latest measurement in the mean cost of a rung."""


def next_rung(
    policy: ResetPolicy,
    offered: Collection[str],
    failed: Collection[str] = (),
    *,
    resting: Collection[str] = (),
    costs: Mapping[str, float] | None = None,
    reuses: int = 0,
) -> tuple[str | None, str]:
    """
    Choose the cheapest rung that is left.

    Args:
        policy: Which rungs may be used.
        offered: Which rungs the sandbox offers, besides ``replace``.
        failed: Which were tried in vain.
        resting: Which are left alone for a while.
        costs: What rungs took, in seconds, as far as that was measured. The others keep their place.
        reuses: How often the sandbox was used again already.

    Returns:
        The rung, or ``None`` if none is left, and why it is no cheaper one.

    """
    passed: list[str] = []
    worn = policy.max_reuses is not None and reuses >= policy.max_reuses
    for rung in _by_cost(costs or {}):
        if rung not in policy.rungs:
            passed.append(f"{rung} is not allowed")
        elif rung in failed:
            passed.append(f"{rung} failed")
        elif rung != "replace" and rung not in offered:
            passed.append(f"{rung} is not offered")
        elif rung in resting:
            passed.append(f"{rung} failed too often")
        elif worn and rung in ("files", "restart"):
            passed.append(f"{rung} was used {reuses} times")
        else:
            return rung, "; ".join(passed)
    return None, "; ".join(passed)


def _by_cost(costs: Mapping[str, float]) -> list[str]:
    """Sort the rungs whose cost is known among their own places, so that an unknown one is tried where it stands."""
    known = iter(sorted((rung for rung in RUNGS if rung in costs), key=lambda rung: costs[rung]))
    return [next(known) if rung in costs else rung for rung in RUNGS]


@attrs.define(eq=False, repr=False)
class Ladder:
    """
    What was learnt about the rungs for the sandboxes of one image.

    Args:
        policy: Which rungs may be used.

    """

    policy: ResetPolicy
    """Which rungs may be used."""
    costs: dict[str, float] = attrs.field(factory=dict)
    """Mean seconds that each rung took."""
    _failures: dict[str, int] = attrs.field(factory=dict)
    _rests_until: dict[str, float] = attrs.field(factory=dict)

    def next(
        self, now: float, offered: Collection[str], failed: Collection[str] = (), *, reuses: int = 0
    ) -> tuple[str | None, str]:
        """Choose a rung: see :func:`next_rung`."""
        resting = {rung for rung, until in self._rests_until.items() if now < until}
        return next_rung(self.policy, offered, failed, resting=resting, costs=self.costs, reuses=reuses)

    def succeeded(self, rung: str, seconds: float) -> None:
        """Note that a rung was applied and verified, and how long it took."""
        self._failures.pop(rung, None)
        self._rests_until.pop(rung, None)
        before = self.costs.get(rung, seconds)
        self.costs[rung] = before + WEIGHT * (seconds - before)

    def failed(self, rung: str, now: float) -> None:
        """Note that a rung was applied in vain."""
        failures = self._failures[rung] = self._failures.get(rung, 0) + 1
        if failures >= PATIENCE:
            self._rests_until[rung] = now + min(LONGEST_REST, FIRST_REST * 2.0 ** min(failures - PATIENCE, 20))

    def __repr__(self) -> str:
        costs = ", ".join(f"{rung} {seconds:.3f} s" for rung, seconds in self.costs.items())
        resting = ", ".join(self._rests_until)
        return f"<Ladder [{costs or 'nothing measured'} | {resting or 'none'} resting]>"
