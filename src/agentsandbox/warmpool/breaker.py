# SPDX-License-Identifier: Apache-2.0
"""When to stop making sandboxes of an image that cannot be made."""

from __future__ import annotations

import copy
import math

import attrs

from agentsandbox.errors import ProvisionError, SandboxError

__all__ = ["Breaker"]


@attrs.define(eq=False, repr=False)
class Breaker:
    """
    Stop making sandboxes of an image that cannot be made.

    Args:
        threshold: Failures in a row that open it.
        cooldown: How long it stays open at first, in seconds; each further failure doubles that.
        cooldown_max: How long it stays open at most, in seconds.

    """

    threshold: int = 3
    cooldown: float = 30.0
    cooldown_max: float = 600.0
    failures: int = attrs.field(default=0, init=False)
    """Failures in a row."""
    error: BaseException | None = attrs.field(default=None, init=False)
    """The last one."""
    until: float = attrs.field(default=-math.inf, init=False)
    """Until when it is open; infinite for good."""
    half_open: bool = attrs.field(default=False, init=False)
    """Whether one sandbox is tried to see if the cause has passed."""

    def succeeded(self) -> None:
        """Note that a sandbox was made."""
        self.failures, self.error, self.until, self.half_open = 0, None, -math.inf, False

    def failed(self, error: BaseException, now: float) -> None:
        """Note that a sandbox could not be made, and why."""
        self.failures += 1
        self.error = error
        if isinstance(error, SandboxError) and not error.retryable:
            self.until = math.inf
        elif self.failures >= self.threshold and self.until != math.inf:
            pause = self.cooldown * 2.0 ** min(self.failures - self.threshold, 30)
            self.until = max(self.until, now + min(self.cooldown_max, pause))
        self.half_open = False

    def reopen(self, now: float) -> bool:
        """Allow one attempt if the time has come; whether that changed anything."""
        if not self.open or now < self.until:
            return False
        self.half_open = True
        return True

    @property
    def tripped(self) -> bool:
        """Whether it stopped the image and no sandbox was made since."""
        return self.until != -math.inf

    @property
    def open(self) -> bool:
        """Whether nothing may be made."""
        return self.tripped and not self.half_open

    def explain(self, image: str, now: float) -> BaseException:
        """Copy the last error for a waiter: tracebacks must not grow into each other."""
        last = self.error
        try:
            error = copy.copy(last)
        except TypeError:
            error = None
        if not isinstance(error, BaseException) or error is last:
            error = ProvisionError(f"{type(last).__name__}: {last}")
        when = "it will not be tried again" if self.until == math.inf else f"next try in {self.until - now:.0f} s"
        times = "once" if self.failures == 1 else f"{self.failures} times in a row"
        error.add_note(f"a sandbox of image {image!r} could not be made {times}; {when}")
        error.__cause__ = last
        return error

    def __repr__(self) -> str:
        state = "half open" if self.half_open else "open" if self.open else "closed"
        return f"<Breaker [{state}, {self.failures} failures in a row]>"
