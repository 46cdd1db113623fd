# SPDX-License-Identifier: Apache-2.0
"""What a reset may do, and what it did."""

from __future__ import annotations

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.command import ProcessInfo

__all__ = ["RUNGS", "ResetPolicy", "ResetReport"]

RUNGS = ("jail", "files", "restart", "replace")
"""Every rung of the ladder, cheapest first."""


@attrs.frozen(kw_only=True)
class ResetPolicy:
    """Which rungs a reset may use."""

    rungs: tuple[str, ...] = attrs.field(default=RUNGS, converter=tuple)
    """Rungs that may be used; those that a sandbox does not offer are passed over."""

    @rungs.validator
    def _rungs(self, _: object, value: tuple[str, ...]) -> None:
        if unknown := [rung for rung in value if rung not in RUNGS]:
            raise ConfigurationError(f"unknown reset rung {unknown[0]!r}; there are {', '.join(RUNGS)}")
        if not value:
            raise ConfigurationError(f"a reset policy needs at least one rung of {', '.join(RUNGS)}")


@attrs.frozen(kw_only=True)
class ResetReport:
    """What a reset did."""

    rung: str
    """The rung that was applied."""
    seconds: float
    """How long it took, in seconds."""
    changed: tuple[str, ...] = ()
    """Paths that had changed and were restored."""
    killed: tuple[ProcessInfo, ...] = ()
    """Processes that were left and were killed."""
    verified: bool
    """Whether its effect was shown."""
    reason: str = ""
    """Why this rung and no cheaper one."""
