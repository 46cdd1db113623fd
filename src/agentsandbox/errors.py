# SPDX-License-Identifier: Apache-2.0
"""
Everything that can go wrong, in one tree, and the one place that judges it.

::

    SandboxError
    ├─ ConfigurationError (ValueError)        what the caller asked for cannot work
    ├─ UsageError (RuntimeError)              a call that makes no sense now: use after release, …
    ├─ CommandError                           the command's own doing; the sandbox is still good
    │   ├─ StartError                         nothing ran
    │   │   ├─ CommandNotFound (FileNotFoundError)
    │   │   ├─ CommandNotExecutable (PermissionError)
    │   │   ├─ UserNotFound
    │   │   └─ WorkingDirectoryNotFound (FileNotFoundError)
    │   ├─ CommandFailed                      ``check=True`` and the exit code is not 0
    │   ├─ CommandTimeout (TimeoutError)      killed, verified dead; carries the partial output
    │   ├─ OutputLimitExceeded                ``require_complete=True`` and the output did not fit
    │   └─ ContentTooLarge                    a file, or all that changed, is over the limit of a diff or checkpoint
    ├─ RewardError                            no valid reward can come of this attempt
    │   ├─ InvalidReward                      the rollout returned no finite number
    │   ├─ InvalidTask                        the task passes before it is solved, …
    │   └─ EvidenceMissing                    the grader's output does not show that its tests ran
    ├─ ResetError
    │   ├─ ResetFailed                        no rung could be applied
    │   └─ ResetUnverified                    a rung was applied, and its effect could not be shown
    ├─ CheckpointError                        there is no such checkpoint, it is damaged, or it cannot be written
    ├─ BatchFailed                            too many failures in one batch; carries every record
    ├─ JournalError                           the journal cannot be read or written; carries what it could not take
    └─ InfrastructureError                    nobody's fault who writes tasks; retryable
        ├─ AcquireTimeout (TimeoutError)
        ├─ EpisodeTimeout (TimeoutError)      the attempt ran into its deadline
        ├─ PoolClosed
        ├─ ProvisionError                     a sandbox could not be made
        │   ├─ ImagePullFailed
        │   ├─ Unschedulable
        │   └─ QuotaExceeded
        ├─ SandboxLost                        gone, replaced, restarted, evicted, out of memory
        │   └─ StreamBroken                   its stream ended and could not be attached again
        ├─ ControlPlaneError
        │   ├─ Throttled
        │   ├─ ApiUnavailable
        │   ├─ PermissionDenied
        │   ├─ NotFound                       no such object
        │   ├─ InvalidObject                  the request itself is wrong
        │   └─ Conflict
        └─ ProtocolError                      a malformed or unexpected frame

Operations on files raise Python's own :exc:`FileNotFoundError`, :exc:`PermissionError`, :exc:`IsADirectoryError` and
:exc:`NotADirectoryError`, with the path in the message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox._kinds import Blame, FailureKind, Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = [
    "TASK_FAULTS",
    "AcquireTimeout",
    "ApiUnavailable",
    "BatchFailed",
    "Blame",
    "CheckpointError",
    "CommandError",
    "CommandFailed",
    "CommandNotExecutable",
    "CommandNotFound",
    "CommandTimeout",
    "ConfigurationError",
    "Conflict",
    "ContentTooLarge",
    "ControlPlaneError",
    "EpisodeTimeout",
    "EvidenceMissing",
    "Failure",
    "FailureKind",
    "ImagePullFailed",
    "InfrastructureError",
    "InvalidObject",
    "InvalidReward",
    "InvalidTask",
    "JournalError",
    "NotFound",
    "OutputLimitExceeded",
    "PermissionDenied",
    "Phase",
    "PoolClosed",
    "ProtocolError",
    "ProvisionError",
    "QuotaExceeded",
    "ResetError",
    "ResetFailed",
    "ResetUnverified",
    "RewardError",
    "SandboxError",
    "SandboxLost",
    "StartError",
    "StreamBroken",
    "Throttled",
    "Unschedulable",
    "UsageError",
    "UserNotFound",
    "WorkingDirectoryNotFound",
    "classify",
]

_LONGEST_MESSAGE = 4000
"""Characters of an error that go into a verdict: some errors carry a whole log, and every record is kept."""


for _words in (FailureKind, Blame, Phase):
    _words.__module__ = __name__  # where everybody knows them from


class SandboxError(Exception):
    """The root of every error that this library raises on purpose."""

    kind: FailureKind = FailureKind.SANDBOX_LOST
    blame: Blame = Blame.SANDBOX
    retryable: bool = False


class ConfigurationError(SandboxError, ValueError):
    """What was asked for cannot work. Raised before anything is created; names the value and the fix."""

    kind = FailureKind.CONFIGURATION
    blame = Blame.CALLER


class UsageError(SandboxError, RuntimeError):
    """A call that makes no sense in the present state, such as ``exec`` on a released lease."""

    kind = FailureKind.USAGE
    blame = Blame.CALLER


class CommandError(SandboxError):
    """The command's own doing. The sandbox is still good, and trying again would give the same."""

    kind = FailureKind.COMMAND
    blame = Blame.TASK


class StartError(CommandError):
    """
    The command could not be started: nothing ran.

    Args:
        message: What the operating system or the runtime said.
        subject: The program, user or directory that it is about.

    """

    def __init__(self, message: str, *, subject: str = "") -> None:
        super().__init__(message)
        self.subject = subject


class CommandNotFound(StartError, FileNotFoundError):
    """There is no such program in the sandbox."""


class CommandNotExecutable(StartError, PermissionError):
    """The program is there, and the user may not execute it."""


class UserNotFound(StartError):
    """The user to run as does not exist in the sandbox, or this sandbox can run no second user."""


class WorkingDirectoryNotFound(StartError, FileNotFoundError):
    """The working directory does not exist in the sandbox."""


class CommandFailed(CommandError):
    """
    The exit code is not 0 and the caller asked for ``check=True``.

    Args:
        result: The :class:`~agentsandbox.ExecResult`.

    """

    def __init__(self, result: Any) -> None:
        tail = result.stderr[-2000:].decode("utf-8", "replace").strip()
        super().__init__(f"exit code {result.exit_code}" + (f": {tail}" if tail else ""))
        self.result = result


class CommandTimeout(CommandError, TimeoutError):
    """
    The command ran, or stayed silent, for too long; its whole process tree was killed and is verified dead.

    Args:
        limit: Which limit fired: ``"total"`` or ``"no_output"``.
        seconds: That limit, in seconds.
        elapsed: How long the command had run, in seconds.
        stdout: What it had printed (head and tail when it exceeded the output limit).
        stderr: The same for standard error.

    """

    kind = FailureKind.COMMAND_TIMEOUT

    def __init__(self, limit: str, seconds: float, elapsed: float, stdout: bytes = b"", stderr: bytes = b"") -> None:
        what = "no output for" if limit == "no_output" else "ran longer than"
        super().__init__(f"{what} {seconds:g} s (killed after {elapsed:.1f} s)")
        self.limit = limit
        self.seconds = seconds
        self.elapsed = elapsed
        self.stdout = stdout
        self.stderr = stderr


class OutputLimitExceeded(CommandError):
    """
    The output did not fit under the limit and the caller asked for all of it or nothing.

    Args:
        limit: The limit, in bytes a stream.
        result: The :class:`~agentsandbox.ExecResult` with what was kept.

    """

    kind = FailureKind.OUTPUT_LIMIT

    def __init__(self, limit: int, result: Any = None) -> None:
        super().__init__(f"the output exceeds the limit of {limit} bytes a stream; raise output_limit to keep it all")
        self.limit = limit
        self.result = result


class ContentTooLarge(CommandError):
    """
    What a diff or a checkpoint would have to hold is over its limit.

    Args:
        path: The file that it is about.
        size: Its size, in bytes.
        reason: Which limit it is.

    """

    kind = FailureKind.OUTPUT_LIMIT

    def __init__(self, path: str, size: int, reason: str = "") -> None:
        super().__init__(f"{path!r} with {size} bytes: {reason or 'too large'}")
        self.path = path
        self.size = size


class RewardError(SandboxError):
    """No valid reward can come of this attempt. Absent is not zero."""

    kind = FailureKind.INVALID_REWARD
    blame = Blame.TASK


class InvalidReward(RewardError):
    """The rollout function returned something that is not a finite number."""

    blame = Blame.CALLER


class InvalidTask(RewardError):
    """The task itself is unsound, for instance because its tests pass before it is solved."""

    kind = FailureKind.INVALID_TASK


class EvidenceMissing(RewardError):
    """The grader's output does not show that every required test ran and passed or failed."""

    kind = FailureKind.EVIDENCE_MISSING


class ResetError(SandboxError):
    """A used sandbox could not be made like new. It never goes back to the pool."""

    kind = FailureKind.RESET
    retryable = True


class ResetFailed(ResetError):
    """No rung of the ladder could be applied."""


class ResetUnverified(ResetError):
    """A rung was applied, and its effect could not be shown."""


class CheckpointError(SandboxError):
    """There is no such checkpoint, it is damaged, or it cannot be written. Nothing was changed in the sandbox."""

    kind = FailureKind.CHECKPOINT
    blame = Blame.CALLER


class InfrastructureError(SandboxError):
    """Nobody's fault who writes tasks or policies: try again on another sandbox."""

    retryable = True


class AcquireTimeout(InfrastructureError, TimeoutError):
    """No sandbox could be had in time."""

    kind = FailureKind.ACQUIRE_TIMEOUT


class EpisodeTimeout(InfrastructureError, TimeoutError):
    """The attempt ran into its deadline and was stopped; its sandbox is not trusted any more."""

    kind = FailureKind.EPISODE_TIMEOUT


class PoolClosed(InfrastructureError):
    """The pool was closed while the call waited."""

    kind = FailureKind.POOL_CLOSED
    blame = Blame.CALLER


class ProvisionError(InfrastructureError):
    """A sandbox could not be made."""

    kind = FailureKind.PROVISION


class ImagePullFailed(ProvisionError):
    """
    The image could not be had.

    Args:
        message: The reason in the words of the runtime.
        permanent: Whether trying again is useless (no such image), as against a passing refusal.

    """

    kind = FailureKind.IMAGE_PULL

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.retryable = not permanent


class Unschedulable(ProvisionError):
    """The cluster has no room, or no node fits."""

    kind = FailureKind.UNSCHEDULABLE
    blame = Blame.CONTROL_PLANE


class QuotaExceeded(ProvisionError):
    """A quota is used up."""

    kind = FailureKind.QUOTA
    blame = Blame.CONTROL_PLANE


class SandboxLost(InfrastructureError):
    """
    The sandbox is not the one it was: gone, replaced, restarted, evicted, killed for memory.

    Args:
        reason: One word for the cause: ``replaced``, ``restarted``, ``evicted``, ``oom_killed``, ``deleted``, ``died``…
        detail: What was observed, in the words of whoever saw it.
        stdout: Output of the command that was running, if there was one.
        stderr: The same for standard error.

    """

    kind = FailureKind.SANDBOX_LOST

    def __init__(self, reason: str, detail: str = "", *, stdout: bytes = b"", stderr: bytes = b"") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.stdout = stdout
        self.stderr = stderr


class StreamBroken(SandboxLost):
    """The stream to the sandbox ended and could not be attached again: what ran has an unknown outcome."""

    kind = FailureKind.STREAM_BROKEN


class ControlPlaneError(InfrastructureError):
    """
    The API server refused or failed.

    Args:
        message: Its words.
        status: The HTTP status, if there was an answer.
        reason: Its one-word reason, such as ``AlreadyExists`` or ``Expired``, if it gave one.

    """

    kind = FailureKind.CONTROL_PLANE
    blame = Blame.CONTROL_PLANE

    def __init__(self, message: str, *, status: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Throttled(ControlPlaneError):
    """
    The API server asked to slow down.

    Args:
        message: Its words.
        retry_after: How long it asked to wait, in seconds, if it said so.
        status: The HTTP status.
        reason: Its one-word reason.

    """

    def __init__(
        self, message: str, *, retry_after: float | None = None, status: int | None = None, reason: str = ""
    ) -> None:
        super().__init__(message, status=status, reason=reason)
        self.retry_after = retry_after


class ApiUnavailable(ControlPlaneError):
    """
    The API server could not be reached, or answered with a server error.

    Args:
        message: What was observed.
        retry_after: How long it asked to wait, in seconds, if it said so.
        ambiguous: Whether a write may have happened all the same: look before you repeat it.
        status: The HTTP status, if there was an answer.
        reason: Its one-word reason, if it gave one.

    """

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        ambiguous: bool = False,
        status: int | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message, status=status, reason=reason)
        self.retry_after = retry_after
        self.ambiguous = ambiguous


class PermissionDenied(ControlPlaneError, PermissionError):
    """The credentials do not allow the call: trying again is useless."""

    blame = Blame.CALLER
    retryable = False


class NotFound(ControlPlaneError):
    """There is no such object (any more)."""

    retryable = False


class InvalidObject(ControlPlaneError):
    """The API server calls the request itself wrong: trying again gives the same."""

    blame = Blame.CALLER
    retryable = False


class Conflict(ControlPlaneError):
    """The object exists already, is another one by now, or somebody else changed it first; ``reason`` says which."""


class ProtocolError(InfrastructureError):
    """A malformed, oversized or unexpected frame. It ends the session, never the driver."""

    kind = FailureKind.PROTOCOL


class BatchFailed(SandboxError):
    """
    More of a batch failed than ``failure_threshold`` allows.

    Args:
        message: How many of how many, and the threshold.
        records: One record an episode, in input order, exactly as a successful batch would give them.

    """

    kind = FailureKind.PROVISION

    def __init__(self, message: str, records: Sequence[Any]) -> None:
        super().__init__(message)
        self.records = tuple(records)


class JournalError(SandboxError):
    """The journal cannot be used or written. ``records`` has all of the batch that it stopped, unwritten ones, too."""

    kind = FailureKind.JOURNAL
    blame = Blame.CALLER

    def __init__(self, message: str, records: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.records = tuple(records)


@attrs.frozen(kw_only=True)
class Failure:
    """The verdict on one attempt that gave no reward."""

    kind: FailureKind
    """What happened."""
    phase: Phase
    """Where in the attempt."""
    blame: Blame
    """Whose doing."""
    retryable: bool
    """Whether the same episode on another sandbox may well succeed."""
    message: str
    """One line for a person, in the words of whoever saw it."""
    gradable: bool = False
    """Whether a grader may still look at what the episode left: its sandbox is the one it was given, and still good."""
    reward_valid: bool = False
    """Whether a reward that was earned before stands: only what failed after the end of an episode leaves it alone."""
    cause: BaseException | None = attrs.field(default=None, eq=False, repr=False)
    """The exception itself, for ``raise … from`` and for debugging; not serialised."""


# The command, the rollout function or the grader failed, and not the place.
_GRADABLE = frozenset(
    {
        FailureKind.COMMAND,
        FailureKind.COMMAND_TIMEOUT,
        FailureKind.OUTPUT_LIMIT,
        FailureKind.ROLLOUT_RAISED,
        FailureKind.INVALID_REWARD,
        FailureKind.EVIDENCE_MISSING,
    }
)

TASK_FAULTS = frozenset({"oom_killed", "disk_full", "unkillable", "killed", "completed"})
"""Reasons of :exc:`SandboxLost` that an episode can bring about: with its memory, files, processes, or a signal."""


def classify(error: BaseException, phase: Phase, *, task_faults: Collection[str] = ()) -> Failure:
    """
    Judge an exception: the only place that decides what may be tried again, graded, or believed.

    Exceptions that are not ours come from the rollout function, and are final: code that raises once raises again, and
    calling its failure infrastructure would hide a bug behind retries.

    Args:
        error: What ended the attempt.
        phase: Where it ended.
        task_faults: Reasons of :exc:`SandboxLost`, out of :data:`TASK_FAULTS`, that are the episode's own, and final.

    Returns:
        The verdict, with the exception kept as its cause.

    """
    if isinstance(error, SandboxError):
        kind, blame, retryable = error.kind, error.blame, error.retryable
        if isinstance(error, SandboxLost) and error.reason in task_faults:
            blame, retryable = Blame.TASK, False
    else:
        kind, blame, retryable = FailureKind.ROLLOUT_RAISED, Blame.CALLER, False
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - a stranger's __str__; its verdict must not depend on it
        text = ""
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}…"
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    gradable = kind in _GRADABLE and phase not in (Phase.ACQUIRE, Phase.HYDRATE)
    axes = {"gradable": gradable, "reward_valid": phase in (Phase.RESET, Phase.RELEASE)}
    return Failure(kind=kind, phase=phase, blame=blame, retryable=retryable, message=message, cause=error, **axes)
