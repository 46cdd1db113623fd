# SPDX-License-Identifier: Apache-2.0
"""Images that nobody has built, for planning and simulation: as many as wanted, some of their layers shared."""

from __future__ import annotations

import math
from random import Random
from typing import TYPE_CHECKING

from agentsandbox.models.image import EXPANSION, ImageManifest, Layer

if TYPE_CHECKING:
    from agentsandbox.backends.simulated.model import ClusterModel

__all__ = ["catalogue", "unknown_image"]

_SPREAD = 0.35
"""Standard deviation of the logarithm of an image's own part: the largest of thousands is thrice the mean."""


def catalogue(model: ClusterModel, count: int, *, seed: int = 0) -> tuple[ImageManifest, ...]:
    """
    Make up images of a few repositories each of which has a base that all its images share.

    Args:
        model: Their mean size, how many repositories, and how much is shared.
        count: How many images.
        seed: The same seed gives the same images.

    """
    random = Random(f"catalogue {seed}")  # noqa: S311 - no secret
    base = round(model.image_size * model.shared)
    own = model.image_size - base
    bases = [_layer(f"base-{number}", base) for number in range(model.repositories)]
    images = []
    for number in range(count):
        repository = number % model.repositories
        # The mean of a log-normal variable with this median is 1.
        size = own * math.exp(random.gauss(-(_SPREAD**2) / 2, _SPREAD))
        name = f"repo-{repository:02d}:{number:05d}"
        images.append(ImageManifest(name=name, layers=(bases[repository], _layer(f"own-{number}", round(size)))))
    return tuple(images)


def unknown_image(model: ClusterModel, name: str) -> ImageManifest:
    """Make up an image of which only the name is known: of the usual size, sharing nothing."""
    return ImageManifest(name=name, layers=(_layer(f"all-{name}", model.image_size),))


def _layer(digest: str, size: int) -> Layer:
    return Layer(digest=digest, size=size, unpacked=round(size * EXPANSION))
