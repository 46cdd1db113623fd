# SPDX-License-Identifier: Apache-2.0
"""How what a session talks through ends, and how it is closed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

__all__ = ["STREAM_ERRORS", "close", "closing"]

STREAM_ERRORS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
"""What a stream raises when it ends."""

CLOSE = 5.0
"""Seconds that closing may take."""


class Closable(Protocol):
    """What can be closed."""

    async def aclose(self) -> None:
        """Close it."""
        ...


async def close(resource: Closable, within: float = CLOSE) -> None:
    """Close a stream, also when the caller is cancelled; leave it to itself after so many seconds."""
    with anyio.move_on_after(within, shield=True):
        await resource.aclose()


@asynccontextmanager
async def closing(pieces: AsyncIterable[bytes]) -> AsyncIterator[None]:
    """Close the caller's generator at the end, also when nobody takes the rest of it: event loops insist on that."""
    try:
        yield
    finally:
        if isinstance(pieces, AsyncGenerator):
            await close(pieces)
