# SPDX-License-Identifier: Apache-2.0
"""Traces for OpenTelemetry: an event sink that makes spans of episodes. Needs the extra ``otel``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.errors import ConfigurationError, FailureKind
from agentsandbox.metrics.resets import reset_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

    from agentsandbox.models.events import Event

__all__ = ["OpenTelemetrySink"]


@attrs.define(eq=False)
class _Episode:
    span: Span
    context: Context
    """In which its attempts begin."""
    ended: float
    """When the last of them ended: it must not end before them."""


@attrs.define(eq=False)
class _Attempt:
    span: Span
    context: Context
    """In which its children begin."""
    asked_at: float
    sandbox: str | None = None
    used: bool = False
    """Whether its first command has started."""


class OpenTelemetrySink:
    """
    Makes a trace of every episode: what was waited for, what was tried, and what failed.

    Hand it to a pool as ``sink=``, one sink a pool. A span ``agentsandbox.episode`` has one child
    ``agentsandbox.attempt`` an attempt, and that one has ``agentsandbox.acquire`` and ``agentsandbox.reset``; the first
    command is an event. Where a batch is submitted within a span of your own, its episodes are children of that.

    Times are those of the events, on the driver's monotonic clock, which is compared with the wall clock once, at the
    first event: durations are right to the microsecond, whatever happens to the wall clock.

    Args:
        tracer: What makes the spans; ``None`` takes that of the global provider.

    Raises:
        ConfigurationError: If ``opentelemetry-api`` is missing.

    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ConfigurationError(
                "traces need opentelemetry-api: pip install 'agentsandbox[otel]', and an SDK that exports them"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("agentsandbox") if tracer is None else tracer
        self._offset: int | None = None
        self._episodes: dict[str, _Episode] = {}
        self._attempts: dict[tuple[str, int | None], _Attempt] = {}
        self._grants: dict[str, Mapping[str, Any]] = {}
        self._users: dict[str, _Attempt] = {}
        self._acts: Mapping[str, Callable[[Event], None]] = {
            "attempt.started": self._started,
            "lease.granted": self._granted,
            "attempt.granted": self._acquired,
            "command.started": self._command,
            "sandbox.lost": self._lost,
            "sandbox.reset": self._reset,
            "sandbox.not_recycled": self._reset,
            "lease.reset": self._reset,
            "sandbox.deleted": self._forget,
            "attempt.ended": self._ended,
            "episode.ended": self._episode_ended,
        }

    def __call__(self, event: Event) -> None:
        """Take in an event of the pool."""
        if self._offset is None:
            self._offset = time.time_ns() - round(event.at * 1e9)
        if (act := self._acts.get(event.name)) is not None:
            act(event)

    def __repr__(self) -> str:
        return f"<OpenTelemetrySink [{len(self._episodes)} episodes, {len(self._attempts)} attempts]>"

    def _wall(self, at: float) -> int:
        """Return a moment in nanoseconds since the epoch."""
        return round(at * 1e9) + (self._offset or 0)

    def _begin(self, name: str, at: float, context: Context | None, **attributes: Any) -> tuple[Span, Context]:
        known = {f"agentsandbox.{key}": value for key, value in attributes.items() if value is not None}
        span = self._tracer.start_span(
            f"agentsandbox.{name}", context=context, start_time=self._wall(at), attributes=known
        )
        return span, self._trace.set_span_in_context(span, context)

    def _finish(self, span: Span, event: Event, at: float) -> None:
        """End a span with what has become of its episode or attempt."""
        data = event.data
        for name in ("status", "reward", "kind"):
            if data.get(name) is not None:
                span.set_attribute(f"agentsandbox.{name}", data[name])
        kind = data.get("kind")
        # What was stopped has not failed: neither a batch that was cancelled, nor the slower one of two attempts.
        if kind is not None and kind != FailureKind.CANCELLED:
            span.set_attribute("error.type", kind)
            span.set_status(self._trace.StatusCode.ERROR, f"{kind}: {data.get('reason')}")
        span.end(self._wall(at))

    def _episode(self, event: Event) -> _Episode:
        name = str(event.episode)
        if name not in self._episodes:
            self._episodes[name] = _Episode(*self._begin("episode", event.at, None, episode=name), event.at)
        return self._episodes[name]

    def _started(self, event: Event) -> None:
        key = str(event.episode), event.attempt
        if (earlier := self._attempts.pop(key, None)) is not None:
            earlier.span.end(self._wall(event.at))
        above = self._episode(event).context
        span, context = self._begin("attempt", event.at, above, episode=key[0], attempt=event.attempt)
        self._attempts[key] = _Attempt(span, context, event.at)

    def _granted(self, event: Event) -> None:
        self._grants[str(event.sandbox)] = event.data

    def _acquired(self, event: Event) -> None:
        if (attempt := self._attempts.get((str(event.episode), event.attempt))) is None:
            return
        attempt.sandbox = str(event.sandbox)
        self._users[attempt.sandbox] = attempt
        grant = self._grants.pop(attempt.sandbox, {})
        start, image = grant.get("start"), grant.get("image")
        span, _ = self._begin(
            "acquire", attempt.asked_at, attempt.context, sandbox=event.sandbox, start=start, image=image
        )
        span.end(self._wall(event.at))
        for name, value in (("sandbox", event.sandbox), ("start", start), ("image", image)):
            if value is not None:
                attempt.span.set_attribute(f"agentsandbox.{name}", value)

    def _command(self, event: Event) -> None:
        attempt = self._attempts.get((str(event.episode), event.attempt))
        if attempt is None or attempt.used:
            return
        attempt.used = True
        ttfc = event.at - attempt.asked_at
        attempt.span.set_attribute("agentsandbox.ttfc_seconds", ttfc)
        attempt.span.add_event("agentsandbox.first_command", timestamp=self._wall(event.at))

    def _lost(self, event: Event) -> None:
        attempt = self._users.get(str(event.sandbox))
        if attempt is not None and attempt.span.is_recording():
            reason = {"agentsandbox.reason": str(event.data.get("reason"))}
            attempt.span.add_event("agentsandbox.sandbox_lost", reason, self._wall(event.at))

    def _reset(self, event: Event) -> None:
        """Show what was done to make a sandbox like new beneath the attempt that used it, also when that is over."""
        attempt = self._attempts.get((str(event.episode), event.attempt)) or self._users.get(str(event.sandbox))
        if (reset := reset_of(event)) is None or attempt is None:
            return
        self._users[str(event.sandbox)] = attempt
        began = event.at - (reset.seconds or 0.0)
        span, _ = self._begin(
            "reset", began, attempt.context, sandbox=event.sandbox, rung=reset.rung, outcome=reset.outcome
        )
        if reset.outcome != "verified":
            span.set_attribute("error.type", reset.outcome)
            why = event.data.get("reason") or event.data.get("error")
            span.set_status(self._trace.StatusCode.ERROR, f"{reset.outcome}: {why}")
        span.end(self._wall(event.at))

    def _forget(self, event: Event) -> None:
        self._users.pop(str(event.sandbox), None)
        self._grants.pop(str(event.sandbox), None)

    def _ended(self, event: Event) -> None:
        if (attempt := self._attempts.pop((str(event.episode), event.attempt), None)) is None:
            return
        if attempt.sandbox is None:
            span, _ = self._begin("acquire", attempt.asked_at, attempt.context)
            self._finish(span, event, event.at)
        self._finish(attempt.span, event, event.at)
        if (episode := self._episodes.get(str(event.episode))) is not None:
            episode.ended = event.at

    def _episode_ended(self, event: Event) -> None:
        episode = self._episode(event)  # one that never came to an attempt has a span all the same
        del self._episodes[str(event.episode)]
        episode.span.set_attribute("agentsandbox.attempts", event.attempt or 0)
        self._finish(episode.span, event, max(event.at, episode.ended))
