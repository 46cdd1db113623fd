# SPDX-License-Identifier: Apache-2.0
"""What containers have written, as ``pods/log`` gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from agentsandbox.testing.cluster.replies import bad_request

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster

__all__ = ["serve"]


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
        lines = list(worker.previous_log)
    else:
        lines = list(worker.log)
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
        seen = worker.written
        await response.write(data)
        while True:
            fresh = list(worker.log)[len(worker.log) - min(worker.written - seen, len(worker.log)) :]
            seen = worker.written
            for stamp, line in fresh:
                await response.write((stamp.encode() + b" " if stamped else b"") + line)
            if not fresh and (worker.gone or "running" not in worker.view.container.state):
                return response
            if not fresh:
                await worker.changed()
    except ConnectionError:
        return response
