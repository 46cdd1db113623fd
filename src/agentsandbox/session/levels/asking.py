# SPDX-License-Identifier: Apache-2.0
"""One request to the shell in a sandbox, and its answer."""

from __future__ import annotations

import os
import secrets

import anyio
import attrs

__all__ = ["Ask", "Reply"]


@attrs.frozen(kw_only=True)
class Reply:
    """The answer to a request."""

    data: bytes
    """What the code wrote."""
    result: str
    """Its line of result."""


class Ask:
    """A request that waits for its answer."""

    __slots__ = ("code", "data", "done", "interrupted", "marker", "reply", "sent")

    def __init__(self, key: str, code: str, data: bytes) -> None:
        word = f"{key}.{secrets.token_hex(8)}"
        self.code = os.fsencode(f"{word}\n{code}\n{word}\n")
        self.data = data
        self.marker = f"\n{word} ".encode()
        self.done = anyio.Event()
        self.reply: Reply | None = None
        """``None`` when done if the connection was lost."""
        self.sent = False
        self.interrupted = False
        """Whether the connection was lost over it: the shell was at it, or would have been next."""
