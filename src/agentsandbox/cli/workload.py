# SPDX-License-Identifier: Apache-2.0
"""What is simulated: images, how many rollouts of each, and how long every one of them takes."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import attrs

from agentsandbox.backends.simulated.catalogue import catalogue
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import ImageUse, NodeFacts
from agentsandbox.hydration.inputs import from_csv, from_oci_layout, read_list
from agentsandbox.hydration.manifest import PLATFORM
from agentsandbox.models.episode import Episode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentsandbox.backends.simulated import ClusterModel

__all__ = ["Inputs", "Workload", "made_up", "of_uses"]

_BETWEEN = 0.4
"""Standard deviation of the logarithm of what the rollouts of an image take on average; an assumption."""

_WITHIN = 0.1
"""The same of the rollouts of one image around that; an assumption."""


@attrs.frozen(kw_only=True)
class Workload:
    """A batch, and what is known of it beforehand."""

    model: ClusterModel
    """The cluster."""
    uses: tuple[ImageUse, ...]
    """The images; the seconds are what a rollout of each takes on average, as earlier steps have shown."""
    episodes: tuple[Episode, ...] = attrs.field(repr=False)
    """The batch in input order; ``inputs["seconds"]`` is what an episode takes, which nobody knows beforehand."""
    seed: int = 0
    """Of everything that is left to chance."""

    @property
    def limit(self) -> int:
        """Sandboxes that all nodes together have room for."""
        return self.model.room * self.model.nodes

    @property
    def work(self) -> float:
        """Seconds of all episodes together."""
        return math.fsum(episode.inputs["seconds"] for episode in self.episodes)

    @property
    def longest(self) -> float:
        """Seconds of the longest episode."""
        return max(float(episode.inputs["seconds"]) for episode in self.episodes)

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Return the nodes as a planner sees them."""
        model = self.model
        return tuple(
            NodeFacts(
                name=f"node-{number:02d}",
                room=model.room,
                disk=model.disk,
                used=model.disk_used,
                headroom=model.gc_high,
                writable_layer=model.writable_layer,
                unpack_rate=model.unpack_rate,
                network_rate=model.network_rate,
                pull_overhead=model.pull_overhead,
                pulls_at_once=model.pulls_at_once,
            )
            for number in range(model.nodes)
        )


def made_up(model: ClusterModel, *, images: int, rollouts: int, seconds: float, seed: int) -> Workload:
    """Make up a batch: *rollouts* of each of *images*, *seconds* each on average."""
    random = Random(f"workload {seed}")  # noqa: S311 - no secret
    uses = [
        ImageUse(image=image, rollouts=rollouts, seconds=seconds * _factor(random, _BETWEEN))
        for image in catalogue(model, images, seed=seed)
    ]
    return of_uses(model, uses, seed=seed)


def of_uses(model: ClusterModel, uses: Sequence[ImageUse], *, seed: int) -> Workload:
    """Make a batch of images that are known, with what their rollouts take on average."""
    random = Random(f"episodes {seed}")  # noqa: S311 - no secret
    episodes = [
        Episode(
            id=f"{use.name}/{number}",
            image=use.name,
            group=use.name,
            inputs={"seconds": use.seconds * _factor(random, _WITHIN)},
        )
        for use in uses
        for number in range(use.rollouts)
    ]
    return Workload(model=model, uses=tuple(uses), episodes=tuple(episodes), seed=seed)


@attrs.frozen(kw_only=True)
class Inputs:
    """Where the images are listed, and how they are looked up there."""

    csv: Path | None = None
    """A file with what they weigh."""
    oci_layout: Path | None = None
    """A directory with their manifests."""
    registry_images: Path | None = None
    """A file with their names; registries have the manifests."""
    platform: str = PLATFORM
    """Of images that are there for several."""
    plain_http: tuple[str, ...] = ()
    """Registries without TLS."""
    ca_file: Path | None = None
    """Certificates for the others."""
    deadline: float = 600.0
    """Seconds that registries have."""

    async def read(self, *, rollouts: int, seconds: float) -> tuple[tuple[ImageUse, ...], dict[str, str]]:
        """
        Read images from the one place that is named.

        Returns:
            The images; and image → why what it weighs is not known.

        Raises:
            ConfigurationError: If several places are named or none, it cannot be read, or no image of it can.

        """
        places = [path for path in (self.csv, self.oci_layout, self.registry_images) if path is not None]
        if len(places) != 1:
            raise ConfigurationError("give either --csv or --oci-layout or --registry-images")
        if self.csv is not None:
            return from_csv(self.csv, rollouts=rollouts, seconds=seconds), {}
        if self.oci_layout is not None:
            uses = from_oci_layout(self.oci_layout, rollouts=rollouts, seconds=seconds, platform=self.platform)
            return uses, {}
        from agentsandbox.hydration.registry import from_registry

        wanted = read_list(places[0], rollouts=rollouts, seconds=seconds)
        found = await from_registry(
            wanted,
            platform=self.platform,
            plain_http=self.plain_http,
            ca_file=self.ca_file,
            deadline=self.deadline,
        )
        unread = {image: f"{type(error).__name__}: {error}" for image, error in found.failed.items()}
        if not found.uses:
            raise ConfigurationError("\n  ".join(["none of the images can be read:", *map(": ".join, unread.items())]))
        return found.uses, unread


def _factor(random: Random, deviation: float) -> float:
    """Draw a log-normal variable whose mean is 1."""
    return math.exp(random.gauss(-(deviation**2) / 2, deviation))
