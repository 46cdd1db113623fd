# SPDX-License-Identifier: Apache-2.0
"""Sandboxes by claims, on a real cluster with the real agent-sandbox controller."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager, suppress

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.agent_sandbox.objects import CORE, EXTENSIONS
from agentsandbox.backends.opening import open_backend
from agentsandbox.client import SandboxClient
from agentsandbox.errors import NotFound, SandboxLost
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing import conformance

from .conftest import NAMESPACE, SMALL, options, sh

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

BASE = f"/apis/{EXTENSIONS}/v1beta1/namespaces/{NAMESPACE}"
CORE_BASE = f"/apis/{CORE}/v1beta1/namespaces/{NAMESPACE}"
RESTART = ResetPolicy(rungs=("restart", "replace"))


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


async def test_a_cold_start_is_told(image, api):
    """The controller tells nobody that it found no warm one; the event, the facts and the report do."""
    told = []
    async with SandboxClient(
        "agent-sandbox", images={image: 1}, spares=0, sink=told.append, backend_options=options()
    ) as client:
        async with await client.acquire(image) as lease:
            facts = lease.capabilities.facts
            sandbox = await api.request("GET", f"{CORE_BASE}/sandboxes/{facts['sandbox']}")
            assert "cold" == sandbox["metadata"]["labels"]["agents.x-k8s.io/launch-type"]
            assert ("cold", facts["claim"]) == (facts["launch"], facts["pod"])
        assert "0 warm, 1 cold" in repr(client.backend)
    assert ["cold"] == [one.data["launch"] for one in told if one.name == "sandbox.claimed"]


@asynccontextmanager
async def backend_of(api, **more):
    """Run a backend; when it ends, nothing of its run may be left on the cluster."""
    backend = open_backend("agent-sandbox", **options(**more))
    async with backend.running():
        yield backend
    assert [] == await left(api, backend.run_id)


async def test_a_suspended_sandbox_comes_back_as_a_fresh_one(image, api):
    """Its Pod goes and its claim stays; resumed, the same Sandbox has another Pod without the old files."""
    async with backend_of(api) as backend:
        sandbox = await backend.create(SandboxSpec(image=image), "one")
        await sh(sandbox, "touch /tmp/mark")
        held = backend._held[sandbox.pod]
        await backend.suspend(sandbox)
        found = await api.request("GET", f"{CORE_BASE}/sandboxes/{held.sandbox}")
        assert "Suspended" == found["spec"]["operatingMode"]
        assert (held.claim, held.sandbox_uid) == (
            found["metadata"]["ownerReferences"][0]["name"],
            found["metadata"]["uid"],
        )
        with pytest.raises(NotFound):
            await api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{sandbox.pod}")
        fresh = await backend.resume(sandbox)
        assert (sandbox.pod, True) == (fresh.pod, sandbox.uid != fresh.uid)
        assert (await sh(fresh, "test ! -e /tmp/mark")).ok
        await fresh.check()
        with pytest.raises(SandboxLost):
            await sandbox.check()
        await backend.destroy(fresh)


async def test_a_claimed_sandbox_is_made_anew_in_place(image, api):
    """The rule of the template works in a claimed Pod: another container in the same Pod, verified and clean."""
    told, seen = [], []
    async with SandboxClient(
        "agent-sandbox", images={image: 1}, spares=0, reset=RESTART, sink=told.append, backend_options=options()
    ) as client:
        for _ in range(3):
            async with await client.acquire(image) as lease:
                clean = "test ! -e /tmp/mark && test ! -e /dev/shm/mark && ! grep -l sleep /proc/[0-9]*/comm"
                assert (await lease.exec(clean, timeout=30)).ok
                await lease.exec("touch /tmp/mark /dev/shm/mark; nohup sleep 600 >/dev/null 2>&1 &", timeout=30)
                facts = lease.capabilities.facts
                pod = await api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{facts['pod']}")
                restarts = pod["status"]["containerStatuses"][0]["restartCount"]
                seen.append((facts["claim"], facts["pod"], pod["metadata"]["uid"], restarts))
        found = await api.request("GET", f"{BASE}/sandboxclaims", params=run_of(client))
        assert [seen[0][0]] == [one["metadata"]["name"] for one in found["items"]]
    assert [(*seen[0][:3], restarts) for restarts in range(3)] == seen
    resets = [(one.data["rung"], one.data["verified"]) for one in told if one.name == "sandbox.reset"]
    assert [("restart", True)] * 2 == resets[:2]


def run_of(client):
    """Select what a client's run has."""
    return {"labelSelector": f"agentsandbox.dev/run-id={client.backend.run_id}"}


async def test_the_controller_keeps_the_network_policy_and_dns_of_the_run(image, api):
    """The policy selects claimed Pods and allows what was asked for; the controller adds none; DNS is the cluster's."""
    network = {"allow": ["dns", "10.1.0.0/16:443"], "probe": False}
    async with SandboxClient(
        "agent-sandbox", images={image: 1}, spares=0, backend_options=options(network=network)
    ) as client:
        async with await client.acquire(image) as lease:
            run_id = client.backend.run_id
            where = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies"
            policies = (await api.request("GET", where))["items"]
            (policy,) = (one for one in policies if run_id in one["metadata"]["name"])
            assert f"asb-{run_id}" == policy["metadata"]["name"]
            assert ["Ingress", "Egress"] == policy["spec"]["policyTypes"]
            assert "ingress" not in policy["spec"]
            assert ["kube-system", "10.1.0.0/16"] == [
                (to.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name"))
                or to["ipBlock"]["cidr"]
                for rule in policy["spec"]["egress"]
                for to in rule["to"]
            ]
            pod = await api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{lease.capabilities.facts['pod']}")
            selected = policy["spec"]["podSelector"]["matchLabels"]
            assert selected.items() <= pod["metadata"]["labels"].items()
            assert ("ClusterFirst", None) == (pod["spec"]["dnsPolicy"], pod["spec"].get("dnsConfig"))
            assert b"8.8.8.8" not in (await lease.exec("cat /etc/resolv.conf", timeout=30)).stdout
            (template,) = (await api.request("GET", f"{BASE}/sandboxtemplates", params=run_of(client)))["items"]
            assert "Unmanaged" == template["spec"]["networkPolicyManagement"]
    left_over = (await api.request("GET", where))["items"]
    assert [] == [one for one in left_over if run_id in one["metadata"]["name"]]


# Pools and templates of somebody else.


@pytest.fixture
async def platform(image, api):
    """Make a template and a pool as a platform's team would, and see that they are as before when the test is over."""
    container = {
        "name": "runtime",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "resources": {"requests": SMALL["requests"], "limits": SMALL["limits"]},
    }
    pod = {"containers": [container], "terminationGracePeriodSeconds": 1}
    objects = (
        ("sandboxtemplates", {"podTemplate": {"spec": pod}}),
        ("sandboxwarmpools", {"replicas": 2, "sandboxTemplateRef": {"name": "platform"}}),
    )
    before = {}
    try:
        for plural, spec in objects:
            kind = {"sandboxtemplates": "SandboxTemplate", "sandboxwarmpools": "SandboxWarmPool"}[plural]
            body = {"apiVersion": f"{EXTENSIONS}/v1beta1", "kind": kind, "metadata": {"name": "platform"}, "spec": spec}
            made = await api.request("POST", f"{BASE}/{plural}", body=body)
            before[plural] = made["metadata"]["uid"], made["spec"]
        await their_pool(api, 2)
        yield "platform"
        for plural, expected in before.items():
            now = await api.request("GET", f"{BASE}/{plural}/platform")
            assert expected == (now["metadata"]["uid"], now["spec"])
        await their_pool(api, 2)
    finally:
        for plural, _ in reversed(objects):
            with suppress(NotFound):
                await api.request("DELETE", f"{BASE}/{plural}/platform")


async def their_pool(api, wanted):
    """Wait until their pool has so many ready."""
    with anyio.fail_after(60):
        while True:
            pool = await api.request("GET", f"{BASE}/sandboxwarmpools/platform")
            if (pool.get("status") or {}).get("readyReplicas", 0) == wanted:
                return
            await anyio.sleep(0.2)


async def test_a_pool_of_somebody_else_is_claimed_from_and_stays_as_it_is(platform, api, capsys):
    """Each episode has a claim of its own, from their warm ones while there are some, with commands that work."""
    told = []

    async def rollout(sandbox, episode):
        facts = sandbox.capabilities.facts
        assert ("platform", "platform", "runtime") == (facts["pool"], facts["template"], facts["container"])
        assert ("replace",) == sandbox.capabilities.rungs
        fresh = await sandbox.exec("test ! -e /tmp/mark && touch /tmp/mark && cat", stdin=b"x" * 100_000, timeout=30)
        return float(fresh.ok and len(fresh.stdout) == 100_000)

    async with SandboxPool(
        "agent-sandbox",
        images={"swe": 2},
        spares=0,
        rollout=rollout,
        sink=told.append,
        backend_options=options(pools={"swe": platform}),
    ) as pool:
        began = anyio.current_time()
        result = await pool.rollout([Episode(id=f"e{i}", image="swe") for i in range(8)])
        seconds = anyio.current_time() - began
        run_id = pool.client.backend.run_id
    assert (1.0,) * 8 == result.rewards
    assert [] == await left(api, run_id)
    launches = [one.data["launch"] for one in told if one.name == "sandbox.claimed"]
    assert 8 <= len(launches)
    assert "warm" in launches
    with capsys.disabled():
        warm_ones = launches.count("warm")
        sys.stdout.write(
            f"\n8 episodes on a pool of others: {seconds:.2f} s, {len(launches)} claims, {warm_ones} warm\n"
        )


async def test_a_template_of_somebody_else_gets_a_pool_of_ours(platform, api):
    """The pool goes with the run."""
    async with backend_of(api, templates={"swe": platform}) as backend:
        sandbox = await backend.create(SandboxSpec(image="swe"), "one")
        assert b"hi" == (await sh(sandbox, "printf hi")).stdout
        await backend.suspend(sandbox)
        fresh = await backend.resume(sandbox)
        assert b"hi" == (await sh(fresh, "printf hi")).stdout
        await backend.destroy(fresh)


async def test_a_pod_of_somebody_elses_pool_deleted_behind_our_back_is_lost_with_its_claim(platform, api):
    """The Pod that takes its place has not got our labels; it goes with the claim all the same."""
    async with backend_of(api, pools={"swe": platform}) as backend:
        sandbox = await backend.create(SandboxSpec(image="swe"), "one")
        where = f"/api/v1/namespaces/{NAMESPACE}/pods/{sandbox.pod}"
        await api.request("DELETE", where)
        with pytest.raises(SandboxLost):
            await sh(sandbox, "sleep 60")
        await backend.destroy(sandbox)
        with pytest.raises(NotFound):
            await api.request("GET", where)
