# SPDX-License-Identifier: Apache-2.0
"""What a container runtime says when a command cannot be started, and what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsandbox.errors import (
    CommandNotExecutable,
    CommandNotFound,
    StartError,
    UserNotFound,
    WorkingDirectoryNotFound,
)

if TYPE_CHECKING:
    from agentsandbox.transport.websocket import ExecStatus

__all__ = ["start_error"]

# The words of runc, crun and runsc, in the order in which they must be looked for: each names the cause last.
_MEANINGS: tuple[tuple[tuple[str, ...], type[StartError]], ...] = (
    (("chdir to cwd", "working directory", "invalid working dir"), WorkingDirectoryNotFound),
    (("unable to find user", "no users found", "unable to find group"), UserNotFound),
    (("executable file not found", "not found in $path", "no such file or directory"), CommandNotFound),
    (("permission denied", "exec format error", "is a directory", "operation not permitted"), CommandNotExecutable),
    (("argument list too long", "text file busy"), StartError),
)


def start_error(status: ExecStatus, program: str) -> StartError | None:
    """
    Return the exception for a command that the runtime did not start.

    Args:
        status: What the server said.
        program: What was to be started.

    Returns:
        The exception with the runtime's words; ``None`` if the status says something else, so that nothing is known.

    """
    if status.exit_code is not None or status.reason not in ("InternalError", ""):
        return None
    words = status.message.lower()
    if "exec" not in words:
        return None
    for needles, kind in _MEANINGS:
        if any(needle in words for needle in needles):
            return kind(_short(status.message, program), subject=program)
    return None


def _short(message: str, program: str) -> str:
    """Leave out what every layer on the way put before it."""
    at = message.find("exec: ")
    text = message[at + 6 :] if at >= 0 else message
    text = text.removesuffix(": unknown")
    return text if program in text else f"{program}: {text}"
