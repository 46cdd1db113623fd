# SPDX-License-Identifier: Apache-2.0
"""
Tests against a real cluster, named by environment variables; without them they are skipped.

``AGENTSANDBOX_E2E_CONTEXT`` a kubeconfig context, ``AGENTSANDBOX_E2E_IMAGE`` an image with a shell and Python 3.7 or
later, ``AGENTSANDBOX_E2E_NAMESPACE`` where to work (``default``), ``AGENTSANDBOX_E2E_IMAGE_2`` a second such image,
``AGENTSANDBOX_E2E_IMAGES`` 16 such images with commas between them, ``AGENTSANDBOX_E2E_NO_PYTHON`` an image with a
shell only, ``AGENTSANDBOX_E2E_APISERVER_RESTART`` a command that stops the API server, waits five seconds and starts it
again.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
import yaml

from agentsandbox.backends.kubernetes import KubernetesBackend
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.models.command import Command

CONTEXT = os.environ.get("AGENTSANDBOX_E2E_CONTEXT")
IMAGE = os.environ.get("AGENTSANDBOX_E2E_IMAGE")
NAMESPACE = os.environ.get("AGENTSANDBOX_E2E_NAMESPACE", "default")
SMALL = {
    "requests": {"cpu": "10m", "memory": "32Mi"},
    "limits": {"cpu": "2", "memory": "512Mi"},
    "run_as_root": True,
    "lifetime": 600,
}


def pytest_collection_modifyitems(items):
    """Skip everything here without a cluster, and say what would name one."""
    if CONTEXT and IMAGE:
        return
    reason = "no cluster: set AGENTSANDBOX_E2E_CONTEXT and AGENTSANDBOX_E2E_IMAGE"
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def anyio_backend():
    """Run on the event loop that the client library needs."""
    return "asyncio"


def variable(name):
    """Return a variable, or skip the test that needs it."""
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} is not set")
    return value


@pytest.fixture
def image():
    """Name the image with Python."""
    return IMAGE


@pytest.fixture
def second_image():
    """Name another image with Python."""
    return variable("AGENTSANDBOX_E2E_IMAGE_2")


@pytest.fixture
def images():
    """Name many images with Python."""
    return variable("AGENTSANDBOX_E2E_IMAGES").split(",")


@pytest.fixture
def no_python():
    """Name an image with a shell and without Python."""
    return variable("AGENTSANDBOX_E2E_NO_PYTHON")


def options(**more):
    """Return the options of a backend for the cluster under test."""
    return {"context": CONTEXT, "namespace": NAMESPACE, **SMALL, **more}


@pytest.fixture
async def api():
    """Connect to the API server by another way than the backend under test."""
    api = await KubernetesApi.connect(context=CONTEXT, namespace=NAMESPACE, max_connections=8)
    yield api
    await api.aclose()


@pytest.fixture
async def events():
    """Collect the events of the backend under test."""
    return []


@pytest.fixture
def running(api, events):
    """Run a backend; when it ends, nothing of its run may be left on the cluster."""

    @asynccontextmanager
    async def run(**more):
        backend = KubernetesBackend(**options(**more))
        backend.sink = events.append
        async with backend.running():
            yield backend
        left = await api.request(
            "GET",
            f"/api/v1/namespaces/{NAMESPACE}/pods",
            params={"labelSelector": f"agentsandbox.dev/run-id={backend.run_id}"},
        )
        assert [] == left["items"]

    return run


async def sh(sandbox, script, **more):
    """Run a script in a sandbox of a backend."""
    return await sandbox.session.exec(Command(command=script, **more))


class Gate:
    """A way to the API server that can be cut: every connection at once, and no new ones until it is open again."""

    def __init__(self, host, port):
        self._where = (host, port)
        self._server = None
        self._tasks = set()
        self.port = 0

    async def open(self):
        """Let connections through."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self):
        """End every connection and refuse new ones."""
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        while self._tasks:  # noqa: ASYNC110 - they end by themselves
            await anyio.sleep(0.01)

    async def _pass(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        other = None
        try:
            with suppress(OSError, asyncio.CancelledError):
                back, other = await asyncio.open_connection(*self._where)
                async with anyio.create_task_group() as group:
                    group.start_soon(self._pump, reader, other, group.cancel_scope)
                    group.start_soon(self._pump, back, writer, group.cancel_scope)
        finally:
            self._tasks.discard(task)
            for end in filter(None, (writer, other)):
                end.transport.abort()

    async def _pump(self, reader, writer, scope):
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        scope.cancel()


@pytest.fixture
async def gate(tmp_path, monkeypatch):
    """Put a gate before the API server, and make the default kubeconfig lead through it."""
    path = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    config = yaml.safe_load(await anyio.Path(path.split(":")[0]).read_text())
    name = next(c["context"]["cluster"] for c in config["contexts"] if c["name"] == CONTEXT)
    cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == name)
    host, _, port = cluster["server"].partition("//")[2].partition(":")
    gate = Gate(host, int(port or 443))
    await gate.open()
    cluster["server"] = f"https://127.0.0.1:{gate.port}"
    cluster.setdefault("tls-server-name", host)
    await anyio.Path(tmp_path / "config").write_text(yaml.safe_dump(config))
    yield gate, str(tmp_path / "config")
    await gate.cut()
