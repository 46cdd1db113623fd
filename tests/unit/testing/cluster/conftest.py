# SPDX-License-Identifier: Apache-2.0
"""A cluster double and a client of it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.testing.cluster import FakeCluster
from agentsandbox.transport.websocket import MAX_MESSAGE, PROTOCOLS, ExecSocket


@pytest.fixture
def anyio_backend():
    """The double is aiohttp's, and that is asyncio's."""
    return "asyncio"


class Client:
    """What a test does with a cluster."""

    def __init__(self, cluster, api):
        self.cluster, self.api = cluster, api
        self.pods = f"/api/v1/namespaces/{cluster.namespace}/pods"

    async def make(self, name="a", command=("sleep", "infinity"), *, ready=True, image="host", container=None, **spec):
        """Create a Pod and wait until it is ready."""
        containers = [{"name": "sandbox", "image": image, "command": list(command), **(container or {})}]
        meta = {"name": name, "labels": spec.pop("labels", {}), "annotations": spec.pop("annotations", {})}
        body = {"metadata": meta, "spec": {"terminationGracePeriodSeconds": 1, "containers": containers, **spec}}
        made = await self.api.request("POST", self.pods, body=body)
        return await self.until(name, is_ready) if ready else made

    async def get(self, name):
        """Read a Pod."""
        return await self.api.request("GET", f"{self.pods}/{name}")

    async def until(self, name, predicate):
        """Wait until a Pod is as it should be; ``None`` is one that is gone."""
        store = self.cluster.store
        kind = store.resource("pods")
        with anyio.fail_after(30):
            while True:
                changed = anyio.Event()
                unsubscribe = store.subscribe(kind, lambda _event, changed=changed: changed.set())
                try:
                    found = store.find(kind, self.cluster.namespace, name)
                    if predicate(found.object if found else None):
                        return found.object if found else None
                    await changed.wait()
                finally:
                    unsubscribe()

    async def eventually(self, predicate):
        """Wait until something that nobody tells is true."""
        with anyio.fail_after(20):
            while not predicate():
                with anyio.move_on_after(0.01):
                    await anyio.sleep_forever()

    async def open(self, command, *, pod="a", stdin=False, protocols=PROTOCOLS, heartbeat=None):
        """Open an exec stream."""
        params = [*(("command", word) for word in command), ("container", "sandbox"), ("stdin", str(stdin).lower())]
        params += [("stdout", "true"), ("stderr", "true"), ("tty", "false")]
        socket = await self.api.websocket(
            f"{self.pods}/{pod}/exec", params=params, protocols=protocols, heartbeat=heartbeat, max_size=MAX_MESSAGE
        )
        return ExecSocket(socket)

    async def run(self, command, *, pod="a", stdin=None, **options):
        """Run a command; return its exit code, its output and its errors."""
        socket = await self.open(command, pod=pod, stdin=stdin is not None, **options)
        if stdin is not None:
            await socket.send(stdin)
            await socket.end_stdin()
        output = {1: b"", 2: b""}
        try:
            while True:
                channel, data = await socket.receive()
                output[channel] += data
        except anyio.EndOfStream:
            pass
        finally:
            await socket.aclose()
        return socket.status.exit_code if socket.status else None, output[1], output[2]


def is_ready(pod):
    """Whether a Pod is ready."""
    conditions = {one["type"]: one["status"] for one in (pod or {"status": {}})["status"].get("conditions") or ()}
    return conditions.get("Ready") == "True"


@pytest.fixture
def started(tmp_path):
    """Start a cluster; by default its Pods have no processes."""

    @asynccontextmanager
    async def start(process="echo-runner", max_connections=64, **options):
        async with FakeCluster(process=process, **options) as cluster:
            api = await KubernetesApi.connect(kubeconfig=cluster.kubeconfig(tmp_path), max_connections=max_connections)
            try:
                yield Client(cluster, api)
            finally:
                await api.aclose()

    return start
