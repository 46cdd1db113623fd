# SPDX-License-Identifier: Apache-2.0
"""A cluster double and a client of it, for tests of what goes wrong between the two."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio

from agentsandbox.client import SandboxClient
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.testing.cluster import FakeCluster, Image, Timing

MODES = ("runner", "shell", "direct")
KEPT = Image(command=("sleep", "infinity"))
"""What a Pod keeps whose first process is not ours to choose."""
ECHO = {"process": "echo-runner"}
"""Pods without processes, for what happens at the API server."""
QUICK = ResetPolicy(rungs=("restart", "replace"))
"""Without the scan of a whole file system that the rung ``files`` begins with."""


@asynccontextmanager
async def client_of(
    tmp_path, *, mode="runner", known=None, options=None, timing=None, clean=True, cluster=None, **client
):
    """Run a cluster, which knows more images than ``host``, and a client of it; afterwards no Pod may be left."""
    timing = timing or Timing(second=0.1)
    async with FakeCluster(images={"host": KEPT, **(known or {})}, timing=timing, **(cluster or {})) as made:
        given = {"kubeconfig": made.kubeconfig(tmp_path), "exec_mode": mode, **(options or {})}
        client = {"images": {"host": 1}, "spares": 0, "reset": QUICK, **client}
        async with SandboxClient("kubernetes", backend_options=given, **client) as found:
            yield made, found
        if clean:
            assert made.pods() == []


async def eventually(predicate, seconds=40):
    """Wait until something that nobody tells is true."""
    with anyio.fail_after(seconds):
        while not predicate():
            with anyio.move_on_after(0.01):
                await anyio.sleep_forever()


def pod_of(lease):
    """The name of a lease's Pod."""
    return lease.capabilities.facts["pod"]


def made(cluster):
    """The creates of Pods that were asked for, dry runs left out."""
    return [request for request in cluster.asked("POST", r"/pods$") if request.get("dryRun") is None]


def opened(cluster, pod=""):
    """The exec streams that were asked for."""
    return cluster.asked("GET", rf"/pods/{pod or '[^/]+'}/exec$")
