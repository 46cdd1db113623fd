# SPDX-License-Identifier: Apache-2.0
"""Images on their way to the nodes, as the kubelets tell of them in Events: nothing else says that a Pod pulls."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import attrs

from agentsandbox.backends.kubernetes.conditions import PodPhase, state_of
from agentsandbox.backends.kubernetes.inplace import same_image
from agentsandbox.backends.kubernetes.owned import namespace_path
from agentsandbox.backends.kubernetes.view import Change, ChangeType
from agentsandbox.backends.kubernetes.watch import Reflector
from agentsandbox.errors import InfrastructureError, PermissionDenied

if TYPE_CHECKING:
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.watch import ListWatch

__all__ = ["Pulls"]

_log = logging.getLogger("agentsandbox.kubernetes")

_SELECTED = "involvedObject.kind=Pod,reason!=Scheduled,reason!=Created,reason!=Started,reason!=Killing"
"""Of the Events that every Pod causes, those that say what came of its image."""

# Not at the beginning: after ten of one reason about one object they are "combined from similar events".
_PULLING = re.compile(r'Pulling image "([^"]+)"')
_FAILED = re.compile(r'Failed to pull image "')

Json = dict[str, Any]


class Tell(Protocol):
    """Where events go."""

    def __call__(self, name: str, data: Mapping[str, Any], *, sandbox: str | None = None) -> None:
        """Tell of one."""


@attrs.frozen
class _Pull:
    pod: str
    image: str
    node: str
    sandbox: str
    began: float


class Pulls:
    """
    Tells ``image.pulling`` and ``image.pulled`` of a run's Pods; run :meth:`run` in a task of its owner.

    Events are a courtesy: they may be late, missing or forbidden. A pull is over at the latest when its Pod runs that
    image or is gone, so that no more is remembered than there are Pods. An image that a node had already is none.

    Args:
        api: The API server.
        pods: The watch of the run's Pods.
        sandbox_of: Returns the name of the sandbox whose Pod has a name; ``None`` if there is none.
        tell: Where the events go.

    """

    def __init__(
        self, api: KubernetesApi, pods: Reflector, *, sandbox_of: Callable[[str], str | None], tell: Tell
    ) -> None:
        self._events = Reflector(_Passing(api, self._hear, self._refuse), f"{namespace_path(api.namespace)}/events")
        self._sandbox_of = sandbox_of
        self._tell = tell
        self._pulls: dict[str, _Pull] = {}
        self._scope = anyio.CancelScope()
        self.refusal: InfrastructureError | None = None
        """Why nothing is known, if so."""
        pods.subscribe(self._look)

    def __repr__(self) -> str:
        return f"<Pulls [{'unknown' if self.refusal else f'{len(self._pulls)} under way'}]>"

    async def run(self) -> None:
        """Listen until cancelled; returns where that is not allowed, and says so once."""
        with self._scope:
            try:
                await self._events.run()
            except InfrastructureError as error:
                self._refuse(error)
        if self.refusal is not None:
            _log.info("waiting for images cannot be told from other waiting: %s", self.refusal)

    def _refuse(self, error: InfrastructureError) -> None:
        self.refusal = error
        self._scope.cancel()

    def _hear(self, event: Mapping[str, Any]) -> None:
        about = event.get("involvedObject") or {}
        uid, pod = str(about.get("uid")), str(about.get("name"))
        reason, message = event.get("reason"), str(event.get("message") or "")
        if reason == "Pulling" and (found := _PULLING.search(message)):
            node = str((event.get("source") or {}).get("host") or event.get("reportingInstance") or "")
            self._begin(uid, pod, found[1], node)
        elif reason == "Pulled":
            self._end(uid)
        elif reason == "Failed" and _FAILED.search(message):
            self._end(uid, message)

    def _begin(self, uid: str, pod: str, image: str, node: str) -> None:
        for other, pull in [*self._pulls.items()]:
            if self._sandbox_of(pull.pod) is None:  # its Pod came and went between two looks
                self._end(other, "the Pod is gone")
        sandbox = self._sandbox_of(pod)
        known = self._pulls.get(uid)
        if sandbox is None or (known is not None and known.image == image):
            return
        self._end(uid, "another image is wanted")
        pull = self._pulls[uid] = _Pull(pod, image, node, sandbox, anyio.current_time())
        self._tell("image.pulling", {"image": pull.image, "node": pull.node, "pod": pull.pod}, sandbox=pull.sandbox)

    def _end(self, uid: str, error: str = "") -> None:
        if (pull := self._pulls.pop(uid, None)) is None:
            return
        data = {"image": pull.image, "node": pull.node, "pod": pull.pod, "seconds": anyio.current_time() - pull.began}
        self._tell("image.pulled", {**data, **({"error": error} if error else {})}, sandbox=pull.sandbox)

    def _look(self, change: Change) -> None:
        uid = change.object["metadata"]["uid"]
        if (pull := self._pulls.get(uid)) is None:
            return
        if change.type is ChangeType.DELETED:
            self._end(uid, "the Pod is gone")
            return
        state = state_of(change.object)
        if state.phase is PodPhase.READY and same_image(pull.image, state.running_image):
            self._end(uid)


class _Passing:
    """An API server whose Events pass by: none of them is kept, and none of before is asked for."""

    def __init__(
        self,
        api: ListWatch,
        hear: Callable[[Json], None],
        refuse: Callable[[InfrastructureError], None],
    ) -> None:
        self._api = api
        self._hear = hear
        self._refuse = refuse

    async def request(self, method: str, path: str, *, params: Mapping[str, Any] | None = None) -> Json:
        answer = await self._api.request(
            method, path, params={**(params or {}), "fieldSelector": _SELECTED, "limit": 1}
        )
        return {"metadata": {"resourceVersion": (answer.get("metadata") or {}).get("resourceVersion")}, "items": []}

    async def watch(self, path: str, *, params: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        try:
            async with aclosing(self._api.watch(path, params={**params, "fieldSelector": _SELECTED})) as events:
                async for event in events:
                    if event.get("type") == "ERROR":
                        yield event
                        continue
                    object_ = event.get("object") or {}
                    if event.get("type") in ("ADDED", "MODIFIED"):
                        self._hear(object_)
                    version = (object_.get("metadata") or {}).get("resourceVersion")
                    yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version}}}
        except PermissionDenied as error:
            self._refuse(error)
            raise
