# SPDX-License-Identifier: Apache-2.0
"""The collectors that sinks for Prometheus keep, once a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["BUCKETS", "STATES", "Collectors"]

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Upper bounds of histograms, in seconds: from a warm command to an image that has to be pulled."""

STATES = ("creating", "ready", "leased", "returned", "lost", "stuck")
"""States of a sandbox, as far as events tell of them; ``returned`` is being made like new, or removed."""


class Collectors:
    """The collectors of one registry, which all of its sinks share."""

    def __init__(self, registry: CollectorRegistry, *, images: bool) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.images = images
        image = ("image",) if images else ()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"agentsandbox_{name}_total", text, ("backend", *labels), registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            name, labels = f"agentsandbox_{name}_seconds", ("backend", *labels)
            return Histogram(name, text, labels, buckets=BUCKETS, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            name, labels = f"agentsandbox_{name}", ("backend", *labels)
            return Gauge(name, text, labels, registry=registry, multiprocess_mode="livesum")

        self.episodes = counter("episodes", "Episodes that have ended, by how.", "status")
        self.restored = counter("episodes_restored", "Episodes whose record an earlier driver had made.", "status")
        self.attempts = counter("attempts", "Attempts that have ended: rewarded, or a kind of failure.", "outcome")
        self.running = gauge("attempts_in_progress", "Attempts under way, by what they are doing.", "state")
        self.retries = counter("retries", "Attempts that were not the first one, by why.", "reason")
        self.waiting = counter("waiting_seconds", "Seconds of attempts, by what they waited for.", "cause")
        self.ttfc = histogram("ttfc", "From acquire() to the start of the first command.", "start", *image)
        self.censored = counter("ttfc_censored", "Those that never came to a first command.", "start", *image)
        self.resets = counter("resets", "Used sandboxes made like new, or tried to.", "rung", "outcome")
        self.reset_seconds = histogram("reset", "How long a reset took.", "rung")
        self.sandboxes = gauge("sandboxes", "Sandboxes that exist, by state.", "state", *image)
        self.creations = counter("sandbox_creations", "Sandboxes whose making has begun.", *image)
        self.made = histogram("sandbox_creation", "From there until it could run its first command.", *image)
        self.pulls = histogram("image_pull", "How long a node took to fetch an image, where that is told.", *image)
        self.failures = counter("sandbox_failures", "Sandboxes that could not be made.", "kind", *image)
        self.losses = counter("sandbox_losses", "Sandboxes that were not what they had been any more.", "reason")
        self.throttles = counter("api_throttles", "Creations that the API server asked to slow down.")

    @classmethod
    def of(cls, registry: CollectorRegistry | None, *, images: bool) -> Collectors:
        """
        Return those of a registry, made if there are none yet.

        Args:
            registry: The registry; ``None`` is the global one.
            images: Whether metrics of sandboxes have a label ``image``.

        Raises:
            ConfigurationError: If ``prometheus_client`` is missing, or they have other labels.

        """
        try:
            from prometheus_client import REGISTRY
        except ImportError as error:
            raise ConfigurationError(
                "metrics for Prometheus need prometheus-client: pip install 'agentsandbox[metrics]'"
            ) from error
        registry = REGISTRY if registry is None else registry
        known = _shared.get(registry)
        if known is None:
            known = _shared[registry] = cls(registry, images=images)
        if known.images is not images:
            raise ConfigurationError(
                f"the sinks of one registry have the same labels, and this one was begun with images={not images}"
            )
        return known


_shared: WeakKeyDictionary[CollectorRegistry, Collectors] = WeakKeyDictionary()
