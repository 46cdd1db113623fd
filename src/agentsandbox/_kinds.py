# SPDX-License-Identifier: Apache-2.0
"""The words of a verdict; everybody takes them from :mod:`agentsandbox.errors`."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Blame", "FailureKind", "Phase"]


class FailureKind(StrEnum):
    """What happened. Stable: journals, reports and trainers' retry rules name these."""

    CONFIGURATION = "configuration"
    USAGE = "usage"
    COMMAND = "command"
    COMMAND_TIMEOUT = "command_timeout"
    OUTPUT_LIMIT = "output_limit"
    ROLLOUT_RAISED = "rollout_raised"
    INVALID_REWARD = "invalid_reward"
    INVALID_TASK = "invalid_task"
    EVIDENCE_MISSING = "evidence_missing"
    RESET = "reset"
    ACQUIRE_TIMEOUT = "acquire_timeout"
    EPISODE_TIMEOUT = "timed_out"
    POOL_CLOSED = "pool_closed"
    PROVISION = "provision"
    IMAGE_PULL = "image_pull"
    UNSCHEDULABLE = "unschedulable"
    QUOTA = "quota"
    SANDBOX_LOST = "sandbox_lost"
    STREAM_BROKEN = "stream_broken"
    CONTROL_PLANE = "control_plane"
    PROTOCOL = "protocol"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    JOURNAL = "journal"
    CHECKPOINT = "checkpoint"


class Blame(StrEnum):
    """Whose doing a failure is."""

    TASK = "task"
    SANDBOX = "sandbox"
    CONTROL_PLANE = "control_plane"
    CALLER = "caller"


class Phase(StrEnum):
    """Where in an attempt a failure happened."""

    ACQUIRE = "acquire"
    HYDRATE = "hydrate"
    EXEC = "exec"
    RESET = "reset"
    RELEASE = "release"
    REWARD = "reward"
