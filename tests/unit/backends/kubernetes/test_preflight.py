# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` finds on a cluster."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager

import pytest

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.preflight import headroom
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture
def examined(tmp_path):
    """Start a cluster, and examine it when it has been made as it should be."""

    @asynccontextmanager
    async def examine(**options):
        version = options.pop("version", (1, 36))
        async with FakeCluster(process="echo-runner", version=version) as cluster:

            async def ask(**more):
                kubeconfig = cluster.kubeconfig(tmp_path)
                checks = await KubernetesBackend(kubeconfig=kubeconfig, **{"user": 1000, **options, **more}).examine()
                assert cluster.pods() == []
                assert [one.path for one in cluster.asked("POST", "/pods$") if one.get("dryRun") is None] == []
                return checks

            yield cluster, ask

    return examine


def bad(checks, *, required=True):
    """What is not as needed."""
    return [check for check in checks if not check.ok and check.required >= required]


async def test_everything_is_there(examined) -> None:
    """A cluster that allows all passes every check, and no Pod is created."""
    async with examined() as (_, ask):
        checks = await ask()

    assert bad(checks, required=False) == []
    assert [check.name for check in checks if not check.name.startswith("permission")] == [
        "server", "clocks", "quota", "namespace", "pod security", "pod", "restart in place",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", ["get", "create"])
async def test_p13_both_verbs_of_exec_are_asked_for(examined, verb) -> None:
    """Old servers check get, new ones create as well: the one that is missing is named."""
    async with examined() as (cluster, ask):
        cluster.access.deny(verb, "pods/exec")
        checks = await ask()

    (check,) = bad(checks)
    assert check.name == "permission pods/exec"
    assert f"not allowed: {verb} pods/exec" in check.detail


@pytest.mark.parametrize("verb", ["create", "delete", "get", "list", "patch", "watch"])
async def test_each_verb_on_pods_is_asked_for(examined, verb) -> None:
    """Whatever is missing is named."""
    async with examined() as (cluster, ask):
        cluster.access.deny(verb, "pods")
        checks = await ask()

    assert f"not allowed: {verb} pods (" in bad(checks)[0].detail


async def test_what_one_can_do_without_is_a_note(examined) -> None:
    """Without events, quotas and deletecollection it works; something is lost, and it says what."""
    async with examined() as (cluster, ask):
        cluster.access.deny("deletecollection", "pods")
        cluster.access.deny("list", "events")
        cluster.access.deny("list", "resourcequotas")
        cluster.access.deny("get", "namespaces")
        checks = await ask()

    assert bad(checks) == []
    assert [check.name for check in bad(checks, required=False)] == [
        "permission pods", "permission events", "permission resourcequotas", "quota",
    ]  # fmt: skip


async def test_a_namespace_that_is_missing_is_named(examined) -> None:
    """Also where namespaces may not be looked at."""
    async with examined(namespace="nowhere") as (cluster, ask):
        seen = bad(await ask())
        cluster.access.deny("get", "namespaces")
        unseen = bad(await ask())

    for checks in (seen, unseen):
        assert [check.name for check in checks] == ["namespace", "pod"]
        assert checks[0].detail == "nowhere does not exist"
        assert "kubectl create namespace nowhere" in checks[0].fix


async def test_a_runtime_class_is_looked_for(examined) -> None:
    """One that is missing fails; of one that is there, the overhead is told."""
    async with examined(runtime_class="gvisor") as (cluster, ask):
        missing = bad(await ask())
        overhead = {"podFixed": {"memory": "128Mi"}}
        cluster.create("runtimeclasses", {"metadata": {"name": "gvisor"}, "handler": "runsc", "overhead": overhead})
        found = {check.name: check for check in await ask()}

    assert [check.name for check in missing] == ["runtime class", "pod"]
    assert "no runtime class 'gvisor'" in missing[0].detail
    assert found["runtime class"].detail == "gvisor, handler runsc, every Pod costs memory 128Mi more"
    assert found["pod"].ok


async def test_the_namespace_s_security_level_is_compared(examined) -> None:
    """Our Pods meet the strictest level; as root they do not, and the cluster's words say why."""
    async with examined() as (cluster, ask):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        cluster.create("namespaces", {"metadata": {"name": "strict", "labels": labels}})
        cluster.create("serviceaccounts", {"metadata": {"name": "default", "namespace": "strict"}})
        good = bad(await ask(namespace="strict"))
        root = {check.name: check for check in bad(await ask(namespace="strict", run_as_root=True, user=0))}

    assert good == []
    assert "enforces restricted" in root["pod security"].detail
    assert "runAsNonRoot != true" in root["pod security"].detail


async def test_a_quota_says_how_many_more(examined) -> None:
    """The scarcest resource decides; no room at all fails."""
    async with examined(requests={"cpu": "1"}) as (cluster, ask):
        spec = {"hard": {"requests.cpu": "2500m", "pods": "10"}}
        cluster.create("resourcequotas", {"metadata": {"name": "q", "namespace": "rl"}, "spec": spec})
        some = {check.name: check for check in await ask()}
        none = {check.name: check for check in bad(await ask(requests={"cpu": "3"}, limits={}))}

    assert (some["quota"].ok, some["quota"].detail) == (True, "room for 2 more Pods, by requests.cpu of quota q")
    assert none["quota"].detail.startswith("room for 0 more Pods")


@pytest.mark.parametrize(
    ("hard", "used", "expected"),
    [
        ({}, {}, math.inf),
        ({"pods": "5"}, {"pods": "3"}, 2),
        ({"count/pods": "5"}, {"count/pods": "9"}, 0),
        ({"requests.memory": "1Gi"}, {"requests.memory": "512Mi"}, 2),
        ({"memory": "1Gi"}, {}, 4),
        ({"limits.cpu": "3"}, {"limits.cpu": "500m"}, 2),
        ({"services": "0"}, {}, math.inf),
    ],
)
async def test_headroom_is_counted_in_pods(hard, used, expected) -> None:
    """Quantities of all kinds are divided by what one Pod asks for."""
    resources = {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"cpu": "1"}}
    manifest = {"spec": {"containers": [{"resources": resources}]}}
    quota = {"metadata": {"name": "q"}, "status": {"hard": hard, "used": used}}

    assert headroom([quota], manifest)[0] == expected


async def test_an_older_server_is_told_apart(examined) -> None:
    """Without the restart rule it works all the same: that is a note, not a failure."""
    async with examined(version=(1, 33)) as (_, ask):
        checks = await ask()

    assert bad(checks) == []
    assert [check.name for check in bad(checks, required=False)] == ["restart in place"]


async def test_nobody_to_ask_is_an_answer(examined, tmp_path) -> None:
    """A server that cannot be reached, credentials that it does not know, a context that does not exist."""
    async with examined() as (cluster, ask):
        cluster.access.tokens = {"other"}
        unknown = await ask()
        wrong = await ask(context="nowhere")
    gone = await KubernetesBackend(kubeconfig=str(tmp_path / "kubeconfig")).examine()

    assert [(check.name, check.ok) for check in (*unknown, *wrong, *gone)] == [
        ("server", False), ("client", False), ("server", False),
    ]  # fmt: skip
    assert "Unauthorized" in unknown[0].detail
    assert "nowhere" in wrong[0].detail
    assert "cannot connect" in gone[0].detail


async def test_a_webhook_s_refusal_is_told_in_its_words(examined) -> None:
    """What the dry run is refused with is what Pods will be refused with."""
    async with examined() as (cluster, ask):
        cluster.access.webhooks["policy.example.com"] = lambda operation, pod: "images must come from our registry"
        (check,) = bad(await ask())

    assert "images must come from our registry" in check.detail
