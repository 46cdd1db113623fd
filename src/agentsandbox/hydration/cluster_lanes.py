# SPDX-License-Identifier: Apache-2.0
"""Fetch images on the nodes of a cluster: one Pod a lane, pinned to its node, whose image is changed in place."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.conditions import PodPhase, state_of
from agentsandbox.backends.kubernetes.inplace import same_image
from agentsandbox.backends.kubernetes.manifests import STRATEGIC_MERGE, image_patch, pod, pod_name, pods_path, selector
from agentsandbox.backends.kubernetes.options import PodOptions
from agentsandbox.backends.kubernetes.placing import Placer
from agentsandbox.backends.kubernetes.removal import Remover
from agentsandbox.backends.kubernetes.watch import Reflector
from agentsandbox.errors import ImagePullFailed, ProvisionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.conditions import PodState

__all__ = ["ClusterLane", "ClusterPuller"]

REMOVE_WITHIN = 60.0
"""Seconds that the removal of Pods may take."""

PULL_WITHIN = 1800.0
"""Seconds that one pull may take: tens of gigabytes on a slow disk."""

_NOBODY = 65534
"""What its Pods run as, whatever the image says: they do nothing."""

# An image without Python or shell does not start: it is on the node by then.
_WAIT = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nsignal.pause()"

_OPTIONS = {
    "requests": {"cpu": "10m", "memory": "32Mi"},
    "limits": {"cpu": "100m", "memory": "128Mi"},
    "lifetime": 6 * 3600,
    "user": _NOBODY,
}


class ClusterPuller:
    """
    Nodes of a cluster that fetch images.

    Args:
        api: The API server.
        run_id: 12 hexadecimal digits that mark its Pods; random if not given.
        owner: Who pays for them.
        options: Fields of :class:`~agentsandbox.backends.kubernetes.options.PodOptions`, such as
            ``image_pull_secrets`` and ``tolerations``.

    """

    def __init__(
        self,
        api: KubernetesApi,
        *,
        run_id: str | None = None,
        owner: str = "hydration",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_id = run_id or secrets.token_hex(6)
        """What marks its Pods."""
        self._api = api
        self._owner = owner
        self._options = PodOptions(**{**_OPTIONS, **(options or {})})
        self._reflector = Reflector(api, pods_path(api.namespace), selector=selector(self.run_id))
        self._placer = Placer(api, self._reflector)
        self._remover = Remover(api, self._reflector, self.run_id)
        self._numbers = itertools.count(1)
        self._running = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be able to fetch; on exit every Pod of it is gone, also when cancelled."""
        async with anyio.create_task_group() as group:
            await group.start(self._reflector.run)
            self._running = True
            try:
                yield
            finally:
                self._running = False
                with anyio.move_on_after(REMOVE_WITHIN, shield=True):
                    await self._remover.remove_run()
                group.cancel_scope.cancel()

    @asynccontextmanager
    async def lane(self, node: str) -> AsyncIterator[ClusterLane]:
        """Hold a place on a node for as long as the context lasts."""
        if not self._running:
            raise UsageError("the puller is not running; use 'async with puller.running():'")
        lane = ClusterLane(self, node)
        try:
            yield lane
        finally:
            with anyio.move_on_after(REMOVE_WITHIN, shield=True):
                await lane.leave()

    async def make(self, node: str, image: str) -> tuple[str, str]:
        """Make a Pod on a node, past the scheduler, which would take it where the image is; name and UID."""
        name = pod_name(self.run_id, next(self._numbers))
        manifest = pod(
            name,
            image,
            options=self._options,
            run_id=self.run_id,
            owner=self._owner,
            nonce=secrets.token_hex(16),
            program=_WAIT,
            restart_rule=False,
        )
        manifest["spec"] |= {"nodeName": node, "restartPolicy": "Always"}
        return name, await self._placer.post(manifest)

    async def change(self, name: str, uid: str, image: str) -> str:
        """Have a Pod serve another image; return the container that it had before."""
        before = self._reflector.get(uid)
        path = pods_path(self._api.namespace, name)
        body = image_patch(uid, image)
        self._reflector.observe(await self._api.request("PATCH", path, body=body, content_type=STRATEGIC_MERGE))
        return "" if before is None else state_of(before).identity.instance

    async def arrived(self, uid: str, image: str, *, before: str = "") -> None:
        """
        Wait until the image of a Pod is on its node, and a container was made of it.

        Args:
            uid: The Pod's.
            image: The image.
            before: The container that the Pod had before.

        Raises:
            ImagePullFailed: If the kubelet says that it cannot be had, or it takes too long.
            ProvisionError: If the Pod is gone or was refused by its node.

        """

        def there(state: PodState) -> bool:
            made = state.identity.instance not in ("", before)
            return made and bool(state.image_id) and same_image(image, state.running_image)

        def decided(found: Mapping[str, Any] | None) -> bool:
            if found is None:
                return True
            state = state_of(found)
            failed = state.failure is not None and state.failure.cause.startswith("image_")
            return there(state) or failed or state.phase in (PodPhase.LOST, PodPhase.TERMINATING)

        try:
            found = await self._reflector.wait_for(uid, decided, timeout=PULL_WITHIN)
        except TimeoutError:
            raise ImagePullFailed(f"{image} was not there within {PULL_WITHIN:g} s") from None
        state = None if found is None else state_of(found)
        if state is not None and there(state):
            return
        if state is not None and state.failure is not None:
            raise state.failure.error()
        raise ProvisionError(f"the Pod that fetches {image} is gone" + (f": {state.reason}" if state else ""))

    async def remove(self, name: str, uid: str) -> None:
        """Remove a Pod."""
        await self._remover.remove(name, uid)

    def __repr__(self) -> str:
        return f"<ClusterPuller [run {self.run_id}, {'running' if self._running else 'stopped'}]>"


class ClusterLane:
    """One Pod on one node, whose image is changed to whatever is to be fetched."""

    def __init__(self, puller: ClusterPuller, node: str) -> None:
        self._puller = puller
        self._node = node
        self._pod: tuple[str, str] | None = None

    async def pull(self, image: str) -> None:
        """
        Have an image on the node.

        Raises:
            ImagePullFailed: If it cannot be had.
            InfrastructureError: If the cluster does not do its part.

        """
        try:
            before = ""
            if self._pod is None:
                self._pod = await self._puller.make(self._node, image)
            else:
                before = await self._puller.change(*self._pod, image)
            await self._puller.arrived(self._pod[1], image, before=before)
        except BaseException:
            # Another Pod begins without this one's back-off, and without its words about another image.
            with anyio.move_on_after(REMOVE_WITHIN, shield=True):
                await self.leave()
            raise

    async def leave(self) -> None:
        """Give the place up."""
        if self._pod is not None:
            gone, self._pod = self._pod, None
            await self._puller.remove(*gone)

    def __repr__(self) -> str:
        return f"<ClusterLane on {self._node} [{self._pod[0] if self._pod else 'no Pod'}]>"
