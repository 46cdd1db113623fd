# SPDX-License-Identifier: Apache-2.0
"""
The life of one sandbox as one table.

::

    creating → hydrating → ready → leased → resetting → ready
                                            resetting → quarantined → deleting → gone
                           ready, leased → recycling → ready
                                           recycling → quarantined → deleting → gone
    any → lost → deleting → gone

What the table does not name cannot happen: it is a :exc:`~agentsandbox.errors.UsageError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import attrs

from agentsandbox.errors import UsageError

__all__ = ["TABLE", "Action", "Input", "SandboxLife", "State", "step"]


class State(StrEnum):
    """Where a sandbox is in its life."""

    CREATING = "creating"
    """The backend was asked for it."""
    HYDRATING = "hydrating"
    """The backend said that its image is still on the way."""
    READY = "ready"
    """Fresh, or verified to be like new; nobody's."""
    LEASED = "leased"
    """Exclusively one attempt's."""
    RESETTING = "resetting"
    """Still that attempt's, being made like new."""
    RECYCLING = "recycling"
    """Nobody's, becoming a fresh sandbox of the same or of another image in the same place."""
    QUARANTINED = "quarantined"
    """It could not be shown to be like new: never granted again."""
    DELETING = "deleting"
    """The backend was asked to remove it, and has not confirmed."""
    LOST = "lost"
    """It is not what it was; what is left of it must be removed."""
    GONE = "gone"
    """Verified gone."""


class Input(StrEnum):
    """What happens to a sandbox."""

    HYDRATE = "hydrate"
    """Its image must be fetched first."""
    CREATED = "created"
    """The backend made it."""
    FAILED = "failed"
    """The backend could not make it, and nothing of it stayed behind."""
    GRANT = "grant"
    """It was assigned to a waiter."""
    HAND_BACK = "hand_back"
    """Its waiter was cancelled before it touched it."""
    RESET = "reset"
    """Its holder wants it like new."""
    VERIFIED = "verified"
    """It was shown to be like new, and its holder let go of it."""
    UNVERIFIED = "unverified"
    """It could not be shown to be like new."""
    RELEASE = "release"
    """Its holder is done with it."""
    RECYCLE = "recycle"
    """Its holder is done with it, or its room is needed for another image, and it can become another one."""
    EVICT = "evict"
    """Its room is needed for another image."""
    LOSE = "lose"
    """It is gone, replaced or broken."""
    REMOVE = "remove"
    """Have it removed."""
    DELETED = "deleted"
    """The backend confirmed that it is gone."""


class Action(StrEnum):
    """What has to be done about it, in order."""

    OFFER = "offer"
    """Put it up for assignment."""
    WITHDRAW = "withdraw"
    """Take it back from assignment."""
    REMOVE = "remove"
    """Apply :attr:`Input.REMOVE` at once."""
    DESTROY = "destroy"
    """Tell the backend to remove it."""
    FORGET = "forget"
    """Nothing of it is left to count."""


def _table() -> dict[tuple[State, Input], tuple[State, tuple[Action, ...]]]:
    table: dict[tuple[State, Input], tuple[State, tuple[Action, ...]]] = {
        (State.CREATING, Input.HYDRATE): (State.HYDRATING, ()),
        (State.READY, Input.GRANT): (State.LEASED, ()),
        (State.READY, Input.EVICT): (State.DELETING, (Action.WITHDRAW, Action.DESTROY)),
        (State.LEASED, Input.HAND_BACK): (State.READY, (Action.OFFER,)),
        (State.LEASED, Input.RELEASE): (State.DELETING, (Action.DESTROY,)),
        (State.LEASED, Input.RESET): (State.RESETTING, ()),
        (State.RESETTING, Input.VERIFIED): (State.READY, (Action.OFFER,)),
        (State.RESETTING, Input.UNVERIFIED): (State.QUARANTINED, (Action.REMOVE,)),
        (State.RESETTING, Input.RELEASE): (State.DELETING, (Action.DESTROY,)),
        (State.LEASED, Input.RECYCLE): (State.RECYCLING, ()),
        (State.READY, Input.RECYCLE): (State.RECYCLING, (Action.WITHDRAW,)),
        (State.RECYCLING, Input.VERIFIED): (State.READY, (Action.OFFER,)),
        (State.RECYCLING, Input.UNVERIFIED): (State.QUARANTINED, (Action.REMOVE,)),
        (State.RECYCLING, Input.REMOVE): (State.DELETING, (Action.DESTROY,)),
        # Whoever makes it another one sees it through.
        (State.RECYCLING, Input.LOSE): (State.LOST, ()),
        (State.QUARANTINED, Input.REMOVE): (State.DELETING, (Action.DESTROY,)),
        # A lost sandbox that somebody holds stays lost until its holder lets go: the holder must see why.
        (State.LEASED, Input.LOSE): (State.LOST, ()),
        (State.RESETTING, Input.LOSE): (State.LOST, ()),
        (State.LOST, Input.LOSE): (State.LOST, ()),
        (State.LOST, Input.RELEASE): (State.DELETING, (Action.DESTROY,)),
        (State.LOST, Input.HAND_BACK): (State.DELETING, (Action.DESTROY,)),
        (State.LOST, Input.REMOVE): (State.DELETING, (Action.DESTROY,)),
        (State.READY, Input.LOSE): (State.LOST, (Action.WITHDRAW, Action.REMOVE)),
        (State.QUARANTINED, Input.LOSE): (State.LOST, (Action.REMOVE,)),
        (State.DELETING, Input.LOSE): (State.DELETING, ()),
        (State.DELETING, Input.DELETED): (State.GONE, (Action.FORGET,)),
    }
    for making in (State.CREATING, State.HYDRATING):
        table[making, Input.CREATED] = (State.READY, (Action.OFFER,))
        table[making, Input.FAILED] = (State.GONE, (Action.FORGET,))
        table[making, Input.LOSE] = (State.LOST, (Action.REMOVE,))
    return table


TABLE: Mapping[tuple[State, Input], tuple[State, tuple[Action, ...]]] = MappingProxyType(_table())
"""Every transition there is."""


def step(state: State, event: Input) -> tuple[State, tuple[Action, ...]]:
    """
    Look up what an input does to a sandbox.

    Args:
        state: Where the sandbox is.
        event: What happens.

    Returns:
        Where it is then, and what has to be done.

    Raises:
        UsageError: If this cannot happen there.

    """
    try:
        return TABLE[state, event]
    except KeyError:
        raise UsageError(f"a sandbox that is {state} cannot take {event!s}") from None


@attrs.define(eq=False, repr=False)
class SandboxLife:
    """
    One sandbox in the books of its pool.

    Args:
        name: Its name.
        image: What it is made from.

    """

    name: str
    """Its name."""
    image: str
    """What it is made from."""
    state: State = State.CREATING
    """Where it is in its life."""
    generation: int = 0
    """Counts its grants. Who holds an older number holds nothing."""
    ready_at: float | None = None
    """When it became ready, in seconds on the driver's monotonic clock."""
    recycled: int = 0
    """How often it became a fresh one in the same place."""
    made_for: str = ""
    """What it was made from at first."""

    def apply(self, event: Input) -> tuple[Action, ...]:
        """
        Let something happen to it.

        Args:
            event: What happens.

        Returns:
            What has to be done, in order.

        Raises:
            UsageError: If this cannot happen now.

        """
        self.state, actions = step(self.state, event)
        if event is Input.GRANT:
            self.generation += 1
        return actions

    def held_by(self, generation: int) -> bool:
        """Whether the holder with this generation still holds it."""
        return self.generation == generation and self.state in (State.LEASED, State.RESETTING, State.LOST)

    def __repr__(self) -> str:
        return f"<SandboxLife {self.name!r} [{self.state}, generation {self.generation}]>"
