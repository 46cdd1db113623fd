# SPDX-License-Identifier: Apache-2.0
"""Pods that are to go: a delete is an order, and done when the Pod's UID is gone."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from agentsandbox.backends.kubernetes.manifests import DOMAIN, delete_options, pods_path, selector
from agentsandbox.backends.kubernetes.watch import backoff
from agentsandbox.errors import ApiUnavailable, Conflict, InfrastructureError, NotFound, PermissionDenied, Throttled

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["Remover"]

PATIENCE = (6.0, 15.0, 30.0)
"""Seconds to wait after each order; more orders than that do not help a Pod that hangs."""

AT_ONCE = 16
"""Orders under way at the same time when everything has to go."""

ASKING = 0.25
"""Seconds between two questions for a Pod when no watch tells of it any more."""

SETTLE = 30.0
"""Seconds in which a run's Pods are to be gone after they were deleted together."""


class Remover:
    """
    Removes Pods.

    Args:
        api: The API server.
        reflector: The watch of the run's Pods.
        run_id: Of the run.
        tell: Called with name and UID of a Pod that does not go after the first order.

    """

    def __init__(
        self,
        api: KubernetesApi,
        reflector: Reflector,
        run_id: str,
        *,
        tell: Callable[[str, str], None] = lambda _name, _uid: None,
    ) -> None:
        self._api = api
        self._reflector = reflector
        self._run_id = run_id
        self._tell = tell
        self._path = pods_path(api.namespace)
        self.stuck: dict[str, str] = {}
        """Pods that go on terminating, by UID."""

    def __repr__(self) -> str:
        return f"<Remover [run {self._run_id}, {len(self.stuck)} stuck]>"

    async def remove(self, pod: str, uid: str) -> None:
        """
        Remove a Pod and wait until it is gone.

        Raises:
            InfrastructureError: If it is still there after a while; it counts as stuck until it is gone.

        """
        for patience in PATIENCE:
            await self._order(pod, uid)
            if await self._goes(pod, uid, patience):
                break
            if uid not in self.stuck:
                self.stuck[uid] = pod
                self._tell(pod, uid)
        else:
            raise InfrastructureError(f"Pod {pod} is still there {sum(PATIENCE):g} s after its deletion")
        self.stuck.pop(uid, None)

    async def remove_unknown(self, pod: str, nonce: str) -> None:
        """Remove what an unanswered create may have made; nothing if the Pod of that name is not the one."""
        try:
            found = await self._api.request("GET", pods_path(self._api.namespace, pod))
        except NotFound:
            return
        if found["metadata"].get("annotations", {}).get(f"{DOMAIN}/nonce") == nonce:
            self._reflector.observe(found)
            await self.remove(pod, found["metadata"]["uid"])

    async def remove_run(self) -> None:
        """Remove every Pod of the run, whoever made it, and wait until they are gone."""
        pods = await self._list()
        if not pods:
            return
        with suppress(PermissionDenied):  # deletecollection is a permission of its own, and one can do without
            await self._api.request("DELETE", self._path, params={"labelSelector": selector(self._run_id)})
        with anyio.move_on_after(SETTLE):
            slots = anyio.Semaphore(AT_ONCE)

            async def remove(name: str, uid: str) -> None:
                async with slots:
                    await self.remove(name, uid)

            async with anyio.create_task_group() as group:
                for name, uid in pods:
                    group.start_soon(remove, name, uid)

    async def _list(self) -> list[tuple[str, str]]:
        pods: list[tuple[str, str]] = []
        params = {"labelSelector": selector(self._run_id), "limit": 500}
        while True:
            page = await self._api.request("GET", self._path, params=params)
            pods += ((item["metadata"]["name"], item["metadata"]["uid"]) for item in page.get("items") or ())
            following = (page.get("metadata") or {}).get("continue")
            if not following:
                return pods
            params["continue"] = following

    async def _order(self, pod: str, uid: str) -> None:
        failures = 0
        while self._reflector.gone(uid) is None:
            try:
                answer = await self._api.request(
                    "DELETE", pods_path(self._api.namespace, pod), body=delete_options(uid)
                )
                if answer.get("kind") == "Pod":
                    self._reflector.observe(answer)
                else:
                    self._reflector.forget(uid)
            except NotFound:
                self._reflector.forget(uid)
            except Conflict as error:
                # Another Pod has the name by now, which is not ours to touch.
                if "precondition" not in str(error).lower() and "uid" not in str(error).lower():
                    raise
                self._reflector.forget(uid)
            except (ApiUnavailable, Throttled) as error:
                failures += 1
                wait = backoff(failures, random.random(), at_least=error.retry_after)  # noqa: S311 - jitter
                await anyio.sleep(wait)
                continue
            return

    async def _goes(self, pod: str, uid: str, patience: float) -> bool:
        """Wait until a Pod is gone, and say whether it is."""
        deadline = anyio.current_time() + patience
        try:
            await self._reflector.wait_for(uid, lambda found: found is None, timeout=patience)
        except TimeoutError:
            return not await self._there(pod, uid)
        except ApiUnavailable:  # the watch ends before the last Pod when everything is cancelled from outside
            while await self._there(pod, uid):
                if anyio.current_time() >= deadline:
                    return False
                await anyio.sleep(ASKING)
        return True

    async def _there(self, pod: str, uid: str) -> bool:
        try:
            found = await self._api.request("GET", pods_path(self._api.namespace, pod))
        except NotFound:
            found = {}
        except (ApiUnavailable, Throttled):
            return True
        if (found.get("metadata") or {}).get("uid") == uid:
            return True
        self._reflector.forget(uid)
        return False
