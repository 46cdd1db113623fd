# SPDX-License-Identifier: Apache-2.0
"""
A new container in the same Pod, of the same image or of another one.

The rule ``RestartAllContainers`` on an exit code of ours starts it without back-off and removes what was before. Where
an image is to change, the kubelet must hear of the old container's end and of the new image at the same time: if it
hears of the image first, it ends the container itself and keeps a record of it, and with such a record a return to an
earlier image backs off; if last, it starts the old image once more. The rule removes every record. So where one is
left, the container is made anew once before the image changes: see :meth:`Changer.backs_off`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes.conditions import PodState, state_of
from agentsandbox.backends.kubernetes.manifests import (
    DOMAIN,
    RESTART_EXIT_CODE,
    STRATEGIC_MERGE,
    image_patch,
    pods_path,
)
from agentsandbox.errors import ProvisionError

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.placing import Placer
    from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
    from agentsandbox.backends.kubernetes.watch import Reflector

__all__ = ["Changer", "same_image", "same_place"]

LOOK = 0.08
"""Seconds that a kubelet takes to look at a Pod that has changed."""

ALIAS = 10.0
"""Seconds after which a container of the image that was before is taken for one of the new name."""

LOOKED = 0.5
"""Seconds after a start in which its last look was surely later than its last knowledge of containers."""


def same_image(asked: str, running: str) -> bool:
    """Return whether a runtime's name of an image is what was asked for; it spells out registry, project and tag."""
    return _full(asked) == _full(running)


def _full(name: str) -> str:
    name, at, digest = name.partition("@")
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not re.search(r"[.:]|^localhost$", first):
        name = f"docker.io/{name}"
    if at:
        return f"{name.rpartition(':')[0] if ':' in name.rpartition('/')[2] else name}@{digest}"
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def same_place(before: Any, after: Any) -> None:
    """Refuse a Pod in which something of the last container is left outside of its root file system."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise ProvisionError("the runner does not say what is left of the container before")
    left = list(after.get("left") or ()) + [
        path for path, digest in (before.get("files") or {}).items() if (after.get("files") or {}).get(path) != digest
    ]
    if left:
        raise ProvisionError(f"left of the container before: {', '.join(map(str, left))}")


class Changer:
    """
    Restarts containers in place.

    Args:
        api: The API server.
        reflector: The watch of the run's Pods.
        placer: Who waits for Pods.
        timeout: Seconds in which the new container must be ready, its image included.

    """

    def __init__(self, api: KubernetesApi, reflector: Reflector, placer: Placer, *, timeout: float) -> None:
        self._api = api
        self._reflector = reflector
        self._placer = placer
        self._timeout = timeout
        self._ids: dict[str, str] = {}
        self.restarted = 0
        """Containers made anew of the same image."""
        self.changed = 0
        """Containers made anew of another one."""

    def __repr__(self) -> str:
        return f"<Changer [{self.restarted} restarted, {self.changed} changed]>"

    async def renew(self, sandbox: KubernetesSandbox, image: str) -> PodState:
        """
        Have the container of a sandbox made anew. Its session is over from then on.

        Args:
            sandbox: Whose.
            image: Of which image.

        Returns:
            The state of the Pod with the new container, which has no runner yet.

        Raises:
            ProvisionError: If it did not come to that. The Pod is of no use any more.
            ControlPlaneError: If the API server does not answer.

        """
        if sandbox.loss is not None or not sandbox.session.alive:
            raise ProvisionError(f"Pod {sandbox.pod} is of no use any more: {sandbox.loss or sandbox.session.lost}")
        old = sandbox.state
        assert old is not None
        sandbox.unwanted = True
        sandbox.unguard()
        other = image != old.image and self._ids.get(image, "") != old.image_id
        if other:
            await self._announce(sandbox, image)
            await self._patch(sandbox, image_patch(sandbox.uid, image))
        await sandbox.session.aclose(shutdown=True, code=RESTART_EXIT_CODE)

        def anew(state: PodState) -> bool:
            new = state.identity
            return new.restarts > old.identity.restarts and new.instance not in ("", old.identity.instance)

        def fresh(state: PodState) -> bool:
            if not anew(state):
                return False
            return not other or same_image(image, state.running_image) or state.image_id != old.image_id

        state = await self._placer.ready(sandbox.pod, sandbox.uid, timeout=self._timeout, fresh=anew)
        if not fresh(state):
            # Either the kubelet has not heard of the new image yet, and makes yet another container; or the image is
            # the same under two names, and then nothing more happens.
            try:
                state = await self._placer.ready(sandbox.pod, sandbox.uid, timeout=ALIAS, fresh=fresh)
            except ProvisionError:
                now = self._reflector.get(sandbox.uid)
                if now is None or state_of(now).identity != state.identity:
                    raise
        self.learn(image, state)
        if other:
            self.changed += 1
        else:
            self.restarted += 1
        return state

    def backs_off(self, sandbox: KubernetesSandbox, image: str) -> bool:
        """Whether the kubelet may refuse an image for a while, unless the container is made anew before it changes."""
        status = (self._reflector.get(sandbox.uid) or {}).get("status") or {}
        ended = [(one.get("lastState") or {}).get("terminated") or {} for one in status.get("containerStatuses") or ()]
        # One that the rule has removed has no id.
        return image != sandbox.spec.image and any(record.get("containerID") for record in ended)

    def learn(self, image: str, state: PodState) -> None:
        """Remember what an image turned out to be, for names of one and the same."""
        if state.image_id:
            self._ids[image] = state.image_id

    async def _announce(self, sandbox: KubernetesSandbox, image: str) -> None:
        """
        Have the kubelet look at the Pod.

        After a look it acts on the next change only when it knows anew which containers run, about once a second. So by
        the time it acts on the new image it knows of the old container's end, too.
        """
        if anyio.current_time() - sandbox.ready_at > LOOKED:
            await self._patch(sandbox, {"metadata": {"uid": sandbox.uid, "annotations": {f"{DOMAIN}/image": image}}})
            await anyio.sleep(LOOK)

    async def _patch(self, sandbox: KubernetesSandbox, body: dict[str, Any]) -> None:
        path = pods_path(self._api.namespace, sandbox.pod)
        self._reflector.observe(await self._api.request("PATCH", path, body=body, content_type=STRATEGIC_MERGE))
