# SPDX-License-Identifier: Apache-2.0
"""Telling a cancellation that is meant for us from any other, and what to say of it."""

from __future__ import annotations

import math

import anyio

from agentsandbox.errors import Blame, Failure, FailureKind, Phase

__all__ = ["cancelled_failure", "really_cancelled"]


def really_cancelled() -> bool:
    """
    Say whether somebody has cancelled us, as against a stray cancellation that came out of a function we called.

    asyncio code can let a ``CancelledError`` of something else escape; only a cancelled scope stops a batch.
    """
    return anyio.current_effective_deadline() == -math.inf


def cancelled_failure(phase: Phase) -> Failure:
    """Return the verdict on what was stopped together with its batch."""
    return Failure(
        kind=FailureKind.CANCELLED,
        phase=phase,
        blame=Blame.CALLER,
        retryable=True,
        message="the batch was cancelled",
    )
