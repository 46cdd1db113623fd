# SPDX-License-Identifier: Apache-2.0
"""The end of everything that a run has with the controller: claims first, or pools and templates would refill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentsandbox.backends.agent_sandbox.objects import path
from agentsandbox.backends.kubernetes import owned
from agentsandbox.backends.kubernetes.manifests import pods_path, selector
from agentsandbox.errors import InfrastructureError

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi

__all__ = ["KINDS", "sweep"]

KINDS = ("sandboxclaims", "sandboxwarmpools", "sandboxtemplates")
"""In the order in which they go."""

AT_ONCE = 16
GONE_WITHIN = 60.0


async def sweep(api: KubernetesApi, namespace: str, run_id: str, version: str) -> None:
    """
    Delete every claim, pool and template of a run, each by its UID, and wait until its Pods are gone.

    Raises:
        InfrastructureError: If Pods of it are still there after a while.

    """
    marked = selector(run_id)
    slots = anyio.Semaphore(AT_ONCE)

    async def delete(where: str, uid: str) -> None:
        async with slots:
            await owned.delete(api, where, uid)

    for plural in KINDS:
        collection = path(version, plural, namespace)
        async with anyio.create_task_group() as group:
            for one in await owned.list_all(api, collection, selector=marked):
                meta = one["metadata"]
                group.start_soon(delete, f"{collection}/{meta['name']}", meta["uid"])
    wait, pods = 0.05, []
    with anyio.move_on_after(GONE_WITHIN):
        while pods := await owned.list_all(api, pods_path(namespace), selector=marked):
            await anyio.sleep(wait)
            wait = min(2 * wait, 1.0)
    if pods:
        raise InfrastructureError(f"{len(pods)} Pods of run {run_id} are still there {GONE_WITHIN:g} s after its end")
