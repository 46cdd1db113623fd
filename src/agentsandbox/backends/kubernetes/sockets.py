# SPDX-License-Identifier: Apache-2.0
"""What connections take of this process: files, threads that look names up; and what is heard when one is refused."""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import attrs

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["BODY_LIMIT", "Refused", "allow_files", "refuse", "resolver"]

BODY_LIMIT = 64 * 1024
"""Bytes of a refusal that are read."""

_LOOKUPS = 4
"""Names looked up at once; answers are kept for ten seconds."""


def allow_files(connections: int, need: int) -> None:
    """
    Make sure that this process may open enough files.

    Args:
        connections: What they are for, for the message.
        need: How many files.

    Raises:
        ConfigurationError: If it may not, and may not raise its limit either.

    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigurationError(
            f"{connections} connections need {need} open files, and this process may open {hard}: "
            "raise the limit (ulimit -Hn) or lower the concurrency"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def resolver() -> Any:
    """
    Return what looks names up for aiohttp, in threads of its own.

    aiohttp's own way goes through the event loop's default executor, which belongs to whoever else runs in this
    process: a trainer that fills it with blocking calls would stop every new connection.
    """
    from aiohttp.resolver import ThreadedResolver

    return ThreadedResolver(loop=_Lookups())  # type: ignore[arg-type]


class _Lookups:
    """The two calls of an event loop that look names up."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(_LOOKUPS)

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> Any:
        return await self._run(partial(socket.getaddrinfo, host, port, **options))

    async def getnameinfo(self, address: Any, flags: int = 0) -> Any:
        return await self._run(partial(socket.getnameinfo, address, flags))

    async def _run(self, function: Any) -> Any:
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._limiter)


@attrs.frozen(kw_only=True)
class Refused(Exception):
    """A websocket handshake that was answered with something else."""

    status: int
    """The HTTP status."""
    body: bytes
    """What the server said."""
    headers: Mapping[str, str]
    """Of the answer."""


async def refuse(response: aiohttp.ClientResponse) -> None:
    """Look at the answer to a handshake before aiohttp throws the server's words away."""
    if response.status != 101:
        raise Refused(status=response.status, body=await response.content.read(BODY_LIMIT), headers=response.headers)
