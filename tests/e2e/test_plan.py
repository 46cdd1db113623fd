# SPDX-License-Identifier: Apache-2.0
"""A plan for the nodes of a real cluster: made, carried out, and followed."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import time
from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.errors import ConfigurationError, ImagePullFailed, NotFound, PermissionDenied
from agentsandbox.models.sandbox import SandboxSpec

from .conftest import CONTEXT, NAMESPACE, options

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

MINE = {"labelSelector": "agentsandbox.dev/owner=hydration"}
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


@pytest.fixture
def command(tmp_path):
    """The command that plans for some images and fetches them."""

    def make(*images):
        file = tmp_path / "images.csv"
        file.write_text("image,size,rollouts,seconds\n" + "".join(f"{image},1000000,2,5\n" for image in images))
        where = ["--backend", "kubernetes", "--context", CONTEXT, "--namespace", NAMESPACE]
        return [sys.executable, "-m", "agentsandbox.cli", "plan", "--csv", str(file), "--fetch", *where]

    return make


async def eventually(predicate, seconds=60):
    """Wait until something is true of the cluster."""
    with anyio.fail_after(seconds):
        while not (found := await predicate()):  # noqa: ASYNC110 - a cluster tells nobody
            await anyio.sleep(0.1)
    return found


@pytest.fixture
async def nodes(api):
    """Name the nodes that are ready."""
    found = (await api.request("GET", "/api/v1/nodes"))["items"]
    conditions = {one["metadata"]["name"]: one["status"]["conditions"] for one in found}
    return [
        name
        for name, known in conditions.items()
        if any(one["type"] == "Ready" and one["status"] == "True" for one in known)
    ]


async def test_a_plan_is_carried_out(command, api, image, second_image, nodes, tmp_path):
    """Every image is on its node afterwards, each was had by a Pod there, and no Pod is left."""
    before = (await api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events", params={"limit": 1}))["metadata"]
    written = tmp_path / "plan.json"
    done = await anyio.run_process([*command(image, second_image), "--json", "--lanes", "1", "--output", str(written)])
    made = json.loads(done.stdout)

    assert {image, second_image} == set(made["placement"])
    assert set(made["placement"].values()) <= set(nodes)
    assert {} == made["failed"]
    assert made["placement"] == json.loads(written.read_text())["placement"]
    assert [] == (await api.request("GET", PODS, params=MINE))["items"]
    events = (await api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/events"))["items"]
    told = [e for e in events if int(e["metadata"]["resourceVersion"]) > int(before["resourceVersion"])]
    for each in (image, second_image):
        assert any(e["reason"] == "Pulled" and f'"{each}"' in e["message"] for e in told)


async def test_what_cannot_be_had_fails_alone(command, api, image):
    """It is named with the kubelet's words, the exit code is 1, and the rest is there."""
    done = await anyio.run_process([*command(image, "registry.invalid/none:1"), "--json"], check=False)
    made = json.loads(done.stdout)

    assert 1 == done.returncode
    assert ["registry.invalid/none:1"] == list(made["failed"])
    assert "registry.invalid" in made["failed"]["registry.invalid/none:1"]
    assert [] == (await api.request("GET", PODS, params=MINE))["items"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_nothing_is_left_when_it_is_stopped(command, api, number):
    """Interrupted in the middle of a pull, it removes its Pods before it ends."""

    async def there():
        return (await api.request("GET", PODS, params=MINE))["items"]

    async with await anyio.open_process(command("registry.invalid/none:1")) as process:
        await eventually(there)
        process.send_signal(number)
        with anyio.fail_after(60):
            assert 0 != await process.wait()
    assert [] == await there()


async def test_a_plan_is_followed(api, image, second_image, nodes):
    """Sandboxes are on the node that the plan says, and its images change in place; the Pods require that node."""
    placement = dict.fromkeys((image, second_image), nodes[0])
    seen = []

    async def rollout(sandbox, _episode):
        pod = await api.request("GET", f"{PODS}/{sandbox.capabilities.facts['pod']}")
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        seen.append((pod["metadata"]["uid"], pod["spec"]["nodeName"], terms["nodeSelectorTerms"]))
        return float((await sandbox.exec("true")).ok)

    given = options(placement=placement)
    async with SandboxPool("kubernetes", backend_options=given, max_sandboxes=1, parallelism=1) as pool:
        batch = [Episode(id=f"{n}-{each}", image=each) for n in range(2) for each in (image, second_image)]
        pool.announce(batch)
        result = await pool.rollout(batch, rollout=rollout)

    assert (1.0,) * 4 == result.rewards
    here = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [nodes[0]]}]}]
    assert [(nodes[0], here)] * 4 == [(node, terms) for _, node, terms in seen]
    assert 1 == len({uid for uid, _, _ in seen})


async def test_a_node_that_there_is_not_is_refused(image):
    """The error names the image, the node, and what there is."""
    pool = SandboxPool("kubernetes", images=[image], backend_options=options(placement={image: "no-such-node"}))
    with pytest.raises(ConfigurationError, match="is placed on 'no-such-node', and there is"):
        async with pool:
            raise AssertionError("it started")


@asynccontextmanager
async def ghost(api):
    """Have a node without a kubelet, that is ready and has no room; yield its name and what removes it."""
    name = f"ghost-{secrets.token_hex(3)}"
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    try:
        await api.request("POST", "/api/v1/nodes", body=body)
    except PermissionDenied as error:
        pytest.skip(f"nodes may not be made: {error}")

    async def remove():
        try:
            await api.request("DELETE", f"/api/v1/nodes/{name}")
        except NotFound:
            return

    async def ready():
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        status = {"conditions": [condition], "allocatable": {"cpu": "0", "memory": "0", "pods": "0"}}
        path, kind = f"/api/v1/nodes/{name}", "application/strategic-merge-patch+json"
        await api.request("PATCH", f"{path}/status", body={"status": status}, content_type=kind)
        return not ((await api.request("GET", path)).get("spec") or {}).get("taints")

    try:
        await eventually(ready)
        yield name, remove
    finally:
        with anyio.move_on_after(30, shield=True):
            await remove()


async def test_a_node_that_goes_hands_its_images_on(api, image, nodes):
    """The Pod that waits for it is given up, another one is made elsewhere, and that is no failure."""
    events = []
    async with ghost(api) as (name, remove):
        given = options(placement={image: name})
        async with SandboxPool("kubernetes", images=[image], backend_options=given, sink=events.append) as pool:

            async def waits():
                pods = (await api.request("GET", PODS))["items"]
                return any("Too many pods" in str(pod["status"]) for pod in pods)

            await eventually(waits)
            await remove()
            async with await pool.acquire(image, timeout=60) as sandbox:
                pod = await api.request("GET", f"{PODS}/{sandbox.capabilities.facts['pod']}")
                assert pod["spec"]["nodeName"] in nodes
    assert 1 == len([event for event in events if event.name == "node.closed"])
    assert [] == [event for event in events if event.name == "sandbox.failed"]


async def test_a_pull_is_told_by_the_kubelet(running, events):
    """Its Events say when an image is on its way, and that it did not come."""
    async with running(ready_timeout=10.0) as backend:
        with pytest.raises(ImagePullFailed):
            await backend.create(SandboxSpec(image="registry.invalid/none:1"), "sb-1")
    told = [event for event in events if event.name.startswith("image.")]

    assert ["image.pulling", "image.pulled"] == [event.name for event in told[:2]]
    assert {"sb-1"} == {event.sandbox for event in told}
    assert {"registry.invalid/none:1"} == {event.data["image"] for event in told}
    assert told[0].data["node"]
    assert "registry.invalid" in told[1].data["error"]
