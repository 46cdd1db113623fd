# SPDX-License-Identifier: Apache-2.0
"""
The templates and warm pools of a run, made when the first is asked for.

There is one of each for every kind of Pod, and one pool for every template of somebody else.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.agent_sandbox.objects import (
    MERGE,
    object_name,
    path,
    replicas_patch,
    template,
    warm_pool,
)
from agentsandbox.backends.kubernetes import owned

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi

__all__ = ["Pools"]


@attrs.define(eq=False)
class _Pool:
    lock: anyio.Lock = attrs.field(factory=anyio.Lock)
    uid: str = ""
    replicas: int = 0
    dropped: bool = False


class Pools:
    """
    Makes templates and pools, and moves how many ready ones a pool keeps.

    The controller has no limit of its own over several pools. Every step up is taken by somebody who was allowed to
    make one sandbox, so that all pools together grow no faster than the one budget allows.

    Args:
        api: The API server.
        run_id: Of the run.
        version: Of the API.
        warm: How many ready ones a pool keeps for claims to come, as long as every sandbox takes a new claim.

    """

    def __init__(self, api: KubernetesApi, *, run_id: str, version: str, warm: int) -> None:
        self._api = api
        self._run_id = run_id
        self._version = version
        self._warm = warm
        self._pools: dict[str, _Pool] = {}

    def __repr__(self) -> str:
        return f"<Pools [{len(self._pools)} pools, {sum(pool.replicas for pool in self._pools.values())} warm]>"

    async def ensure(self, pod: dict[str, Any]) -> str:
        """
        Return the name of the pool whose Sandboxes are made like a Pod; make it if there is none.

        Raises:
            ControlPlaneError: If the API server refuses or does not answer.

        """
        nonce = secrets.token_hex(8)
        wanted = template(pod, run_id=self._run_id, version=self._version, nonce=nonce)
        name = str(wanted["metadata"]["name"])
        pool = self._pools.setdefault(name, _Pool())
        async with pool.lock:
            if not pool.uid:
                await owned.create(self._api, self._path("sandboxtemplates"), wanted)
                await self._make(name, name, pool, nonce)
        return name

    async def ensure_of(self, template: str) -> str:
        """
        Return the name of our pool of a template that somebody else has made; make it if there is none.

        Raises:
            ControlPlaneError: If the API server refuses or does not answer.

        """
        name = object_name(self._run_id, {"template": template})
        pool = self._pools.setdefault(name, _Pool())
        async with pool.lock:
            if not pool.uid:
                await self._make(name, template, pool, secrets.token_hex(8))
        return name

    async def _make(self, name: str, template: str, pool: _Pool, nonce: str) -> None:
        body = warm_pool(template, name=name, run_id=self._run_id, version=self._version, nonce=nonce)
        made = await owned.create(self._api, self._path("sandboxwarmpools"), body)
        pool.uid = str(made["metadata"]["uid"])

    @property
    def any(self) -> bool:
        """Whether a pool of ours was asked for."""
        return bool(self._pools)

    async def raise_one(self, name: str) -> None:
        """Take one step up, if it is a pool of ours and keeps fewer than it is to."""
        pool = self._pools.get(name)
        if pool is None:
            return
        async with pool.lock:
            if not pool.dropped and pool.replicas < self._warm:
                await self._set(name, pool, pool.replicas + 1)

    async def drop(self, name: str) -> None:
        """Keep nothing ready any more: whoever holds a Sandbox uses it again, and no claim is to come."""
        pool = self._pools[name]
        async with pool.lock:
            pool.dropped = True
            if pool.replicas:
                await self._set(name, pool, 0)

    async def _set(self, name: str, pool: _Pool, replicas: int) -> None:
        where = path(self._version, "sandboxwarmpools", self._api.namespace, name)
        await self._api.request("PATCH", where, body=replicas_patch(pool.uid, replicas), content_type=MERGE)
        pool.replicas = replicas

    def _path(self, plural: str) -> str:
        return path(self._version, plural, self._api.namespace)
