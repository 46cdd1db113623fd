# SPDX-License-Identifier: Apache-2.0
"""The end of everything that a run has with the controller: claims first, or pools and templates would refill."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentsandbox.backends.agent_sandbox.objects import path
from agentsandbox.backends.kubernetes import owned
from agentsandbox.backends.kubernetes.manifests import pods_path, selector
from agentsandbox.backends.kubernetes.reaping import CLAIMED
from agentsandbox.errors import InfrastructureError

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi

__all__ = ["sweep"]

AT_ONCE = 16
GONE_WITHIN = 60.0


async def sweep(api: KubernetesApi, namespace: str, run_id: str, version: str, *, pools: bool = True) -> None:
    """
    Delete every claim, pool and template of a run, each by its UID, and wait until its Pods are gone.

    Args:
        api: The API server.
        namespace: Where.
        run_id: Of the run.
        version: Of the extensions' API.
        pools: Whether it has made pools and templates; who has not needs no right to look for them.

    Raises:
        InfrastructureError: If Pods of it are still there after a while.

    """
    marked = selector(run_id)
    slots = anyio.Semaphore(AT_ONCE)

    async def delete(where: str, uid: str) -> None:
        async with slots:
            await owned.delete(api, where, uid)

    for kind in CLAIMED:
        if not pools and kind.kind != "SandboxClaim":
            continue
        collection = path(version, kind.plural, namespace)
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
