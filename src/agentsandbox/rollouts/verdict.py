# SPDX-License-Identifier: Apache-2.0
"""Judging one attempt: is what it returned a reward, and whose fault is what it raised. Pure."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Iterator, Mapping
from numbers import Real
from typing import Any

import attrs

from agentsandbox.errors import (
    Blame,
    Failure,
    FailureKind,
    InvalidReward,
    JournalError,
    Phase,
    RewardError,
    SandboxError,
    classify,
)
from agentsandbox.models.episode import EpisodeRecord, Graded, Status

__all__ = ["failure_of", "is_infrastructure", "journal_error", "reward_of"]


def reward_of(value: object) -> Graded:
    """
    Take what a rollout function returned as a reward.

    Args:
        value: A finite number, a truth value, or a :class:`Graded` with one.

    Returns:
        The reward as a float, with whatever was given beside it.

    Raises:
        InvalidReward: If it is anything else. ``None`` and NaN are not zero.

    """
    graded = value if isinstance(value, Graded) else Graded(reward=value)  # type: ignore[arg-type]
    number: Any = graded.reward
    if not isinstance(number, Real):
        hint = "; return a number at the end of the rollout function" if number is None else "; convert it with float()"
        raise InvalidReward(f"the rollout function returned {_short(number)}, which is not a number{hint}")
    try:
        reward = float(number)
    except (OverflowError, TypeError, ValueError):
        reward = math.inf
    if not math.isfinite(reward):
        raise InvalidReward(f"the rollout function returned {_short(number)}, which is not finite")
    if not isinstance(graded.info, Mapping):
        raise InvalidReward(f"the info of a Graded is a mapping, not {_short(graded.info)}")
    if graded.patch is not None and not isinstance(graded.patch, str):
        raise InvalidReward(f"the patch of a Graded is a string, not {_short(graded.patch)}")
    return Graded(reward=reward, patch=graded.patch, info=dict(graded.info))


def failure_of(error: BaseException, phase: Phase, *, task_faults: Collection[str] = ()) -> Failure:
    """
    Judge what ended an attempt, also when a task group of the rollout function has wrapped it.

    A group counts as infrastructure only if every error in it may be tried again: one error of the rollout function's
    own among them makes it final.

    Args:
        error: What was raised.
        phase: Where.
        task_faults: Ends of a sandbox that are the episode's own doing; see :func:`~agentsandbox.errors.classify`.

    Returns:
        The verdict; its cause is *error* itself.

    """
    leaves = list(_leaves(error))
    deciding: BaseException = error
    if len(leaves) == 1 or all(isinstance(leaf, SandboxError) and leaf.retryable for leaf in leaves):
        deciding = leaves[0]
    where = Phase.REWARD if isinstance(deciding, RewardError) else phase
    return attrs.evolve(classify(deciding, where, task_faults=task_faults), cause=error)


def journal_error(error: BaseException) -> JournalError | None:
    """Return the failure of the journal if it is what stopped a batch, and nothing else did."""
    leaves = list(_leaves(error))
    found = [leaf for leaf in leaves if isinstance(leaf, JournalError)]
    return found[0] if found and len(found) == len(leaves) else None


_INFRASTRUCTURE = frozenset(
    {
        FailureKind.ACQUIRE_TIMEOUT,
        FailureKind.EPISODE_TIMEOUT,
        FailureKind.POOL_CLOSED,
        FailureKind.PROVISION,
        FailureKind.IMAGE_PULL,
        FailureKind.UNSCHEDULABLE,
        FailureKind.QUOTA,
        FailureKind.SANDBOX_LOST,
        FailureKind.STREAM_BROKEN,
        FailureKind.CONTROL_PLANE,
        FailureKind.PROTOCOL,
    }
)
"""Kinds of :exc:`InfrastructureError`; a record that was read from a journal has no exception to ask any more."""


def is_infrastructure(record: EpisodeRecord) -> bool:
    """Say whether an episode has no reward through nobody's fault who wrote it."""
    failure = record.failure
    if failure is None or failure.kind is FailureKind.CANCELLED or failure.blame is Blame.TASK:
        return False
    return record.status is Status.RETRYABLE or failure.kind in _INFRASTRUCTURE


def _short(value: object) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # noqa: BLE001 - a stranger's __repr__, or an integer with too many digits
        return f"a {type(value).__name__}"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
