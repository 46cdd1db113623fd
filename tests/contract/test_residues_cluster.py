# SPDX-License-Identifier: Apache-2.0
"""
What an episode can leave behind in Pods of the cluster double, whose user is an ordinary one.

Every residue over the rung ``files``, and over the others one of each kind and what Pods keep when their container is
made anew; ``test_residues_cluster_all.py`` has the rest.
"""

from __future__ import annotations

import pytest

from agentsandbox import SandboxClient
from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.testing.cluster import FakeCluster, Image

from ..residues.harness import FIRST_OF_KIND, ORDINARY, Hydrated, each, leave, opened  # noqa: TID252 - one copy

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SHARED = [plant for plant in ORDINARY if plant.kind == "sockets and IPC" or plant in FIRST_OF_KIND]


class Pods(Hydrated, KubernetesBackend):
    """Pods in which the fixture's tree was made before anybody may use them."""


@pytest.fixture(scope="module")
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="module")
async def options(tmp_path_factory, anyio_backend):
    """Run a cluster with an image whose user is an ordinary one, and one whose user is root."""
    images = {"host": Image(command=("sleep", "infinity")), "root": Image(user="root", workdir="/work")}
    async with FakeCluster(images=images) as cluster:
        yield {"kubeconfig": cluster.kubeconfig(tmp_path_factory.mktemp("cluster"))}


@pytest.fixture(scope="module")
async def place(request, options):
    """Open a place for the rung that the test names."""
    async with opened(request.param, "host", Pods(**options), Pods(**options)) as place:
        yield place


@pytest.mark.parametrize("place", ["files"], indirect=True)
@each(ORDINARY)
async def test_files_are_put_right_in_place(place, plant):
    """Whatever an ordinary user left, the next episode sees what a Pod is like that nobody ever used."""
    await leave(place, plant)


@pytest.mark.parametrize("place", ["restart"], indirect=True)
@each(SHARED)
async def test_a_container_that_is_made_anew_inherits_nothing(place, plant):
    """Neither files nor what a Pod shares between its containers."""
    await leave(place, plant)


@pytest.mark.parametrize("place", ["replace"], indirect=True)
@each(FIRST_OF_KIND)
async def test_another_pod_inherits_nothing(place, plant):
    """A Pod that was replaced is another one."""
    await leave(place, plant)


@pytest.mark.parametrize("level", ["shell", "direct"])
async def test_where_no_runner_can_look_nothing_is_called_clean(options, level):
    """The lower exec levels offer another Pod and nothing else, whatever a policy allows."""
    backend = KubernetesBackend(exec_mode=level, **options)
    async with SandboxClient(backend, images={"host": 1}, spares=0, reset=ResetPolicy()) as client:
        async with await client.acquire("host") as lease:
            assert ("replace",) == lease.capabilities.rungs
            before = lease.identity
            report = await lease.reset()
            assert ("replace", before.uid != lease.identity.uid) == (report.rung, True)
            between = lease.identity
        async with await client.acquire("host") as lease:
            assert lease.identity.uid not in (before.uid, between.uid)
            assert not lease.reused


async def test_a_pod_that_was_attached_again_beside_an_episode_is_made_anew(options):
    """Whoever has the relay's user may have come between: what then says "clean" is not believed."""
    rungs = []

    def sink(event):
        if event.name == "sandbox.reset":
            rungs.append(event.data["rung"])

    backend = Pods(**options)
    policy = ResetPolicy(rungs=("files", "restart", "replace"))
    async with SandboxClient(backend, images={"host": 1}, spares=0, reset=policy, sink=sink) as client:
        for cut in (False, True, False):
            async with await client.acquire("host") as lease:
                (sandbox,) = backend._sandboxes.values()
                if cut:
                    await sandbox.session._link._stream.aclose()
                assert (await lease.exec("echo still there")).ok
                assert 1 + cut == sandbox.session.streams
        async with await client.acquire("host"):
            assert ["files", "restart", "files"] == rungs
