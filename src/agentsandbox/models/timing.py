# SPDX-License-Identifier: Apache-2.0
"""Durations, all in seconds on the driver's monotonic clock."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs

__all__ = ["StartKind", "TTFCSample", "TTFCSummary", "Timings"]


class StartKind(StrEnum):
    """How an attempt came by its sandbox."""

    COLD = "cold"
    """It waited while the sandbox was made."""
    WARM = "warm"
    """A fresh sandbox was ready when it asked."""
    REUSED = "reused"
    """A used sandbox, reset and verified, was ready when it asked."""


@attrs.frozen(kw_only=True)
class TTFCSample:
    """The time from the call of ``acquire()`` to the start of the episode's first command."""

    seconds: float
    """Time to first command; for a censored sample the time that was waited in vain."""
    start: StartKind = StartKind.COLD
    """How the sandbox was come by."""
    censored: bool = False
    """Whether the first command never started, so that the true value is larger."""
    stages: Mapping[str, float] = attrs.field(factory=dict)
    """Its parts: ``queue`` until the lease was granted, and ``start`` from there until the first command ran."""
    episode: str | None = None
    """The episode, if there was one."""
    image: str = ""
    """The image that was asked for."""
    sandbox: str | None = None
    """The sandbox that was granted, if one was."""


@attrs.frozen(kw_only=True)
class TTFCSummary:
    """A set of samples in figures."""

    n: int = 0
    """Samples that are not censored: the figures are of these."""
    mean: float | None = None
    """Arithmetic mean."""
    p50: float | None = None
    """Median."""
    p95: float | None = None
    """95th percentile, linearly interpolated."""
    p99: float | None = None
    """99th percentile, linearly interpolated."""
    max: float | None = None
    """The largest."""
    censored: int = 0
    """How many attempts never came to a first command."""
    by_start: Mapping[str, TTFCSummary] = attrs.field(factory=dict)
    """The same for cold, warm and reused sandboxes apart."""
    by_stage: Mapping[str, TTFCSummary] = attrs.field(factory=dict)
    """The same for each stage."""


@attrs.frozen(kw_only=True)
class Timings:
    """Where the time of one attempt went."""

    queued: float | None = None
    """From the submission of the batch to the call of ``acquire()``."""
    acquire: float | None = None
    """From the call of ``acquire()`` to the grant of the lease."""
    first_command: float | None = None
    """From the call of ``acquire()`` to the start of the first command (TTFC)."""
    run: float | None = None
    """From the grant to the end of the rollout function."""
    release: float | None = None
    """From there until the sandbox was given back."""
    total: float | None = None
    """From the submission of the batch to the end of the attempt."""
    ready_at: float | None = None
    """When the sandbox was granted, counted from the submission of the batch."""
