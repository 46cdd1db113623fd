# SPDX-License-Identifier: Apache-2.0
"""Waiting for what the controller makes of a claim, or for the word that nothing will come of it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.agent_sandbox.objects import ClaimState, Verdict, claim_state, controller_of
from agentsandbox.backends.kubernetes.conditions import PodFailure, state_of
from agentsandbox.backends.kubernetes.manifests import pods_path
from agentsandbox.errors import ApiUnavailable, InfrastructureError, NotFound, ProvisionError, Throttled

if TYPE_CHECKING:
    from agentsandbox.backends.agent_sandbox.held import Held
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["Waiting"]

LAG = 10.0
"""Seconds for which a pool or template may be missing in the controller's eyes after it was made."""

FIRST_LOOK, LAST_LOOK = 0.25, 15.0
"""Seconds between two looks at a Pod that no watch tells of: at first, and at most."""

SOON, LATER = 0.06, 1.0
"""The same for one that is about to come or to go."""


class Waiting:
    """
    Waits for claims and their Pods.

    Args:
        api: The API server.
        claims: The watch of the run's claims.
        pods: The watch of the run's Pods; it does not tell of those of somebody else's template before they are ours.

    """

    def __init__(self, api: KubernetesApi, claims: Reflector, pods: Reflector) -> None:
        self._api = api
        self._claims = claims
        self._pods = pods

    def __repr__(self) -> str:
        return f"<Waiting [{len(self._claims.objects)} claims, {len(self._pods.objects)} Pods]>"

    async def ready(self, held: Held, timeout: float) -> ClaimState:
        """
        Wait until a claim has a Sandbox that is ready.

        Raises:
            ProvisionError: In the words of the controller or the kubelet, if it does not come to that in time.
            InvalidObject: In the controller's words, if the claim asks for what it cannot get.
            ApiUnavailable: If nobody watches any more.

        """
        last = ClaimState(name=held.claim, verdict=Verdict.WAIT)
        found: dict[str, Any] | None = None
        failure: PodFailure | None = None
        ended: ApiUnavailable | None = None

        def settled(found: dict[str, Any] | None, *, missing: bool) -> bool:
            nonlocal last
            if found is None:
                return True
            last = claim_state(found)
            return last.verdict not in (Verdict.WAIT, *(() if missing else (Verdict.MISSING,)))

        async def wait(scope: anyio.CancelScope) -> None:
            nonlocal found, ended
            try:
                found = await self._claims.wait_for(held.uid, lambda found: settled(found, missing=True))
                if last.verdict is Verdict.MISSING:
                    with anyio.move_on_after(LAG):
                        found = await self._claims.wait_for(held.uid, lambda found: settled(found, missing=False))
            except ApiUnavailable as error:
                ended = error
            scope.cancel()

        async def look(scope: anyio.CancelScope) -> None:
            nonlocal failure
            with suppress(ApiUnavailable):
                failure = await self._hopeless(held)
                scope.cancel()

        try:
            with anyio.fail_after(timeout):
                async with anyio.create_task_group() as group:
                    group.start_soon(wait, group.cancel_scope)
                    group.start_soon(look, group.cancel_scope)
        except TimeoutError:
            if (pod := self._named(held.claim)) is not None and (why := state_of(pod).failure) is not None:
                raise why.error() from None
            words = last.error() if last.reason else f"claim {held.claim}: nothing was said about it"
            raise ProvisionError(f"{words}; not ready after {timeout:g} s") from None
        if ended is not None:
            raise ended
        if failure is not None and last.verdict is not Verdict.READY:
            raise failure.error()
        if found is None:
            raise ProvisionError(f"claim {held.claim} was deleted before it was ready")
        if last.verdict is Verdict.READY:
            return last
        raise last.error()

    async def _hopeless(self, held: Held) -> PodFailure:
        """
        Return why the Pod of a claim that is started cold can never be ready, once it says so.

        The controller does not read it: its claim says for ever that dependencies are not ready. The Pod has the name
        of the claim. One from a pool is ready when it is taken.
        """

        def over(pod: dict[str, Any] | None) -> bool:
            failure = None if pod is None else state_of(pod).failure
            return failure is not None and (failure.permanent or failure.over)

        pod: dict[str, Any] | None = None
        if held.given is None:
            pod = await self._pods.wait_for(held.claim, over)
        wait = FIRST_LOOK
        while not over(pod):
            await anyio.sleep(wait)
            wait = min(2 * wait, LAST_LOOK)
            with suppress(InfrastructureError):
                pod = await self._api.request("GET", pods_path(self._api.namespace, held.claim))
        assert pod is not None
        failure = state_of(pod).failure
        assert failure is not None
        return failure

    def _named(self, pod: str) -> dict[str, Any] | None:
        return next((one for one in self._pods.objects.values() if one["metadata"]["name"] == pod), None)

    async def another(self, name: str, than: str, *, watched: bool) -> dict[str, Any]:
        """
        Wait for a Pod of the same name as one that was.

        Args:
            name: The name.
            than: The UID of the one that was.
            watched: Whether the watch tells of it.

        Raises:
            ControlPlaneError: If the API server refuses or does not answer.

        """

        def anew(pod: dict[str, Any] | None) -> bool:
            return pod is not None and pod["metadata"]["uid"] != than and not pod["metadata"].get("deletionTimestamp")

        pod = await self._pods.wait_for(name, anew) if watched else None
        wait = SOON
        while not anew(pod):
            await anyio.sleep(wait)
            wait = min(2 * wait, LATER)
            with suppress(NotFound, ApiUnavailable, Throttled):
                pod = await self._api.request("GET", pods_path(self._api.namespace, name))
        assert pod is not None
        return pod

    async def vanished(self, name: str, sandbox: str) -> None:
        """
        Wait until a Sandbox, by its UID if that is known, has no Pod any more.

        Raises:
            ControlPlaneError: If the API server refuses.

        """
        wait = SOON
        while True:
            with suppress(ApiUnavailable, Throttled):
                try:
                    pod = await self._api.request("GET", pods_path(self._api.namespace, name))
                except NotFound:
                    return
                if sandbox and controller_of(pod).get("uid") != sandbox:
                    return
            await anyio.sleep(wait)
            wait = min(2 * wait, LATER)
