# SPDX-License-Identifier: Apache-2.0
"""Files of a sandbox, through the builtins of its runner."""

from __future__ import annotations

import errno
import hashlib
import sys
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from agentsandbox.errors import OutputLimitExceeded, StreamBroken
from agentsandbox.models.command import Command
from agentsandbox.protocol.frames import STDOUT, FrameError
from agentsandbox.session.call import WINDOW, Call
from agentsandbox.session.replies import os_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.session.calls import Calls

__all__ = ["builtin", "in_thread", "read_file", "sha256", "write_file"]

FILE_TIMEOUT = 300.0
"""Seconds that reading or writing one file may take."""

HASH_IN_THREAD = 256 * 1024
"""Bytes from which on hashing would hold up the event loop for a good part of a millisecond."""

THREADS = 32
"""Threads a loop may use for archives and hashes. They are not those of the default pool: user code may block that."""

_threads: RunVar[anyio.CapacityLimiter] = RunVar("agentsandbox_file_threads")


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in one of our own threads."""
    try:
        limiter = _threads.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(THREADS)
        _threads.set(limiter)
    return await anyio.to_thread.run_sync(function, *arguments, limiter=limiter)


async def sha256(data: bytes) -> str:
    """Return the SHA-256 of *data*, without holding up the event loop."""
    return str(await in_thread(_sha256, data)) if len(data) >= HASH_IN_THREAD else _sha256(data)


async def builtin(
    calls: Calls,
    name: str,
    path: str,
    arguments: dict[str, Any],
    *,
    user: str | int | None,
    timeout: float,
    limit: int = 1,
    stdin: Any = None,
    on_output: Any = None,
) -> tuple[Call, dict[str, Any]]:
    """Run a builtin to its end; raise what it reports."""
    command = Command(command=(name, path), user=user, timeout=timeout)
    payload = {
        "builtin": name,
        "args": {"path": path, **arguments},
        "cwd": None,
        "env": {},
        "user": user,
        "stdin": stdin is not None,
        "merge": False,
        "timeout": timeout,
        "no_output_timeout": None,
        "grace": 0.0,
        "window": WINDOW,
    }
    call = await calls.run(payload, stdin=stdin, on_output=on_output, limit=limit)
    if call.exit is None or call.exit.limit is not None:
        calls.outcome(call, command)
    assert call.exit is not None
    report = call.exit.report
    try:
        error = os_error(report, path)
        if error is None and call.exit.code:
            # Only a builtin that was killed, for memory for instance, ends without saying why.
            raise StreamBroken("builtin_died", f"{name} of {path!r} ended with exit code {call.exit.code}")
    except FrameError as violation:
        calls.link.violate(violation)
        raise calls.loss() from violation
    if error is not None:
        raise error
    return call, report


async def read_file(calls: Calls, path: str, *, user: str | int | None, limit: int | None) -> bytes:
    """Return the contents of a file; see :meth:`Session.read_file`."""
    most = sys.maxsize if limit is None else max(limit, 1)
    try:
        call, report = await builtin(calls, "read", path, {"limit": limit}, user=user, timeout=FILE_TIMEOUT, limit=most)
    except OSError as error:
        if limit is not None and error.errno == errno.EFBIG:
            raise OutputLimitExceeded(limit) from error
        raise
    data = call.kept[STDOUT].take()
    if report.get("size") != len(data) or len(data) != call.sizes[STDOUT]:
        raise _damaged(calls, f"{path!r} arrived with {len(data)} bytes of {report.get('size')!r:.100}")
    return data


async def write_file(calls: Calls, path: str, data: bytes, *, mode: int | None, user: str | int | None) -> None:
    """Write a file; see :meth:`Session.write_file`."""
    data = bytes(data)
    digest = await sha256(data)
    arguments = {"size": len(data), "sha256": digest, "mode": mode, "parents": True}
    try:
        _, report = await builtin(calls, "write", path, arguments, user=user, timeout=FILE_TIMEOUT, stdin=data)
    except OSError as error:
        if error.errno == errno.EIO:
            raise _damaged(calls, f"{path!r} did not arrive as it was sent: {error.strerror}") from error
        raise
    if report.get("size") != len(data) or report.get("sha256") != digest:
        raise _damaged(calls, f"{path!r} did not arrive as it was sent")


def _damaged(calls: Calls, detail: str) -> StreamBroken:
    """Return the error for data that was lost on the way, and trust the session no more."""
    calls.link.lose(StreamBroken("damaged", detail))
    return StreamBroken("damaged", detail)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
