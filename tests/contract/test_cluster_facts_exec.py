# SPDX-License-Identifier: Apache-2.0
"""The cluster double answers what a real server of version 1.36.2 answered: exec streams."""

from __future__ import annotations

import base64
import json

import pytest

from agentsandbox.testing.cluster import Timing

from .recorded_cluster import (
    Normal,
    change_image,
    cluster_as_recorded,
    is_ready,
    load,
    make,
    path,
    phase,
    pod,
    run_exec,
    until,
    waits_for,
)

pytestmark = pytest.mark.anyio

EXEC = load("exec")


@pytest.fixture
def anyio_backend():
    """The double is aiohttp's, and that is asyncio's."""
    return "asyncio"


def channels(frames):
    """Join what each channel says; how it is cut differs from run to run, but an empty message comes first."""
    joined = {}
    for frame in frames:
        joined[frame[0]] = joined.get(frame[0], b"") + frame[1:]
    return joined


def recorded_channels(case):
    joined = {}
    for frame in case["frames"]:
        data = frame["data"]
        data = base64.b64decode(data["base64"]) if isinstance(data, dict) else data.encode()
        joined[frame["channel"]] = joined.get(frame["channel"], b"") + data
    return joined


HANDSHAKES = [name for name, case in EXEC.items() if "handshake_error" in case]
STREAMS = [name for name in EXEC if name not in HANDSHAKES]
NOT_PLAIN = {
    "large_stdout_8MiB",
    "oom_in_child",
    "oom_in_child_memory_events",
    "pod_deleted_mid_stream",
    "image_patched_mid_stream",
    "long_argument_100KiB",
    "long_argument_1MiB",
}


def as_text(found):
    """Status frames as objects, ids numbered."""
    normal = Normal()
    return {channel: normal(json.loads(data)) if channel == 3 else data for channel, data in found.items()}


async def replay(case, cluster, session, **more):
    """Ask a recorded case again and compare everything but times and cuts."""
    recorded = EXEC[case]
    request = recorded["request"]
    command = more.pop("command", request["command"])
    found = await run_exec(
        cluster,
        session,
        command,
        protocol=request["protocol"],
        stdin=request["stdin"],
        tty=request["tty"],
        sent=request["sent"],
        patience=1 if "timed_out_after_seconds" in recorded else 30,
        **more,
    )
    assert found["negotiated"] == recorded["negotiated"]
    assert found["close_code"] == recorded.get("close_code")
    assert found["frames"][0] == b"\x01"
    return found


@pytest.mark.parametrize("case", [name for name in STREAMS if name not in NOT_PLAIN])
async def test_stream_as_recorded(case: str) -> None:
    """An exec stream says what was recorded: output, status, protocol and how the connection ends."""
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        found = await replay(case, cluster, session)

        if case == "background_child_detached":  # it is still there when its stream has ended
            left = await run_exec(cluster, session, ["sh", "-c", "grep -l sleep /proc/[0-9]*/comm | wc -l"])
            assert channels(left["frames"])[1] == b"2\n"

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC[case]))


async def test_large_output_as_recorded() -> None:
    """8 MiB of output arrive whole, in messages of at most 32 KiB and a byte, and then the status."""
    recorded = EXEC["large_stdout_8MiB"]
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        found = await replay("large_stdout_8MiB", cluster, session)

    assert sum(len(frame) - 1 for frame in found["frames"]) == recorded["total_bytes"]
    assert max(map(len, found["frames"])) <= 32 * 1024 + 1
    assert found["frames"][-1][1:].decode() == recorded["frames"][-1]["data"]


@pytest.mark.parametrize(("case", "size"), [("long_argument_100KiB", 100 * 1024), ("long_argument_1MiB", 1024 * 1024)])
async def test_long_argument_as_recorded(case: str, size: int) -> None:
    """An argument of 100 KiB works, and one of 1 MiB fails in the words of the container runtime, with exit code 1."""
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        found = await replay(case, cluster, session, command=["sh", "-c", ": " + "x" * size])

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC[case]))


async def test_memory_as_recorded() -> None:
    """A child over the memory limit is killed: exit code 137, one more in its cgroup's count, the Pod as before."""
    async with cluster_as_recorded(enforce_memory=True) as (cluster, session):
        await make(cluster, session, pod("a"))
        before = cluster.pod("a")
        first = await replay("oom_in_child", cluster, session)
        second = await replay("oom_in_child_memory_events", cluster, session)
        after = cluster.pod("a")

    assert as_text(channels(first["frames"])) == as_text(recorded_channels(EXEC["oom_in_child"]))
    assert as_text(channels(second["frames"])) == as_text(recorded_channels(EXEC["oom_in_child_memory_events"]))
    assert after == before


async def test_deletion_in_a_stream_as_recorded() -> None:
    """Deleting a Pod ends its streams with exit code 137, once the grace period is over."""
    async with cluster_as_recorded(timing=Timing(second=0.1)) as (cluster, session):
        await make(cluster, session, pod("a"))

        async def act():
            async with session.delete(path(cluster, "a")) as response:
                assert response.status == 200

        found = await replay("pod_deleted_mid_stream", cluster, session, act=act)

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC["pod_deleted_mid_stream"]))


async def test_image_change_in_a_stream_as_recorded() -> None:
    """Changing a Pod's image ends its streams with exit code 137."""
    async with cluster_as_recorded(timing=Timing(second=0.1)) as (cluster, session):
        await make(cluster, session, pod("a"))

        async def act():
            await change_image(cluster, session, "a", "docker.io/sandbox/swe:2")

        found = await replay("image_patched_mid_stream", cluster, session, act=act)

    assert as_text(channels(found["frames"])) == as_text(recorded_channels(EXEC["image_patched_mid_stream"]))


@pytest.mark.parametrize("case", HANDSHAKES)
async def test_handshake_as_recorded(case: str) -> None:
    """A stream that cannot be opened is refused with the recorded status."""
    recorded = EXEC[case]
    bodies = {
        "exec_while_container_waiting": pod("a", image="registry.invalid/none:1"),
        "exec_in_finished_pod": pod("a", ["true"], restartPolicy="Never"),
        "exec_in_pending_pod": pod("a", resources={"requests": {"cpu": "500"}}),
    }
    predicates = {
        "exec_while_container_waiting": waits_for("ImagePullBackOff"),
        "exec_in_finished_pod": phase("Succeeded"),
        "exec_in_pending_pod": lambda found: bool(found["status"].get("conditions")),
    }
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, bodies.get(case, pod("a")), ready=False)
        await until(cluster, "a", predicates.get(case, is_ready))
        found = await run_exec(
            cluster,
            session,
            recorded["request"]["command"],
            protocol=recorded["request"]["protocol"],
            container="other" if case == "no_such_container" else "sandbox",
            pod="other" if case == "no_such_pod" else "a",
        )

    assert found["handshake_error"] == recorded["handshake_error"]
