# SPDX-License-Identifier: Apache-2.0
"""One list and one watch a collection, however many wait for something in it."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import attrs

from agentsandbox.backends.kubernetes.view import Change, ChangeType, View, newer
from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    Conflict,
    InfrastructureError,
    InvalidObject,
    NotFound,
    PermissionDenied,
)

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

__all__ = ["Change", "ChangeType", "ListWatch", "Reflector", "View", "backoff", "newer"]

Json = dict[str, Any]
Predicate = Callable[[Json | None], bool]
Callback = Callable[["Change"], None]

_PAGE = 200
"""Objects a list call: each Pod carries our program, and larger answers would hold the event loop while parsed."""
_MIN_BACKOFF = 0.25
_MAX_BACKOFF = 15.0
_BRIEF = 1.0
"""A watch that ends sooner and says nothing is a failure, or it would be opened again without pause."""
_PERMANENT = (ConfigurationError, InvalidObject, NotFound, PermissionDenied)


class ListWatch(Protocol):
    """What a reflector needs of an API server; :class:`~.api.KubernetesApi` is one."""

    async def request(self, method: str, path: str, *, params: Mapping[str, Any] | None = None) -> Json:
        """Call it once."""
        ...

    def watch(self, path: str, *, params: Mapping[str, Any]) -> AsyncGenerator[Json, None]:
        """Yield the events of one connection."""
        ...


def backoff(failures: int, jitter: float, *, at_least: float | None = None) -> float:
    """
    Return how long to wait before the next try, in seconds.

    Args:
        failures: In a row, from 1 on.
        jitter: Random, from 0 to 1, so that drivers do not come back in step.
        at_least: What the server asked for, in seconds.

    """
    ceiling = min(_MAX_BACKOFF, _MIN_BACKOFF * 2.0 ** min(failures - 1, 10))
    wait = ceiling * (0.5 + 0.5 * jitter)
    return wait if at_least is None else at_least + wait * jitter


@attrs.define(eq=False)
class _Waiter:
    predicate: Predicate
    done: anyio.Event = attrs.field(factory=anyio.Event)
    result: Json | None = None
    error: InfrastructureError | None = None


@attrs.define(eq=False, repr=False)
class Reflector:
    """
    A cache of one collection, kept up to date by one watch; run :meth:`run` in a task of its owner.

    While the API server does not answer, the cache stays as it was and :attr:`stale_since` says since when it may be
    wrong. Nothing that is missed stays missed: after every failure, every ``410`` and every silence there is a list.

    Args:
        api: The API server.
        path: Of the collection, such as ``/api/v1/namespaces/default/pods``.
        selector: Label selector; give one of your run only.
        idle: Seconds of silence, bookmarks included, after which a watch counts as stalled. Servers send a bookmark
            about once a minute.
        poll: The same while somebody waits for something.
        watch_timeout: Seconds after which the server is asked to end a watch.

    """

    _api: ListWatch
    _path: str
    _selector: str = attrs.field(default="", kw_only=True)
    _idle: float = attrs.field(default=90.0, kw_only=True)
    _poll: float = attrs.field(default=20.0, kw_only=True)
    _watch_timeout: float = attrs.field(default=290.0, kw_only=True)
    stale_since: float | None = attrs.field(default=None, init=False)
    """Since when the view may be behind, on the event loop's clock; ``None`` while all is well."""
    failure: InfrastructureError | ConfigurationError | None = attrs.field(default=None, init=False)
    """What the last try ended with, while it is stale."""
    lists: int = attrs.field(default=0, init=False)
    """How many lists were taken."""
    watches: int = attrs.field(default=0, init=False)
    """How many watches were opened."""
    _view: View = attrs.field(factory=View, init=False)
    _heard: float = attrs.field(default=-math.inf, init=False)
    _failures: int = attrs.field(default=0, init=False)
    _waiters: defaultdict[str, list[_Waiter]] = attrs.field(factory=lambda: defaultdict(list), init=False)
    _callbacks: list[Callback] = attrs.field(factory=list, init=False)
    _keyed: defaultdict[str, list[Callback]] = attrs.field(factory=lambda: defaultdict(list), init=False)
    _ended: InfrastructureError | None = attrs.field(default=None, init=False)

    def __repr__(self) -> str:
        state = "ended" if self._ended else "stale" if self.stale_since is not None else "live"
        waiting = sum(map(len, self._waiters.values()))
        return (
            f"<Reflector {self._path} {state} objects={len(self._view.objects)} waiting={waiting} lists={self.lists} "
            f"watches={self.watches}>"
        )

    @property
    def objects(self) -> Mapping[str, Json]:
        """Everything that is known, by UID. Not to be changed."""
        return self._view.objects

    def get(self, uid: str) -> Json | None:
        """Return what is known of an object, or ``None`` if it is gone or was never seen."""
        return self._view.objects.get(uid)

    def gone(self, uid: str) -> Json | None:
        """Return the last that was seen of an object that was deleted not long ago."""
        return self._view.gone.get(uid)

    def observe(self, object_: Json) -> None:
        """
        Take in an object from the answer to a call, such as a create.

        From then on its deletion is noticed, even if the watch never told that it was there.
        """
        self._publish(self._view.put(object_))

    def forget(self, uid: str) -> None:
        """Take in that a call found an object gone; the watch will tell nothing new about it."""
        known = self._view.objects.get(uid)
        if known is not None:
            self._publish(self._view.drop(known))

    def subscribe(self, callback: Callback, *, uid: str | None = None) -> Callable[[], None]:
        """
        Call something at every change, in the watching task: it must be quick and must not raise.

        Args:
            callback: What to call.
            uid: Of the only object to tell about; ``None`` is all.

        Returns:
            A function that ends the subscription.

        """
        where = self._callbacks if uid is None else self._keyed[uid]
        where.append(callback)

        def unsubscribe() -> None:
            if callback in where:
                where.remove(callback)
            if uid is not None and not where:
                self._keyed.pop(uid, None)

        return unsubscribe

    async def wait_for(self, key: str, predicate: Predicate, *, timeout: float | None = None) -> Json | None:
        """
        Wait until something is true of an object.

        Args:
            key: Its UID, or its name where it does not exist yet.
            predicate: Asked at every change, and first about what is known; ``None`` is an object that was deleted.
            timeout: In seconds; ``None`` is without limit.

        Returns:
            The object as the predicate liked it, ``None`` if it liked its absence.

        Raises:
            TimeoutError: If the time is up.
            ApiUnavailable: If nobody watches any more.

        """
        known = self.get(key) or next((o for o in self.objects.values() if o["metadata"]["name"] == key), None)
        if (known is not None or key in self._view.gone) and predicate(known):
            return known
        if self._ended is not None:
            raise self._ended
        waiter = _Waiter(predicate)
        self._waiters[key].append(waiter)
        try:
            with anyio.fail_after(timeout):
                await waiter.done.wait()
        finally:
            waiting = self._waiters[key]
            waiting.remove(waiter)
            if not waiting:
                del self._waiters[key]
        if waiter.error is not None:
            raise waiter.error
        return waiter.result

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Keep the cache up to date until cancelled; started when the first list is in.

        Raises:
            ControlPlaneError: If the first list is refused for good, for instance for lack of permission. Later the
                same is only a reason to be stale.

        """
        try:
            while True:
                try:
                    await self._list()
                    if self.lists == 1:
                        task_status.started()
                    while await self._watch():
                        pass
                except (InfrastructureError, ConfigurationError) as error:
                    if not self.lists and isinstance(error, _PERMANENT):
                        raise
                    expired = isinstance(error, Conflict) and error.status == 410
                    await self._failed(error, pause=not expired or self._failures > 0)
        finally:
            self._end()

    async def _list(self) -> None:
        items: list[Json] = []
        params: dict[str, Any] = {"limit": _PAGE, "labelSelector": self._selector or None}
        while True:
            page = await self._api.request("GET", self._path, params=params)
            items += page.get("items") or ()
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                break
            params["continue"] = meta["continue"]
        self.lists += 1
        changes = self._view.reconcile(items, str(meta.get("resourceVersion") or ""))
        self._well()
        self._publish(changes)

    async def _watch(self) -> bool:
        """Follow one watch to its end; return whether the next one may go on from there, or a list is due."""
        self.watches += 1
        params = {
            "labelSelector": self._selector or None,
            "resourceVersion": self._view.version or None,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(math.ceil(self._watch_timeout * random.uniform(0.8, 1.0))),  # noqa: S311 - jitter
        }
        opened = self._heard = anyio.current_time()
        silent, stalled = True, False
        broken: InfrastructureError | ConfigurationError | None = None
        async with anyio.create_task_group() as tasks:

            async def guard() -> None:
                nonlocal stalled
                while not stalled:
                    limit = self._heard + (min(self._poll, self._idle) if self._waiters else self._idle)
                    await anyio.sleep(min(self._poll, max(0.01, limit - anyio.current_time())))
                    limit = self._heard + (min(self._poll, self._idle) if self._waiters else self._idle)
                    stalled = anyio.current_time() >= limit
                tasks.cancel_scope.cancel()

            tasks.start_soon(guard)
            try:
                async with aclosing(self._api.watch(self._path, params=params)) as events:
                    async for event in events:
                        changes = self._view.event(event)
                        silent, self._failures = False, 0
                        self._well()
                        self._publish(changes)
            except (InfrastructureError, ConfigurationError) as error:
                broken = error
            tasks.cancel_scope.cancel()
        if broken is not None:
            raise broken
        if stalled:
            return False
        if silent and anyio.current_time() - opened < _BRIEF:
            raise ApiUnavailable("the watch ended as soon as it began")
        self._failures = 0
        return True

    def _well(self) -> None:
        self._heard = anyio.current_time()
        self.stale_since = self.failure = None

    async def _failed(self, error: InfrastructureError | ConfigurationError, *, pause: bool) -> None:
        self._failures += 1
        if not pause:
            return
        self.failure = error
        if self.stale_since is None:
            self.stale_since = self._heard if self._heard > -math.inf else anyio.current_time()
        wait = getattr(error, "retry_after", None)
        await anyio.sleep(backoff(self._failures, random.random(), at_least=wait))  # noqa: S311 - jitter

    def _publish(self, changes: Iterable[Change]) -> None:
        for change in changes:
            meta = change.object["metadata"]
            now = None if change.type is ChangeType.DELETED else change.object
            for key in (meta["uid"], meta["name"]):
                for waiter in self._waiters.get(key, ()):
                    if not waiter.done.is_set() and waiter.predicate(now):
                        waiter.result = now
                        waiter.done.set()
            for callback in (*self._keyed.get(meta["uid"], ()), *self._callbacks):
                callback(change)

    def _end(self) -> None:
        self._ended = ApiUnavailable("nobody watches any more")
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.error = self._ended
                waiter.done.set()
