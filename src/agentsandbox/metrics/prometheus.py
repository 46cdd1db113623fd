# SPDX-License-Identifier: Apache-2.0
"""Metrics for Prometheus: an event sink that keeps collectors. Needs the extra ``metrics``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox import errors
from agentsandbox.errors import FailureKind
from agentsandbox.metrics.collectors import STATES, Collectors
from agentsandbox.metrics.resets import reset_of
from agentsandbox.models.episode import Status
from agentsandbox.models.timing import StartKind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from agentsandbox.models.events import Event

__all__ = ["PrometheusSink"]

_KINDS = frozenset(map(str, FailureKind))
_KIND_OF = {name: str(getattr(getattr(errors, name), "kind", "other")) for name in errors.__all__}
_WORD = re.compile(r"[a-z0-9_]{1,40}")
_MOST_WORDS = 50
"""Values that a label may take whose words a backend chooses; what comes later is ``other``."""


@attrs.define(eq=False)
class _Sandbox:
    image: str
    began: float
    pulling: float | None = None
    """Since when its image is being fetched."""
    pulls: list[tuple[float, float]] = attrs.field(factory=list)
    """When it was, since the last lease."""
    counted: tuple[str, ...] | None = None
    """Under which labels it is in the gauge."""

    @property
    def state(self) -> str | None:
        return self.counted[1] if self.counted else None

    def pulled(self, at: float) -> None:
        """Note that a fetch is over, if one was under way."""
        if self.pulling is not None:
            self.pulls.append((self.pulling, at))
            self.pulling = None

    def fetching(self, since: float, until: float) -> float:
        """For how much of that time its image was being fetched."""
        self.pulled(until)
        pulls, self.pulls = self.pulls, []
        return sum(max(0.0, min(until, end) - max(since, begin)) for begin, end in pulls)


@attrs.define(eq=False)
class _Lease:
    requested_at: float
    start: str
    image: str
    used: bool = False
    """Whether its first command has started."""


@attrs.define(eq=False)
class _Attempt:
    asked_at: float
    since: float
    state: str = "waiting"
    lease: _Lease | None = None
    commands: int = 0
    used: bool = False


class PrometheusSink:
    """
    Counts what happens in a pool for Prometheus.

    Hand it to a client or a pool as ``sink=``, one sink a pool. Sinks on one registry share its collectors. Labels take
    few values: never the id of an episode or of a sandbox. It takes microseconds an event and waits for nothing.

    Args:
        backend: The value of the label ``backend``, such as ``"local"``.
        registry: Where the metrics are; ``None`` is the global one of ``prometheus_client``.
        images: Whether metrics of sandboxes have a label ``image``. Each image makes a hundred time series, so this is
            for dozens of images and not for thousands.

    Raises:
        ConfigurationError: If ``prometheus_client`` is missing, or the registry has our metrics with other labels.

    """

    def __init__(self, backend: str, *, registry: CollectorRegistry | None = None, images: bool = False) -> None:
        self.backend = backend
        """The value of the label ``backend``."""
        self._on = Collectors.of(registry, images=images)
        self._sandboxes: dict[str, _Sandbox] = {}
        self._leases: dict[str, _Lease] = {}
        self._attempts: dict[tuple[str | None, int | None], _Attempt] = {}
        self._failed: dict[str | None, str] = {}
        self._words: set[str] = set()
        self._acts: Mapping[str, Callable[[Event], None]] = {
            "sandbox.created": self._created,
            "image.pulling": self._pulling,
            "image.pulled": self._pulled,
            "sandbox.ready": self._ready,
            "sandbox.failed": self._not_made,
            "sandbox.lost": self._lost,
            "sandbox.stuck": self._stuck,
            "sandbox.deleted": self._deleted,
            "sandbox.reset": self._reset,
            "sandbox.not_recycled": self._reset,
            "lease.granted": self._granted,
            "lease.refused": self._refused,
            "lease.reset": self._lease_reset,
            "lease.released": self._released,
            "command.started": self._command_started,
            "command.ended": self._command_ended,
            "attempt.started": self._attempt_started,
            "attempt.granted": self._attempt_granted,
            "attempt.ended": self._attempt_ended,
            "episode.ended": self._episode_ended,
            "episode.restored": self._episode_restored,
        }
        self._show_zeros()

    def __call__(self, event: Event) -> None:
        """Take in an event of the pool."""
        if (act := self._acts.get(event.name)) is not None:
            act(event)

    def __repr__(self) -> str:
        return f"<PrometheusSink {self.backend!r} [{len(self._sandboxes)} sandboxes, {len(self._attempts)} attempts]>"

    def _show_zeros(self) -> None:
        """Have what has not happened yet be 0 instead of absent, so that its rate is known from the first time on."""
        on, backend = self._on, self.backend
        for status in Status:
            on.episodes.labels(backend, status)
        for state in ("waiting", "agent", "exec"):
            on.running.labels(backend, state)
        for cause in ("queue", "hydrate", "start", "agent", "exec"):
            on.waiting.labels(backend, cause)
        on.throttles.labels(backend)
        if not on.images:
            on.creations.labels(backend)
            for state in STATES:
                on.sandboxes.labels(backend, state)
            for start in StartKind:
                on.ttfc.labels(backend, start)
                on.censored.labels(backend, start)

    def _image(self, image: str) -> tuple[str, ...]:
        return (image,) if self._on.images else ()

    # Sandboxes.

    def _put(self, sandbox: _Sandbox, state: str | None) -> None:
        if sandbox.counted is not None:
            self._on.sandboxes.labels(*sandbox.counted).dec()
        sandbox.counted = None if state is None else (self.backend, state, *self._image(sandbox.image))
        if sandbox.counted is not None:
            self._on.sandboxes.labels(*sandbox.counted).inc()

    def _created(self, event: Event) -> None:
        self._deleted(event)
        sandbox = _Sandbox(str(event.data.get("image", "")), event.at)
        self._sandboxes[str(event.sandbox)] = sandbox
        self._on.creations.labels(self.backend, *self._image(sandbox.image)).inc()
        self._put(sandbox, "creating")

    def _pulling(self, event: Event) -> None:
        if (sandbox := self._sandboxes.get(str(event.sandbox))) is not None:
            sandbox.pulling = event.at

    def _pulled(self, event: Event) -> None:
        if "error" not in event.data and (seconds := event.data.get("seconds")) is not None:
            self._on.pulls.labels(self.backend, *self._image(str(event.data.get("image", "")))).observe(seconds)
        if (sandbox := self._sandboxes.get(str(event.sandbox))) is not None:
            sandbox.pulled(event.at)

    def _ready(self, event: Event) -> None:
        if (sandbox := self._sandboxes.get(str(event.sandbox))) is None:
            return
        seconds = event.data.get("recycled")
        if seconds is None:
            self._on.made.labels(self.backend, *self._image(sandbox.image)).observe(event.at - sandbox.began)
        else:
            sandbox.began = event.at - seconds
        sandbox.image = str(event.data.get("image", sandbox.image))
        self._put(sandbox, "ready")

    def _not_made(self, event: Event) -> None:
        name = str(event.data.get("error", "")).partition(":")[0]
        sandbox = self._sandboxes.get(str(event.sandbox))
        image = self._image("" if sandbox is None else sandbox.image)
        self._on.failures.labels(self.backend, _KIND_OF.get(name, "other"), *image).inc()
        if name == "Throttled":
            self._on.throttles.labels(self.backend).inc()
        self._deleted(event)

    def _lost(self, event: Event) -> None:
        sandbox = self._sandboxes.get(str(event.sandbox))
        if sandbox is not None and sandbox.state != "lost":  # its backend and its holder may both have seen it
            self._on.losses.labels(self.backend, self._word(event.data.get("reason"))).inc()
            self._put(sandbox, "lost")

    def _stuck(self, event: Event) -> None:
        if (sandbox := self._sandboxes.get(str(event.sandbox))) is not None:
            self._put(sandbox, "stuck")

    def _deleted(self, event: Event) -> None:
        self._leases.pop(str(event.sandbox), None)
        if (sandbox := self._sandboxes.pop(str(event.sandbox), None)) is not None:
            self._put(sandbox, None)

    def _reset(self, event: Event) -> None:
        reset = reset_of(event)
        assert reset is not None
        self._on.resets.labels(self.backend, self._word(reset.rung), reset.outcome).inc()
        if reset.seconds is not None:
            self._on.reset_seconds.labels(self.backend, self._word(reset.rung)).observe(reset.seconds)

    def _word(self, value: Any) -> str:
        """Return a word that a backend has chosen, as long as there are few of them."""
        word = str(value)
        if word not in self._words:
            if len(self._words) >= _MOST_WORDS or not _WORD.fullmatch(word):
                return "other"
            self._words.add(word)
        return word

    # Leases.

    def _granted(self, event: Event) -> None:
        data = event.data
        start, image = str(data.get("start", StartKind.COLD)), str(data.get("image", ""))
        self._leases[str(event.sandbox)] = _Lease(event.at - data.get("queue", 0.0), start, image)
        if (sandbox := self._sandboxes.get(str(event.sandbox))) is not None:
            self._put(sandbox, "leased")

    def _refused(self, event: Event) -> None:
        if (event.episode, event.attempt) not in self._attempts:
            self._censor(StartKind.COLD, str(event.data.get("image", "")))

    def _lease_reset(self, event: Event) -> None:
        if reset_of(event) is None:
            return
        self._reset(event)
        sandbox = self._sandboxes.get(str(event.sandbox))
        if sandbox is not None and sandbox.state == "ready":  # the lease has another sandbox
            self._put(sandbox, "leased")

    def _released(self, event: Event) -> None:
        sandbox, lease = self._sandboxes.get(str(event.sandbox)), self._leases.pop(str(event.sandbox), None)
        if sandbox is not None and sandbox.state == "leased":
            self._put(sandbox, "returned")
        alone = (event.episode, event.attempt) not in self._attempts
        if alone and lease is not None and not lease.used:
            self._censor(lease.start, lease.image)

    def _censor(self, start: str, image: str) -> None:
        self._on.censored.labels(self.backend, start, *self._image(image)).inc()

    # Attempts.

    def _attempt_started(self, event: Event) -> None:
        key = event.episode, event.attempt
        if (earlier := self._attempts.pop(key, None)) is not None:
            self._turn(earlier, None, event.at)
        if event.attempt is not None and event.attempt > 1:
            twin = any((event.episode, number) in self._attempts for number in range(1, event.attempt))
            reason = "hedge" if twin else self._failed.get(event.episode, "resumed")
            self._on.retries.labels(self.backend, reason).inc()
        self._attempts[key] = _Attempt(event.at, event.at)
        self._on.running.labels(self.backend, "waiting").inc()

    def _attempt_granted(self, event: Event) -> None:
        attempt = self._attempts.get((event.episode, event.attempt))
        if attempt is None or attempt.state != "waiting":
            return
        attempt.lease = lease = self._leases.get(str(event.sandbox))
        sandbox = self._sandboxes.get(str(event.sandbox))
        began, fetching = event.at, 0.0
        if lease is not None and lease.start == StartKind.COLD and sandbox is not None:
            began = min(event.at, max(attempt.since, sandbox.began))
            fetching = sandbox.fetching(began, event.at)
        self._on.waiting.labels(self.backend, "hydrate").inc(fetching)
        self._on.waiting.labels(self.backend, "start").inc(max(0.0, event.at - began - fetching))
        self._turn(attempt, "agent", event.at, until=began)

    def _attempt_ended(self, event: Event) -> None:
        kind = event.data.get("kind")
        outcome = "rewarded" if kind is None else kind if kind in _KINDS else "other"
        self._on.attempts.labels(self.backend, outcome).inc()
        if kind is not None:
            self._failed[event.episode] = outcome
        if (attempt := self._attempts.pop((event.episode, event.attempt), None)) is None:
            return
        self._turn(attempt, None, event.at)
        if not attempt.used:
            lease = attempt.lease
            self._censor(StartKind.COLD if lease is None else lease.start, "" if lease is None else lease.image)

    def _command_started(self, event: Event) -> None:
        lease = self._leases.get(str(event.sandbox))
        attempt = self._attempts.get((event.episode, event.attempt))
        if attempt is not None:
            lease = attempt.lease or lease
            attempt.commands += 1
            if not attempt.used:
                attempt.used = True
                self._observe(event.at - attempt.asked_at, lease)
            if attempt.commands == 1:
                self._turn(attempt, "exec", event.at)
        elif lease is not None and not lease.used:
            self._observe(event.at - lease.requested_at, lease)
        if lease is not None:
            lease.used = True

    def _observe(self, seconds: float, lease: _Lease | None) -> None:
        start, image = (StartKind.COLD, "") if lease is None else (lease.start, lease.image)
        self._on.ttfc.labels(self.backend, start, *self._image(image)).observe(seconds)

    def _command_ended(self, event: Event) -> None:
        attempt = self._attempts.get((event.episode, event.attempt))
        if attempt is not None and attempt.commands and event.data.get("started") is not None:
            attempt.commands -= 1
            if not attempt.commands:
                self._turn(attempt, "agent", event.at)

    def _turn(self, attempt: _Attempt, state: str | None, at: float, *, until: float | None = None) -> None:
        """Have an attempt do something else now; what it did before it did *until* then."""
        cause = "queue" if attempt.state == "waiting" else attempt.state
        self._on.waiting.labels(self.backend, cause).inc(max(0.0, (at if until is None else until) - attempt.since))
        self._on.running.labels(self.backend, attempt.state).dec()
        if state is not None:
            attempt.state, attempt.since = state, at
            self._on.running.labels(self.backend, state).inc()

    def _episode_ended(self, event: Event) -> None:
        self._failed.pop(event.episode, None)
        self._on.episodes.labels(self.backend, str(event.data.get("status"))).inc()

    def _episode_restored(self, event: Event) -> None:
        self._on.restored.labels(self.backend, str(event.data.get("status"))).inc()
