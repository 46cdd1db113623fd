# SPDX-License-Identifier: Apache-2.0
"""
Isolated sandboxes for reinforcement learning of coding agents.

:class:`SandboxPool` runs batches of episodes, :class:`SandboxClient` grants sandboxes one by one, and
:class:`BlockingPool` is for code that is not async. Errors are in :mod:`agentsandbox.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsandbox.errors import BatchFailed as BatchFailed
from agentsandbox.errors import CheckpointError as CheckpointError
from agentsandbox.errors import CommandFailed as CommandFailed
from agentsandbox.errors import CommandTimeout as CommandTimeout
from agentsandbox.errors import ConfigurationError as ConfigurationError
from agentsandbox.errors import EvidenceMissing as EvidenceMissing
from agentsandbox.errors import Failure as Failure
from agentsandbox.errors import FailureKind as FailureKind
from agentsandbox.errors import InfrastructureError as InfrastructureError
from agentsandbox.errors import InvalidTask as InvalidTask
from agentsandbox.errors import SandboxError as SandboxError
from agentsandbox.errors import SandboxLost as SandboxLost
from agentsandbox.errors import UsageError as UsageError
from agentsandbox.models.changes import Change as Change
from agentsandbox.models.changes import Checkpoint as Checkpoint
from agentsandbox.models.changes import Diff as Diff
from agentsandbox.models.command import ExecResult as ExecResult
from agentsandbox.models.episode import Attempt as Attempt
from agentsandbox.models.episode import Counts as Counts
from agentsandbox.models.episode import Episode as Episode
from agentsandbox.models.episode import EpisodeRecord as EpisodeRecord
from agentsandbox.models.episode import Graded as Graded
from agentsandbox.models.episode import GroupSummary as GroupSummary
from agentsandbox.models.episode import RolloutResult as RolloutResult
from agentsandbox.models.episode import Status as Status
from agentsandbox.models.events import Event as Event
from agentsandbox.models.events import EventSink as EventSink
from agentsandbox.models.reset import ResetPolicy as ResetPolicy
from agentsandbox.models.reset import ResetReport as ResetReport
from agentsandbox.models.timing import TTFCSample as TTFCSample
from agentsandbox.models.timing import TTFCSummary as TTFCSummary

if TYPE_CHECKING:
    from agentsandbox.blocking import BlockingLease as BlockingLease
    from agentsandbox.blocking import BlockingPool as BlockingPool
    from agentsandbox.client import CheckpointStore as CheckpointStore
    from agentsandbox.client import Lease as Lease
    from agentsandbox.client import SandboxClient as SandboxClient
    from agentsandbox.pool import SandboxPool as SandboxPool
    from agentsandbox.rollouts.gather import gather_rollouts as gather_rollouts
    from agentsandbox.rollouts.grading import grade_tests as grade_tests
    from agentsandbox.rollouts.grading import require_failing as require_failing
    from agentsandbox.rollouts.grading import require_passed as require_passed
    from agentsandbox.rollouts.hedging import HedgePolicy as HedgePolicy
    from agentsandbox.rollouts.journal import Journal as Journal
    from agentsandbox.warmpool.stragglers import StragglerPolicy as StragglerPolicy

__all__ = [
    "Attempt",
    "BatchFailed",
    "BlockingLease",
    "BlockingPool",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "CommandFailed",
    "CommandTimeout",
    "ConfigurationError",
    "Counts",
    "Diff",
    "Episode",
    "EpisodeRecord",
    "Event",
    "EventSink",
    "EvidenceMissing",
    "ExecResult",
    "Failure",
    "FailureKind",
    "Graded",
    "GroupSummary",
    "HedgePolicy",
    "InfrastructureError",
    "InvalidTask",
    "Journal",
    "Lease",
    "ResetPolicy",
    "ResetReport",
    "RolloutResult",
    "SandboxClient",
    "SandboxError",
    "SandboxLost",
    "SandboxPool",
    "Status",
    "StragglerPolicy",
    "TTFCSample",
    "TTFCSummary",
    "UsageError",
    "__version__",
    "gather_rollouts",
    "grade_tests",
    "require_failing",
    "require_passed",
]

_LAZY = {
    "BlockingLease": "agentsandbox.blocking",
    "BlockingPool": "agentsandbox.blocking",
    "CheckpointStore": "agentsandbox.client",
    "HedgePolicy": "agentsandbox.rollouts.hedging",
    "Journal": "agentsandbox.rollouts.journal",
    "Lease": "agentsandbox.client",
    "SandboxClient": "agentsandbox.client",
    "SandboxPool": "agentsandbox.pool",
    "StragglerPolicy": "agentsandbox.warmpool.stragglers",
    "gather_rollouts": "agentsandbox.rollouts.gather",
    "grade_tests": "agentsandbox.rollouts.grading",
    "require_failing": "agentsandbox.rollouts.grading",
    "require_passed": "agentsandbox.rollouts.grading",
}
"""What needs an event loop comes with its first use: reading a record must not cost the import of one."""


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from importlib import import_module

        value = getattr(import_module(_LAZY[name]), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("agentsandbox")
    else:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
