# SPDX-License-Identifier: Apache-2.0
"""
What the layers below tell the layers above: frozen events through one sink, the only thing that travels up.

Metrics, journal, logging and progress are all sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

__all__ = ["Event", "EventSink", "discard"]


@attrs.frozen(kw_only=True)
class Event:
    """Something that happened."""

    name: str
    """What: ``sandbox.ready``, ``command.started``, ``episode.ended``, …; the reference of events lists all of them."""
    at: float
    """When, on the driver's monotonic clock, in seconds."""
    sandbox: str | None = None
    """The sandbox it is about."""
    episode: str | None = None
    """The episode it is about."""
    attempt: int | None = None
    """The attempt it is about."""
    data: Mapping[str, Any] = attrs.field(factory=dict)
    """Anything else that serialises to JSON."""


EventSink = Callable[[Event], None]
"""A callable that takes an event. It must not block; an exception of it is reported once and goes no further."""


def discard(event: Event) -> None:
    """Take an event and do nothing with it."""
