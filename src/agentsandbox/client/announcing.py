# SPDX-License-Identifier: Apache-2.0
"""Rollouts that are to come, so that their sandboxes are ready when they begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.episode import Episode
from agentsandbox.models.limits import check_count

if TYPE_CHECKING:
    from agentsandbox.warmpool.engine import Engine
    from agentsandbox.warmpool.outlook import Announcement

__all__ = ["Announced", "count"]


class Announced:
    """
    Rollouts that were announced: see :meth:`SandboxClient.announce`.

    What is left of them goes down with every lease of their images that is granted, and is forgotten when the client is
    closed.
    """

    def __init__(self, engine: Engine, announcement: Announcement) -> None:
        self._engine = engine
        self._announcement = announcement

    @property
    def left(self) -> Mapping[str, int]:
        """Image → how many of its rollouts have no sandbox yet."""
        return MappingProxyType(self._announcement.left)

    def withdraw(self) -> None:
        """Expect the rest of them no longer. Idempotent."""
        self._engine.retract(self._announcement)

    def __repr__(self) -> str:
        return repr(self._announcement).replace("Announcement", "Announced")


def count(batch: Iterable[Episode] | Mapping[str, int]) -> dict[str, int]:
    """
    Return how many rollouts there are of each image, in the order in which the images come up.

    Raises:
        ConfigurationError: If it is neither a mapping of images to whole numbers nor a collection of episodes.

    """
    if isinstance(batch, Mapping):
        for image, number in batch.items():
            if not isinstance(image, str) or not image:
                raise ConfigurationError(f"an image is a name such as 'host', not {image!r}")
            check_count(f"the number of rollouts of image {image!r}", number, least=0)
        return {image: number for image, number in batch.items() if number}
    counts: Counter[str] = Counter()
    for episode in batch:
        other: Any = episode
        if not isinstance(other, Episode):
            raise ConfigurationError(f"a batch to announce has episodes, or maps images to numbers; not {other!r}")
        counts[episode.image] += 1
    return dict(counts)
