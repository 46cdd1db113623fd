# SPDX-License-Identifier: Apache-2.0
"""How often, and after which errors, a lost stream is opened again."""

from __future__ import annotations

import anyio
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from agentsandbox.errors import InfrastructureError, ProtocolError, SandboxLost

__all__ = ["REATTACH_ATTEMPTS", "STREAM_ERRORS", "attempts", "pause"]

REATTACH_ATTEMPTS = 6
"""How often a lost stream is opened again before the sandbox counts as lost."""

REATTACH_TIME = 60.0
"""Seconds after which no further attempt is begun."""

REATTACH_WAIT = 5.0
"""The longest pause between two of them, in seconds; they begin at a tenth of a second and double."""

STREAM_ERRORS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
"""What a stream raises when it ends."""


def attempts() -> AsyncRetrying:
    """Return the attempts for one loss. They keep their own state, so that each loss needs new ones."""
    return AsyncRetrying(
        stop=stop_after_attempt(REATTACH_ATTEMPTS) | stop_after_delay(REATTACH_TIME),
        wait=wait_random_exponential(multiplier=0.1, max=REATTACH_WAIT),
        retry=retry_if_exception(_passing),
        sleep=anyio.sleep,
        reraise=True,
    )


async def pause(fruitless: int) -> None:
    """Wait after so many streams in a row that could be attached and then carried nothing."""
    if fruitless:
        await anyio.sleep(min(0.1 * 2**fruitless, REATTACH_WAIT))


def _passing(error: BaseException) -> bool:
    """Whether to open the stream once more: yes, unless somebody has seen that the sandbox is gone."""
    if isinstance(error, InfrastructureError):
        return error.retryable and not isinstance(error, (SandboxLost, ProtocolError))
    return isinstance(error, STREAM_ERRORS)
