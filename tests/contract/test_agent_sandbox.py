# SPDX-License-Identifier: Apache-2.0
"""Sandboxes by claims, on a double of the agent-sandbox controller that behaves as the real one was seen to behave."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.agent_sandbox.objects import EXTENSIONS
from agentsandbox.backends.agent_sandbox.roles import ROLE_RULES
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.roles import role
from agentsandbox.backends.opening import open_backend
from agentsandbox.client import SandboxClient
from agentsandbox.errors import (
    ConfigurationError,
    InfrastructureError,
    InvalidObject,
    ProvisionError,
    SandboxLost,
    UsageError,
)
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing.cluster import FakeCluster, Timing

from .cluster_clients import eventually

pytestmark = pytest.mark.anyio

FACTS = json.loads((Path(__file__).parent / "facts/agent_sandbox_crds.json").read_text())
KINDS = ("sandboxclaims", "sandboxwarmpools", "sandboxtemplates", "sandboxes")
SPEC = SandboxSpec(image="host")
FRESH = {"reset": ResetPolicy(rungs=("replace",))}


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


def there(cluster, plural):
    """The objects of a kind."""
    return [one.object for one in cluster.store.all(cluster.store.resource(plural), cluster.namespace)]


@asynccontextmanager
async def client_of(tmp_path, *, options=None, client=SandboxClient, timing=None, images=None, **given):
    """Run a cluster with the controller, and a client of it; afterwards nothing may be left."""
    timing = timing or Timing(second=0.1)
    names = images or {"host": 1}
    async with FakeCluster(agent_sandbox=True, timing=timing, images=dict.fromkeys(names, "host")) as cluster:
        options = {"kubeconfig": cluster.kubeconfig(tmp_path), **(options or {})}
        async with client("agent-sandbox", images=names, spares=0, backend_options=options, **given) as made:
            yield cluster, made
        assert [[]] * 5 == [cluster.pods(), *(there(cluster, kind) for kind in KINDS)]


def without_times(claim):
    """What must be the same of a recorded and a replayed claim."""
    status = claim.get("status") or {}
    conditions = [(one["type"], one["status"], one["reason"]) for one in status.get("conditions") or ()]
    named = sorted(key for key in claim["metadata"].get("annotations") or {} if key.endswith("/sandbox-name"))
    return (
        claim["metadata"]["generation"],
        sorted(claim["spec"]),
        conditions,
        named,
        sorted(status.get("sandbox") or {}),
    )


async def test_the_double_answers_a_claim_as_the_controller_did(tmp_path):
    """New, assigned, ready: the same steps with the same fields; then the Sandbox and Pod bear the same marks."""
    pod = {"containers": [{"name": "sandbox", "image": "host", "command": ["sleep", "infinity"]}]}
    base = f"/apis/{EXTENSIONS}/v1beta1/namespaces/rl"
    async with FakeCluster(agent_sandbox=True) as cluster:
        api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=2)
        try:
            for plural, name, spec in (
                ("sandboxtemplates", "swe", {"podTemplate": {"spec": pod}}),
                ("sandboxwarmpools", "swe", {"replicas": 2, "sandboxTemplateRef": {"name": "swe"}}),
            ):
                await api.request("POST", f"{base}/{plural}", body={"metadata": {"name": name}, "spec": spec})
            await eventually(lambda: there(cluster, "sandboxwarmpools")[0].get("status", {}).get("readyReplicas") == 2)
            pool = there(cluster, "sandboxwarmpools")[0]
            assert FACTS["warmpool_ready"]["status"] == pool["status"]

            seen = []
            kind = cluster.store.resource("sandboxclaims")
            cluster.store.subscribe(kind, lambda event: seen.append(event.now.object))
            body = {"metadata": {"name": "c1"}, "spec": {"warmPoolRef": {"name": "swe"}}}
            await api.request("POST", f"{base}/sandboxclaims", body=body)
            await eventually(lambda: bool(seen[-1].get("status", {}).get("sandbox")))
            steps = list(dict.fromkeys(map(str, map(without_times, seen))))
            recorded = [event["object"] for event in FACTS["claim_watch"]]
            assert list(dict.fromkeys(map(str, map(without_times, recorded)))) == steps

            claim = seen[-1]
            (sandbox,) = (one for one in there(cluster, "sandboxes") if one["metadata"]["name"] == name_in(claim))
            for field in ("labels", "annotations"):
                assert set(FACTS["claimed_sandbox"]["metadata"][field]) == set(sandbox["metadata"][field])
                assert set(FACTS["claimed_pod"]["metadata"][field]) == set(
                    cluster.pod(name_in(claim))["metadata"][field]
                )
            assert "warm" == sandbox["metadata"]["labels"]["agents.x-k8s.io/launch-type"]
            assert (
                FACTS["claimed_sandbox"]["spec"]["podTemplate"]["spec"]["dnsConfig"]
                == (cluster.pod(name_in(claim))["spec"]["dnsConfig"])
            )

            before = cluster.pod(name_in(claim))["metadata"]["uid"]
            cluster.delete_behind(name_in(claim))
            await eventually(lambda: cluster.pods(name_in(claim))[:1] != [] and claim_now(cluster)["status"] == "True")
            assert before != cluster.pod(name_in(claim))["metadata"]["uid"]

            body = {"metadata": {"name": "c2"}, "spec": {"warmPoolRef": {"name": "nope"}}}
            await api.request("POST", f"{base}/sandboxclaims", body=body)
            await eventually(lambda: "status" in cluster.store.get(kind, "rl", "c2").object)
            recorded = FACTS["claim_of_missing_pool"]
            assert without_times(recorded) == without_times(cluster.store.get(kind, "rl", "c2").object)
        finally:
            await api.aclose()


def name_in(claim):
    """The name of a claim's Sandbox."""
    return claim["status"]["sandbox"]["name"]


def claim_now(cluster):
    """The Ready condition of the first claim."""
    return there(cluster, "sandboxclaims")[0]["status"]["conditions"][0]


async def test_a_sandbox_is_a_claim_and_says_how_it_was_started(tmp_path):
    """One claim, one Sandbox, one Pod; a cold start is told, not hidden."""
    told = []
    async with client_of(tmp_path, sink=told.append) as (cluster, client), await client.acquire("host") as lease:
        assert b"hi" == (await lease.exec(["printf", "hi"])).stdout
        facts = lease.capabilities.facts
        assert ("cold", facts["claim"]) == (facts["launch"], facts["pod"])
        assert [1, 1, 1] == [len(there(cluster, kind)) for kind in ("sandboxclaims", "sandboxes", "sandboxtemplates")]
        (event,) = (one for one in told if one.name == "sandbox.claimed")
        assert ("cold", facts["claim"]) == (event.data["launch"], event.data["claim"])
        backend = client.backend
        assert repr(backend).endswith("running, 1 claims, 0 warm, 1 cold]>")
        assert "<Claims [0 warm, 1 cold]>" == repr(backend._claims)
        assert "<Waiting [1 claims, 1 Pods]>" == repr(backend._claims._waiting)
        assert "<Pools [1 pools, 0 warm]>" == repr(backend._pools)


async def test_forty_episodes_hold_no_more_claims_than_sandboxes(tmp_path):
    """Two images at concurrency eight: at most eight claims are ever made, and every reward is there."""

    async def rollout(sandbox, episode):
        return float((await sandbox.exec(["true"])).exit_code == 0)

    images = {"a": 4, "b": 4}
    async with client_of(tmp_path, client=SandboxPool, images=images, rollout=rollout) as (cluster, pool):
        batch = [Episode(id=f"e{i}", image="ab"[i % 2]) for i in range(40)]
        result = await pool.rollout(batch)
        assert (1.0,) * 40 == result.rewards
        assert 8 >= len(cluster.asked("POST", "/sandboxclaims$"))


async def test_a_pod_replaced_behind_our_back_is_a_retryable_record_and_never_a_reward(tmp_path):
    """The controller makes a Pod of the same name; what would run in it is not this episode."""

    async def rollout(sandbox, episode):
        cluster.delete_behind(sandbox.capabilities.facts["pod"])
        await sandbox.exec(["sleep", "60"])
        return 1.0

    given = {"client": SandboxPool, "rollout": rollout, "max_attempts": 1}
    async with client_of(tmp_path, **given) as (cluster, pool):
        result = await pool.rollout([Episode(id="e", image="host")])
        (record,) = result.records
        assert (None, True) == (record.reward, record.retryable)
        assert ("e",) == tuple(episode.id for episode in result.retryable)


async def test_a_lost_sandbox_takes_its_claim_and_the_new_pod_along(tmp_path):
    """After the loss nothing of it stays, and the next lease has another claim."""
    async with client_of(tmp_path) as (cluster, client):
        async with await client.acquire("host") as lease:
            first = lease.capabilities.facts["claim"]
            cluster.delete_behind(lease.capabilities.facts["pod"])
            with pytest.raises(SandboxLost):
                await lease.exec(["sleep", "60"])
        async with await client.acquire("host") as lease:
            second = lease.capabilities.facts["claim"]
            assert first != second
            await eventually(lambda: [second] == [one["metadata"]["name"] for one in there(cluster, "sandboxclaims")])


async def test_where_nothing_is_used_again_a_pool_keeps_ready_ones_for_the_next_claims(tmp_path):
    """Each create raises the pool by one step at most; later claims are warm, and the reports say so."""
    options = {"reuse": False, "warm": 2}
    async with client_of(tmp_path, options=options, **FRESH) as (cluster, client):
        launches = []
        for _ in range(4):
            async with await client.acquire("host") as lease:
                launches.append(lease.capabilities.facts["launch"])
            await eventually(lambda: there(cluster, "sandboxwarmpools")[0]["status"].get("readyReplicas", 0) >= 1)
        assert ["warm", "warm"] == launches[2:]
        steps = [one.body["spec"]["replicas"] for one in cluster.asked("PATCH", "/sandboxwarmpools/")]
        assert [1, 2] == steps


async def test_held_sandboxes_that_are_used_again_drop_the_refill_of_their_pool(tmp_path):
    """Nobody is going to claim it: the pool keeps none as soon as that is known."""
    async with client_of(tmp_path, options={"warm": 2}) as (cluster, client):
        for _ in range(3):
            async with await client.acquire("host"):
                pass
        await eventually(lambda: there(cluster, "sandboxwarmpools")[0]["status"]["replicas"] == 0)
        assert 0 == there(cluster, "sandboxwarmpools")[0]["spec"]["replicas"]
        assert 1 == len(cluster.asked("POST", "/sandboxclaims$"))


async def test_another_runs_objects_are_left_alone(tmp_path):
    """The end of a run deletes what has its labels, each by its UID, and nothing else."""
    async with FakeCluster(agent_sandbox=True) as cluster:
        cluster.create("sandboxtemplates", {"metadata": {"name": "other", "namespace": "rl"}, "spec": {}})
        options = {"kubeconfig": cluster.kubeconfig(tmp_path)}
        async with SandboxClient("agent-sandbox", images={"host": 1}, backend_options=options) as client:
            async with await client.acquire("host"):
                pass
        assert ["other"] == [one["metadata"]["name"] for one in there(cluster, "sandboxtemplates")]
        deletes = cluster.asked("DELETE", f"/apis/{EXTENSIONS}")
        assert [True] * 3 == [bool(one.body["preconditions"]["uid"]) for one in deletes]


async def test_a_claim_whose_answer_was_lost_is_found_again(tmp_path):
    """The create is repeated under the same name and recognised by its mark: one claim, no second Pod."""
    async with FakeCluster(agent_sandbox=True) as cluster:
        cluster.faults.cut("POST", "/sandboxclaims$", after=True)
        options = {"kubeconfig": cluster.kubeconfig(tmp_path)}
        async with SandboxClient("agent-sandbox", images={"host": 1}, spares=0, backend_options=options) as client:
            async with await client.acquire("host"):
                assert 1 == len(there(cluster, "sandboxclaims")) == len(cluster.pods())
        assert [] == cluster.pods()


async def test_a_pod_that_can_never_be_ready_is_the_kubelets_word_for_it(tmp_path):
    """The claim says for ever that dependencies are not ready; what the Pod says ends the wait, and nothing stays."""
    async with client_of(tmp_path) as (cluster, client):
        cluster.images.clear()
        with pytest.raises(ProvisionError, match=r"(ErrImagePull|ImagePullBackOff): .*host: not found"):
            await client.acquire("host")


async def test_a_pod_that_is_not_ready_in_time_is_the_controllers_word_for_it(tmp_path):
    """A claim is not waited for until the end of time, and nothing of it stays."""
    options = {"ready_timeout": 0.5}
    timing = Timing(start=30.0, second=0.1)
    async with client_of(tmp_path, options=options, timing=timing, acquire_timeout=5.0) as (_cluster, client):
        with pytest.raises(InfrastructureError, match=r"claim asb-.*: DependenciesNotReady: .*; not ready after 0.5 s"):
            await client.acquire("host")


@asynccontextmanager
async def backend_of(tmp_path, *, timing=None, cluster=None, **options):
    """Run a cluster with the controller, and a backend of it; afterwards nothing may be left."""
    timing = timing or Timing(second=0.1)
    async with FakeCluster(agent_sandbox=True, timing=timing, **(cluster or {})) as made:
        backend = open_backend("agent-sandbox", kubeconfig=made.kubeconfig(tmp_path), **options)
        async with backend.running():
            yield made, backend
        policies = there(made, "networkpolicies")
        assert [[]] * 6 == [made.pods(), policies, *(there(made, kind) for kind in KINDS)]


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("InvalidMetadata", InvalidObject),
        ("EnvVarsInjectionRejected", InvalidObject),
        ("VolumeClaimTemplatesError", InvalidObject),
        ("InvalidConfiguration", InvalidObject),
        ("TemplateNotFound", ProvisionError),
        ("WarmPoolNotFound", ProvisionError),
        ("PodFailed", ProvisionError),
        ("PodSucceeded", ProvisionError),
        ("SandboxExpired", ProvisionError),
        ("ClaimExpired", ProvisionError),
        ("SandboxMissing", ProvisionError),
        ("SandboxSuspended", ProvisionError),
        ("MultiplePods", ProvisionError),
    ],
)
async def test_a_reason_that_is_final_ends_the_wait_at_once(tmp_path, monkeypatch, reason, error):
    """In the controller's words, without waiting for the time to be up; the claim is gone, and the next one is fine."""
    monkeypatch.setattr("agentsandbox.backends.agent_sandbox.waiting.LAG", 0.1)
    async with backend_of(tmp_path, ready_timeout=3600.0) as (cluster, backend):
        cluster.agent_sandbox.refuse(reason, "so it is")
        with pytest.raises(error, match=rf"^claim asb-\S+: {reason}: so it is") as caught:
            await backend.create(SPEC, "one")
        assert error is type(caught.value)
        assert [] == there(cluster, "sandboxclaims")
        sandbox = await backend.create(SPEC, "two")
        await sandbox.check()


async def test_the_network_policy_and_dns_are_what_was_asked_for(tmp_path):
    """One policy of ours selects claimed Pods; the controller adds none of its own, and no public resolvers."""
    network = {"allow": ["dns", "10.1.0.0/16:443"], "require": True}
    plugin = {"process": "echo-runner", "network": "enforcing"}
    async with backend_of(tmp_path, network=network, cluster=plugin) as (cluster, backend):
        told = []
        backend.sink = told.append
        sandbox = await backend.create(SPEC, "one")
        (policy,) = there(cluster, "networkpolicies")
        assert f"asb-{backend.run_id}" == policy["metadata"]["name"]
        assert (["Ingress", "Egress"], []) == (policy["spec"]["policyTypes"], policy["spec"]["ingress"])
        assert 2 == len(policy["spec"]["egress"])
        pod = cluster.pod(sandbox.pod)
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert ("ClusterFirst", None) == (pod["spec"]["dnsPolicy"], pod["spec"].get("dnsConfig"))
        (event,) = (one for one in told if one.name == "network.fenced")
        assert "enforced" == event.data["verdict"]
        assert sandbox.capabilities.facts["network_policy"].startswith("enforced")
        template = {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "host"}]}}}
        stored = cluster.create(
            "sandboxtemplates", {"metadata": {"name": "other", "namespace": "rl"}, "spec": template}
        )
        await eventually(lambda: 2 == len(there(cluster, "networkpolicies")))  # as it makes one where nobody refuses it
        cluster.delete(stored, None)
        await eventually(lambda: 1 == len(there(cluster, "networkpolicies")))


async def test_a_suspended_sandbox_comes_back_as_a_fresh_one(tmp_path):
    """Its claim stays while its Pod is gone; resumed, nothing of the old file system is there."""
    async with FakeCluster(agent_sandbox=True, timing=Timing(second=0.1)) as cluster:
        backend = open_backend("agent-sandbox", kubeconfig=cluster.kubeconfig(tmp_path))
        async with backend.running():
            sandbox = await backend.create(SandboxSpec(image="host"), "one")
            await backend.suspend(sandbox)
            assert ([], 1) == (cluster.pods(), len(there(cluster, "sandboxclaims")))
            fresh = await backend.resume(sandbox)
            assert (sandbox.pod, True) == (fresh.pod, sandbox.uid != fresh.uid)
            await fresh.check()
            await backend.destroy(fresh)
            assert [] == there(cluster, "sandboxclaims")


async def test_other_backends_cannot_suspend(tmp_path):
    """The error says who can."""
    async with FakeCluster() as cluster:
        backend = open_backend("kubernetes", kubeconfig=cluster.kubeconfig(tmp_path))
        with pytest.raises(UsageError, match=r"backend 'kubernetes' cannot suspend .*'agent-sandbox' can"):
            await backend.suspend(object())
        with pytest.raises(UsageError, match="cannot resume"):
            await backend.resume(object())


async def test_a_cluster_without_the_controller_is_refused_before_anything_is_made(tmp_path):
    """The error says what to install, or what to use instead."""
    async with FakeCluster() as cluster:
        options = {"kubeconfig": cluster.kubeconfig(tmp_path)}
        with pytest.raises(ConfigurationError, match=r"install the agent-sandbox controller .* backend 'kubernetes'"):
            async with SandboxClient("agent-sandbox", images={"host": 1}, backend_options=options):
                pass
        assert [] == cluster.asked("POST")


@pytest.mark.parametrize("warm", [-1, 1.5, True])
def test_a_number_of_ready_ones_that_is_none_is_refused(warm):
    """Before anything is asked for."""
    with pytest.raises(ConfigurationError, match="warm must be a whole number"):
        open_backend("agent-sandbox", warm=warm)


async def test_doctor_names_the_versions_of_the_controllers_kinds(tmp_path):
    """Where it is there, and what to do where it is not."""
    for there_, expected in ((True, [(True, "v1beta1")] * 2), (False, [(False, "not served")] * 2)):
        async with FakeCluster(agent_sandbox=there_) as cluster:
            checks = await open_backend("agent-sandbox", kubeconfig=cluster.kubeconfig(tmp_path)).examine()
            found = [(check.ok, check.detail) for check in checks if check.name.endswith("agents.x-k8s.io")]
            assert expected == found


async def test_doctor_asks_for_what_claims_need_and_not_for_pods(tmp_path):
    """Who has the least Role passes; that no Pods may be tried costs restarts in place, and nothing more."""
    async with FakeCluster(agent_sandbox=True) as cluster:
        cluster.access.use_role(role("claims", ROLE_RULES, namespace="rl", optional=False))
        checks = await open_backend("agent-sandbox", kubeconfig=cluster.kubeconfig(tmp_path)).examine()
        assert [] == [check.name for check in checks if check.required and not check.ok]
        assert "permission sandboxclaims" in [check.name for check in checks]
        (pod,) = (check for check in checks if check.name == "pod")
        assert (False, False) == (pod.ok, pod.required)
        assert "no used sandbox is made anew in place" in pod.detail


async def test_no_create_is_made_twice_under_cancellation(tmp_path):
    """Cancelled in the middle of a claim, nothing of it stays."""
    async with FakeCluster(agent_sandbox=True, timing=Timing(start=30.0)) as cluster:
        backend = open_backend("agent-sandbox", kubeconfig=cluster.kubeconfig(tmp_path))
        async with backend.running(), anyio.create_task_group() as group:
            group.start_soon(backend.create, SandboxSpec(image="host"), "one")
            await eventually(lambda: bool(cluster.pods()))
            group.cancel_scope.cancel()
        assert ([], []) == (cluster.pods(), there(cluster, "sandboxclaims"))
