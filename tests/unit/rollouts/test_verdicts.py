# SPDX-License-Identifier: Apache-2.0
"""Three questions about every failure, answered from what was observed: again? gradable? does the reward stand?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from agentsandbox.backends.kubernetes.conditions import lost, state_of
from agentsandbox.errors import (
    TASK_FAULTS,
    AcquireTimeout,
    ApiUnavailable,
    Blame,
    CommandFailed,
    CommandNotFound,
    CommandTimeout,
    ConfigurationError,
    EpisodeTimeout,
    EvidenceMissing,
    FailureKind,
    InfrastructureError,
    InvalidReward,
    InvalidTask,
    OutputLimitExceeded,
    PermissionDenied,
    Phase,
    PoolClosed,
    ProtocolError,
    ResetUnverified,
    SandboxError,
    SandboxLost,
    StreamBroken,
    Throttled,
    UsageError,
    classify,
)
from agentsandbox.models.command import ExecResult
from agentsandbox.models.episode import Attempt, Episode, EpisodeRecord, Status
from agentsandbox.rollouts.gather import gather_rollouts
from agentsandbox.rollouts.verdict import failure_of, is_infrastructure

from .fakes import FakeLease, FakeSource

pytestmark = pytest.mark.anyio

PODS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "backends" / "kubernetes" / "facts" / "pod_status.json").read_text(encoding="utf-8")
)["cases"]
"""What a real cluster said of Pods that failed in every way that could be provoked."""


def observed(case: str) -> SandboxError | None:
    """Return what our own code makes of a recorded Pod that had been leased while it was well, or was to be."""
    pod = PODS[case]
    state = state_of(pod)
    if state.failure is not None:
        return state.failure.error()
    before = PODS["restarting_in_place_1"] if case == "restarted_in_place" else pod
    return lost(pod, state_of(before).identity)


@pytest.mark.parametrize(
    ("case", "kind", "again"),
    [
        ("running_ready", None, None),
        ("after_oom_in_child", None, None),
        ("restarted_in_place", "sandbox_lost", True),
        ("first_process_oom_killed", "sandbox_lost", True),
        ("succeeded", "sandbox_lost", True),
        ("evicted_ephemeral_storage", "sandbox_lost", True),
        ("terminating", "sandbox_lost", True),
        ("restarting_in_place_1", "sandbox_lost", True),
        ("restarting_in_place_2", "sandbox_lost", True),
        ("crash_loop_back_off", "provision", True),
        ("ImagePullBackOff", "image_pull", True),
        ("unschedulable", "unschedulable", True),
        ("InvalidImageName", "image_pull", False),
        ("ErrImageNeverPull", "image_pull", False),
        ("no_shell", "provision", False),
        ("root_image", "provision", False),
    ],
)
def test_recorded_pods(case: str, kind: str | None, again: bool | None) -> None:
    """Each recorded end of a Pod: infrastructure, never gradable, never with a reward; again unless it must recur."""
    error = observed(case)

    if kind is None:
        assert error is None, "there is nothing to judge: the sandbox is well"
        return
    failure = classify(error, Phase.EXEC)
    assert (failure.kind, failure.retryable, failure.gradable, failure.reward_valid) == (kind, again, False, False)


def test_every_recorded_pod_is_judged() -> None:
    """The table above leaves none out."""
    (mark,) = [m for m in test_recorded_pods.pytestmark if m.name == "parametrize"]

    assert {row[0] for row in mark.args[1]} == set(PODS)


@pytest.mark.parametrize(
    ("error", "again", "gradable"),
    [
        (CommandFailed(ExecResult(exit_code=1)), False, True),
        (CommandNotFound("x"), False, True),
        (CommandTimeout("total", 1, 1), False, True),
        (OutputLimitExceeded(1), False, True),
        (InvalidReward("x"), False, True),
        (EvidenceMissing("x"), False, True),
        (ValueError("x"), False, True),
        (InvalidTask("x"), False, False),
        (ConfigurationError("x"), False, False),
        (UsageError("x"), False, False),
        (EpisodeTimeout("x"), True, False),
        (SandboxLost("evicted"), True, False),
        (StreamBroken("reset"), True, False),
        (ProtocolError("x"), True, False),
        (AcquireTimeout("x"), True, False),
        (PoolClosed("x"), True, False),
        (Throttled("x"), True, False),
        (ApiUnavailable("x"), True, False),
        (PermissionDenied("x"), False, False),
        (ResetUnverified("x"), True, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_three_axes(error: Exception, again: bool, gradable: bool) -> None:
    """What failed in a sound sandbox may be graded and is not repeated; what lost its sandbox is the other way."""
    failure = classify(error, Phase.EXEC)

    assert (failure.retryable, failure.gradable) == (again, gradable)
    assert not (failure.retryable and failure.gradable)
    assert not failure.reward_valid


@pytest.mark.parametrize("phase", list(Phase))
def test_the_phase_decides_whether_a_reward_stands(phase: Phase) -> None:
    """What fails when the episode is over takes nothing from it; before it began there is nothing to grade."""
    failure = classify(SandboxLost("evicted"), phase)

    assert failure.reward_valid == (phase in (Phase.RESET, Phase.RELEASE))
    assert classify(ValueError(), phase).gradable == (phase not in (Phase.ACQUIRE, Phase.HYDRATE))


@pytest.mark.parametrize("reason", sorted(TASK_FAULTS))
def test_what_an_episode_did_to_its_own_sandbox_may_be_called_final(reason: str) -> None:
    """A fork bomb or a full disk is infrastructure, unless the trainer says that it is the task's own doing."""
    usual = classify(SandboxLost(reason), Phase.EXEC)
    own = classify(SandboxLost(reason), Phase.EXEC, task_faults={reason})
    other = classify(SandboxLost("evicted"), Phase.EXEC, task_faults=TASK_FAULTS)

    assert (usual.retryable, usual.blame) == (True, Blame.SANDBOX)
    assert (own.retryable, own.blame, own.gradable) == (False, Blame.TASK, False)
    assert (other.retryable, other.blame) == (True, Blame.SANDBOX)


async def test_p54_a_fault_of_the_task_is_final_and_has_no_reward() -> None:
    """With task_faults an out-of-memory kill is not tried again, is no infrastructure failure, and is not 0 either."""

    async def hungry(sandbox: FakeLease, episode: Episode) -> float:
        sandbox.lose("oom_killed")
        await sandbox.exec("true")
        return 1.0

    batch = [Episode(id="a", image="host")]
    usual = (await gather_rollouts(FakeSource(), batch, hungry)).records[0]
    own = (
        await gather_rollouts(FakeSource(), batch, hungry, task_faults={"oom_killed"}, failure_threshold=0.0)
    ).records[0]

    assert (usual.status, usual.attempts, usual.reward) == (Status.RETRYABLE, 2, None)
    assert (own.status, own.attempts, own.reward, own.failure.blame) == (Status.FAILED, 1, None, Blame.TASK)
    assert (is_infrastructure(usual), is_infrastructure(own)) == (True, False)


@pytest.mark.parametrize("faults", ["oom_killed", {"evicted"}, {"weather"}], ids=str)
async def test_faults_that_are_not_the_tasks_are_refused(faults: Any) -> None:
    """An eviction cannot be declared the fault of a task."""

    async def solve(sandbox: FakeLease, episode: Episode) -> float:
        return 1.0

    with pytest.raises(ConfigurationError, match="task_faults is a set out of"):
        await gather_rollouts(FakeSource(), [Episode(id="a", image="host")], solve, task_faults=faults)


def test_a_group_of_errors_keeps_all_three_answers() -> None:
    """What a task group wrapped is judged as what it wraps."""
    failure = failure_of(ExceptionGroup("x", [SandboxLost("oom_killed")]), Phase.EXEC, task_faults={"oom_killed"})

    assert (failure.retryable, failure.gradable, failure.blame) == (False, False, Blame.TASK)
    assert isinstance(failure.cause, ExceptionGroup)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_a_record_without_its_exception_is_judged_alike(kind: FailureKind) -> None:
    """A record that was read from a journal counts against the threshold as the one that was written."""
    error = {cls.kind: cls for cls in _errors() if issubclass(cls, InfrastructureError)}.get(kind)
    failure = attrs.evolve(classify(SandboxLost("x"), Phase.EXEC), kind=kind, retryable=False, cause=None)
    record = EpisodeRecord(
        episode=Episode(id="a", image="host"),
        status=Status.FAILED,
        failure=failure,
        history=(Attempt(number=1, failure=failure),),
    )

    assert is_infrastructure(record) == (error is not None)


def _errors() -> list[type[SandboxError]]:
    found, todo = [], [SandboxError]
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return found
