# SPDX-License-Identifier: Apache-2.0
"""The identity fence: nothing that ran in another sandbox comes back as a result."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agentsandbox.errors import CommandError, ProtocolError, SandboxLost, UsageError

if TYPE_CHECKING:
    from agentsandbox.client.command_log import CommandEntry
    from agentsandbox.warmpool.engine import Engine
    from agentsandbox.warmpool.tenure import Tenure

__all__ = ["fenced"]


@asynccontextmanager
async def fenced(
    engine: Engine,
    tenure: Tenure,
    held: Callable[[], bool],
    entry: CommandEntry | None = None,
    *,
    ends: bool = True,
    clean: Callable[[BaseException], None] = lambda _: None,
) -> AsyncIterator[None]:
    """
    Compare the sandbox's identity before and after what is done in the context; a difference kills the tenure.

    Args:
        engine: Who must know of a loss.
        tenure: Whose sandbox.
        held: Whether the lease still has this sandbox, asked at the end.
        entry: The line of the command log that this is about.
        ends: Whether the entry is over when the context is; on an error it always is.
        clean: Takes credentials out of an error before anybody sees it.

    Raises:
        SandboxLost: If the sandbox is not the one it was.
        UsageError: If the lease let go of the sandbox meanwhile.

    """
    try:
        await tenure.sandbox.check()
        try:
            yield
        except (CommandError, OSError):
            # An error of the command is a result too: it counts only if it comes from the right sandbox.
            await tenure.sandbox.check()
            raise
        await tenure.sandbox.check()
        if not held():
            raise UsageError(f"the lease of sandbox {tenure.sandbox.name} was released or reset while it was in use")
    except BaseException as error:
        clean(error)
        if isinstance(error, (SandboxLost, ProtocolError)):
            engine.lose(tenure, error if isinstance(error, SandboxLost) else SandboxLost("broken", str(error)))
        if entry is not None:
            entry.end(error)
        raise
    if entry is not None and ends:
        entry.end(None)
