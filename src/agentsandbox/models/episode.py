# SPDX-License-Identifier: Apache-2.0
"""Units of work and what came of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs

from agentsandbox.errors import ConfigurationError, Failure
from agentsandbox.models.sandbox import Identity
from agentsandbox.models.timing import Timings, TTFCSample, TTFCSummary

__all__ = [
    "Attempt",
    "Counts",
    "Episode",
    "EpisodeRecord",
    "Graded",
    "GroupSummary",
    "RolloutResult",
    "Status",
    "check_batch",
]


@attrs.frozen(kw_only=True)
class Episode:
    """One unit of work, tried in one or more attempts."""

    id: str = attrs.field()
    """Unique in its batch."""
    image: str
    """What its sandbox is made from."""
    group: Hashable = None
    """Episodes of one group are compared with each other, as GRPO does with the rollouts of one prompt."""
    inputs: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    """Whatever the rollout function needs. Not interpreted."""
    artifacts: tuple[str, ...] = attrs.field(default=(), converter=tuple)
    """Files in the sandbox that are saved with the record before the sandbox is released."""
    timeout: float | None = attrs.field(default=None)
    """Seconds one attempt may take, from the grant of its sandbox; ``None`` is the pool's."""

    @id.validator
    def _id(self, _: object, value: str) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"an episode id is a string that is not empty, not {value!r}")

    @timeout.validator
    def _timeout(self, _: object, value: float | None) -> None:
        if value is not None and not value > 0:
            raise ConfigurationError(f"timeout of episode {self.id!r} must be above 0 seconds, not {value!r}")


@attrs.frozen(kw_only=True)
class Graded:
    """A reward with what a rollout function wants to keep beside it."""

    reward: float
    """The reward."""
    patch: str | None = None
    """What the episode changed, as a patch."""
    info: Mapping[str, Any] = attrs.field(factory=dict)
    """Anything that serialises to JSON."""


class Status(StrEnum):
    """How an episode ended. Exactly one of them, and ``submitted`` is the sum of all."""

    REWARDED = "rewarded"
    """A grader produced a number in the sandbox that the episode was given."""
    FAILED = "failed"
    """It failed for good: by its own doing, or by a mistake in the rollout function."""
    RETRYABLE = "retryable"
    """It failed by nobody's doing who wrote it: submit it again."""
    CANCELLED = "cancelled"
    """The batch was stopped before it ended."""


@attrs.frozen(kw_only=True)
class Attempt:
    """One try of an episode in one sandbox."""

    number: int
    """1 for the first."""
    sandbox: str | None = None
    """The sandbox it was given."""
    node: str | None = None
    """Where that sandbox was."""
    identity: Identity | None = None
    """Its identity when it was granted, compared around every command."""
    reward: float | None = None
    """The reward, if it gave one."""
    failure: Failure | None = None
    """Why it gave none."""
    ttfc: TTFCSample | None = None
    """Its time to first command."""
    timings: Timings = Timings()
    """Where its time went."""
    commands: tuple[Mapping[str, Any], ...] = ()
    """Its command log: one mapping a command."""
    restored: str | None = None
    """The id of the checkpoint that it went on from, if it did."""
    checkpoints: tuple[str, ...] = ()
    """The ids of the checkpoints that it made, in order: another attempt can go on from the last one."""


@attrs.frozen(kw_only=True)
class EpisodeRecord:
    """What came of one episode."""

    episode: Episode = attrs.field(repr=lambda episode: repr(episode.id))
    """The episode."""
    status: Status
    """How it ended."""
    reward: float | None = None
    """The reward; absent, never 0, unless a grader produced it."""
    failure: Failure | None = None
    """Why there is no reward."""
    attempts: int = 0
    """How many attempts it took."""
    history: tuple[Attempt, ...] = attrs.field(default=(), repr=False)
    """Every attempt, in order."""
    patch: str | None = attrs.field(default=None, repr=False)
    """What it changed, if the rollout function said so."""
    info: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    """What the rollout function wanted to keep."""
    artifacts: Mapping[str, Path] = attrs.field(factory=dict, repr=False)
    """Where the files that the episode names were saved."""

    @property
    def reason(self) -> str | None:
        """One line for a person: why there is no reward."""
        return self.failure.message if self.failure else None

    @property
    def retryable(self) -> bool:
        """Whether the episode should be submitted again."""
        return self.status is Status.RETRYABLE

    @property
    def last(self) -> Attempt | None:
        """The attempt that decided."""
        return self.history[-1] if self.history else None

    @property
    def ttfc(self) -> TTFCSample | None:
        """Time to first command of the attempt that decided."""
        return self.last.ttfc if self.last else None

    @property
    def timings(self) -> Timings:
        """Where the time of the deciding attempt went."""
        return self.last.timings if self.last else Timings()


@attrs.frozen(kw_only=True)
class Counts:
    """The conservation law: ``submitted`` is the sum of the other four once a batch has ended."""

    submitted: int = 0
    """Episodes given to the pool."""
    rewarded: int = 0
    """Those with a valid reward."""
    failed: int = 0
    """Those that failed for good."""
    retryable: int = 0
    """Those to submit again."""
    cancelled: int = 0
    """Those that were stopped."""

    @property
    def pending(self) -> int:
        """Those that have not ended."""
        return self.submitted - self.rewarded - self.failed - self.retryable - self.cancelled


@attrs.frozen(kw_only=True)
class GroupSummary:
    """The state of one group of episodes."""

    group: Hashable
    """Its key."""
    size: int
    """How many episodes it has."""
    rewards: tuple[float | None, ...]
    """Their rewards in input order."""

    @property
    def valid_count(self) -> int:
        """How many have a valid reward."""
        return sum(reward is not None for reward in self.rewards)

    @property
    def complete(self) -> bool:
        """Whether all have a valid reward, so that advantages within the group mean something."""
        return self.valid_count == self.size

    @property
    def all_failed(self) -> bool:
        """Whether none has a valid reward: there is nothing to compare, and nothing to fall back to."""
        return self.valid_count == 0


@attrs.frozen(kw_only=True)
class RolloutResult:
    """What came of a batch."""

    records: tuple[EpisodeRecord, ...] = attrs.field(repr=lambda records: f"<{len(records)} records>")
    """One record an episode, in input order."""
    counts: Counts = Counts()
    """The conservation law in figures."""
    ttfc: TTFCSummary = TTFCSummary()
    """Time to first command over every attempt."""
    samples: tuple[TTFCSample, ...] = attrs.field(default=(), repr=False)
    """The samples behind it."""
    wall_seconds: float = 0.0
    """From submission to the last record."""
    late_results: int = 0
    """Results of superseded attempts that arrived after all and were dropped."""
    resumed: int = 0
    """Records that were taken from a journal, as an earlier driver had made them."""
    extra_acquires: int = 0
    """Sandboxes that were asked for beside those of the attempts, to make up for stragglers."""
    lost_twins: int = 0
    """Attempts that were given up because their twin was faster."""

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Rewards in input order; ``None`` where there is no valid one."""
        return tuple(record.reward for record in self.records)

    @property
    def valid_count(self) -> int:
        """How many rewards are valid."""
        return sum(record.reward is not None for record in self.records)

    @property
    def retryable(self) -> tuple[Episode, ...]:
        """The episodes to submit again."""
        return tuple(record.episode for record in self.records if record.retryable)

    @property
    def groups(self) -> Mapping[Hashable, GroupSummary]:
        """The groups in order of first appearance. Episodes without a group are in none."""
        members: dict[Hashable, list[float | None]] = {}
        for record in self.records:
            if record.episode.group is not None:
                members.setdefault(record.episode.group, []).append(record.reward)
        return {key: GroupSummary(group=key, size=len(r), rewards=tuple(r)) for key, r in members.items()}


def check_batch(batch: Sequence[Episode]) -> None:
    """
    Refuse a batch that cannot work, before anything is created for it.

    Raises:
        ConfigurationError: If something is not an episode, or two have the same id.

    """
    seen: set[str] = set()
    for episode in batch:
        if not isinstance(episode, Episode):
            raise ConfigurationError(f"a batch is a sequence of Episode, not {episode!r}")
        if episode.id in seen:
            raise ConfigurationError(f"episode id {episode.id!r} appears twice in the batch; ids tell records apart")
        seen.add(episode.id)
