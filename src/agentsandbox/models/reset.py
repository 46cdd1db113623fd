# SPDX-License-Identifier: Apache-2.0
"""What a reset may do, and what it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.command import ProcessInfo
from agentsandbox.models.limits import check_count, check_number

__all__ = ["RUNGS", "ResetPolicy", "ResetReport"]

RUNGS = ("jail", "files", "restart", "replace")
"""Every rung of the ladder, cheapest first."""

ON_CHANGE = ("restore", "replace")

COPIES_LIMIT = 256 * 1024**2
"""How many bytes of files a sandbox keeps copies of when nothing is said: a large repository and its environment."""


def _words(value: Iterable[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ConfigurationError(f"a reset policy takes collections of strings, not one string; use [{value!r}]")
    return tuple(value)


def _check_paths(_: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for path in value:
        if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
            raise ConfigurationError(f"{attribute.name} has absolute paths such as '/opt/env', not {path!r}")


def _check_seconds(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    check_number(attribute.name, value)


@attrs.frozen(kw_only=True)
class ResetPolicy:
    """Which rungs a reset may use, what they restore, and how long a sandbox may be used again."""

    rungs: tuple[str, ...] = attrs.field(default=RUNGS, converter=_words)
    """Rungs that may be used; those that a sandbox does not offer are passed over."""
    scope: tuple[str, ...] = attrs.field(default=(), converter=_words, validator=_check_paths)
    """
    Directories that ``files`` restores beside the working directory, the home, ``/tmp``, ``/var/tmp``, ``/dev/shm``,
    ``/dev/mqueue`` and ``/run``: environments that episodes install into, for instance. A change anywhere else is found
    and makes the rung fail.
    """
    exclude: tuple[str, ...] = attrs.field(default=(), converter=_words, validator=_check_paths)
    """Directories outside of the scope that ``files`` does not look at: volumes that others write to."""
    max_reuses: int | None = attrs.field(default=None)
    """How often one sandbox may be used again; ``None`` for any number."""
    budget_seconds: float = attrs.field(default=30.0, validator=_check_seconds)
    """Seconds that the rungs before ``replace`` may take together."""
    on_change: str = "restore"
    """What to do when files of the scope changed: ``"restore"`` them, or ``"replace"``: go on to the next rung."""
    copies_limit: int = COPIES_LIMIT
    """How many bytes of files are kept for being restored; what is beyond it is compared, and makes the rung fail."""

    @rungs.validator
    def _rungs(self, _: object, value: tuple[str, ...]) -> None:
        if unknown := [rung for rung in value if rung not in RUNGS]:
            raise ConfigurationError(f"unknown reset rung {unknown[0]!r}; there are {', '.join(RUNGS)}")
        if not value:
            raise ConfigurationError(f"a reset policy needs at least one rung of {', '.join(RUNGS)}")

    def __attrs_post_init__(self) -> None:
        if self.on_change not in ON_CHANGE:
            raise ConfigurationError(f"on_change is one of {', '.join(ON_CHANGE)}, not {self.on_change!r}")
        if self.max_reuses is not None:
            check_count("max_reuses", self.max_reuses, least=0)
        check_count("copies_limit", self.copies_limit, least=0)


@attrs.frozen(kw_only=True)
class ResetReport:
    """What a reset did."""

    rung: str
    """The rung that was applied."""
    seconds: float
    """How long it took, in seconds."""
    changed: tuple[str, ...] = ()
    """Paths that had changed and were restored; at most 100 of them."""
    killed: tuple[ProcessInfo, ...] = ()
    """Processes that were left and were killed."""
    verified: bool
    """Whether its effect was shown."""
    reason: str = ""
    """Why this rung and no cheaper one; if it was not verified, why not."""
    secrets: tuple[str, ...] = ()
    """Files with credentials that had been placed, and are gone."""
    figures: Mapping[str, float] = attrs.field(factory=dict)
    """What it looked at: files, hashed files, seconds for the scope and for the rest."""
