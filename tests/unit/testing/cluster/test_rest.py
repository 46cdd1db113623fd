# SPDX-License-Identifier: Apache-2.0
"""What requests do to objects."""

from __future__ import annotations

import pytest

from agentsandbox.errors import Conflict, InvalidObject, NotFound, PermissionDenied
from agentsandbox.testing.cluster import Resource

pytestmark = pytest.mark.anyio
MERGE = "application/merge-patch+json"


async def test_lists_by_selectors_and_pages(started) -> None:
    """A list is selected by labels and fields, sorted by name, and cut into pages that show one moment."""
    async with started() as client:
        for name in ("c", "a", "d", "b"):
            await client.make(name, labels={"group": "x" if name < "c" else "y"})

        def names(found):
            return [one["metadata"]["name"] for one in found["items"]]

        assert names(await client.api.request("GET", client.pods)) == ["a", "b", "c", "d"]
        labelled = await client.api.request("GET", client.pods, params={"labelSelector": "group=x"})
        assert names(labelled) == ["a", "b"]
        by_name = await client.api.request("GET", client.pods, params={"fieldSelector": "metadata.name=d"})
        assert names(by_name) == ["d"]
        pending = await client.api.request("GET", client.pods, params={"fieldSelector": "status.phase=Pending"})
        assert names(pending) == []

        first = await client.api.request("GET", client.pods, params={"limit": 3})
        assert (names(first), first["metadata"]["remainingItemCount"]) == (["a", "b", "c"], 1)
        client.cluster.delete_behind("d")
        await client.make("e")
        more = {"limit": 3, "continue": first["metadata"]["continue"]}
        second = await client.api.request("GET", client.pods, params=more)
        assert names(second) == ["d"]
        assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
        with pytest.raises(Conflict) as caught:
            await client.api.request("GET", client.pods, params={"continue": "bm8="})
        assert (caught.value.status, caught.value.reason) == (410, "Expired")


async def test_generated_names_and_dry_runs(started) -> None:
    """A generated name is the prefix and five characters; a dry run says what would be and leaves nothing."""
    async with started() as client:
        body = {"metadata": {"generateName": "p-"}, "spec": {"containers": [{"name": "sandbox", "image": "host"}]}}
        tried = await client.api.request("POST", client.pods, params={"dryRun": "All"}, body=body)
        assert client.cluster.pods() == []
        made = await client.api.request("POST", client.pods, body=body)

        assert (len(tried["metadata"]["name"]), len(made["metadata"]["name"])) == (7, 7)
        assert tried["spec"]["restartPolicy"] == "Always"
        await client.api.request("DELETE", f"{client.pods}/{made['metadata']['name']}", params={"dryRun": "All"})
        assert "deletionTimestamp" not in client.cluster.pods()[0]["metadata"]


async def test_bad_objects_are_refused(started) -> None:
    """An object of another kind, without metadata or for another namespace is a bad request."""
    async with started() as client:
        for body in (
            {"kind": "Job", "metadata": {"name": "a"}},
            {"spec": {}},
            {"metadata": {"name": "a", "namespace": "other"}, "spec": {"containers": []}},
        ):
            with pytest.raises(InvalidObject) as caught:
                await client.api.request("POST", client.pods, body=body)
            assert caught.value.status == 400
        with pytest.raises(InvalidObject) as caught:
            await client.api.request(
                "POST", client.pods, body={"metadata": {"name": "a", "labels": {"x": "no spaces"}}}
            )
        assert caught.value.status == 422
        with pytest.raises(NotFound):
            await client.api.request(
                "POST", "/api/v1/namespaces/nowhere/pods", body={"metadata": {"name": "a"}, "spec": {}}
            )


async def test_a_patch_that_changes_nothing_makes_no_version(started) -> None:
    """What stays the same keeps its version; labels make a new version, and only the spec a new generation."""
    async with started() as client:
        made = await client.make(labels={"a": "1"})
        path = f"{client.pods}/a"
        same = await client.api.request("PATCH", path, body={"metadata": {"labels": {"a": "1"}}}, content_type=MERGE)
        other = await client.api.request("PATCH", path, body={"metadata": {"labels": {"a": "2"}}}, content_type=MERGE)
        shorter = await client.api.request(
            "PATCH", path, body={"spec": {"activeDeadlineSeconds": 9}}, content_type=MERGE
        )

        assert same["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        assert int(other["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
        assert [one["metadata"]["generation"] for one in (made, other, shorter)] == [1, 1, 2]


async def test_p43_compare_and_swap(started) -> None:
    """Of two writers with the same version, the second gets 409; so does one that means another object's UID."""
    async with started() as client:
        made = await client.make()
        version = made["metadata"]["resourceVersion"]
        path = f"{client.pods}/a"
        claim = {"metadata": {"resourceVersion": version, "labels": {"owner": "one"}}}
        await client.api.request("PATCH", path, body=claim, content_type=MERGE)
        for body in (
            claim | {"metadata": {**claim["metadata"], "labels": {"owner": "two"}}},
            {"metadata": {"uid": "x"}},
        ):
            with pytest.raises(Conflict):
                await client.api.request("PATCH", path, body=body, content_type=MERGE)

        assert (await client.get("a"))["metadata"]["labels"] == {"owner": "one"}


async def test_put_replaces_and_status_is_apart(started) -> None:
    """A PUT replaces all but the status, and one of the status only that."""
    async with started() as client:
        path = "/api/v1/namespaces/rl/configmaps"
        made = await client.api.request("POST", path, body={"metadata": {"name": "m"}, "data": {"a": "1", "b": "2"}})
        body = {**made, "data": {"a": "3"}}
        put = await client.api.request("PUT", f"{path}/m", body=body)
        assert put["data"] == {"a": "3"}
        with pytest.raises(Conflict):
            await client.api.request("PUT", f"{path}/m", body=body)

        await client.make()
        pod = await client.get("a")
        changed = {
            **pod,
            "status": {**pod["status"], "phase": "Unknown"},
            "metadata": {**pod["metadata"], "labels": {"x": "y"}},
        }
        new = await client.api.request("PUT", f"{client.pods}/a/status", body=changed)
        assert (new["status"]["phase"], new["metadata"].get("labels")) == ("Unknown", pod["metadata"].get("labels"))


async def test_deletes_with_grace_and_by_selector(started) -> None:
    """A delete marks what runs, removes what does not, and a collection is deleted by selector."""
    async with started() as client:
        await client.make("a", labels={"x": "1"})
        await client.make("b", labels={"x": "2"})
        await client.make("c", ready=False, image="missing/one:1", labels={"x": "1"})
        marked = await client.api.request("DELETE", f"{client.pods}/a", body={"gracePeriodSeconds": 1})
        assert marked["metadata"]["deletionGracePeriodSeconds"] == 1
        assert await client.until("a", lambda pod: pod is None) is None
        await client.api.request("DELETE", client.pods, params={"labelSelector": "x=1"})
        await client.until("c", lambda pod: pod is None)

        assert [pod["metadata"]["name"] for pod in client.cluster.pods()] == ["b"]
        last = await client.api.request("DELETE", f"{client.pods}/b", body={"gracePeriodSeconds": 0})
        assert last["metadata"]["name"] == "b"
        with pytest.raises(NotFound):
            await client.get("b")


async def test_p45_finalizers_hold_objects(started) -> None:
    """A Pod with a finalizer stays, marked, until the finalizer is removed."""
    async with started() as client:
        await client.make()
        client.cluster.hold_deletion("a")
        await client.api.request("DELETE", f"{client.pods}/a")
        await client.until("a", lambda pod: pod["status"]["phase"] == "Succeeded")
        again = await client.api.request("DELETE", f"{client.pods}/a")
        assert again["metadata"]["deletionTimestamp"]
        await client.api.request(
            "PATCH", f"{client.pods}/a", body={"metadata": {"finalizers": None}}, content_type=MERGE
        )
        await client.until("a", lambda pod: pod is None)


async def test_namespaces_go_with_what_is_in_them(started) -> None:
    """A namespace that is deleted takes its objects with it, takes no new ones, and is gone when it is empty."""
    async with started() as client:
        await client.api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": "mine"}})
        pods = "/api/v1/namespaces/mine/pods"
        body = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "sandbox", "image": "host"}]}}
        await client.api.request(
            "POST", pods, body={**body, "metadata": {"name": "a", "finalizers": ["example.com/x"]}}
        )
        deleted = await client.api.request("DELETE", "/api/v1/namespaces/mine")
        assert deleted["status"]["phase"] == "Terminating"
        with pytest.raises(PermissionDenied, match="is being terminated"):
            await client.api.request("POST", pods, body={**body, "metadata": {"name": "b"}})
        await client.api.request("PATCH", f"{pods}/a", body={"metadata": {"finalizers": None}}, content_type=MERGE)
        store = client.cluster.store
        await client.eventually(lambda: store.find(store.resource("namespaces"), "", "mine") is None)


async def test_discovery_and_custom_resources(started) -> None:
    """Version and resources can be discovered, and kinds may be added."""
    async with started() as client:
        kind = Resource(
            plural="sandboxclaims", kind="SandboxClaim", group="extensions.agents.x-k8s.io", version="v1alpha1"
        )
        client.cluster.store.register(kind)
        version = await client.api.request("GET", "/version")
        core = await client.api.request("GET", "/api/v1")
        groups = await client.api.request("GET", "/apis")
        base = "/apis/extensions.agents.x-k8s.io/v1alpha1"
        made = await client.api.request("POST", f"{base}/namespaces/rl/sandboxclaims", body={"metadata": {"name": "c"}})
        listed = await client.api.request("GET", f"{base}/sandboxclaims")

        assert (version["major"], version["minor"]) == ("1", "36")
        assert {"pods", "pods/exec", "pods/log"} <= {one["name"] for one in core["resources"]}
        assert "extensions.agents.x-k8s.io" in [one["name"] for one in groups["groups"]]
        assert (made["kind"], [one["metadata"]["name"] for one in listed["items"]]) == ("SandboxClaim", ["c"])
        assert await client.api.text("GET", "/readyz") == "ok"
        with pytest.raises(NotFound):
            await client.api.request("GET", "/apis/nowhere/v1/things")
        assert repr(client.cluster.store).startswith("<Store at ")
