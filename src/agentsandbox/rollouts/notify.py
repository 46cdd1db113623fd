# SPDX-License-Identifier: Apache-2.0
"""What sinks are told of episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentsandbox.models.episode import EpisodeRecord
    from agentsandbox.warmpool.publishing import Publisher

__all__ = ["tell_ended", "tell_restored"]


def tell_ended(publisher: Publisher, record: EpisodeRecord, at: float) -> None:
    """Tell every sink that an episode has its record."""
    publisher.emit("episode.ended", at, **_facts(record))


def tell_restored(publisher: Publisher, record: EpisodeRecord, at: float) -> None:
    """Tell every sink that an episode has a record already, from an earlier driver."""
    publisher.emit("episode.restored", at, **_facts(record))


def _facts(record: EpisodeRecord) -> dict[str, Any]:
    return {
        "sandbox": record.last.sandbox if record.last else None,
        "episode": record.episode.id,
        "attempt": record.attempts or None,
        "status": record.status.value,
        "reward": record.reward,
        "kind": record.failure.kind.value if record.failure else None,
        "reason": record.reason,
    }
