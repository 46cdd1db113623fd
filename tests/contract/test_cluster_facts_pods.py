# SPDX-License-Identifier: Apache-2.0
"""The cluster double answers what a real server of version 1.36.2 answered: Pods in every state."""

from __future__ import annotations

import pytest

from .recorded_cluster import (
    Normal,
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

STATUS = load("pod_status")


@pytest.fixture
def anyio_backend():
    """The double is aiohttp's, and that is asyncio's."""
    return "asyncio"


PODS = {
    "running_ready": (pod("a"), is_ready),
    "after_oom_in_child": (pod("a"), is_ready),
    "crash_loop_back_off": (pod("crash", ["sh", "-c", "sleep 1; exit 1"]), waits_for("CrashLoopBackOff")),
    "first_process_oom_killed": (
        pod("pid1oom", ["python3", "-c", "import time; time.sleep(1); bytearray(10**9)"], restartPolicy="Never"),
        phase("Failed"),
    ),
    "succeeded": (pod("done", ["true"], restartPolicy="Never"), phase("Succeeded")),
    "ImagePullBackOff": (pod("nopull", image="registry.invalid/none:1"), waits_for("ImagePullBackOff")),
    "InvalidImageName": (pod("badimg", image="docker.io/UPPER:1"), waits_for("InvalidImageName")),
    "ErrImageNeverPull": (
        pod("never", image="docker.io/sandbox/none:9", container={"imagePullPolicy": "Never"}),
        waits_for("ErrImageNeverPull"),
    ),
    "unschedulable": (
        pod("huge", resources={"requests": {"cpu": "500"}}),
        lambda found: bool(found["status"].get("conditions")),
    ),
    "evicted_ephemeral_storage": (
        pod(
            "disk",
            ["sh", "-c", "head -c 60000000 /dev/zero > /big; sleep infinity"],
            resources={
                "limits": {"ephemeral-storage": "20Mi"},
                "requests": {"cpu": "10m", "ephemeral-storage": "20Mi"},
            },
        ),
        is_ready,
    ),
    "terminating": (pod("slowstop", terminationGracePeriodSeconds=20), is_ready),
}


async def test_every_pod_status_is_asked() -> None:
    """No recorded status of a Pod is left out here."""
    assert set(STATUS) == set(PODS)


def by_type(found):
    """The order of conditions says nothing once they went through a client."""
    return {
        **found,
        "status": {**found["status"], "conditions": sorted(found["status"]["conditions"], key=lambda c: c["type"])},
    }


@pytest.mark.parametrize("case", PODS)
async def test_pod_status_as_recorded(case: str) -> None:
    """A Pod in that state has the recorded metadata, spec and status."""
    body, predicate = PODS[case]
    recorded = STATUS[case]
    async with cluster_as_recorded(enforce_memory=True) as (cluster, session):
        await make(cluster, session, body, ready=False)
        found = await until(cluster, body["metadata"]["name"], predicate)
        if case == "after_oom_in_child":
            await run_exec(cluster, session, ["python3", "-c", "bytearray(10**9)"])
            found = cluster.pod("a")
        elif case == "evicted_ephemeral_storage":
            cluster.evict("facts", "disk", message=recorded["status"]["message"])
            found = await until(cluster, "disk", phase("Failed"))
        elif case == "terminating":
            async with session.delete(path(cluster, "slowstop")) as response:
                assert response.status == 200
            found = cluster.pod("slowstop")
            # The grace period is the Pod's, and nobody waits for it here.
            cluster.delete_behind("slowstop")

    for one in (found, recorded):
        one["metadata"].pop("resourceVersion")
    assert Normal()(by_type(found)) == Normal()(by_type(recorded))
