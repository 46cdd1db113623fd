# SPDX-License-Identifier: Apache-2.0
"""The loss of a sandbox, as each of those whom it hits is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentsandbox.errors import SandboxLost

__all__ = ["told"]


def told(lost: SandboxLost, stdout: bytes = b"", stderr: bytes = b"") -> SandboxLost:
    """
    Return an exception for one caller, so that tracebacks do not grow into each other.

    Args:
        lost: Why the sandbox is lost.
        stdout: What the caller's command had written to standard output.
        stderr: The same of standard error.

    """
    error = type(lost)(lost.reason, lost.detail, stdout=stdout, stderr=stderr)
    error.__cause__ = lost.__cause__
    return error
