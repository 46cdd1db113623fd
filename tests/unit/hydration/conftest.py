# SPDX-License-Identifier: Apache-2.0
"""Images and nodes that are made up."""

from __future__ import annotations

from random import Random

import pytest

from agentsandbox.hydration import ImageUse, NodeFacts
from agentsandbox.models.image import ImageManifest, Layer

GB = 1000**3


def image(name: str, own: int = 100_000_000, base: str | None = None, base_size: int = 500_000_000) -> ImageManifest:
    """An image of one layer of its own, on a base that others may have too; on disk as large as fetched."""
    layers = () if base is None else (Layer(digest=base, size=base_size, unpacked=base_size),)
    return ImageManifest(name=name, layers=(*layers, Layer(digest=f"own {name}", size=own, unpacked=own)))


def random_instance(seed: int) -> tuple[list[ImageUse], list[NodeFacts]]:
    """Images of a few families, with rollouts of different lengths, and a few nodes."""
    random = Random(seed)
    bases = [(f"base {n}", int(random.uniform(50e6, 900e6))) for n in range(random.randint(1, 12))]
    uses = []
    for number in range(random.randint(150, 400)):
        base, size = random.choice(bases)
        own = int(random.lognormvariate(18.5, 0.7))
        manifest = image(f"image {number}", own, base, size)
        seconds = random.choice([5.0, 20.0, 60.0])
        uses.append(ImageUse(image=manifest, rollouts=random.randint(1, 8), seconds=seconds))
    nodes = [NodeFacts(name=f"node-{n}", disk=1000 * GB) for n in range(random.randint(2, 12))]
    return uses, nodes


@pytest.fixture
def make_image():
    return image


@pytest.fixture
def make_instance():
    return random_instance
