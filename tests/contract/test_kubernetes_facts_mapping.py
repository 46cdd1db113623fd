# SPDX-License-Identifier: Apache-2.0
"""What a real server of version 1.36.2 sent, byte for byte, and the result or error that it must become here."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import aiohttp
import anyio
import pytest

from agentsandbox.backends.kubernetes.conditions import Cause, PodPhase, deleted, lost, state_of
from agentsandbox.backends.kubernetes.refusals import handshake_error
from agentsandbox.errors import (
    ApiUnavailable,
    Blame,
    CommandNotExecutable,
    CommandNotFound,
    FailureKind,
    ImagePullFailed,
    InvalidObject,
    NotFound,
    Phase,
    ProvisionError,
    SandboxLost,
    StreamBroken,
    Unschedulable,
    classify,
)
from agentsandbox.models.command import Command, ExecResult, OutputSizes
from agentsandbox.session.levels import DirectSession
from agentsandbox.transport.websocket import PROTOCOLS, ExecSocket

pytestmark = pytest.mark.anyio

FACTS = Path(__file__).parent / "facts"
EXEC = json.loads((FACTS / "exec.json").read_text())["cases"]
PODS = json.loads((FACTS / "pod_status.json").read_text())["cases"]


@pytest.fixture
def anyio_backend():
    """The websocket is aiohttp's, and that is asyncio's."""
    return "asyncio"


class Recorded:
    """The websocket of a recorded stream: the same messages, cut as they were, and the same end."""

    def __init__(self, case):
        self.protocol = case["negotiated"]
        self.close_code = None
        self.sent = []
        self._ends = case.get("close_code")
        self._messages = [bytes((one["channel"],)) + payload(one) for one in case["frames"]]

    async def receive(self):
        if self._messages:
            return aiohttp.WSMessage(aiohttp.WSMsgType.BINARY, self._messages.pop(0), None)
        if self._ends is None:
            await anyio.sleep_forever()
        self.close_code = self._ends
        return aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None)

    async def send_bytes(self, data):
        self.sent.append(bytes(data))

    async def close(self):
        self._ends = self._ends or 1000


def payload(frame):
    """What came after the channel byte; of the few long messages only the length was kept, and all were zeros."""
    data = frame["data"]
    data = base64.b64decode(data["base64"]) if isinstance(data, dict) else data.encode()
    return data or bytes(frame["bytes"])


async def run(case, *, stdin=None, command=None, **limits):
    """Run a recorded command again over its recorded stream, at the level that has nothing but such streams."""
    streams = []

    async def connect(argv, *, stdin=False):
        asked = EXEC["command_not_found"] if argv[0].endswith("no-such-program") else case
        streams.append(Recorded({**asked, "negotiated": case["negotiated"]}))
        return ExecSocket(streams[-1])

    session = DirectSession(connect)
    async with anyio.create_task_group() as group:
        await group.start(session.run)
        try:
            request = Command(command=tuple(command or case["request"]["command"]), **limits)
            return await session.exec(request, stdin=stdin), session.lost, streams[-1]
        except Exception as error:  # noqa: BLE001 - it is what the test is about
            return error, session.lost, streams[-1]
        finally:
            group.cancel_scope.cancel()


RESULTS = {
    "exit_0": (0, b"", b""),
    "exit_3_out_err": (3, b"out\n", b"err\n"),
    "exit_3_v4": (3, b"", b""),
    "killed_by_sigkill": (137, b"", b""),
    "stdin_then_close_v5": (0, b"hello", b""),
    "binary_stdout": (0, bytes(range(256)), b""),
    "background_child_holds_stdout": (0, b"started\n", b""),
    "background_child_detached": (0, b"started\n", b""),
    "long_argument_100KiB": (0, b"", b""),
    "long_argument_1MiB": (1, b"", b"exec /usr/bin/sh: argument list too long\n"),
    "tty": (0, b"out\r\nerr\r\n/dev/pts/0\r\n", b""),
    "oom_in_child": (137, b"", b""),
    "oom_in_child_memory_events": (1, b"oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", b""),
    "pod_deleted_mid_stream": (137, b"go\n", b""),
    "image_patched_mid_stream": (137, b"go\n", b""),
}
"""Each is the command's own end as far as its stream can tell; whether it counts is for the Pod to say, see below."""

START_ERRORS = {
    "command_not_found": (CommandNotFound, '"no-such-command": executable file not found in $PATH'),
    "not_executable": (CommandNotExecutable, '"/etc/passwd": permission denied'),
}

UNENDED = ("stdin_no_close_v4_hangs", "close_frame_sent_to_v4")

HANDSHAKES = {
    "no_such_container": (
        "container other is not valid for pod a",
        InvalidObject,
        FailureKind.CONTROL_PLANE,
        False,
    ),
    "no_such_pod": ('pods "other" not found', NotFound, FailureKind.CONTROL_PLANE, False),
    "protocol_refused": ("", InvalidObject, FailureKind.CONTROL_PLANE, False),
    "exec_while_container_waiting": (
        'unable to upgrade connection: container not found ("sandbox")',
        ApiUnavailable,
        FailureKind.CONTROL_PLANE,
        True,
    ),
    "exec_in_finished_pod": (
        'unable to upgrade connection: container not found ("sandbox")',
        ApiUnavailable,
        FailureKind.CONTROL_PLANE,
        True,
    ),
    "exec_in_pending_pod": (
        "pod a does not have a host assigned",
        InvalidObject,
        FailureKind.CONTROL_PLANE,
        False,
    ),
}
"""The statuses were recorded, without bodies; the words are the double's, which are those of the same server."""


def test_every_stream_has_its_meaning() -> None:
    """No recorded stream is left out."""
    assert set(EXEC) == {*RESULTS, *START_ERRORS, *UNENDED, *HANDSHAKES, "large_stdout_8MiB"}


@pytest.mark.parametrize("case", RESULTS)
async def test_stream_is_a_result(case: str) -> None:
    """Exit code and both streams are the recorded ones, complete, and the sandbox is still good."""
    code, stdout, stderr = RESULTS[case]
    stdin = b"hello" if case == "stdin_then_close_v5" else None
    command = ["true"] if case.startswith("long_argument") else None  # it does not fit into our URLs, on purpose

    result, lost_for, socket = await run(EXEC[case], stdin=stdin, command=command)

    assert isinstance(result, ExecResult), result
    assert (result.exit_code, result.stdout, result.stderr) == (code, stdout, stderr)
    assert (result.truncated, result.sizes) == (False, OutputSizes(stdout=len(stdout), stderr=len(stderr)))
    assert lost_for is None
    assert socket.sent == ([b"\0hello", b"\xff\0"] if stdin else [])


async def test_large_stream_is_counted() -> None:
    """What exceeds the limit is counted and cut in the middle, and says so."""
    recorded = EXEC["large_stdout_8MiB"]
    frames = [recorded["frames"][0], *[recorded["frames"][1]] * 1024, recorded["frames"][-1]]

    result, _, _ = await run({**recorded, "frames": frames}, output_limit=4096)

    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, 4096)
    assert result.sizes.stdout == 1024 * recorded["frames"][1]["bytes"] == 8 * 1024 * 1024


@pytest.mark.parametrize("case", START_ERRORS)
async def test_stream_is_a_start_error(case: str) -> None:
    """Nothing ran: an error of the command, final, in the runtime's words, and the sandbox is still good."""
    kind, words = START_ERRORS[case]

    error, lost_for, _ = await run(EXEC[case])
    verdict = classify(error, Phase.EXEC)

    assert type(error) is kind
    assert str(error) == words
    assert error.subject == EXEC[case]["request"]["command"][0]
    assert (verdict.kind, verdict.blame, verdict.retryable) == (FailureKind.COMMAND, Blame.TASK, False)
    assert lost_for is None


@pytest.mark.parametrize("case", UNENDED)
async def test_stream_that_never_ends_is_no_result(case: str) -> None:
    """Protocol v4 leaves a reader of standard input waiting: the time limit fires, with what had been printed."""
    error, lost_for, socket = await run(EXEC[case], timeout=0.05)
    verdict = classify(error, Phase.EXEC)

    assert (type(error), error.reason, error.stdout) == (SandboxLost, "unkillable", b"hello")
    assert (verdict.kind, verdict.retryable) == (FailureKind.SANDBOX_LOST, True)
    assert lost_for is not None
    assert not [message for message in socket.sent if message[:1] == b"\xff"]


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["exit_0", "exit_3_out_err", "binary_stdout"])
async def test_stream_without_its_status_is_no_result(case: str, keep: int) -> None:
    """However much arrived, without the status the outcome is unknown."""
    frames = [one for one in EXEC[case]["frames"] if one["channel"] != 3][:keep]

    error, _, _ = await run({**EXEC[case], "frames": frames})
    verdict = classify(error, Phase.EXEC)

    assert type(error) is StreamBroken
    assert error.stdout == b"".join(payload(one) for one in frames if one["channel"] == 1 and one["bytes"])
    assert (verdict.kind, verdict.retryable, verdict.gradable) == (FailureKind.STREAM_BROKEN, True, False)


@pytest.mark.parametrize("case", HANDSHAKES)
def test_handshake_is_an_error(case: str) -> None:
    """A refused handshake started nothing; what may pass is told from what stays."""
    words, kind, failure, retryable = HANDSHAKES[case]
    status = EXEC[case]["handshake_error"]["status"]
    body = json.dumps({"kind": "Status", "message": words, "code": status}) if words else ""

    error = handshake_error(status, body, {}, protocols=PROTOCOLS)
    verdict = classify(error, Phase.EXEC)

    assert type(error) is kind
    assert error.status == status
    assert str(error) == (words or "the server speaks none of v5.channel.k8s.io, v4.channel.k8s.io")
    assert (verdict.kind, verdict.retryable) == (failure, retryable)
    assert not getattr(error, "ambiguous", False)


READY = {
    "running_ready": "containerd://d98736127c6a83d2e0045ea78225da29272863ad77a257d221e60d321209a9ce",
    "after_oom_in_child": "containerd://d98736127c6a83d2e0045ea78225da29272863ad77a257d221e60d321209a9ce",
}

FAILING = {
    "crash_loop_back_off": (Cause.CRASHING, ProvisionError, FailureKind.PROVISION, True, "back-off 10s restarting"),
    "ImagePullBackOff": (Cause.IMAGE_UNAVAILABLE, ImagePullFailed, FailureKind.IMAGE_PULL, True, "no such host"),
    "InvalidImageName": (Cause.IMAGE_INVALID, ImagePullFailed, FailureKind.IMAGE_PULL, False, "must be lowercase"),
    "ErrImageNeverPull": (Cause.IMAGE_ABSENT, ImagePullFailed, FailureKind.IMAGE_PULL, False, "pull policy of Never"),
    "unschedulable": (Cause.UNSCHEDULABLE, Unschedulable, FailureKind.UNSCHEDULABLE, True, "1 Insufficient cpu"),
}

OVER = {
    "first_process_oom_killed": (PodPhase.LOST, "oom_killed", "exit code 137 (OOMKilled)"),
    "succeeded": (PodPhase.LOST, "completed", "exit code 0 (Completed)"),
    "evicted_ephemeral_storage": (
        PodPhase.LOST,
        "evicted",
        "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi.",
    ),
    "terminating": (PodPhase.TERMINATING, "deleted", ""),
}


def test_every_pod_has_its_meaning() -> None:
    """No recorded Pod is left out."""
    assert set(PODS) == {*READY, *FAILING, *OVER}


@pytest.mark.parametrize("case", READY)
def test_pod_is_ready(case: str) -> None:
    """A child that was killed for memory leaves no trace in its Pod: it is the same sandbox, and it is good."""
    state = state_of(PODS[case])

    assert (state.phase, state.reason, state.failure) == (PodPhase.READY, "", None)
    assert (state.identity.instance, state.identity.restarts) == (READY[case], 0)
    assert lost(PODS[case], state.identity) is None


@pytest.mark.parametrize("case", FAILING)
def test_pod_that_does_not_become_ready(case: str) -> None:
    """Each is the error of its kind, in the cluster's words, and final only where another Pod would fail alike."""
    cause, kind, failure, retryable, words = FAILING[case]
    state = state_of(PODS[case])

    error = state.failure.error()
    verdict = classify(error, Phase.ACQUIRE)

    assert (state.phase, state.failure.cause, type(error)) == (PodPhase.FAILING, cause, kind)
    assert str(error).startswith(f"{state.reason}: ")
    assert words in str(error)
    assert (verdict.kind, verdict.retryable, verdict.gradable) == (failure, retryable, False)
    assert (state.failure.retry_in or math.inf) == (10.0 if case == "crash_loop_back_off" else math.inf)


@pytest.mark.parametrize("case", OVER)
@pytest.mark.parametrize("seen", ["there", "gone"])
def test_pod_that_is_over(case: str, seen: str) -> None:
    """Whether it is looked at in time or only remembered: the loss has the Pod's own reason and words."""
    phase, reason, words = OVER[case]
    pod = PODS[case]
    state = state_of(pod)

    error = lost(pod, state.identity) if seen == "there" else lost(None, state.identity, last=pod)
    verdict = classify(error, Phase.EXEC)

    assert (state.phase, state.reason) == (phase, reason)
    assert (type(error), error.reason, error.detail) == (SandboxLost, reason, words)
    assert (verdict.kind, verdict.blame, verdict.retryable) == (FailureKind.SANDBOX_LOST, Blame.SANDBOX, True)
    assert deleted(pod).reason == reason


@pytest.mark.parametrize("faults", [(), ("oom_killed",)], ids=["by default", "by policy"])
def test_memory_of_the_first_process_is_the_tasks_where_the_policy_says_so(faults: tuple[str, ...]) -> None:
    """Out of memory is known from the Pod, never from exit code 137, and is the task's fault only if declared so."""
    pod = PODS["first_process_oom_killed"]

    verdict = classify(lost(pod, state_of(pod).identity), Phase.EXEC, task_faults=faults)

    assert (verdict.blame, verdict.retryable) == ((Blame.TASK, False) if faults else (Blame.SANDBOX, True))
