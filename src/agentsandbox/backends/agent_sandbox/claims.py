# SPDX-License-Identifier: Apache-2.0
"""From a pool to a Sandbox, by a claim; and back."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.agent_sandbox.objects import (
    MERGE,
    Launch,
    assigned,
    claim,
    controller_of,
    launch_of,
    path,
    pod_of,
)
from agentsandbox.backends.agent_sandbox.waiting import Waiting
from agentsandbox.backends.kubernetes import owned
from agentsandbox.backends.kubernetes.manifests import DOMAIN, pods_path
from agentsandbox.errors import ApiUnavailable, InfrastructureError, NotFound, ProvisionError

if TYPE_CHECKING:
    from agentsandbox.backends.agent_sandbox.held import Held
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["Claims"]

GONE_WITHIN = 60.0
"""Seconds from the deletion of a claim to the end of its Pod, by way of the garbage collector."""


class Claims:
    """
    Makes claims, waits for them and ends them. One watch tells of all of them.

    Args:
        api: The API server.
        claims: The watch of the run's claims.
        pods: The watch of the run's Pods.
        run_id: Of the run.
        version: Of the extensions' API.
        core: Version of the Sandbox's API.
        lifetime: Seconds after which the controller ends a claim whatever we do.

    """

    def __init__(
        self,
        api: KubernetesApi,
        claims: Reflector,
        pods: Reflector,
        *,
        run_id: str,
        version: str,
        core: str,
        lifetime: float,
    ) -> None:
        self._api = api
        self._claims = claims
        self._pods = pods
        self._waiting = Waiting(api, claims, pods)
        self._run_id = run_id
        self._version = version
        self._core = core
        self._lifetime = lifetime
        self.launched = {Launch.WARM: 0, Launch.COLD: 0}
        """How many Sandboxes came from where."""

    def __repr__(self) -> str:
        return f"<Claims [{self.launched[Launch.WARM]} warm, {self.launched[Launch.COLD]} cold]>"

    async def take(self, held: Held, pool: str, *, timeout: float) -> dict[str, Any]:
        """
        Claim a Sandbox and wait for it.

        Args:
            held: Noted step by step, so that its owner can end it at any time.
            pool: From which pool.
            timeout: In seconds.

        Returns:
            Its Pod.

        Raises:
            ProvisionError: In the controller's own words, if it did not come to that.
            ControlPlaneError: If the API server refuses or does not answer.

        """
        now = datetime.fromtimestamp(time.time() + (self._api.clock_offset or 0.0), UTC)
        body = claim(
            held.claim,
            pool,
            run_id=self._run_id,
            version=self._version,
            nonce=held.nonce,
            now=now,
            lifetime=self._lifetime,
        )
        made = await owned.create(self._api, self._path("sandboxclaims"), body)
        held.uid = str(made["metadata"]["uid"])
        self._claims.observe(made)
        state = await self._waiting.ready(held, timeout)
        sandbox = await self._api.request("GET", self._path("sandboxes", state.sandbox))
        owner = controller_of(sandbox)
        if owner.get("uid") != held.uid:
            raise ProvisionError(f"Sandbox {state.sandbox} is not of claim {held.claim} but of {owner.get('name')}")
        held.sandbox, held.sandbox_uid = state.sandbox, str(sandbox["metadata"]["uid"])
        held.launch = launch_of(sandbox)
        self.launched[held.launch] += 1
        pod = await self._api.request("GET", pods_path(self._api.namespace, pod_of(sandbox)))
        return await self.adopt(held, pod)

    async def adopt(self, held: Held, pod: dict[str, Any]) -> dict[str, Any]:
        """
        Take the Pod of a claim's Sandbox for its own.

        Pods of somebody else's template get the labels of the run, by which they are watched; the controller leaves
        labels alone that it has not set.

        Returns:
            The Pod as it is now.

        Raises:
            ProvisionError: If it is not of that Sandbox.
            ControlPlaneError: If the API server refuses or does not answer.

        """
        meta = pod["metadata"]
        if controller_of(pod).get("uid") != held.sandbox_uid:
            raise ProvisionError(f"Pod {meta['name']} is not of Sandbox {held.sandbox}")
        held.pod_uid = str(meta["uid"])
        if held.given is not None:
            where = pods_path(self._api.namespace, meta["name"])
            body = {"metadata": {"uid": held.pod_uid, "labels": owned.marks(self._run_id)}}
            pod = await self._api.request("PATCH", where, body=body, content_type=MERGE)
        self._pods.observe(pod)
        return pod

    async def another(self, held: Held, name: str, than: str, *, timeout: float) -> dict[str, Any]:
        """
        Wait for another Pod of a claim's Sandbox, under the same name, and take it for the claim's own.

        Args:
            held: The claim.
            name: Of the Pod.
            than: The UID of the one that was.
            timeout: In seconds.

        Returns:
            The Pod.

        Raises:
            TimeoutError: If there is none in time.
            ControlPlaneError: If the API server refuses or does not answer.

        """
        with anyio.fail_after(timeout):
            return await self.adopt(held, await self._waiting.another(name, than, watched=held.given is None))

    async def drop(self, held: Held) -> None:
        """
        End a claim, and return when its Pod is gone.

        Raises:
            InfrastructureError: If the Pod is still there after a while.

        """
        if not held.uid:
            await self._find(held)
        if not held.uid:
            return
        # A Pod that took the place of one of somebody else's template has not got our labels: no watch tells of it.
        unseen = held.given is not None and (not held.pod_uid or self._pods.get(held.pod_uid) is None)
        name = held.sandbox or assigned(self._claims.get(held.uid) or {}) or held.claim
        await owned.delete(self._api, self._path("sandboxclaims", held.claim), held.uid)
        try:
            await self._claims.wait_for(held.uid, lambda found: found is None, timeout=GONE_WITHIN)
            for uid in self._pods_of(held):
                await self._pods.wait_for(uid, lambda found: found is None, timeout=GONE_WITHIN)
            if unseen:
                with anyio.fail_after(GONE_WITHIN):
                    await self._waiting.vanished(name, held.sandbox_uid)
        except (TimeoutError, ApiUnavailable) as error:
            message = f"what claim {held.claim} brought is still there {GONE_WITHIN:g} s after its deletion"
            raise InfrastructureError(message) from error

    async def _find(self, held: Held) -> None:
        """Look for what an unanswered create may have made."""
        try:
            found = await self._api.request("GET", self._path("sandboxclaims", held.claim))
        except NotFound:
            return
        if (found["metadata"].get("annotations") or {}).get(f"{DOMAIN}/nonce") == held.nonce:
            held.uid = str(found["metadata"]["uid"])
            self._claims.observe(found)

    def _pods_of(self, held: Held) -> list[str]:
        """Return the Pods that a claim has brought: also one that took another's place behind our back."""
        seen = held.given is None or self._pods.get(held.pod_uid) is not None
        uids = [held.pod_uid] if held.pod_uid and seen else []
        for pod in self._pods.objects.values():
            owner, uid = controller_of(pod), pod["metadata"]["uid"]
            if uid not in uids and owner and (owner.get("uid") == held.sandbox_uid or owner.get("name") == held.claim):
                uids.append(uid)
        return uids

    def _path(self, plural: str, name: str | None = None) -> str:
        version = self._core if plural == "sandboxes" else self._version
        return path(version, plural, self._api.namespace, name)
