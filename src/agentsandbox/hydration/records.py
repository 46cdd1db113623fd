# SPDX-License-Identifier: Apache-2.0
"""What a plan is made from, and what it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from agentsandbox.models.image import ImageManifest

__all__ = ["Advice", "ImageUse", "NodeFacts", "NodePlan", "Plan", "Step", "Unplaced", "Wave"]


def _positive(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ConfigurationError(f"{attribute.name} must be above 0, not {value!r}")


def _share(_: object, attribute: attrs.Attribute[Any], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ConfigurationError(f"{attribute.name} is a share between 0 and 1, not {value!r}: a full disk evicts Pods")


def _names(value: Iterable[str]) -> frozenset[str]:
    return frozenset(value)


@attrs.frozen(kw_only=True)
class ImageUse:
    """An image, and what is done with it in a batch."""

    image: ImageManifest
    """The image."""
    rollouts: int = attrs.field(default=1, validator=_positive)
    """Episodes of it."""
    seconds: float = attrs.field(default=60.0, validator=_positive)
    """What one of them takes, the time to make its sandbox fresh included."""

    @property
    def name(self) -> str:
        """The image's name."""
        return self.image.name


@attrs.frozen(kw_only=True)
class NodeFacts:
    """A node, as far as a plan depends on it."""

    name: str
    """Its name."""
    room: int = attrs.field(default=110, validator=_positive)
    """Sandboxes that it has room for at once."""
    disk: int = attrs.field(default=100 * 1000**3, validator=_positive)
    """Bytes of the disk that images and writable layers are on."""
    used: int = 0
    """Bytes of it that something else takes."""
    headroom: float = attrs.field(default=0.85, validator=_share)
    """Share of the disk above which the kubelet removes images: a plan stays below."""
    writable_layer: int = 0
    """Bytes that a sandbox writes."""
    unpack_rate: float = attrs.field(default=300e6, validator=_positive)
    """Bytes on disk a second, all its pulls together."""
    network_rate: float = attrs.field(default=1e9, validator=_positive)
    """Bytes fetched a second, all its pulls together."""
    pull_overhead: float = 0.5
    """Seconds that a pull takes besides."""
    pulls_at_once: int = attrs.field(default=5, validator=_positive)
    """Pulls at a time."""
    images: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    """Images that are there already, by name or digest."""
    layers: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    """Layers that are there already."""

    @property
    def budget(self) -> int:
        """Bytes that images may take before the kubelet begins to remove some."""
        return max(0, int(self.disk * self.headroom) - self.used - self.room * self.writable_layer)

    def with_(self, images: Iterable[ImageManifest]) -> NodeFacts:
        """Return the node with more images on it, and their layers."""
        names, layers = set(self.images), set(self.layers)
        for image in images:
            names.add(image.name)
            layers.update(layer.digest for layer in image.layers)
        return attrs.evolve(self, images=names, layers=layers)


@attrs.frozen(kw_only=True)
class Step:
    """What happens to an image on a node."""

    pull: str | None = None
    """The image that is fetched."""
    evict: str | None = None
    """The image that is not needed for the longest time to come, and goes."""


@attrs.frozen(kw_only=True)
class Wave:
    """Images that are on a node at the same time."""

    images: tuple[str, ...]
    """In the order in which they are fetched and used."""
    size: int
    """Bytes on disk, shared layers once."""
    pull_seconds: float
    """What it takes to fetch what is missing of them."""
    run_seconds: float
    """What their episodes take on that node."""


@attrs.frozen(kw_only=True)
class NodePlan:
    """What one node does."""

    node: str
    """Its name."""
    waves: tuple[Wave, ...] = ()
    """One after another; the next one is fetched while the episodes of one run."""
    sandboxes: int = 0
    """Sandboxes that it is worth having there at once."""
    pull_seconds: float = 0.0
    """Seconds of fetching."""
    run_seconds: float = 0.0
    """Seconds of episodes."""
    complete_seconds: float = 0.0
    """Until its last episode is over, beginning with what is on the node when the batch begins."""
    steps: tuple[Step, ...] = ()
    """With several batches: what it fetches and removes for this one, in order. It may begin while others run."""

    @property
    def images(self) -> tuple[str, ...]:
        """Its images in order."""
        return tuple(image for wave in self.waves for image in wave.images)

    @property
    def stall_seconds(self) -> float:
        """Seconds in which it has sandboxes and nothing to run in them, because images are on their way."""
        return max(0.0, self.complete_seconds - self.run_seconds)


@attrs.frozen(kw_only=True)
class Unplaced:
    """An image that no node can hold."""

    image: str
    """Which."""
    reason: str
    """Why, with figures."""


@attrs.frozen(kw_only=True)
class Advice:
    """The one change that helps most."""

    change: str
    """What to change."""
    effect: str
    """What comes of it."""
    complete_seconds: float
    """Until the batch is over then, and those ahead."""


@attrs.frozen(kw_only=True)
class Plan:
    """Which image on which node, in which order, and what to expect of it."""

    nodes: tuple[NodePlan, ...]
    """Node by node."""
    placement: Mapping[str, str]
    """Image → node."""
    unplaced: tuple[Unplaced, ...] = ()
    """What does not fit anywhere."""
    pulled: int = 0
    """Bytes fetched, over all nodes."""
    complete_seconds: float = 0.0
    """Predicted: until the last episode is over."""
    bound_seconds: float = 0.0
    """No plan for these images and nodes can be faster than this."""
    pull_bound_seconds: float = 0.0
    """The part of it that is about fetching: every layer once, spread over all nodes."""
    run_bound_seconds: float = 0.0
    """The part of it that is about episodes: all of them, in all the room there is."""
    load_seconds: float = 0.0
    """The busiest node's fetching or running, whichever is longer: what the placement makes small."""
    load_bound_seconds: float = 0.0
    """No placement can make that smaller than this."""
    sandboxes: int = 0
    """Pods to make if their image can be changed in place."""
    sandboxes_without_change: int = 0
    """Pods to make if it cannot."""
    advice: Advice | None = None
    """What would help most; ``None`` if nothing would."""
    ahead: tuple[Plan, ...] = ()
    """
    The batches that follow, one after another. Each begins when the one before it is over, and its seconds count from
    then; its images are fetched before that as far as the disk has room, so that only its episodes bound it.
    """
    total_bound_seconds: float = 0.0
    """This batch and those ahead cannot be over sooner."""

    @property
    def batches(self) -> tuple[Plan, ...]:
        """Return this batch and those ahead."""
        return (self, *self.ahead)

    @property
    def total_seconds(self) -> float:
        """Predicted: until the last batch is over."""
        return sum(each.complete_seconds for each in self.batches)

    @property
    def stall_seconds(self) -> float:
        """Seconds by which fetching makes the batch longer."""
        running = max((node.run_seconds for node in self.nodes), default=0.0)
        return max(0.0, self.complete_seconds - max(running, self.run_bound_seconds))
