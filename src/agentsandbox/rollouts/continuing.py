# SPDX-License-Identifier: Apache-2.0
"""Episodes that go on from a checkpoint: their sandbox is made to hold it before the rollout function has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from agentsandbox.models.episode import Episode, Graded
    from agentsandbox.rollouts.source import RolloutFunction

__all__ = ["check_restore", "continuing"]


def check_restore(restore: Mapping[str, Any], batch: Sequence[Episode]) -> None:
    """
    Refuse what cannot be meant.

    Raises:
        ConfigurationError: If it is no mapping, or names an episode that is not in the batch.

    """
    if not isinstance(restore, Mapping):
        raise ConfigurationError(f"restore is a mapping of episode ids to checkpoints, not {restore!r:.100}")
    known = {episode.id for episode in batch}
    if unknown := [id for id in restore if id not in known]:
        raise ConfigurationError(f"restore names episode {unknown[0]!r}, which is not in the batch")


def continuing(rollout: RolloutFunction, restore: Mapping[str, Any], store: Any = None) -> RolloutFunction:
    """
    Return a rollout function that begins where checkpoints were made.

    Whatever goes wrong with that is the attempt's failure, within its time: a checkpoint that is damaged is final, a
    sandbox that is lost is tried again on another one.

    Args:
        rollout: What runs an episode.
        restore: Episode id → the checkpoint, or its id, that every attempt of it begins with.
        store: Where they are kept; ``None`` is the pool's.

    """

    async def begin(sandbox: Any, episode: Episode) -> float | Graded:
        if episode.id in restore:
            await sandbox.restore(restore[episode.id], store)
        return await rollout(sandbox, episode)

    return begin
