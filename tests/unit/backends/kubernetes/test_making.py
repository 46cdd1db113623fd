# SPDX-License-Identifier: Apache-2.0
"""Limits of making a sandbox, and what is told when one is reached."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.evidence import last_warning
from agentsandbox.backends.kubernetes.failures import Cause, PodFailure
from agentsandbox.backends.kubernetes.refusals import handshake_error
from agentsandbox.errors import ConfigurationError, PermissionDenied, ProtocolError, ProvisionError
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.testing.cluster import FakeCluster, Timing

pytestmark = pytest.mark.anyio

HOST = SandboxSpec(image="host")


@pytest.fixture
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@asynccontextmanager
async def backend_of(tmp_path, *, timing=None, **options):
    """Run a cluster without processes and a backend on it; afterwards no Pod may be left."""
    async with FakeCluster(process="echo-runner", timing=timing or Timing(second=0.1)) as cluster:
        backend = KubernetesBackend(kubeconfig=cluster.kubeconfig(tmp_path), **options)
        async with backend.running():
            yield cluster, backend
        assert cluster.pods() == []


@pytest.mark.parametrize(
    ("what", "waits"),
    [
        (lambda cluster: cluster.faults.stall("POST", r"/pods$"), "the API server"),
        (lambda cluster: setattr(cluster.timing, "start", 60.0), "the Pod to be ready"),
        (lambda cluster: cluster.faults.exec(silent=True, times=None), "an answer from the Pod"),
    ],
    ids=["no answer to the create", "never ready", "runner silent"],
)
async def test_a_create_that_never_ends_is_given_up(tmp_path, what, waits) -> None:
    """After ``create_timeout``, naming it and what it waited for; the episode may be tried again, nothing is left."""
    async with backend_of(tmp_path, create_timeout=0.5) as (cluster, backend):
        await backend.destroy(await backend.create(HOST, "sb-0"))  # so that the rule has been asked about
        what(cluster)
        with pytest.raises(ProvisionError, match=rf"after 0.5 s \(create_timeout\): it still waited for {waits}") as it:
            await backend.create(HOST, "sb-1")
        assert it.value.retryable
        cluster.faults.clear()
        assert cluster.pods() == []


@pytest.mark.parametrize("option", ["create_timeout", "ready_timeout", "heartbeat", "heartbeat_timeout"])
def test_limits_must_make_sense(option) -> None:
    """Each is a time above 0."""
    with pytest.raises(ConfigurationError, match=f"{option} must be above 0 seconds, not -1"):
        KubernetesBackend(**{option: -1})


def test_p10_the_heartbeat_is_below_the_usual_idle_timers() -> None:
    """Load balancers cut what is silent for 60 seconds."""
    with pytest.raises(ConfigurationError, match="heartbeat must be below 60 seconds, not 60"):
        KubernetesBackend(heartbeat=60)


async def test_what_only_events_tell_is_in_the_error(tmp_path) -> None:
    """A volume that cannot be mounted is told in an Event only: its words come with the error."""
    async with backend_of(tmp_path, timing=Timing(sandbox=60.0), ready_timeout=0.5) as (cluster, backend):

        async def warn() -> None:
            while not cluster.pods():  # noqa: ASYNC110 - nothing tells
                await anyio.sleep(0)
            cluster.event(cluster.pods()[0], "Warning", "FailedMount", "MountVolume.SetUp failed:\nno such volume")

        async with anyio.create_task_group() as group:
            group.start_soon(warn)
            with pytest.raises(ProvisionError, match=r"0.5 s: .*; FailedMount: MountVolume.SetUp failed: no such vol"):
                await backend.create(HOST, "sb-1")


async def test_without_the_permission_no_event_is_told(tmp_path) -> None:
    """Events may be out of bounds, and one can do without."""
    async with backend_of(tmp_path) as (cluster, backend):
        cluster.access.deny("list", "events")
        assert await last_warning(backend._api, cluster.namespace, "uid") == ""


@pytest.mark.parametrize(
    ("reason", "message", "hint"),
    [
        ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root", "run_as_root=True"),
        ("CreateContainerConfigError", "image has non-numeric user (app), cannot verify", "user=1000"),
        ("ErrImageNeverPull", "Container image is not present", "pull_policy='IfNotPresent'"),
        ("CreateContainerConfigError", 'secret "x" not found', ""),
    ],
)
def test_errors_say_what_to_do_where_that_is_known(reason, message, hint) -> None:
    """After the cluster's own words."""
    failure = PodFailure(cause=Cause.CONFIG, reason=reason, message=message, permanent=True)

    assert str(failure.error()).startswith(f"{reason}: {message}")
    assert hint in failure.hint
    assert bool(failure.hint) == bool(hint)


def test_a_handshake_that_is_none() -> None:
    """A success that is no switch of protocols is a broken server; a 403 with words is a permission."""
    assert isinstance(handshake_error(200, "", {}, protocols=["v5"]), ProtocolError)
    assert isinstance(handshake_error(403, "no", {}, protocols=["v5"]), PermissionDenied)


def test_without_the_client_library_everything_else_works() -> None:
    """The error for ``kubernetes`` names the fix, and the local backend does not care."""
    code = """
import sys
sys.modules["kubernetes_asyncio"] = None
import anyio
from agentsandbox import SandboxClient, SandboxPool
from agentsandbox.errors import ConfigurationError

async def main():
    async with SandboxClient("local", images=["host"]) as client, await client.acquire("host") as lease:
        print((await lease.exec("echo local")).text, end="")
    try:
        async with SandboxPool("kubernetes", images=["host"]):
            pass
    except ConfigurationError as error:
        print(error)

anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    expected = "backend 'kubernetes' needs kubernetes-asyncio: pip install kubernetes-asyncio"
    assert done.stdout.splitlines() == ["local", expected]
