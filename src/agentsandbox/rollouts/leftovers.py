# SPDX-License-Identifier: Apache-2.0
"""Putting away what earlier drivers left behind when they were killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.backends.opening import backend_class
from agentsandbox.errors import SandboxError

if TYPE_CHECKING:
    from agentsandbox.backends.base import Backend
    from agentsandbox.rollouts.journal import Journal
    from agentsandbox.warmpool.publishing import Publisher

__all__ = ["reap"]


async def reap(journal: Journal, backend: Backend, publisher: Publisher) -> None:
    """
    Tell of the sandboxes that dead drivers held, and have their backends remove them, run by run.

    Args:
        journal: What names them; open for writing.
        backend: The present one; another that is named is looked up.
        publisher: Who is told.

    """
    now = anyio.current_time()
    for orphan in journal.orphans:
        publisher.emit(
            "sandbox.orphaned",
            now,
            sandbox=orphan.sandbox,
            episode=orphan.episode,
            attempt=orphan.attempt,
            run=orphan.run,
            identity=attrs.asdict(orphan.identity),
        )
    for receipt in journal.leftovers:
        run_id, name = receipt.get("run_id"), receipt.get("backend")
        try:
            kind = type(backend) if name == backend.name else backend_class(str(name))
            removed = await kind.remove_leftovers(receipt)
        except (SandboxError, LookupError) as error:  # The latter: killed before it could say where it was.
            # The next driver tries again; meanwhile it is no reason not to work.
            publisher.emit("leftovers.failed", now, sandbox=None, run_id=run_id, reason=str(error))
        else:
            await journal.reaped(receipt, removed)
            publisher.emit("leftovers.removed", now, sandbox=None, run_id=run_id, removed=removed)
