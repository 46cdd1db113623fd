# SPDX-License-Identifier: Apache-2.0
"""Telling sinks what happened, whatever they do with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from agentsandbox.models.events import Event, EventSink

__all__ = ["Publisher"]

_log = logging.getLogger("agentsandbox.warmpool")


class Publisher:
    """
    Hand every event to every sink. A sink that raises is reported once, and breaks nothing.

    Args:
        sinks: Who is told, in order.

    """

    def __init__(self, sinks: Iterable[EventSink] = ()) -> None:
        self._sinks = tuple(sinks)
        self._failing: set[int] = set()

    def emit(
        self,
        name: str,
        at: float,
        *,
        sandbox: str | None,
        episode: str | None = None,
        attempt: int | None = None,
        **data: Any,
    ) -> None:
        """Make an event of what happened and hand it on."""
        if self._sinks:
            self.publish(Event(name=name, at=at, sandbox=sandbox, episode=episode, attempt=attempt, data=data))

    def publish(self, event: Event) -> None:
        """Hand an event on."""
        for number, sink in enumerate(self._sinks):
            try:
                sink(event)
            except Exception:  # noqa: BLE001 - a stranger's code; no rollout hangs on it
                if number not in self._failing:
                    self._failing.add(number)
                    _log.exception("event sink %r failed on %s; further failures of it are not shown", sink, event.name)

    def __repr__(self) -> str:
        return f"<Publisher [{len(self._sinks)} sinks, {len(self._failing)} failing]>"
