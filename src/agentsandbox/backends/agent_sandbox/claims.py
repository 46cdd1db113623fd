# SPDX-License-Identifier: Apache-2.0
"""From a pool to a Sandbox, by a claim; and back."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.agent_sandbox.objects import (
    ClaimState,
    Launch,
    Verdict,
    claim,
    claim_state,
    launch_of,
    path,
    pod_of,
)
from agentsandbox.backends.kubernetes import owned
from agentsandbox.backends.kubernetes.manifests import DOMAIN, pods_path
from agentsandbox.errors import ApiUnavailable, InfrastructureError, NotFound, ProvisionError

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["Claims", "Held"]

LAG = 10.0
"""Seconds for which a pool or template may be missing in the controller's eyes after it was made."""

GONE_WITHIN = 60.0
"""Seconds from the deletion of a claim to the end of its Pod, by way of the garbage collector."""


@attrs.define(eq=False, kw_only=True)
class Held:
    """A claim, and what it has brought."""

    claim: str
    """The name of the claim."""
    uid: str = ""
    """Its UID; empty before the API server has answered."""
    nonce: str = attrs.field(factory=lambda: secrets.token_hex(8))
    """By which we know it if the answer is lost."""
    sandbox: str = ""
    """The name of its Sandbox."""
    sandbox_uid: str = ""
    """The Sandbox's UID."""
    launch: Launch | None = None
    """How the Sandbox was started."""
    pod_uid: str = ""
    """The UID of the Pod that it had first; another one is another sandbox."""


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
        state = await self._ready(held, timeout)
        sandbox = await self._api.request("GET", self._path("sandboxes", state.sandbox))
        owner = _controller(sandbox)
        if owner.get("uid") != held.uid:
            raise ProvisionError(f"Sandbox {state.sandbox} is not of claim {held.claim} but of {owner.get('name')}")
        held.sandbox, held.sandbox_uid = state.sandbox, str(sandbox["metadata"]["uid"])
        held.launch = launch_of(sandbox)
        self.launched[held.launch] += 1
        pod = await self._api.request("GET", pods_path(self._api.namespace, pod_of(sandbox)))
        owner = _controller(pod)
        if owner.get("uid") != held.sandbox_uid:
            raise ProvisionError(f"Pod {pod['metadata']['name']} is not of Sandbox {held.sandbox}")
        held.pod_uid = str(pod["metadata"]["uid"])
        self._pods.observe(pod)
        return pod

    async def _ready(self, held: Held, timeout: float) -> ClaimState:
        last = ClaimState(name=held.claim, verdict=Verdict.WAIT)

        def settled(found: dict[str, Any] | None, *, missing: bool) -> bool:
            nonlocal last
            if found is None:
                return True
            last = claim_state(found)
            return last.verdict not in (Verdict.WAIT, *(() if missing else (Verdict.MISSING,)))

        try:
            with anyio.fail_after(timeout):
                found = await self._claims.wait_for(held.uid, lambda found: settled(found, missing=True))
                if last.verdict is Verdict.MISSING:
                    with anyio.move_on_after(LAG):
                        found = await self._claims.wait_for(held.uid, lambda found: settled(found, missing=False))
        except TimeoutError:
            words = last.error() if last.reason else f"claim {held.claim}: nothing was said about it"
            raise ProvisionError(f"{words}; not ready after {timeout:g} s") from None
        if found is None:
            raise ProvisionError(f"claim {held.claim} was deleted before it was ready")
        if last.verdict is Verdict.READY:
            return last
        raise last.error()

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
        await owned.delete(self._api, self._path("sandboxclaims", held.claim), held.uid)
        try:
            await self._claims.wait_for(held.uid, lambda found: found is None, timeout=GONE_WITHIN)
            for uid in self._pods_of(held):
                await self._pods.wait_for(uid, lambda found: found is None, timeout=GONE_WITHIN)
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
        uids = [held.pod_uid] if held.pod_uid else []
        for pod in self._pods.objects.values():
            owner, uid = _controller(pod), pod["metadata"]["uid"]
            if uid not in uids and owner and (owner.get("uid") == held.sandbox_uid or owner.get("name") == held.claim):
                uids.append(uid)
        return uids

    def _path(self, plural: str, name: str | None = None) -> str:
        version = self._core if plural == "sandboxes" else self._version
        return path(version, plural, self._api.namespace, name)


def _controller(object_: dict[str, Any]) -> dict[str, Any]:
    owners = object_["metadata"].get("ownerReferences") or ()
    return next((one for one in owners if one.get("controller")), {})
