# SPDX-License-Identifier: Apache-2.0
"""How often, and after which errors, a lost stream is opened again."""

from __future__ import annotations

import anyio
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from agentsandbox.errors import InfrastructureError, ProtocolError, SandboxLost
from agentsandbox.session.streams import STREAM_ERRORS

__all__ = ["REATTACH_ATTEMPTS", "Worth", "attempts", "pause"]

REATTACH_ATTEMPTS = 6
"""How often a lost stream is opened again before the sandbox counts as lost."""

REATTACH_TIME = 60.0
"""Seconds after which no further attempt is begun: an API server takes that long to come back."""

REATTACH_WAIT = 5.0
"""The longest pause between two of them, in seconds; they begin at a tenth of a second and double."""

LASTING = 10.0
"""Seconds after which a stream was worth having, even if nothing had to be said on it."""


def attempts(*, most: int | None = REATTACH_ATTEMPTS, longest: float = REATTACH_WAIT) -> AsyncRetrying:
    """
    Return the attempts for one loss. They keep their own state, so that each loss needs new ones.

    Args:
        most: How many; ``None`` is as many as there is time for.
        longest: The longest pause, in seconds.

    """
    late = stop_after_delay(REATTACH_TIME)
    return AsyncRetrying(
        stop=late if most is None else stop_after_attempt(most) | late,
        wait=wait_random_exponential(multiplier=0.1, max=longest),
        retry=retry_if_exception(_passing),
        sleep=anyio.sleep,
        reraise=True,
    )


async def pause(fruitless: int, longest: float = REATTACH_WAIT) -> None:
    """Wait after so many streams in a row that could be attached and then carried nothing."""
    if fruitless:
        await anyio.sleep(min(0.1 * 2**fruitless, longest))


class Worth:
    """Whether streams are worth opening: some can be attached again and again, and carry nothing."""

    def __init__(self) -> None:
        self._carried = (-1, -1)
        self._since = 0.0
        self.fruitless = 0
        """Streams in a row that could be attached and then carried nothing."""

    def __repr__(self) -> str:
        return f"<Worth [{self.fruitless} fruitless streams in a row]>"

    def attached(self, carried: tuple[int, int], now: float) -> None:
        """Note that a stream is attached when so many frames have got through, there and back."""
        lasted = now - self._since >= LASTING
        self.fruitless = self.fruitless + 1 if carried == self._carried and not lasted else 0
        self._carried, self._since = carried, now


def _passing(error: BaseException) -> bool:
    """Whether to open the stream once more: yes, unless somebody has seen that the sandbox is gone."""
    if isinstance(error, InfrastructureError):
        return error.retryable and not isinstance(error, (SandboxLost, ProtocolError))
    return isinstance(error, STREAM_ERRORS)
