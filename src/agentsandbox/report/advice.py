# SPDX-License-Identifier: Apache-2.0
"""What to do about each kind of failure, in one line for a person."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from agentsandbox.errors import FailureKind

__all__ = ["ADVICE"]

ADVICE: Mapping[FailureKind, str] = MappingProxyType(
    {
        FailureKind.CONFIGURATION: "Correct what the message names; nothing was tried.",
        FailureKind.USAGE: "Correct the rollout function: it used a sandbox that it had not, or had given back.",
        FailureKind.COMMAND: "Look at the command log: let the rollout function expect this error, or mend the task.",
        FailureKind.COMMAND_TIMEOUT: "Give the command a longer timeout, or have what it left graded.",
        FailureKind.OUTPUT_LIMIT: "Raise the limit that the message names, or have the command write less.",
        FailureKind.ROLLOUT_RAISED: "Correct the rollout function; it would raise again.",
        FailureKind.INVALID_REWARD: "Have the rollout function return a finite number in every case.",
        FailureKind.INVALID_TASK: "Take the task out of the data: it passes before it is solved.",
        FailureKind.EVIDENCE_MISSING: "Look at the grader's output: its tests did not run to their end.",
        FailureKind.RESET: "Submit it again. If it repeats, widen the scope of the reset to what episodes change.",
        FailureKind.ACQUIRE_TIMEOUT: "Submit it again with lower parallelism or a longer acquire_timeout.",
        FailureKind.EPISODE_TIMEOUT: "Submit it again, with a longer episode_timeout or deadline if it repeats.",
        FailureKind.POOL_CLOSED: "Submit it again; keep the pool open until the batch has ended.",
        FailureKind.PROVISION: "Submit it again; run the doctor command if no sandbox can be made.",
        FailureKind.IMAGE_PULL: "See whether the image exists, and whether the nodes may pull it.",
        FailureKind.UNSCHEDULABLE: "Ask for fewer sandboxes at once or smaller ones, or add nodes.",
        FailureKind.QUOTA: "Ask for fewer sandboxes at once, or raise the quota.",
        FailureKind.SANDBOX_LOST: "Submit it again. If it repeats, look for one node or image, and at its memory.",
        FailureKind.STREAM_BROKEN: "Submit it again. If it repeats, look at the network between driver and cluster.",
        FailureKind.CONTROL_PLANE: "Submit it again with a lower create_rate; if it was refused, look at permissions.",
        FailureKind.PROTOCOL: "Submit it again. If it repeats, something in the image writes into the runner's stream.",
        FailureKind.CANCELLED: "Submit it again; the batch was stopped.",
        FailureKind.INTERRUPTED: "Resume the journal; the driver ended while it ran.",
        FailureKind.JOURNAL: "Make room on the disk of the journal, and resume.",
        FailureKind.CHECKPOINT: "See whether the checkpoint is where the message says, and is whole.",
    }
)
"""Failure kind → what to do."""
