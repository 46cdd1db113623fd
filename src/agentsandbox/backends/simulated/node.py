# SPDX-License-Identifier: Apache-2.0
"""One node: room for Pods, a disk with the kubelet's garbage collection, and image pulls that wait for each other."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from agentsandbox.errors import ProvisionError

if TYPE_CHECKING:
    from agentsandbox.backends.simulated.model import ClusterModel
    from agentsandbox.models.image import ImageManifest, Layer

__all__ = ["Node"]


@attrs.define(eq=False)
class _Here:
    """An image, or a layer, that is on the node or on its way."""

    ready_at: float
    users: int = 0


class Node:
    """
    What a kubelet and its container runtime do, as far as time and room are concerned.

    Args:
        name: The node's.
        model: What it is like.

    """

    def __init__(self, name: str, model: ClusterModel) -> None:
        self.name = name
        self.pods = 0
        """Pods that take room, those that end included."""
        self.bytes_pulled = 0
        """Bytes fetched, ever."""
        self.pulls = 0
        """Images fetched, ever."""
        self.removed = 0
        """Images that garbage collection took away, ever."""
        self.disk = model.disk_used
        """Bytes on disk."""
        self.disk_peak = self.disk
        """The most there ever were."""
        self._model = model
        self._images: dict[str, _Here] = {}
        self._manifests: dict[str, ImageManifest] = {}
        self._layers: dict[str, _Here] = {}
        # Images that no Pod uses, the one that was used last at the end.
        self._unused: OrderedDict[str, None] = OrderedDict()
        self._sizes: list[int] = []
        self._pulling = [0.0] * model.pulls_at_once
        self._starting = [0.0] * model.starts_at_once

    @property
    def room(self) -> int:
        """How many more Pods it takes."""
        return self._model.room - self.pods

    def has(self, image: str, now: float) -> bool:
        """Whether an image is there."""
        here = self._images.get(image)
        return here is not None and here.ready_at <= now

    def images(self) -> Iterable[str]:
        """Return the images that are there or on their way."""
        return self._images.keys()

    def tells_of(self, image: str, now: float) -> bool:
        """Whether the scheduler knows that an image is there: a node tells of its largest images only."""
        if not self.has(image, now):
            return False
        most = self._model.status_images
        return len(self._sizes) <= most or self._manifests[image].unpacked >= self._sizes[-most]

    def hydrate(self, image: ImageManifest) -> None:
        """
        Have an image on the node from the beginning.

        Raises:
            ProvisionError: If the disk has no room for it.

        """
        self._add(image, 0.0)
        self._unused[image.name] = None

    def pull(self, image: ImageManifest, now: float) -> float:
        """
        Have an image for a Pod: fetch what is not there. The image is in use until :meth:`leave`.

        Returns:
            When it is there.

        Raises:
            ProvisionError: If the disk has no room for it.

        """
        here = self._images.get(image.name)
        if here is None:
            here = self._add(image, now, fetch=True)
        here.users += 1
        self._unused.pop(image.name, None)
        return here.ready_at

    def leave(self, image: str) -> None:
        """Let a Pod that used an image use it no more."""
        here = self._images[image]
        here.users -= 1
        if not here.users:
            self._unused[image] = None

    def write(self, size: int) -> None:
        """Let the Pods' own files grow, or shrink."""
        self._collect(size)
        self._grow(size)

    def start(self, seconds: float, now: float) -> float:
        """Start something that takes a while; return when it has started."""
        return _serve(self._starting, seconds, now)

    def _add(self, image: ImageManifest, now: float, *, fetch: bool = False) -> _Here:
        missing = [layer for layer in image.layers if layer.digest not in self._layers]
        need = sum(layer.unpacked for layer in missing)
        self._collect(need)
        if self.disk + need > self._model.disk:
            raise ProvisionError(
                f"no space left on the disk of {self.name}: {image.name!r} needs {need / 1e9:.1f} GB, and "
                f"{(self._model.disk - self.disk) / 1e9:.1f} GB are free"
            )
        ready_at = end = self._fetch(missing, now) if fetch else 0.0
        # A layer can be used by others once it is unpacked, and they are unpacked one after another from the base on.
        begun = 0.0 if not missing else end - self._unpacking(missing)
        for layer in image.layers:
            if layer.digest not in self._layers:
                begun = begun + self._unpacking([layer]) if fetch else 0.0
                self._layers[layer.digest] = _Here(begun)
            here = self._layers[layer.digest]
            here.users += 1
            ready_at = max(ready_at, here.ready_at)
        self._grow(need)
        self._manifests[image.name] = image
        insort(self._sizes, image.unpacked)
        found = self._images[image.name] = _Here(ready_at)
        return found

    def _fetch(self, missing: list[Layer], now: float) -> float:
        self.bytes_pulled += sum(layer.size for layer in missing)
        self.pulls += 1
        return _serve(self._pulling, self._model.pull_overhead + self._unpacking(missing), now)

    def _unpacking(self, layers: list[Layer]) -> float:
        # Downloading and unpacking overlap; the slower of the two decides. Each lane has its share of both.
        model, lanes = self._model, self._model.pulls_at_once
        return sum(max(layer.size / model.network_rate, layer.unpacked / model.unpack_rate) * lanes for layer in layers)

    def _collect(self, need: int) -> None:
        """Remove unused images, the longest unused first, if the disk would be too full, as the kubelet does."""
        model = self._model
        if self.disk + need <= model.gc_high * model.disk:
            return
        while self._unused and self.disk + need > model.gc_low * model.disk:
            name, _ = self._unused.popitem(last=False)
            manifest = self._manifests.pop(name)
            del self._images[name]
            del self._sizes[bisect_left(self._sizes, manifest.unpacked)]
            self.removed += 1
            for layer in manifest.layers:
                here = self._layers[layer.digest]
                here.users -= 1
                if not here.users:
                    del self._layers[layer.digest]
                    self.disk -= layer.unpacked

    def _grow(self, size: int) -> None:
        self.disk += size
        self.disk_peak = max(self.disk_peak, self.disk)

    def __repr__(self) -> str:
        return (
            f"<Node {self.name!r} [{self.pods} of {self._model.room} Pods, {len(self._images)} images, "
            f"{self.disk / 1e9:.1f} of {self._model.disk / 1e9:.0f} GB]>"
        )


def _serve(lanes: list[float], seconds: float, now: float) -> float:
    """Give the lane that is free first some work; return when that is done."""
    end = max(now, lanes[0]) + seconds
    heapq.heapreplace(lanes, end)
    return end
