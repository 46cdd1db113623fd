# SPDX-License-Identifier: Apache-2.0
"""The documented Roles allow what is done, and nothing more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.evidence import events_text
from agentsandbox.backends.kubernetes.roles import CLUSTER_RULES, JOB_RULES, PLACEMENT_RULES, ROLE_RULES, pairs, role
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing.cluster import FakeCluster

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[4] / "docs" / "howto" / "kubernetes.md"

PATH = re.compile(r"/(?:api/v1|apis/[^/]+/[^/]+)/(?:namespaces/[^/]+/(?=\w))?([^/]+)(/[^/]+)?(/\w+)?")
EVERYBODY = {("create", "selfsubjectaccessreviews")}
"""Every user of a cluster may do it."""
OFFERED = {("get", "namespaces"), ("list", "nodes")}
"""Tried, and done without."""


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


def documented():
    """The roles of the page, by kind and name."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    objects = [yaml.safe_load(block) for block in blocks]
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@pytest.mark.parametrize(
    ("kind", "name", "rules"),
    [
        ("Role", "agentsandbox", ROLE_RULES),
        ("Role", "agentsandbox-job", JOB_RULES),
        ("ClusterRole", "agentsandbox", CLUSTER_RULES),
        ("ClusterRole", "agentsandbox-placement", PLACEMENT_RULES),
    ],
)
def test_the_page_has_the_roles_of_the_code(kind, name, rules) -> None:
    """Word for word."""
    expected = role(name, rules, namespace="rollouts" if kind == "Role" else None)

    assert documented()[kind, name] == expected


def used(cluster) -> set[tuple[str, str]]:
    """Every verb on every resource that was asked for."""
    found = set()
    for request in cluster.requests:
        match = PATH.fullmatch(request.path)
        if match is None:
            continue  # /version
        plural, name, subresource = match.groups()
        resource = plural + (subresource or "")
        if resource == "pods/exec":
            found |= {("get", resource), ("create", resource)}
            continue
        watch = request.get("watch") == "true"
        verbs = {
            "GET": "get" if name else "watch" if watch else "list",
            "POST": "create",
            "PATCH": "patch",
            "DELETE": "delete" if name else "deletecollection",
        }
        found.add((verbs[request.method], resource))
    return found


async def solve(sandbox, episode):
    """One command."""
    return float((await sandbox.exec(["true"])).ok)


async def everything(cluster, tmp_path) -> None:
    """Do all that a driver does: make, look, restart with another image, lose an answer, remove, tell."""
    kubeconfig = cluster.kubeconfig(tmp_path)
    backend = KubernetesBackend(kubeconfig=kubeconfig, user=1000)
    assert [check for check in await backend.examine() if check.required and not check.ok] == []
    cluster.faults.cut("POST", r"/pods$", after=True)
    batch = [Episode(id=image + str(n), image=image) for n in range(2) for image in ("a", "b")]
    policy = ResetPolicy(rungs=("restart", "replace"))
    async with SandboxPool(
        backend, images={"a": 1, "b": 1}, spares=0, max_sandboxes=1, rollout=solve, reset=policy
    ) as pool:
        result = await pool.rollout(batch)
    assert result.rewards == (1.0,) * 4
    async with backend.running():
        await backend.create(SandboxSpec(image="a"), "left")
    api = await KubernetesApi.connect(kubeconfig=kubeconfig, max_connections=8)
    try:
        await events_text(api, api.namespace)
    finally:
        await api.aclose()


@pytest.mark.parametrize("optional", [True, False], ids=["whole", "least"])
async def test_the_role_suffices_and_nothing_in_it_is_unused(tmp_path, optional) -> None:
    """With it everything works; what is optional is only tried."""
    async with FakeCluster(images={"a": "host", "b": "host"}) as cluster:
        cluster.access.use_role(role("agentsandbox", ROLE_RULES, namespace="rl", optional=optional))

        await everything(cluster, tmp_path)

        unasked = set() if optional else {("watch", "events")}  # where a list is refused
        assert used(cluster) - EVERYBODY - OFFERED == set(pairs(ROLE_RULES)) - unasked
