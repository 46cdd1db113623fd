# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox bench exec`` on a cluster: a command over an open stream beside one over a connection of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.backend import KubernetesBackend
from agentsandbox.backends.kubernetes.evidence import cluster_facts
from agentsandbox.backends.kubernetes.manifests import exec_params, exec_path
from agentsandbox.cli.bench import environment, spread, timed
from agentsandbox.cli.cluster_options import DEFAULT_IMAGE
from agentsandbox.errors import ProtocolError
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.pool import SandboxPool
from agentsandbox.transport.websocket import MAX_MESSAGE, PROTOCOLS, ExecSocket

if TYPE_CHECKING:
    from agentsandbox.cli.cluster_options import ClusterOptions

__all__ = ["bench_exec"]

WARM_UP = 10


async def bench_exec(cluster: ClusterOptions, image: str | None, *, repeats: int = 200) -> dict[str, Any]:
    """
    Measure ``true`` in one warm Pod, in turn over its open stream and over an exec connection made for it.

    Args:
        cluster: Where.
        image: What the Pod is made from; ``None`` is the default.
        repeats: How many commands of each kind.

    """
    backend = KubernetesBackend(**cluster.for_backend(image))
    name = image or DEFAULT_IMAGE
    api = await KubernetesApi.connect(**cluster.where(), max_connections=8)
    try:
        facts = await cluster_facts(api, [name])
        async with (
            SandboxPool(backend, images={name: 1}, spares=0, reset=ResetPolicy(rungs=("replace",))) as pool,
            await pool.acquire(name) as lease,
        ):
            pod = lease.capabilities.facts["pod"]
            stream: list[float] = []
            connection: list[float] = []
            for number in range(repeats + WARM_UP):
                pair = (await timed(lambda: _connect(api, pod)), await timed(lambda: lease.exec(["true"])))
                if number >= WARM_UP:
                    connection.append(pair[0])
                    stream.append(pair[1])
    finally:
        await api.aclose()
    return {
        "bench": "exec",
        "backend": "kubernetes",
        "image": name,
        "environment": {**environment(), "cluster": facts},
        "latency": {
            "open_stream": spread(stream),
            "connection_each": spread(connection),
            "times_faster_p50": quantile(connection, 0.5) / quantile(stream, 0.5),
        },
    }


async def _connect(api: KubernetesApi, pod: str) -> None:
    """Run ``true`` as a plain client does: a connection, a command, a status."""
    socket = ExecSocket(
        await api.websocket(
            exec_path(api.namespace, pod),
            params=exec_params(["true"]),
            protocols=PROTOCOLS,
            heartbeat=None,
            max_size=MAX_MESSAGE,
        )
    )
    try:
        while socket.status is None:
            await socket.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        pass  # servers close right after the status
    finally:
        await socket.aclose()
    if socket.status is None or socket.status.exit_code != 0:
        raise ProtocolError(f"exec of 'true' in Pod {pod} ended with {socket.status}")
