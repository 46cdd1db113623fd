# SPDX-License-Identifier: Apache-2.0
"""The cluster double answers what a real server of version 1.36.2 answered: refusals and watches."""

from __future__ import annotations

import json

import pytest

from .recorded_cluster import (
    NIL_UUID,
    Normal,
    cluster_as_recorded,
    load,
    make,
    path,
    pod,
)

pytestmark = pytest.mark.anyio

API = load("api")


@pytest.fixture
def anyio_backend():
    """The double is aiohttp's, and that is asyncio's."""
    return "asyncio"


REQUESTS = {
    "create_already_exists": ("POST", "", pod("a")),
    "get_not_found": ("GET", "nope", None),
    "invalid_pod": ("POST", "", pod("UPPER")),
    "patch_immutable_field": (
        "PATCH",
        "a",
        {"spec": {"containers": [{"name": "sandbox", "command": ["x"]}]}},
    ),
    "delete_wrong_uid": ("DELETE", "a", {"preconditions": {"uid": NIL_UUID}}),
    "patch_wrong_resource_version": ("PATCH", "a", {"metadata": {"resourceVersion": "1", "labels": {"x": "y"}}}),
}


async def test_every_api_case_is_asked() -> None:
    """No recorded answer of the API is left out here."""
    assert set(API) == {*REQUESTS, "watch_in_place_image_change"}


@pytest.mark.parametrize("case", REQUESTS)
async def test_refusal_as_recorded(case: str) -> None:
    """A refusal has the recorded status, reason, headers and body, word by word."""
    recorded = API[case]
    method, name, body = REQUESTS[case]
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        async with session.request(
            method, path(cluster, name), data=json.dumps(body) if body else None, headers={"Content-Type": kind}
        ) as response:
            answer = await response.json()

            assert (response.status, response.reason) == (recorded["status"], recorded["reason"])
            assert set(recorded["headers"]) <= set(response.headers)
            assert response.headers["Content-Type"] == recorded["headers"]["Content-Type"]
    assert Normal()(answer) == Normal()(recorded["body"])


async def watched(cluster, session, act, *, count, start=None):
    """Return the first *count* events of a watch, with *act* done meanwhile at each event."""
    events = []
    params = {"watch": "true", "timeoutSeconds": "30"}
    async with session.get(path(cluster), params=params) as response:
        async for line in response.content:
            events.append(json.loads(line))
            await act(events)
            if len(events) >= count:
                break
    return events


async def test_image_change_in_place_as_recorded() -> None:
    """A watch tells an image change as recorded: patched, observed, and then the next container, all in full."""
    recorded = API["watch_in_place_image_change"]
    async with cluster_as_recorded() as (cluster, session):
        await make(cluster, session, pod("a"))

        async def act(events):
            if len(events) == 1:
                patch = {"spec": {"containers": [{"name": "sandbox", "image": "docker.io/library/busybox:1.36"}]}}
                headers = {"Content-Type": "application/strategic-merge-patch+json"}
                async with session.patch(path(cluster, "a"), data=json.dumps(patch), headers=headers) as response:
                    assert response.status == 200

        events = await watched(cluster, session, act, count=len(recorded))

    told = [
        {
            "type": one["type"],
            "status": one["object"]["status"],
            "image": one["object"]["spec"]["containers"][0]["image"],
        }
        for one in events
    ]
    wanted = [{key: one[key] for key in ("type", "status", "image")} for one in recorded]
    assert Normal()(told) == Normal()(wanted)
