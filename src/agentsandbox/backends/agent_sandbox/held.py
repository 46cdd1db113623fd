# SPDX-License-Identifier: Apache-2.0
"""What is known of one claim of ours."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from agentsandbox.backends.agent_sandbox.given import Given, Offer
    from agentsandbox.backends.agent_sandbox.objects import Launch

__all__ = ["Held"]


@attrs.define(eq=False, kw_only=True)
class Held:
    """A claim, and what it has brought."""

    claim: str
    """The name of the claim."""
    uid: str = ""
    """Its UID; empty before the API server has answered."""
    nonce: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """By which we know it if the answer is lost."""
    sandbox: str = ""
    """The name of its Sandbox."""
    sandbox_uid: str = ""
    """The Sandbox's UID."""
    launch: Launch | None = None
    """How the Sandbox was started."""
    pod_uid: str = ""
    """The UID of the Pod that it had first; another one is another sandbox."""
    given: Given | None = None
    """Whose template it is made from, if it is not ours."""
    offer: Offer | None = None
    """What its Pod has then."""
