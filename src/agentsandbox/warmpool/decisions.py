# SPDX-License-Identifier: Apache-2.0
"""Who waits for a sandbox, and what the book can have done about it."""

from __future__ import annotations

from typing import Any

import attrs

__all__ = ["Create", "Decision", "Destroy", "Grant", "Recycle", "Refuse", "Waiter"]


@attrs.define(eq=False, repr=False)
class Waiter:
    """
    Somebody who wants a sandbox.

    Args:
        image: Of which image.
        requested_at: Since when, in seconds.

    """

    image: str
    """Of which image."""
    requested_at: float
    """Since when."""
    grant: Grant | None = None
    """What it was given."""
    error: BaseException | None = None
    """Why it will be given nothing."""
    wake: Any = None
    """For the engine: what to call when either is set."""
    returning: bool = False
    """Whether it had a sandbox already, which this one replaces."""

    def __repr__(self) -> str:
        state = "granted" if self.grant else "refused" if self.error else "waiting"
        return f"<Waiter for {self.image!r} [{state}]>"


@attrs.frozen(eq=False)
class Grant:
    """A waiter has its sandbox from now on."""

    waiter: Waiter
    """Who."""
    name: str
    """Which sandbox."""
    generation: int
    """Which grant of it this is: what the holder shows when it gives it back."""
    ready_at: float
    """Since when the sandbox had been ready."""
    reused: bool = False
    """Whether its place had served somebody before."""


@attrs.frozen
class Refuse:
    """A waiter gets nothing."""

    waiter: Waiter
    """Who."""
    error: BaseException
    """Why; an exception of its own, to be raised."""


@attrs.frozen
class Create:
    """Have a sandbox made."""

    name: str
    """Under which name."""
    image: str
    """From what."""


@attrs.frozen
class Destroy:
    """Have a sandbox removed."""

    name: str
    """Which."""


@attrs.frozen
class Recycle:
    """Have a sandbox become a fresh one in the same place."""

    name: str
    """Which."""
    image: str | None
    """Of what; ``None`` is for :meth:`PoolBook.decide` to say in a moment: who released it may be about to ask."""


Decision = Grant | Refuse | Create | Destroy | Recycle
"""Something to be done."""
