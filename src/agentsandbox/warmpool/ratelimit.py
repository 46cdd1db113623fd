# SPDX-License-Identifier: Apache-2.0
"""How fast to ask a control plane: a token bucket, and a limiter that slows down when it is told to."""

from __future__ import annotations

import math
from random import Random

from agentsandbox.errors import ConfigurationError

__all__ = ["AdaptiveLimiter", "TokenBucket"]


class TokenBucket:
    """
    Allow ``rate`` calls a second on average, and ``burst`` of them at once.

    What a full bucket gives at once is an advance: it fills again only after the time that it would have taken to give
    as many one by one. So after a quiet time, with one second's worth as ``burst``, no more than ``rate`` are allowed
    in the first second either.

    Args:
        rate: Tokens a second.
        burst: Most tokens that can be saved up; it starts with as many.
        now: The present, in seconds on whatever clock the other calls use.

    Raises:
        ConfigurationError: If the rate is not above 0 or the burst is below 1.

    """

    def __init__(self, rate: float, burst: float, *, now: float = 0.0) -> None:
        if not rate > 0:
            raise ConfigurationError(f"a rate must be above 0 a second, not {rate!r}; None means no limit")
        if not burst >= 1:
            raise ConfigurationError(f"a burst must be at least 1, not {burst!r}")
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Take a token if there is one; whether there was."""
        self._fill(now)
        # Waiting exactly until next_at() must suffice in floating-point arithmetic too, also after months of uptime.
        if self._tokens < 1 - 1e-5:
            return False
        if self._tokens >= self.burst:
            self._at = now + (self.burst - 1) / self.rate
        self._tokens = max(0.0, self._tokens - 1)
        return True

    def next_at(self, now: float) -> float:
        """When the next token is there; ``now`` if one is."""
        self._fill(now)
        return now if self._tokens >= 1 else max(now, self._at) + (1 - self._tokens) / self.rate

    def set_rate(self, rate: float, now: float) -> None:
        """Change the rate from now on."""
        self._fill(now)
        if self._at > now:  # what was advanced is paid back at the new rate
            self._at = now + (self._at - now) * self.rate / rate
        self.rate = rate

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
            self._at = now

    def __repr__(self) -> str:
        return f"<TokenBucket [{self.rate:g}/s, {self._tokens:.3f} of {self.burst:g}]>"


class AdaptiveLimiter:
    """
    Speed up step by step while calls succeed, halve when the other side asks to slow down (AIMD).

    Args:
        rate: Most calls a second; ``None`` for no limit of our own, so that only pauses count.
        burst: Most calls at once; ``None`` for one second's worth.
        floor: Fewest calls a second that it slows down to.
        increase: By how much a success raises the rate, in calls a second; ``None`` for a twentieth of ``rate``.
        decrease: By what a refusal multiplies it.
        backoff: First pause after a refusal that names no time, in seconds; it doubles with each refusal in a row.
        backoff_max: Longest such pause.
        random: Source of jitter: drivers that were refused together must not come back together.
        now: The present.

    """

    def __init__(
        self,
        *,
        rate: float | None = None,
        burst: float | None = None,
        floor: float = 0.1,
        increase: float | None = None,
        decrease: float = 0.5,
        backoff: float = 1.0,
        backoff_max: float = 60.0,
        random: Random | None = None,
        now: float = 0.0,
    ) -> None:
        self._bucket = None if rate is None else TokenBucket(rate, max(1.0, rate) if burst is None else burst, now=now)
        self._ceiling = math.inf if rate is None else rate
        self._floor = min(floor, self._ceiling)
        self._increase = increase if increase is not None else (0.0 if rate is None else rate / 20)
        self._decrease = decrease
        self._backoff = backoff
        self._backoff_max = backoff_max
        self._random = random or Random()  # noqa: S311 - jitter, not a secret
        self._refusals = 0
        self._paused_until = -math.inf

    @property
    def rate(self) -> float:
        """Calls a second at present; infinite without a limit."""
        return math.inf if self._bucket is None else self._bucket.rate

    def take(self, now: float) -> bool:
        """Whether a call may be made now; if so, it is counted."""
        return now >= self._paused_until and (self._bucket is None or self._bucket.take(now))

    def next_at(self, now: float) -> float:
        """When the next call may be made."""
        start = max(now, self._paused_until)
        return start if self._bucket is None else max(start, self._bucket.next_at(now))

    def succeeded(self, now: float) -> None:
        """Note that a call went through."""
        self._refusals = 0
        if self._bucket is not None and self._bucket.rate < self._ceiling:
            self._bucket.set_rate(min(self._ceiling, self._bucket.rate + self._increase), now)

    def refused(self, now: float, retry_after: float | None = None) -> None:
        """
        Note that the other side refused or failed a call.

        Refusals of calls that were under way together count as one; each can lengthen the pause.

        Args:
            now: The present.
            retry_after: For how many seconds it asked to be left alone: honoured as a minimum.

        """
        if now >= self._paused_until:
            self._refusals += 1
            if self._bucket is not None:
                self._bucket.set_rate(max(self._floor, self._bucket.rate * self._decrease), now)
        pause = min(self._backoff_max, self._backoff * 2.0 ** min(max(self._refusals - 1, 0), 30))
        jitter = self._random.random() * pause
        # Without a time of its own the pause is between half and once and a half of the backoff.
        least = retry_after if retry_after is not None else pause / 2
        self._paused_until = max(self._paused_until, now + least + jitter)

    def __repr__(self) -> str:
        rate = "no limit" if self._bucket is None else f"{self._bucket.rate:g}/s of {self._ceiling:g}/s"
        return f"<AdaptiveLimiter [{rate}, {self._refusals} refusals in a row]>"
