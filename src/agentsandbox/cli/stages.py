# SPDX-License-Identifier: Apache-2.0
"""Where the time to a first command went, from what the driver itself saw. One clock, so that the parts add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from agentsandbox.models.events import Event
    from agentsandbox.models.timing import TTFCSample

__all__ = ["STAGES", "StageRecorder", "split"]

STAGES = {
    "asked": "queued",
    "created": "created",
    "scheduled": "scheduled",
    "sandbox_ready": "sandbox ready",
    "started": "container started",
    "open": "stream open",
    "prepared": "prepared",
    "granted": "granted",
    "first": "first command",
}
"""What was seen, in order, and what the time from the moment before until then is called."""


@attrs.frozen(kw_only=True)
class Split:
    """One time to first command in its parts."""

    stages: Mapping[str, float]
    """Seconds of each part; they add up to the whole."""
    making: float | None = None
    """Seconds from the moment the sandbox was asked for until it was ready, whenever that was."""


def split(sample: TTFCSample, moments: Mapping[str, float]) -> Split:
    """
    Divide a time to first command.

    What was done before anybody asked takes no part of it: those parts are 0. What was not seen is part of what was
    seen next.

    Args:
        sample: The whole.
        moments: Keys of :data:`STAGES` → when, on the driver's monotonic clock; ``requested`` is its beginning.

    """
    begin = at = moments["requested"]
    parts: dict[str, float] = {}
    seen = {**moments, "first": begin + sample.seconds}
    for key, name in STAGES.items():
        if key in seen:
            moment = min(max(seen[key], at), begin + sample.seconds)
            parts[name] = moment - at
            at = moment
    making = seen["prepared"] - seen["asked"] if "prepared" in seen and "asked" in seen else None
    return Split(stages=parts, making=making)


class StageRecorder:
    """
    An event sink that remembers of each lease what was seen of its sandbox.

    Args:
        pod: Name of a sandbox → what was seen of its Pod.

    """

    def __init__(self, pod: Callable[[str], Mapping[str, float]] = lambda _: {}) -> None:
        self.moments: dict[tuple[str | None, str | None], dict[str, float]] = {}
        """Episode and sandbox → what was seen, and when."""
        self._sandboxes: dict[str, dict[str, float]] = {}
        self._pod = pod

    def __repr__(self) -> str:
        return f"<StageRecorder [{len(self.moments)} leases, {len(self._sandboxes)} sandboxes]>"

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if event.sandbox is None:
            return
        if event.name == "sandbox.created":
            self._sandboxes[event.sandbox] = {"asked": event.at}
        elif event.name == "sandbox.opened":
            self._sandboxes.setdefault(event.sandbox, {})["open"] = event.at
        elif event.name == "sandbox.ready":
            seen = self._sandboxes.setdefault(event.sandbox, {})
            if (recycled := event.data.get("recycled")) is not None:
                seen["asked"] = event.at - recycled
                seen.pop("open", None)  # that was the runner before
            seen["prepared"] = event.at
        elif event.name == "lease.granted":
            seen = {**self._pod(event.sandbox), **self._sandboxes.get(event.sandbox, {})}
            requested = event.at - float(event.data.get("queue", 0.0))
            self.moments[event.episode, event.sandbox] = {**seen, "granted": event.at, "requested": requested}
