# SPDX-License-Identifier: Apache-2.0
"""Where the Pods of a run may connect to, and whether that is so."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import yaml

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.network import Fence, NetworkRules, Verdict
from agentsandbox.backends.kubernetes.reaping import reap
from agentsandbox.backends.kubernetes.roles import NETWORK_RULES, ROLE_RULES, role
from agentsandbox.errors import CommandTimeout, ConfigurationError, ProvisionError
from agentsandbox.models.command import ExecResult
from agentsandbox.models.sandbox import Capabilities, ExecLevel, SandboxSpec
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio

SPEC = SandboxSpec(image="host")


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """A policy engine of the double is never late."""
    monkeypatch.setattr("agentsandbox.backends.kubernetes.network.PROGRAMMED", 0.3)
    monkeypatch.setattr("agentsandbox.backends.kubernetes.network.EVERY", 0.05)


@asynccontextmanager
async def opened(tmp_path, rules, *, network):
    """A running backend on a cluster, and what it told."""
    async with FakeCluster(process="echo-runner", network=network) as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), user=1000, network=rules)
        backend.events = []
        backend.sink = backend.events.append
        async with backend.running():
            yield cluster, backend
        assert policies(cluster) == []


def policies(cluster):
    """The network policies that are there."""
    return [one.object for one in cluster.store.all(cluster.store.resource("networkpolicies"), "rl")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, None),
        (False, NetworkRules()),
        ([], NetworkRules()),
        (["dns", "10.0.0.0/8:443"], NetworkRules(allow=("dns", "10.0.0.0/8:443"))),
        ({"allow": ["dns"], "require": True}, NetworkRules(allow=("dns",), require=True)),
        (NetworkRules(probe=False), NetworkRules(probe=False)),
    ],
    ids=repr,
)
def test_what_is_allowed_can_be_said_in_several_ways(value, expected):
    """Nothing said leaves it to the cluster; an empty list allows nothing."""
    assert expected == NetworkRules.of(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dns", "network is False, a list of what is allowed such as"),
        (7, "not 7$"),
        (["example.com"], "'example.com' is not 'dns', a network, or a network with a port"),
        ({"allow": "dns"}, r"allow is a list; use \['dns'\]"),
        ({"deny": []}, "network has no field deny"),
        ({"require": True, "probe": False}, "require=True needs probe=True"),
    ],
    ids=repr,
)
def test_what_no_policy_can_say_is_refused_before_anything_is_created(value, message):
    """The error names the value."""
    with pytest.raises(ConfigurationError, match=message):
        KubernetesBackend(network=value)


async def test_an_enforced_policy_is_seen_to_be_enforced(tmp_path):
    """A connection works, then the policy is there, and it does not work any more."""
    async with opened(tmp_path, False, network="enforcing") as (cluster, backend):
        sandbox = await backend.create(SPEC, "sb-1")
        (policy,) = policies(cluster)

        assert sandbox.capabilities.network is False
        assert sandbox.capabilities.facts["network_policy"].startswith(
            "enforced: a connection that is forbidden failed"
        )
        assert [sandbox.pod] == [pod["metadata"]["name"] for pod in cluster.pods()], (
            "the two Pods of the probe are gone"
        )
        assert ["enforced"] == [e.data["verdict"] for e in backend.events if e.name == "network.fenced"]
        assert {
            "agentsandbox.dev/managed-by": "agentsandbox",
            "agentsandbox.dev/run-id": backend.run_id,
            "agentsandbox.dev/owner": backend.owner,
        } == policy["metadata"]["labels"]
        assert {
            "podSelector": {"matchLabels": {"agentsandbox.dev/run-id": backend.run_id}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": [],
        } == policy["spec"]


async def test_a_policy_that_nobody_enforces_is_stated_as_unenforced(tmp_path):
    """The cluster takes the policy and does nothing about it: whoever looks is told so."""
    async with opened(tmp_path, False, network="plain") as (cluster, backend):
        sandbox = await backend.create(SPEC, "sb-1")

        assert len(policies(cluster)) == 1
        assert sandbox.capabilities.network is True
        assert sandbox.capabilities.facts["network_policy"].startswith(
            "unenforced: a connection between two Pods still worked"
        )


async def test_what_cannot_be_told_is_said_to_be_unknown(tmp_path):
    """Where Pods do not reach each other anyway, a failed connection shows nothing."""
    async with opened(tmp_path, False, network="none") as (cluster, backend):
        sandbox = await backend.create(SPEC, "sb-1")

        assert len(policies(cluster)) == 1
        assert sandbox.capabilities.network is True
        assert (
            "unknown: Pods do not reach each other here, policy or not: OSError: [Errno 101] Network is unreachable"
            == sandbox.capabilities.facts["network_policy"]
        )


async def test_no_sandbox_is_made_where_enforcement_is_required_and_not_seen(tmp_path):
    """The error says what was seen, and what would help; nothing is left."""
    async with opened(tmp_path, {"require": True}, network="plain") as (cluster, backend):
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"not known to be enforced .*unenforced.* Cilium or Calico"):
                await backend.create(SPEC, "sb-1")

        assert [] == cluster.pods()


async def test_where_enforcement_is_required_and_seen_sandboxes_are_made(tmp_path):
    """Also many at once: the probe is made once."""
    async with opened(tmp_path, {"allow": ["dns"], "require": True}, network="enforcing") as (cluster, backend):
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(backend.create, SPEC, f"sb-{number}")

        assert 4 + 2 == len([one for one in cluster.asked("POST", r"/pods$") if one.get("dryRun") is None])
        assert 1 == len(cluster.asked("POST", r"/networkpolicies$"))
        assert 4 == len(cluster.pods())


async def test_without_a_probe_no_pod_is_made_for_it(tmp_path):
    """The policy is there, and said to be untried."""
    async with opened(tmp_path, {"probe": False}, network="enforcing") as (cluster, backend):
        sandbox = await backend.create(SPEC, "sb-1")

        assert 1 == len(policies(cluster))
        assert 1 == len([one for one in cluster.asked("POST", r"/pods$") if one.get("dryRun") is None])
        assert "unknown: not tried, as was asked for" == sandbox.capabilities.facts["network_policy"]


async def test_without_the_option_no_policy_is_asked_for(tmp_path):
    """What a cluster does by itself is its own business, and needs no permission."""
    async with opened(tmp_path, None, network="enforcing") as (cluster, backend):
        sandbox = await backend.create(SPEC, "sb-1")

        assert [] == cluster.asked("", "networkpolicies")
        assert "network_policy" not in sandbox.capabilities.facts


async def test_a_missing_permission_is_named(tmp_path):
    """The Role without the part for the option does not do; with it, it does."""
    async with opened(tmp_path, False, network="enforcing") as (cluster, backend):
        cluster.access.use_role(role("agentsandbox", ROLE_RULES, namespace="rl"))
        with pytest.raises(ConfigurationError, match=r"needs create, delete, get and list on networkpolicies"):
            await backend.create(SPEC, "sb-1")
        checks = {check.name: check for check in await backend.examine()}
        assert checks["permission networkpolicies"].ok is False

        cluster.access.use_role(role("agentsandbox", (*ROLE_RULES, *NETWORK_RULES), namespace="rl"))
        await backend.create(SPEC, "sb-1")
        checks = {check.name: check for check in await backend.examine()}
        assert checks["permission networkpolicies"].ok is True


async def test_a_policy_whose_answer_is_lost_is_found_and_removed(tmp_path):
    """The API server made it and the connection broke."""
    async with opened(tmp_path, {"probe": False}, network="enforcing") as (cluster, backend):
        cluster.faults.cut("POST", r"/networkpolicies$", after=True)
        await backend.create(SPEC, "sb-1")

        assert 1 == len(policies(cluster))


async def test_reaping_removes_the_policy_of_a_run_after_its_pods(tmp_path):
    """What a killed driver leaves behind; another run's stays."""
    async with FakeCluster(process="echo-runner") as cluster:
        api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=8)
        try:
            for run in ("0123456789ab", "ba9876543210"):
                await Fence(api, NetworkRules(probe=False), run, "me").up(None, None)
            removed = await reap(api, "0123456789ab")
        finally:
            await api.aclose()

        assert ["deleted NetworkPolicy rl/asb-0123456789ab"] == removed
        assert ["asb-ba9876543210"] == [policy["metadata"]["name"] for policy in policies(cluster)]


class Probe:
    """A Pod of the probe that answers what a test says."""

    pod = "probe"

    def __init__(self, level=ExecLevel.RUNNER, answer=None):
        self.capabilities = Capabilities(exec_level=level)
        self.session = self
        self.facts = {}
        self.answer = answer

    async def exec(self, command):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or ExecResult(exit_code=0)


@asynccontextmanager
async def fenced(tmp_path, **rules):
    """A fence on a cluster where the Pod ``probe`` has an address; what was removed is in its list."""
    async with FakeCluster(process="echo-runner") as cluster:
        api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=8)
        meta = {"name": "probe", "namespace": "rl"}
        await api.request(
            "POST",
            "/api/v1/namespaces/rl/pods",
            body={"metadata": meta, "spec": {"containers": [{"name": "sandbox", "image": "host"}]}},
        )
        with anyio.fail_after(20):
            while not (cluster.pod("probe").get("status") or {}).get("podIP"):
                await anyio.lowlevel.checkpoint()
        fence = Fence(api, NetworkRules(**rules), "0123456789ab", "me")
        fence.removed = []

        async def remove(sandbox):
            fence.removed.append(sandbox)

        fence.remove = remove
        try:
            yield cluster, fence
        finally:
            await fence.down()
            await api.aclose()
        assert policies(cluster) == []


@pytest.mark.parametrize(
    ("probe", "detail"),
    [
        (Probe(ExecLevel.SHELL), "the image has no Python to try it with"),
        (Probe(answer=CommandTimeout("total", 10.0, 10.0)), "it could not be tried: ran longer than 10 s"),
        (
            Probe(answer=ExecResult(exit_code=1, stderr=b"ImportError: no socket\n")),
            "Pods do not reach each other here, policy or not: ImportError: no socket",
        ),
        (Probe(answer=ExecResult(exit_code=9)), "Pods do not reach each other here, policy or not: exit code 9"),
    ],
    ids=["no Python", "too slow", "broken", "silent"],
)
async def test_a_probe_that_does_not_work_shows_nothing(tmp_path, probe, detail):
    """The policy is made all the same, and both Pods are removed."""

    async def make(name):
        return probe

    async with fenced(tmp_path) as (cluster, fence):
        assert await fence.up(make, fence.remove) is True
        assert await fence.up(make, fence.remove) is False

        assert (Verdict.UNKNOWN, True) == (fence.verdict, fence.detail.startswith(detail)), fence.detail
        assert [probe, probe] == fence.removed
        assert 1 == len(policies(cluster))


async def test_a_pod_of_the_probe_that_cannot_be_made_is_an_error_and_the_next_call_tries_again(tmp_path):
    """There is no policy yet, so nothing may run; the other Pod is removed."""
    calls = []

    async def make(name):
        calls.append(name)
        if len(calls) == 2:
            raise ProvisionError("no room")
        return Probe(ExecLevel.SHELL)

    async with fenced(tmp_path) as (cluster, fence):
        with pytest.raises(ProvisionError, match="no room"):
            await fence.up(make, fence.remove)
        assert (None, 1, []) == (fence.verdict, len(fence.removed), policies(cluster))
        await fence.up(make, fence.remove)

        assert (Verdict.UNKNOWN, 3, 1) == (fence.verdict, len(fence.removed), len(policies(cluster)))


async def test_pods_that_do_not_answer_hold_up_nobody(tmp_path, monkeypatch):
    """There is a limit for all of it."""
    monkeypatch.setattr("agentsandbox.backends.kubernetes.network.PROBE_LIMIT", 0.05)

    class Silent(Probe):
        async def exec(self, command):
            await anyio.sleep_forever()

    async def make(name):
        return Silent()

    async with fenced(tmp_path) as (_, fence):
        await fence.up(make, fence.remove)

        assert "unknown: the two Pods did not answer in time" == fence.text


@pytest.mark.parametrize("there", ["ours", "another's", "nothing"])
async def test_a_policy_that_may_have_been_made_is_looked_for_at_the_end(tmp_path, there):
    """Its answer never came: what is there is removed if it has our mark."""
    async with fenced(tmp_path, probe=False) as (cluster, fence):
        await fence.up(None, None)
        fence._uid = ""
        (stored,) = cluster.store.all(cluster.store.resource("networkpolicies"), "rl")
        if there == "nothing":
            cluster.store.remove(stored)
        elif there == "another's":
            meta = {**stored.object["metadata"], "annotations": {}}
            cluster.store.replace(stored, {**stored.object, "metadata": meta})
        await fence.down()

        assert (there == "another's") == bool(policies(cluster))
        for one in list(cluster.store.all(cluster.store.resource("networkpolicies"), "rl")):
            cluster.store.remove(one)


def test_the_page_has_the_role_of_the_code():
    """Word for word."""
    page = Path(__file__).parents[4] / "docs" / "howto" / "secrets-and-network.md"
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)

    assert role("agentsandbox-network", NETWORK_RULES, namespace="rollouts") == yaml.safe_load(block)


async def test_only_what_is_done_is_in_the_role(tmp_path):
    """Create, get and delete; list is for reaping."""
    async with opened(tmp_path, False, network="enforcing") as (cluster, backend):
        cluster.faults.cut("POST", r"/networkpolicies$", after=True)
        await backend.create(SPEC, "sb-1")
    asked = {
        (one.method, one.path.rpartition("/")[2].startswith("asb-")) for one in cluster.asked("", "networkpolicies")
    }

    assert {("POST", False), ("GET", True), ("DELETE", True)} == asked


def test_the_state_of_a_fence_is_in_its_repr():
    """One line."""

    class Api:
        namespace = "rl"

    fence = Fence(Api(), NetworkRules(allow=["dns"]), "0" * 12, "me")

    assert "<Fence [not there, 1 allowed]>" == repr(fence)
    assert "not there yet" == fence.text
