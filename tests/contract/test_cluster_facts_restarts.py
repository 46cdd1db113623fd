# SPDX-License-Identifier: Apache-2.0
"""The cluster double answers what a real server of version 1.36.2 answered: restarts in place."""

from __future__ import annotations

import json

import pytest

from agentsandbox.testing.cluster import Timing

from .recorded_cluster import (
    FACTS,
    Normal,
    change_image,
    cluster_as_recorded,
    is_ready,
    load,
    make,
    pod,
    run_exec,
    until,
)

pytestmark = pytest.mark.anyio

RESTARTS = load("restart_in_place")


@pytest.fixture
def anyio_backend():
    """The double is aiohttp's, and that is asyncio's."""
    return "asyncio"


# A first process that does not handle a signal yet never sees it.
READY = "until grep -q 'SigCgt:.*42..$' /proc/1/status; do :; done"
FIRST_PROCESS = json.loads((FACTS / "restart_in_place.json").read_text())["first_process"]


def summary(event):
    """What was recorded of an event."""
    found = event["object"]
    return {
        "type": event["type"],
        "phase": found["status"]["phase"],
        "image": found["spec"]["containers"][0]["image"],
        "conditions": [[c["type"], c["status"], c.get("reason")] for c in found["status"].get("conditions") or ()],
        "containers": [
            {key: c.get(key) for key in ("image", "ready", "restartCount", "containerID", "state", "lastState")}
            for c in found["status"].get("containerStatuses") or ()
        ],
    }


def distinct(events):
    """Leave out what repeats the event before it: only fields changed that were not recorded."""
    normal = Normal()
    kept = []
    for event in events:
        one = normal({key: value for key, value in event.items() if key not in ("at", "type")})
        if not kept or kept[-1] != one:
            kept.append(one)
    return kept


def rendered(recorded):
    return [{**one, "conditions": [[*c] for c in one["conditions"]]} for one in recorded]


@pytest.mark.parametrize("case", RESTARTS)
async def test_restart_in_place_as_recorded(case: str) -> None:
    """Restarts and image changes in place go through the recorded states, with the recorded back-off."""
    recorded = RESTARTS[case]
    rules = recorded["restart_policy_rules"]
    container = {"restartPolicy": "Never", "restartPolicyRules": rules} if rules else {}
    body = pod(
        f"facts-{case.replace('_', '-')}",
        ["sh", "-c", FIRST_PROCESS],
        restartPolicy=recorded["pod_restart_policy"],
        terminationGracePeriodSeconds=300,  # of the test's short seconds
        container={**container, "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
        volumes=[{"name": "data", "emptyDir": {}}],
    )
    name = body["metadata"]["name"]
    wanted = distinct(rendered(recorded["watch"]))
    timing = Timing(second=0.01, observe=0.2 if rules else 0.0, sandbox=0.001, start=0.001)
    events = []
    async with cluster_as_recorded("default", timing=timing) as (cluster, session):
        unsubscribe = cluster.store.subscribe(
            cluster.store.resource("pods"),
            lambda event: events.append(summary({"type": event.type, "object": event.now.object})),
        )
        await make(cluster, session, body)
        for step in range(4):
            restarts = cluster.pod(name)["status"]["containerStatuses"][0]["restartCount"]
            if step == 0 and recorded["empty_dir_marker_survives"] is not None:
                await run_exec(cluster, session, ["sh", "-c", "touch /marker /data/marker"], pod=name)
            await run_exec(cluster, session, ["sh", "-c", READY], pod=name)
            if "image_patch" in case:
                await change_image(cluster, session, name, f"docker.io/sandbox/swe:{2 - step % 2}")
            if rules or "image_patch" not in case:
                await run_exec(cluster, session, ["sh", "-c", "kill -USR1 1"], pod=name)
            if len(distinct(events)) >= len(wanted) + 2:
                break
            await until(
                cluster,
                name,
                lambda found, restarts=restarts: (
                    is_ready(found) and found["status"]["containerStatuses"][0]["restartCount"] > restarts
                ),
            )
            if step == 0 and recorded["empty_dir_marker_survives"] is not None:
                root = await run_exec(cluster, session, ["test", "-e", "/marker"], pod=name)
                data = await run_exec(cluster, session, ["test", "-e", "/data/marker"], pod=name)
                survives = [json.loads(found["frames"][-1][1:])["status"] == "Success" for found in (root, data)]
                expected = [recorded["root_file_system_marker_survives"], recorded["empty_dir_marker_survives"]]
                assert survives == expected, (root, data)
        unsubscribe()

    first = next(i for i, one in enumerate(events) if normal_start(one) == normal_start(recorded["watch"][0]))
    assert distinct(events[first:])[: len(wanted)] == wanted


def normal_start(event):
    """By what the first recorded event is found among ours."""
    return [len(event["containers"]), event["phase"], [tuple(c[:2]) for c in event["conditions"]]]
