# SPDX-License-Identifier: Apache-2.0
"""The exception tree and its one judge."""

from __future__ import annotations

import inspect
import re

import pytest

from agentsandbox import errors
from agentsandbox.errors import (
    AcquireTimeout,
    ApiUnavailable,
    BatchFailed,
    Blame,
    CommandFailed,
    CommandNotExecutable,
    CommandNotFound,
    CommandTimeout,
    ConfigurationError,
    Conflict,
    ControlPlaneError,
    EpisodeTimeout,
    EvidenceMissing,
    FailureKind,
    ImagePullFailed,
    InfrastructureError,
    InvalidReward,
    InvalidTask,
    OutputLimitExceeded,
    PermissionDenied,
    Phase,
    PoolClosed,
    QuotaExceeded,
    ResetUnverified,
    SandboxError,
    SandboxLost,
    StreamBroken,
    Throttled,
    Unschedulable,
    UsageError,
    WorkingDirectoryNotFound,
    classify,
)
from agentsandbox.models.command import ExecResult

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, SandboxError)]


def test_everything_public_is_exported() -> None:
    """``__all__`` names every public class and function of the module, and the faults of tasks, once."""
    public = {
        name
        for name, value in vars(errors).items()
        if getattr(value, "__module__", None) == "agentsandbox.errors" and not name.startswith("_")
    }

    assert sorted(errors.__all__) == sorted({*public, "TASK_FAULTS"})


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_printed_tree_is_the_real_one(kind: type[SandboxError]) -> None:
    """Every error stands in the docstring under its parent, and is documented itself."""
    lines = errors.__doc__.splitlines()
    depths = {
        match[2]: (len(match[1]), number)
        for number, line in enumerate(lines)
        if (match := re.match(r"^([ │├└─]*)([A-Z]\w+)\b", line)) and match[2] in errors.__all__
    }
    assert kind.__name__ in depths, "it is not in the tree"
    if kind is not SandboxError:
        depth, number = depths[kind.__name__]
        above = [name for name, (d, n) in depths.items() if n < number and d < depth]
        parent = max(above, key=lambda name: depths[name][1])
        assert parent in {base.__name__ for base in kind.__bases__}
    assert kind.__doc__


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigurationError, ValueError),
        (UsageError, RuntimeError),
        (CommandNotFound, FileNotFoundError),
        (CommandNotExecutable, PermissionError),
        (WorkingDirectoryNotFound, FileNotFoundError),
        (CommandTimeout, TimeoutError),
        (AcquireTimeout, TimeoutError),
        (EpisodeTimeout, TimeoutError),
        (PermissionDenied, PermissionError),
    ],
    ids=lambda kind: kind.__name__,
)
def test_they_are_pythons_own_errors_too(kind: type, builtin: type) -> None:
    """Whoever catches Python's error catches ours."""
    assert issubclass(kind, builtin)


@pytest.mark.parametrize(
    ("error", "kind", "blame", "retryable"),
    [
        pytest.param(ConfigurationError("x"), "configuration", "caller", False, id="configuration"),
        pytest.param(UsageError("x"), "usage", "caller", False, id="usage"),
        pytest.param(CommandNotFound("x", subject="git"), "command", "task", False, id="start"),
        pytest.param(CommandFailed(ExecResult(exit_code=1)), "command", "task", False, id="failed"),
        pytest.param(CommandTimeout("total", 1, 1), "command_timeout", "task", False, id="command timeout"),
        pytest.param(OutputLimitExceeded(10), "output_limit", "task", False, id="output"),
        pytest.param(InvalidReward("x"), "invalid_reward", "caller", False, id="reward"),
        pytest.param(InvalidTask("x"), "invalid_task", "task", False, id="task"),
        pytest.param(EvidenceMissing("x"), "evidence_missing", "task", False, id="evidence"),
        pytest.param(ResetUnverified("x"), "reset", "sandbox", True, id="reset"),
        pytest.param(AcquireTimeout("x"), "acquire_timeout", "sandbox", True, id="acquire"),
        pytest.param(EpisodeTimeout("x"), "timed_out", "sandbox", True, id="episode"),
        pytest.param(PoolClosed("x"), "pool_closed", "caller", True, id="closed"),
        pytest.param(ImagePullFailed("x"), "image_pull", "sandbox", True, id="pull refused"),
        pytest.param(ImagePullFailed("x", permanent=True), "image_pull", "sandbox", False, id="no such image"),
        pytest.param(Unschedulable("x"), "unschedulable", "control_plane", True, id="unschedulable"),
        pytest.param(QuotaExceeded("x"), "quota", "control_plane", True, id="quota"),
        pytest.param(SandboxLost("evicted"), "sandbox_lost", "sandbox", True, id="lost"),
        pytest.param(StreamBroken("reset"), "stream_broken", "sandbox", True, id="stream"),
        pytest.param(Throttled("x"), "control_plane", "control_plane", True, id="throttled"),
        pytest.param(ApiUnavailable("x"), "control_plane", "control_plane", True, id="api"),
        pytest.param(Conflict("x"), "control_plane", "control_plane", True, id="conflict"),
        pytest.param(PermissionDenied("x"), "control_plane", "caller", False, id="denied"),
        pytest.param(errors.NotFound("x"), "control_plane", "control_plane", False, id="not found"),
        pytest.param(errors.InvalidObject("x"), "control_plane", "caller", False, id="invalid object"),
        pytest.param(errors.ProtocolError("x"), "protocol", "sandbox", True, id="protocol"),
        pytest.param(ValueError("x"), "rollout_raised", "caller", False, id="not ours"),
        pytest.param(KeyboardInterrupt(), "rollout_raised", "caller", False, id="not even an Exception"),
    ],
)
def test_verdicts(error: BaseException, kind: str, blame: str, retryable: bool) -> None:
    """The kind, whose doing it is and whether to try again follow from the error alone."""
    failure = classify(error, Phase.EXEC)

    assert (failure.kind, failure.blame, failure.retryable, failure.phase) == (kind, blame, retryable, Phase.EXEC)
    assert failure.cause is error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(ValueError("two\nlines "), "ValueError: two\nlines", id="text"),
        pytest.param(ValueError(), "ValueError", id="no text"),
        pytest.param(SandboxLost("evicted"), "SandboxLost: evicted", id="reason"),
        pytest.param(SandboxLost("oom_killed", "64 MiB"), "SandboxLost: oom_killed: 64 MiB", id="detail"),
        pytest.param(
            CommandTimeout("total", 2.5, 2.61), "CommandTimeout: ran longer than 2.5 s (killed after 2.6 s)", id="total"
        ),
        pytest.param(
            CommandTimeout("no_output", 30, 31.04),
            "CommandTimeout: no output for 30 s (killed after 31.0 s)",
            id="no output",
        ),
        pytest.param(CommandFailed(ExecResult(exit_code=2)), "CommandFailed: exit code 2", id="silent failure"),
        pytest.param(
            CommandFailed(ExecResult(exit_code=2, stderr=b"x" * 3000 + b"the end\n")),
            f"CommandFailed: exit code 2: {'x' * 1992}the end",
            id="failure with words",
        ),
        pytest.param(
            OutputLimitExceeded(10),
            "OutputLimitExceeded: the output exceeds the limit of 10 bytes a stream; raise output_limit to keep it all",
            id="limit",
        ),
        pytest.param(ValueError("x" * 5000), f"ValueError: {'x' * 4000}…", id="a whole log"),
    ],
)
def test_messages(error: BaseException, message: str) -> None:
    """A message is for a person: what happened, and where it helps the numbers."""
    assert classify(error, Phase.EXEC).message == message


def test_what_errors_carry() -> None:
    """Partial output, limits, records and hints are attributes."""
    timeout = CommandTimeout("total", 1.0, 1.2, b"out", b"err")
    lost = StreamBroken("reset", "by peer", stdout=b"o", stderr=b"e")
    result = ExecResult(exit_code=0)
    gone = ApiUnavailable("x", retry_after=2.0, ambiguous=True, status=503, reason="Busy")

    assert (timeout.limit, timeout.seconds, timeout.elapsed, timeout.stdout, timeout.stderr) == (
        "total",
        1.0,
        1.2,
        b"out",
        b"err",
    )
    assert (lost.reason, lost.detail, lost.stdout, lost.stderr) == ("reset", "by peer", b"o", b"e")
    assert isinstance(lost, SandboxLost)
    assert OutputLimitExceeded(5, result).result is result
    assert CommandFailed(result).result is result
    assert CommandNotFound("x", subject="git").subject == "git"
    assert BatchFailed("x", [1, 2]).records == (1, 2)
    assert Throttled("x", retry_after=3.0, status=429).retry_after == 3.0
    assert (gone.retry_after, gone.ambiguous, gone.status, gone.reason) == (2.0, True, 503, "Busy")
    assert (ControlPlaneError("x").status, ControlPlaneError("x").reason) == (None, "")


def test_only_infrastructure_and_resets_are_retryable_by_default() -> None:
    """Nothing that the task or the caller did is tried again."""
    retryable = {kind for kind in CLASSES if kind.retryable}

    assert {kind for kind in retryable if not issubclass(kind, (InfrastructureError, errors.ResetError))} == set()


def test_failures_are_equal_whatever_raised_them() -> None:
    """The exception is for debugging: two failures of the same kind are equal, and their repr has no traceback."""
    first, second = classify(ValueError("x"), Phase.EXEC), classify(ValueError("x"), Phase.EXEC)

    assert first == second
    assert "cause" not in repr(first)
    assert (first.kind, first.blame) == (FailureKind.ROLLOUT_RAISED, Blame.CALLER)
