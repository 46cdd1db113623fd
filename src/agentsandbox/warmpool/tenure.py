# SPDX-License-Identifier: Apache-2.0
"""What the holder of a sandbox has in hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from agentsandbox.models.timing import StartKind

if TYPE_CHECKING:
    from agentsandbox.backends.base import BackendSandbox
    from agentsandbox.errors import SandboxLost
    from agentsandbox.warmpool.book import Grant

__all__ = ["Tenure"]


@attrs.define(eq=False)
class Tenure:
    """What the holder of a sandbox has in hand."""

    image: str
    """The image that was asked for."""
    sandbox: BackendSandbox = attrs.field(repr=lambda sandbox: repr(sandbox.name))
    """The sandbox."""
    grant: Grant = attrs.field(repr=False)
    """The claim to it."""
    requested_at: float
    """When it was asked for, in seconds on the driver's monotonic clock."""
    granted_at: float
    """When it was granted."""
    lost: SandboxLost | None = None
    """Why it is not to be used any more."""

    @property
    def start(self) -> StartKind:
        """How it was come by: warm or reused if it was ready before it was asked for."""
        if self.grant.ready_at > self.requested_at:
            return StartKind.COLD
        return StartKind.REUSED if self.grant.reused else StartKind.WARM
