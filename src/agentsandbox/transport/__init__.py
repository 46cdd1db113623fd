# SPDX-License-Identifier: Apache-2.0
"""
One duplex stream of bytes to a runner, whatever carries it.

A session needs three methods of it, and nothing else: see :class:`ByteStream`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ByteStream"]


class ByteStream(Protocol):
    """
    What a session needs of a transport.

    One task receives while another one sends; there are never two of a kind at a time. Both calls may be cancelled;
    bytes of a cancelled :meth:`send` may or may not have gone out, so that the stream is of no use afterwards.
    """

    async def receive(self) -> bytes:
        """
        Return the next bytes, at least one, as soon as there are any.

        Raises:
            anyio.EndOfStream: If the other side ended the stream.
            anyio.BrokenResourceError: If the stream broke.
            anyio.ClosedResourceError: If this side was closed.

        """
        ...

    async def send(self, chunks: Sequence[bytes]) -> None:
        """
        Write all *chunks* in order, and return when the transport has taken them.

        Raises:
            anyio.BrokenResourceError: If the stream broke.
            anyio.ClosedResourceError: If this side was closed.

        """
        ...

    async def aclose(self) -> None:
        """Close it at once, also for a :meth:`receive` or :meth:`send` that waits. Idempotent."""
        ...
