# SPDX-License-Identifier: Apache-2.0
"""Sandboxes by claims, on a real cluster with the real agent-sandbox controller."""

from __future__ import annotations

import sys

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.agent_sandbox.objects import EXTENSIONS
from agentsandbox.client import SandboxClient
from agentsandbox.errors import NotFound
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.testing import conformance

from .conftest import NAMESPACE, options

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

BASE = f"/apis/{EXTENSIONS}/v1beta1/namespaces/{NAMESPACE}"


@pytest.fixture(autouse=True)
async def controller(api):
    """Skip where the cluster does not have the controller."""
    try:
        await api.request("GET", f"/apis/{EXTENSIONS}")
    except NotFound:
        pytest.skip("the cluster has no agent-sandbox controller")


async def left(api, run_id):
    """What a run has on the cluster."""
    names = []
    for where in (f"/api/v1/namespaces/{NAMESPACE}/pods", *(f"{BASE}/sandbox{kind}s" for kind in KINDS)):
        found = await api.request("GET", where, params={"labelSelector": f"agentsandbox.dev/run-id={run_id}"})
        names += [one["metadata"]["name"] for one in found["items"]]
    return names


KINDS = ("claim", "template", "warmpool")


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check, image):
    """The rule in the check's docstring holds in claimed Pods."""
    async with SandboxClient("agent-sandbox", images={image: 2}, backend_options=options()) as client:
        try:
            await check(client, image)
        except conformance.NotApplicable as reason:
            pytest.skip(str(reason))


async def test_forty_episodes_over_two_images(image, second_image, api, capsys):
    """Every reward is there, no more claims than sandboxes are made, every start is told, and nothing is left."""
    claimed = []

    def hear(event):
        if event.name == "sandbox.claimed":
            claimed.append(event.data["launch"])

    async def rollout(sandbox, episode):
        for number in range(4):
            done = await sandbox.exec(f"echo {number} >> log; wc -l < log", timeout=30)
        return float(done.stdout.strip() == b"4")

    images = {image: 4, second_image: 4}
    batch = [Episode(id=f"e{i}", image=(image, second_image)[i % 2]) for i in range(40)]
    async with SandboxPool(
        "agent-sandbox", images=images, spares=0, rollout=rollout, sink=hear, workdir="/tmp", backend_options=options()
    ) as pool:
        async with anyio.create_task_group() as group:
            for name in images:
                for _ in range(4):
                    group.start_soon(warm, pool, name)
        began = anyio.current_time()
        result = await pool.rollout(batch)
        seconds = anyio.current_time() - began
        run_id = pool.client.backend.run_id
    assert (1.0,) * 40 == result.rewards
    assert 8 >= len(claimed)
    assert {"warm", "cold"} >= set(claimed)
    assert [] == await left(api, run_id)
    with capsys.disabled():
        sys.stdout.write(f"\n40 episodes after warm-up: {seconds:.2f} s, {len(claimed)} claims\n")


async def warm(pool, image):
    """Have a sandbox once."""
    async with await pool.acquire(image):
        pass


async def test_a_pod_deleted_behind_our_back_is_a_retryable_record(image, api):
    """The controller makes another Pod of the same name; the episode has no reward and may be tried again."""

    async def rollout(sandbox, episode):
        pod = sandbox.capabilities.facts["pod"]
        await api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
        await sandbox.exec("sleep 60")
        return 1.0

    async with SandboxPool(
        "agent-sandbox", images=[image], rollout=rollout, max_attempts=1, backend_options=options()
    ) as pool:
        (record,) = (await pool.rollout([Episode(id="e", image=image)])).records
        run_id = pool.client.backend.run_id
    assert (None, True) == (record.reward, record.retryable)
    assert [] == await left(api, run_id)


async def test_fresh_sandboxes_are_taken_from_the_pool(image):
    """Where nothing is used again, the pool has the next one ready, and the launch type says so."""
    launches = []
    fresh = {"reset": ResetPolicy(rungs=("replace",)), "backend_options": options(reuse=False, warm=1)}
    async with SandboxClient("agent-sandbox", images={image: 1}, spares=0, **fresh) as client:
        for _ in range(3):
            async with await client.acquire(image) as lease:
                launches.append(lease.capabilities.facts["launch"])
            with anyio.fail_after(30):
                while await ready(client) < 1:  # noqa: ASYNC110 - the controller tells nobody here
                    await anyio.sleep(0.1)
    assert "warm" == launches[-1]


async def ready(client):
    """How many ready ones the pools of a client have."""
    api = client.backend._api
    found = await api.request(
        "GET", f"{BASE}/sandboxwarmpools", params={"labelSelector": f"agentsandbox.dev/run-id={client.backend.run_id}"}
    )
    return sum((pool.get("status") or {}).get("readyReplicas", 0) for pool in found["items"])
