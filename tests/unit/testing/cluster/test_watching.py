# SPDX-License-Identifier: Apache-2.0
"""Watches of the double."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from agentsandbox.errors import ApiUnavailable, ControlPlaneError, InvalidObject
from agentsandbox.testing.cluster import Timing

pytestmark = pytest.mark.anyio
MERGE = "application/merge-patch+json"


async def collect(client, count, *, act=None, **params):
    """Return the first *count* events of a watch, or all if it ends sooner; *act* runs once it is open."""
    found, failure = [], None
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group, aclosing(client.api.watch(client.pods, params=params)) as events:
            if act is not None:
                group.start_soon(act)
            try:
                async for event in events:
                    found.append(event)
                    if len(found) == count:
                        break
            except ControlPlaneError as error:
                failure = error  # not in a group
    if failure is not None:
        raise failure
    return found


def told(events):
    """Events in short."""
    return [(one["type"], one["object"]["metadata"].get("name")) for one in events]


async def test_watch_from_a_version_misses_nothing(started) -> None:
    """A watch from the version of a list tells every change after it, each with a larger version."""
    async with started() as client:
        await client.make("a")
        listed = await client.api.request("GET", client.pods)
        version = listed["metadata"]["resourceVersion"]
        await client.make("b")
        client.cluster.delete_behind("b")
        events = await collect(client, 20, resourceVersion=version, timeoutSeconds="1")

        names = told(events)
        assert (names[0], names[-1]) == (("ADDED", "b"), ("DELETED", "b"))
        assert {kind for kind, _ in names[1:-1]} == {"MODIFIED"}
        versions = [int(one["object"]["metadata"]["resourceVersion"]) for one in events]
        assert versions == sorted(set(versions))
        assert versions[0] > int(version)


async def test_watch_without_a_version_begins_with_what_is_there(started) -> None:
    """Without a version, what is there is added first."""
    async with started() as client:
        await client.make("a")
        await client.make("b")

        assert told(await collect(client, 2)) == [("ADDED", "a"), ("ADDED", "b")]


async def test_selection_changes_are_additions_and_deletions(started) -> None:
    """What comes into a watch's selection is added, what leaves it is deleted."""
    async with started() as client:
        await client.make("a", labels={"x": "1"})
        version = (await client.get("a"))["metadata"]["resourceVersion"]
        for value in ("2", "3", "1"):
            body = {"metadata": {"labels": {"x": value}}}
            await client.api.request("PATCH", f"{client.pods}/a", body=body, content_type=MERGE)
        events = await collect(client, 2, labelSelector="x=1", resourceVersion=version)

        assert told(events) == [("DELETED", "a"), ("ADDED", "a")]


async def test_p51_too_old_a_version_is_told_in_the_stream(started) -> None:
    """A version that is forgotten gives an ERROR event with code 410 in an answer with status 200, and then the end."""
    async with started() as client:
        await client.make("a")
        client.cluster.store.compact()
        oldest = client.cluster.store.version
        (event,) = await collect(client, 5, resourceVersion="5")

        assert event["type"] == "ERROR"
        assert (event["object"]["code"], event["object"]["reason"]) == (410, "Expired")
        assert event["object"]["message"] == f"too old resource version: 5 ({oldest})"
        assert client.cluster.asked("GET", "/pods$")[-1].status == 200
        assert told(await collect(client, 1, resourceVersion=str(oldest), act=lambda: client.make("b"))) == [
            ("ADDED", "b")
        ]
        with pytest.raises(InvalidObject):
            await collect(client, 1, resourceVersion="None")


async def test_bookmarks_tell_the_version(started) -> None:
    """A quiet watch gets bookmarks, if it asked for them, with nothing but the version."""
    async with started(timing=Timing(bookmark=0.05)) as client:
        await client.make("a")
        version = str(client.cluster.store.version)
        (event,) = await collect(client, 1, resourceVersion=version, allowWatchBookmarks="true")
        assert (event["type"], event["object"]["metadata"]) == ("BOOKMARK", {"resourceVersion": version})
        assert await collect(client, 1, resourceVersion=version, timeoutSeconds="1") == []


async def test_faults_of_watches(started) -> None:
    """A watch can be dropped, expire, be cut within an event or fall silent, after as many events as wanted."""
    async with started() as client:
        for name in ("a", "b", "c"):
            await client.make(name)
        client.cluster.faults.watch("/pods$", kind="expire", events=1)
        assert [one["type"] for one in await collect(client, 5)] == ["ADDED", "ERROR"]
        for kind in ("drop", "cut"):
            client.cluster.faults.watch("/pods$", kind=kind, events=1)
            with pytest.raises(ApiUnavailable):
                await collect(client, 5)
        fault = client.cluster.faults.watch("/pods$", kind="stall", events=2)
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.2):
                await collect(client, 3)
        assert fault.hits == 1
        assert len(await collect(client, 3)) == 3


async def test_open_watches_are_dropped(started) -> None:
    """Dropping watches breaks those that are open."""
    async with started() as client:

        async def drop():
            await client.eventually(lambda: client.cluster.drop_watches("/pods$"))

        with pytest.raises(ApiUnavailable):
            await collect(client, 1, act=drop, resourceVersion=str(client.cluster.store.version))
