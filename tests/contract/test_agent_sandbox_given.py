# SPDX-License-Identifier: Apache-2.0
"""Claims on pools and templates that somebody else has made: used, never changed, and honest about what they lack."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import attrs
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.agent_sandbox.objects import EXTENSIONS
from agentsandbox.backends.agent_sandbox.roles import GIVEN_RULES as RULES
from agentsandbox.backends.kubernetes.roles import role
from agentsandbox.backends.opening import open_backend
from agentsandbox.client import SandboxClient
from agentsandbox.errors import ConfigurationError, PermissionDenied, ProvisionError, SandboxLost, UsageError
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing.cluster import FakeCluster, Timing

from .cluster_clients import eventually

pytestmark = pytest.mark.anyio

KINDS = ("sandboxtemplates", "sandboxwarmpools")


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


def there(cluster, plural):
    """The objects of a kind."""
    return [one.object for one in cluster.store.all(cluster.store.resource(plural), cluster.namespace)]


def theirs(cluster):
    """What the platform's team has made, without its status and whatever the controller adds."""
    return [
        (one["metadata"]["name"], one["metadata"]["uid"], one["spec"]) for kind in KINDS for one in there(cluster, kind)
    ]


def make(cluster, *, replicas=2, name="platform", container="runtime", **pod):
    """Make a template and a pool as somebody else would."""
    first = {"name": container, "image": "host", "command": ["sleep", "infinity"]}
    spec = {"podTemplate": {"spec": {"containers": [first], **pod}}}
    cluster.create("sandboxtemplates", {"metadata": {"name": f"{name}-template", "namespace": "rl"}, "spec": spec})
    spec = {"replicas": replicas, "sandboxTemplateRef": {"name": f"{name}-template"}}
    cluster.create("sandboxwarmpools", {"metadata": {"name": name, "namespace": "rl"}, "spec": spec})


def ready(cluster, name="platform"):
    """How many a pool has ready."""
    found = next(one for one in there(cluster, "sandboxwarmpools") if one["metadata"]["name"] == name)
    return (found.get("status") or {}).get("readyReplicas", 0)


@asynccontextmanager
async def cluster_of(tmp_path, **given):
    """Run a cluster whose platform's team has a pool with two ready ones; afterwards all of theirs is as it was."""
    async with FakeCluster(agent_sandbox=True, timing=Timing(second=0.1)) as cluster:
        make(cluster, **given)
        await eventually(lambda: ready(cluster) == given.get("replicas", 2))
        before = theirs(cluster)
        yield cluster, {"kubeconfig": cluster.kubeconfig(tmp_path)}
        assert before == theirs(cluster)
        assert [] == there(cluster, "sandboxclaims")
        await eventually(lambda: len(cluster.pods()) == given.get("replicas", 2))
        assert {} == {key: value for pod in cluster.pods() for key, value in ours(pod).items()}


def ours(pod):
    """Labels of ours on a Pod."""
    labels = pod["metadata"].get("labels") or {}
    return {key: value for key, value in labels.items() if key.startswith("agentsandbox.dev/")}


async def test_a_sandbox_is_claimed_from_the_named_pool_and_says_what_it_lacks(tmp_path):
    """Commands run in their container, and the facts name pool, template and what follows for resets."""
    async with cluster_of(tmp_path) as (cluster, options):
        options["pools"] = {"swe": "platform"}
        async with SandboxClient("agent-sandbox", images={"swe": 1}, spares=0, backend_options=options) as client:
            async with await client.acquire("swe") as lease:
                done = await lease.exec("echo out; echo err >&2; exit 3", timeout=20)
                assert (3, b"out\n", b"err\n") == (done.exit_code, done.stdout, done.stderr)
                found = lease.capabilities
                assert ("runner", ("replace",)) == (found.exec_level, found.rungs)
                facts = {key: found.facts[key] for key in ("launch", "pool", "template", "container", "template_image")}
                assert facts == {
                    "launch": "warm",
                    "pool": "platform",
                    "template": "platform-template",
                    "container": "runtime",
                    "template_image": "host",
                }
                assert "each used sandbox is replaced by a new claim" in found.facts["template_lacks"]
                assert found.facts["pod"].startswith("platform-")
                (claim,) = there(cluster, "sandboxclaims")
                assert {"name": "platform"} == claim["spec"]["warmPoolRef"]
        assert [[], []] == [cluster.asked("POST", f"/{kind}$") for kind in KINDS]
        assert [[], []] == [cluster.asked("PATCH", f"/{kind}/") for kind in KINDS]
        assert [[], []] == [cluster.asked("DELETE", f"/{kind}/") for kind in KINDS]
        deletes = cluster.asked("DELETE", "/sandboxclaims/")
        assert claim["metadata"]["uid"] in [delete.body["preconditions"]["uid"] for delete in deletes]


async def test_every_episode_has_a_claim_of_its_own(tmp_path):
    """What an episode leaves behind cannot be shown to be gone there, so nobody gets it."""

    async def rollout(sandbox, episode):
        fresh = await sandbox.exec("test ! -e mark && touch mark", timeout=20)
        return float(fresh.exit_code == 0)

    async with cluster_of(tmp_path) as (cluster, options):
        options["pools"] = {"swe": "platform"}
        async with SandboxPool(
            "agent-sandbox", images={"swe": 2}, spares=0, rollout=rollout, workdir="/tmp", backend_options=options
        ) as pool:
            result = await pool.rollout([Episode(id=f"e{i}", image="swe") for i in range(4)])
        assert (1.0,) * 4 == result.rewards
        assert 4 <= len(cluster.asked("POST", "/sandboxclaims$"))


async def test_images_of_both_kinds_live_together(tmp_path):
    """A sandbox of ours becomes no sandbox of theirs in place, nor the other way round: each takes its own claim."""
    async with cluster_of(tmp_path) as (cluster, options):
        options["pools"] = {"swe": "platform"}
        images, launches = {"host": 1, "swe": 1}, []
        async with SandboxClient(
            "agent-sandbox", images=images, spares=0, max_sandboxes=1, backend_options=options
        ) as client:
            for image in ("host", "swe", "host", "swe"):
                async with await client.acquire(image) as lease:
                    assert (await lease.exec(["true"])).ok
                    launches.append((lease.capabilities.facts.get("pool"), lease.capabilities.facts["launch"]))
        assert [None, "platform", None, "platform"] == [pool for pool, _ in launches]
        assert [] == [one for one in cluster.asked("PATCH", "/pods/") if "spec" in one.body]


async def test_a_lost_stream_finds_the_runner_again(tmp_path):
    """It was started by an exec, and outlives it: the command goes on, and runs once."""
    async with cluster_of(tmp_path) as (cluster, options):
        backend = open_backend("agent-sandbox", pools={"swe": "platform"}, **options)
        async with backend.running():
            sandbox = await backend.create(SandboxSpec(image="swe", workdir="/tmp"), "one")
            results = []

            async def run():
                script = "echo x >> log; while [ ! -e go ]; do sleep 0.05; done; wc -l < log"
                results.append(await sandbox.session.exec(Command(command=script, timeout=60)))

            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await sandbox.session.exec(Command(command="while [ ! -e log ]; do sleep 0.05; done", timeout=20))
                async with cluster.outage():
                    pass
                assert (await sandbox.session.exec(Command(command="touch go", timeout=60))).ok
            assert b"1" == results[0].stdout.strip()
            assert 2 == backend._attacher.opened
            await backend.destroy(sandbox)


async def test_a_pod_replaced_behind_our_back_is_a_loss_and_goes_with_its_claim(tmp_path):
    """The new one has not got our labels, and is gone all the same when the claim is."""
    async with cluster_of(tmp_path) as (cluster, options):
        backend = open_backend("agent-sandbox", pools={"swe": "platform"}, **options)
        async with backend.running():
            sandbox = await backend.create(SandboxSpec(image="swe"), "one")
            cluster.delete_behind(sandbox.pod)
            await eventually(lambda: sandbox.loss is not None)
            with pytest.raises(SandboxLost):
                await sandbox.check()
            await backend.destroy(sandbox)
            assert sandbox.pod not in [pod["metadata"]["name"] for pod in cluster.pods()]


async def test_a_claim_beyond_what_is_ready_is_cold_and_says_so(tmp_path):
    """Their pool is not scaled for us."""
    async with cluster_of(tmp_path, replicas=0) as (_cluster, options):
        options["pools"] = {"swe": "platform"}
        told = []
        async with SandboxClient(
            "agent-sandbox", images={"swe": 1}, spares=0, sink=told.append, backend_options=options
        ) as client:
            async with await client.acquire("swe") as lease:
                assert "cold" == lease.capabilities.facts["launch"]
        (event,) = (one for one in told if one.name == "sandbox.claimed")
        assert ("cold", "platform") == (event.data["launch"], event.data["pool"])


async def test_a_cold_pod_that_can_never_be_ready_is_the_kubelets_word_for_it(tmp_path):
    """No watch tells of it before it is ours, so it is looked at."""
    async with cluster_of(tmp_path, replicas=0) as (cluster, options):
        cluster.images.clear()
        backend = open_backend("agent-sandbox", pools={"swe": "platform"}, ready_timeout=3600.0, **options)
        async with backend.running():
            with pytest.raises(ProvisionError, match=r"(ErrImagePull|ImagePullBackOff): .*host: not found"):
                await backend.create(SandboxSpec(image="swe"), "one")


async def test_a_pool_that_its_owner_removes_is_named(tmp_path, monkeypatch):
    """Sandboxes that are there go on; new ones are refused in the controller's words."""
    monkeypatch.setattr("agentsandbox.backends.agent_sandbox.waiting.LAG", 0.1)
    async with FakeCluster(agent_sandbox=True, timing=Timing(second=0.1)) as cluster:
        make(cluster)
        await eventually(lambda: ready(cluster) == 2)
        options = {"kubeconfig": cluster.kubeconfig(tmp_path), "pools": {"swe": "platform"}}
        backend = open_backend("agent-sandbox", **options)
        async with backend.running():
            sandbox = await backend.create(SandboxSpec(image="swe"), "one")
            cluster.delete(cluster.store.get(cluster.store.resource("sandboxwarmpools"), "rl", "platform"), None)
            with pytest.raises(ProvisionError, match='WarmPoolNotFound: SandboxWarmPool "platform" not found'):
                await backend.create(SandboxSpec(image="swe"), "two")
            assert (await sandbox.session.exec(Command(command=("true",)))).ok


async def test_a_template_gets_a_pool_of_ours_which_goes_with_the_run(tmp_path):
    """It keeps as many ready as is asked for; the template stays as it is."""
    async with cluster_of(tmp_path) as (cluster, options):
        options |= {"templates": {"swe": "platform-template"}, "warm": 1}
        async with SandboxClient("agent-sandbox", images={"swe": 1}, spares=0, backend_options=options) as client:
            for _ in range(2):
                async with await client.acquire("swe") as lease:
                    assert (await lease.exec(["true"])).ok
                pool = next(one for one in there(cluster, "sandboxwarmpools") if one["metadata"]["name"] != "platform")
                assert {"name": "platform-template"} == pool["spec"]["sandboxTemplateRef"]
                await eventually(lambda name=pool["metadata"]["name"]: ready(cluster, name) == 1)
            assert 1 == pool["spec"]["replicas"]


async def test_suspension_works_there_too(tmp_path):
    """The Sandbox belongs to our claim."""
    async with cluster_of(tmp_path) as (cluster, options):
        backend = open_backend("agent-sandbox", pools={"swe": "platform"}, **options)
        async with backend.running():
            sandbox = await backend.create(SandboxSpec(image="swe"), "one")
            await backend.suspend(sandbox)
            assert sandbox.pod not in [pod["metadata"]["name"] for pod in cluster.pods()]
            fresh = await backend.resume(sandbox)
            assert (sandbox.pod, True) == (fresh.pod, sandbox.uid != fresh.uid)
            await fresh.check()
            with pytest.raises(UsageError, match="replaced, not made anew in place"):
                await backend.restart(fresh)
            await backend.destroy(fresh)


async def test_a_pool_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    """By its name, and with what shows which there are."""
    async with cluster_of(tmp_path) as (cluster, options):
        for more, words in (
            ({"pools": {"swe": "nope"}}, "image 'swe': SandboxWarmPool 'nope' is not in namespace rl"),
            ({"templates": {"swe": "nope"}}, "image 'swe': SandboxTemplate 'nope' is not in namespace rl"),
        ):
            with pytest.raises(ConfigurationError, match=words):
                async with SandboxClient("agent-sandbox", images={"swe": 1}, backend_options={**options, **more}):
                    pass
        assert [] == cluster.asked("POST", f"/apis/{EXTENSIONS}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pools": ["a"]}, "pools is a mapping"),
        ({"pools": {"": "a"}}, "an image is a name such as 'swe', not ''"),
        ({"pools": {"swe": 1}}, "'swe' is to be the name of a pool, not 1"),
        ({"templates": {"swe": "a/b"}}, "'a/b' is not the name of an object"),
        ({"pools": {"swe": "a"}, "templates": {"swe": "b"}}, "'swe' is in pools and in templates"),
        ({"pools": {"swe": "a"}, "network": False}, "network= is for Pods that this run makes"),
        ({"pools": {"swe": "a"}, "placement": {"swe": "node1"}}, "placement= is for Pods that this run makes"),
        ({"templates": {"swe": "a"}, "jail": True, "run_as_root": True}, "jail= is for Pods that this run makes"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, words):
    """Before a cluster hears of it."""
    with pytest.raises(ConfigurationError, match=words):
        open_backend("agent-sandbox", **options)


async def test_doctor_says_what_a_pool_lacks(tmp_path):
    """That it is there, how many are ready, and that used sandboxes are replaced; or that it is not there."""
    async with cluster_of(tmp_path) as (cluster, options):
        make(cluster, name="empty", replicas=0)
        pools = {"swe": "platform", "none": "nope", "cold": "empty"}
        checks = await open_backend("agent-sandbox", pools=pools, **options).examine()
        found = {check.name: check for check in checks if check.name.startswith("image ")}
        assert [True, True, False] == [found[f"image swe{more}"].ok for more in ("", " warm", " reuse")]
        assert "container runtime of host" in found["image swe"].detail
        assert ("2 of 2 ready", False) == (found["image swe warm"].detail, found["image swe reuse"].required)
        assert (False, "0 of 0 ready") == (found["image cold warm"].ok, found["image cold warm"].detail)
        assert (False, True) == (found["image none"].ok, found["image none"].required)
        for kind in KINDS:
            cluster.delete(
                cluster.store.get(cluster.store.resource(kind), "rl", "empty" + "-template" * (kind == KINDS[0])), None
            )


async def test_the_smaller_role_suffices_for_pools_of_others(tmp_path):
    """Neither templates nor pools are made, changed, listed or deleted."""
    async with cluster_of(tmp_path) as (cluster, options):
        cluster.access.use_role(role("claims", RULES, namespace="rl", optional=False))
        options["pools"] = {"swe": "platform"}
        async with SandboxClient("agent-sandbox", images={"swe": 1}, spares=0, backend_options=options) as client:
            async with await client.acquire("swe") as lease:
                assert (await lease.exec(["true"])).ok


async def test_cancelled_in_the_middle_of_a_claim_nothing_stays(tmp_path):
    """Also the Pod of a Sandbox that was not known yet to be ours."""
    async with FakeCluster(agent_sandbox=True, timing=Timing(start=30.0, second=0.1)) as cluster:
        make(cluster, replicas=0)
        backend = open_backend("agent-sandbox", kubeconfig=cluster.kubeconfig(tmp_path), pools={"swe": "platform"})
        async with backend.running():
            async with anyio.create_task_group() as group:
                group.start_soon(backend.create, SandboxSpec(image="swe"), "one")
                await eventually(lambda: bool(cluster.pods()))
                group.cancel_scope.cancel()
            assert ([], []) == (cluster.pods(), there(cluster, "sandboxclaims"))


async def test_who_may_not_label_pods_is_told_so_and_leaves_nothing(tmp_path):
    """Without labels no watch would tell of their end."""
    async with cluster_of(tmp_path) as (cluster, options):
        rules = [
            attrs.evolve(r, verbs=tuple(v for v in r.verbs if (r.resource, v) != ("pods", "patch"))) for r in RULES
        ]
        cluster.access.use_role(role("claims", rules, namespace="rl"))
        backend = open_backend("agent-sandbox", pools={"swe": "platform"}, **options)
        async with backend.running():
            with pytest.raises(PermissionDenied, match="cannot patch resource"):
                await backend.create(SandboxSpec(image="swe"), "one")


async def test_leftovers_are_removed_with_their_claims_whatever_their_pods_are_called(tmp_path):
    """The Pods of somebody else's pool bear its name; they go with the claim, which is ours."""
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.reaping import reap

    async with cluster_of(tmp_path) as (_cluster, options):
        backend = open_backend("agent-sandbox", pools={"swe": "platform"}, **options)
        with pytest.raises(ZeroDivisionError):
            async with backend.running():
                await backend.create(SandboxSpec(image="swe"), "one")
                api = await KubernetesApi.connect(kubeconfig=options["kubeconfig"], namespace="rl", max_connections=2)
                try:
                    (line,) = await reap(api, backend.run_id)
                finally:
                    await api.aclose()
                assert line.startswith(f"deleted SandboxClaim rl/asb-{backend.run_id}-")
                raise ZeroDivisionError
