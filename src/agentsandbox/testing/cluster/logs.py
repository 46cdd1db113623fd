# SPDX-License-Identifier: Apache-2.0
"""What containers have written, as ``pods/log`` gives it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import attrs
from aiohttp import web

from agentsandbox.testing.cluster.replies import bad_request

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster

__all__ = ["Log", "serve"]

_KEPT = 50_000


@attrs.define(eq=False)
class Log:
    """What a container has written."""

    lines: deque[tuple[str, bytes]] = attrs.field(factory=lambda: deque(maxlen=_KEPT))
    """The lines that are kept, each with its time."""
    written: int = 0
    """How many there ever were, those of earlier containers included."""
    previous: tuple[tuple[str, bytes], ...] = ()
    """Those of the container before."""

    def add(self, now: str, lines: list[bytes]) -> None:
        """Add lines."""
        self.lines.extend((now, line) for line in lines)
        self.written += len(lines)

    def turn(self) -> None:
        """Begin anew, with the next container."""
        self.previous = tuple(self.lines)
        self.lines.clear()


async def serve(
    cluster: FakeCluster, http: web.Request, namespace: str, name: str, headers: dict[str, str]
) -> web.StreamResponse:
    """Answer one request for a log; with ``follow`` until the container ends."""
    query = http.rel_url.query
    pod = cluster.rest.pod(namespace, name)
    containers = [container["name"] for container in pod.object["spec"]["containers"]]
    container = query.get("container") or containers[0]
    if container not in containers:
        raise bad_request(f"container {container} is not valid for pod {name}")
    worker = cluster.kubelet.workers.get(pod.uid)
    state = worker.view.container.state if worker is not None else {"waiting": {"reason": "ContainerCreating"}}
    if worker is None or (not worker.view.container.container_id and "waiting" in state):
        reason = state["waiting"]["reason"]
        raise bad_request(f'container "{container}" in pod "{name}" is waiting to start: {reason}')
    stamped = query.get("timestamps") in ("true", "1")
    if query.get("previous") in ("true", "1"):
        if not worker.view.container.restarts:
            raise bad_request(f'previous terminated container "{container}" in pod "{name}" not found')
        lines = list(worker.log.previous)
    else:
        lines = list(worker.log.lines)
    if query.get("tailLines"):
        count = int(query["tailLines"])
        lines = lines[-count:] if count else []
    data = b"".join((stamp.encode() + b" " if stamped else b"") + line for stamp, line in lines)
    if query.get("limitBytes"):
        data = data[: int(query["limitBytes"])]
    headers = {**headers, "Content-Type": "text/plain"}
    if query.get("follow") not in ("true", "1"):
        return web.Response(body=data, headers=headers)
    response = web.StreamResponse(headers=headers)
    await response.prepare(http)
    try:
        seen = worker.log.written
        await response.write(data)
        while True:
            fresh = list(worker.log.lines)[
                len(worker.log.lines) - min(worker.log.written - seen, len(worker.log.lines)) :
            ]
            seen = worker.log.written
            for stamp, line in fresh:
                await response.write((stamp.encode() + b" " if stamped else b"") + line)
            if not fresh and (worker.gone or "running" not in worker.view.container.state):
                return response
            if not fresh:
                await worker.changed()
    except ConnectionError:
        return response
