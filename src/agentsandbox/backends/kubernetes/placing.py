# SPDX-License-Identifier: Apache-2.0
"""From a manifest to a Pod that is ready, or to the reason why there is none."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.conditions import Cause, PodPhase, PodState, deleted, state_of
from agentsandbox.backends.kubernetes.evidence import last_warning
from agentsandbox.backends.kubernetes.manifests import DOMAIN, pods_path
from agentsandbox.backends.kubernetes.watch import backoff
from agentsandbox.errors import ApiUnavailable, Conflict, InvalidObject, NotFound, ProvisionError, Throttled

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["Placer"]

ASKS = 5
"""How often to ask whether an unanswered create made its Pod."""

OVER = (PodPhase.LOST, PodPhase.TERMINATING)


class Placer:
    """
    Makes Pods and waits for them.

    Args:
        api: The API server.
        reflector: The watch of the run's Pods.

    """

    def __init__(self, api: KubernetesApi, reflector: Reflector) -> None:
        self._api = api
        self._reflector = reflector
        self._path = pods_path(api.namespace)
        self._rule: bool | None = None
        self._asking = anyio.Lock()

    def __repr__(self) -> str:
        rule = {None: "not asked yet", True: "yes", False: "no"}[self._rule]
        return f"<Placer [rule RestartAllContainers: {rule}]>"

    async def knows_rule(self, manifest: dict[str, Any]) -> bool:
        """
        Return whether the server knows the rule in a manifest; it is asked once, by a dry run.

        Args:
            manifest: A Pod with the rule.

        """
        async with self._asking:
            if self._rule is None:
                wanted = manifest["spec"]["containers"][0]["restartPolicyRules"]
                params = {"dryRun": "All"}
                try:
                    answer = await self._api.request("POST", self._path, params=params, body=manifest)
                except InvalidObject:
                    # Or the Pod is wrong otherwise; then it is refused again, in words about what is wrong.
                    self._rule = False
                else:
                    self._rule = answer["spec"]["containers"][0].get("restartPolicyRules") == wanted
            return self._rule

    async def post(self, manifest: dict[str, Any]) -> str:
        """
        Make a Pod; if the answer is lost, find out whether it was made.

        Returns:
            Its UID.

        Raises:
            ControlPlaneError: If the API server refuses or cannot be reached.
            QuotaExceeded: If a quota is used up.

        """
        asked = 0
        while True:
            try:
                made = await self._api.request("POST", self._path, body=manifest)
            except ApiUnavailable as error:
                if not error.ambiguous:
                    raise
                found = await self._find(manifest)
                if found is None:
                    asked += 1
                    if asked >= ASKS:
                        raise
                    continue
                made = found
            except Conflict as error:
                if error.reason != "AlreadyExists":
                    raise
                found = await self._find(manifest)
                if found is None:
                    raise
                made = found
            self._reflector.observe(made)
            return str(made["metadata"]["uid"])

    async def _find(self, manifest: dict[str, Any]) -> dict[str, Any] | None:
        meta = manifest["metadata"]
        for failures in range(1, ASKS + 1):
            try:
                found = await self._api.request("GET", f"{self._path}/{meta['name']}")
            except NotFound:
                return None
            except (ApiUnavailable, Throttled):
                await anyio.sleep(backoff(failures, random.random()))  # noqa: S311 - jitter
                continue
            nonce = f"{DOMAIN}/nonce"
            ours = (found["metadata"].get("annotations") or {}).get(nonce) == meta["annotations"][nonce]
            return found if ours else None
        return None

    async def ready(
        self, pod: str, uid: str, *, timeout: float, fresh: Callable[[PodState], bool] | None = None
    ) -> PodState:
        """
        Wait until a Pod is ready.

        Args:
            pod: Its name.
            uid: Its UID.
            timeout: In seconds.
            fresh: Whether a ready container is the one that is waited for, and not what was before a restart. With it,
                a container that the kubelet does not start at once is a failure: another Pod is there sooner.

        Raises:
            ProvisionError: In the cluster's own words, if it is over, cannot become ready, or is not in time.

        """
        last: PodState | None = None

        def settled(found: dict[str, Any] | None) -> bool:
            nonlocal last
            if found is None:
                return True
            last = state = state_of(found)
            if state.phase is PodPhase.READY:
                return fresh is None or fresh(state)
            if state.phase in OVER:
                return True
            failure = state.failure
            if failure is None:
                return False
            return failure.permanent or failure.over or (fresh is not None and failure.cause is Cause.CRASHING)

        try:
            found = await self._reflector.wait_for(uid, settled, timeout=timeout)
        except TimeoutError:
            found = None
            if last is not None and last.failure is not None:
                raise last.failure.error() from None
            why = f": {last.reason} {last.message}".rstrip() if last is not None else ""
            if warning := await last_warning(self._api, self._api.namespace, uid):
                why += f"; {warning}"
            raise ProvisionError(f"Pod {pod} is not ready after {timeout:g} s{why}") from None
        if found is None:
            gone = self._reflector.gone(uid)
            state = deleted(gone) if gone is not None else None
            raise ProvisionError(f"Pod {pod} was deleted before it was ready" + (f": {state.message}" if state else ""))
        state = state_of(found)
        if state.phase is PodPhase.READY:
            return state
        if state.failure is not None:
            raise state.failure.error()
        raise ProvisionError(f"Pod {pod} {state.reason}: {state.message}".rstrip(": "))
