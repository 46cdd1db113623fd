# SPDX-License-Identifier: Apache-2.0
"""Which rung of the reset ladder comes next."""

from __future__ import annotations

from collections.abc import Collection

from agentsandbox.models.reset import RUNGS, ResetPolicy

__all__ = ["IMPLEMENTED", "next_rung"]

IMPLEMENTED = frozenset({"replace"})
"""Rungs that can be applied. Every backend can replace a sandbox, so that one is always offered."""


def next_rung(policy: ResetPolicy, offered: Collection[str], failed: Collection[str] = ()) -> tuple[str | None, str]:
    """
    Choose the cheapest rung that is left.

    Args:
        policy: Which rungs may be used.
        offered: Which rungs the sandbox offers, besides ``replace``.
        failed: Which were tried in vain.

    Returns:
        The rung, or ``None`` if none is left, and why it is no cheaper one.

    """
    passed: list[str] = []
    for rung in RUNGS:
        if rung not in policy.rungs:
            passed.append(f"{rung} is not allowed")
        elif rung in failed:
            passed.append(f"{rung} failed")
        elif rung not in IMPLEMENTED or (rung != "replace" and rung not in offered):
            passed.append(f"{rung} is not offered")
        else:
            return rung, "; ".join(passed)
    return None, "; ".join(passed)
