# SPDX-License-Identifier: Apache-2.0
"""What container images weigh, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.limits import check_count

__all__ = ["EXPANSION", "ImageManifest", "Layer"]

EXPANSION = 2.7
"""
Bytes on disk for a byte of a compressed layer, when only the compressed size is known, as in an OCI manifest: what gzip
at its default level makes of installed Python environments and source trees, roughly.
"""


def _bytes(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    check_count(attribute.name, value, least=0)


@attrs.frozen(kw_only=True)
class Layer:
    """One layer. Layers of the same digest are the same layer, on a node once whoever uses it."""

    digest: str
    """What it is known by."""
    size: int = attrs.field(validator=_bytes)
    """Bytes that are fetched: compressed."""
    unpacked: int = attrs.field(default=-1)
    """Bytes on the disk of a node; :data:`EXPANSION` times the size when nothing is said."""

    def __attrs_post_init__(self) -> None:
        """Fill in what was not said."""
        if self.unpacked < 0:
            object.__setattr__(self, "unpacked", round(self.size * EXPANSION))


def _tuple(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    return tuple(layers)


@attrs.frozen(kw_only=True)
class ImageManifest:
    """One image."""

    name: str
    """What it is called."""
    layers: tuple[Layer, ...] = attrs.field(converter=_tuple)
    """Its layers, the base first."""

    @layers.validator
    def _layers(self, _: object, value: tuple[Layer, ...]) -> None:
        if not value:
            raise ConfigurationError(f"image {self.name!r} has no layers")

    @property
    def unpacked(self) -> int:
        """Bytes that it takes on a node that has nothing of it."""
        return sum(layer.unpacked for layer in self.layers)

    @property
    def size(self) -> int:
        """Bytes that a node fetches that has nothing of it."""
        return sum(layer.size for layer in self.layers)
