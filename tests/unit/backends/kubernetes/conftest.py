# SPDX-License-Identifier: Apache-2.0
"""Small servers on loopback that answer as a real API server was recorded."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentsandbox.backends.kubernetes.api import KubernetesApi


@pytest.fixture
def serving():
    """Serve every path with one handler."""
    return _serving


@pytest.fixture
def kubeconfig(tmp_path):
    """Write a kubeconfig for a server."""

    def write(host, user=None, **cluster):
        return _kubeconfig(tmp_path, host, user, **cluster)

    return write


@pytest.fixture
def connected(tmp_path):
    """Connect to a server with that handler."""

    def connect(handler, **options):
        return _connected(handler, tmp_path, **options)

    return connect


@asynccontextmanager
async def _serving(handler):
    """Serve every path with one handler; yield the base URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield "http://{}:{}".format(*site._server.sockets[0].getsockname()[:2])
    finally:
        await runner.cleanup()


def _kubeconfig(path, host, user=None, **cluster):
    """Write a kubeconfig with two contexts; the current one has the namespace ``rl``."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "main",
        "clusters": [{"name": "c", "cluster": {"server": host, **cluster}}],
        "users": [{"name": "u", "user": user or {"token": "t0"}}],
        "contexts": [
            {"name": "main", "context": {"cluster": "c", "user": "u", "namespace": "rl"}},
            {"name": "other", "context": {"cluster": "c", "user": "u"}},
        ],
    }
    path = path / "config"
    path.write_text(json.dumps(config))
    return str(path)


@asynccontextmanager
async def _connected(handler, tmp_path, *, max_connections=8, user=None, **options):
    """An API connected to a server with that handler."""
    async with _serving(handler) as host:
        api = await KubernetesApi.connect(
            kubeconfig=_kubeconfig(tmp_path, host, user), max_connections=max_connections, **options
        )
        try:
            yield api
        finally:
            await api.aclose()
