# SPDX-License-Identifier: Apache-2.0
"""Watches: every change from a version on, one JSON a line, until a time is up."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING

import anyio
from aiohttp import web

from agentsandbox.testing.cluster.matching import matcher
from agentsandbox.testing.cluster.replies import Refusal, expired

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.rest import Request
    from agentsandbox.testing.cluster.store import Event, Stored

__all__ = ["watch"]

_DEFAULT_TIMEOUT = 3600.0


def _line(kind: str, raw: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + raw + b"}\n"


class _Watch:
    def __init__(self, cluster: FakeCluster, request: Request) -> None:
        self.cluster, self.request = cluster, request
        self.match = matcher(request.query.get("labelSelector", ""), request.query.get("fieldSelector", ""))
        self.queue: deque[bytes] = deque()
        self.ready = anyio.Event()
        self.version = cluster.store.version
        self.sent = 0
        self.dropped = False

    def hear(self, event: Event) -> None:
        self.version = max(self.version, event.now.version)
        line = self.line(event)
        if line is not None:
            self.queue.append(line)
            self.ready.set()

    def line(self, event: Event) -> bytes | None:
        """Return an event as this watch sees it: what comes into its selection is added, what leaves it is deleted."""
        if self.request.namespace and event.now.namespace != self.request.namespace:
            return None
        if self.request.name and event.now.name != self.request.name:
            return None
        now = self.match(event.now.object)
        if event.type != "MODIFIED":
            return _line(event.type, event.now.raw()) if now else None
        before = event.before is not None and self.match(event.before.object)
        if now:
            return _line("MODIFIED" if before else "ADDED", event.now.raw())
        return _line("DELETED", event.now.raw()) if before else None

    def existing(self) -> list[Stored]:
        request = self.request
        found = self.cluster.store.all(request.resource, request.namespace)
        return [one for one in found if self.match(one.object) and request.name in ("", one.name)]

    def bookmark(self) -> bytes:
        resource = self.request.resource
        meta = {"resourceVersion": str(self.version)}
        return _line(
            "BOOKMARK",
            json.dumps({"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta}).encode(),
        )


async def watch(
    cluster: FakeCluster, http: web.Request, request: Request, headers: dict[str, str]
) -> web.StreamResponse:
    """Serve one watch to its end."""
    state = _Watch(cluster, request)
    asked = request.query.get("resourceVersion") or ""
    fault = cluster.faults.take_watch(http.path)
    response = web.StreamResponse(headers={**headers, "Content-Type": "application/json"})
    response.enable_chunked_encoding()
    unsubscribe = cluster.store.subscribe(request.resource, state.hear)
    cluster.watches[state] = http
    try:
        try:
            if asked in ("", "0"):
                state.queue.extend(_line("ADDED", one.raw()) for one in state.existing())
            else:
                if not asked.isdigit():
                    raise Refusal(400, "BadRequest", f'Invalid value: "{asked}": strconv.ParseUint: invalid syntax')
                for event in cluster.store.since(request.resource, int(asked)):
                    state.hear(event)
                state.version = max(state.version, int(asked)) if int(asked) <= cluster.store.version else state.version
        except Refusal as refusal:
            if refusal.code != 410:
                raise
            # What is too old is only told once the watch is open.
            await response.prepare(http)
            await response.write(_line("ERROR", json.dumps(refusal.status).encode()))
            return response
        if state.queue:
            state.ready.set()
        await response.prepare(http)
        with anyio.move_on_after(float(request.query.get("timeoutSeconds") or _DEFAULT_TIMEOUT)):
            while await _step(state, response, (fault.kind, fault.events) if fault is not None else None):
                pass
    except ConnectionError:  # the client is gone
        pass
    finally:
        unsubscribe()
        cluster.watches.pop(state, None)
    return response


async def _step(state: _Watch, response: web.StreamResponse, fault: tuple[str, int] | None) -> bool:
    if fault is not None and state.sent >= fault[1]:
        return await _spoil(state, response, fault[0])
    if not state.queue:
        bookmarks = state.request.query.get("allowWatchBookmarks") in ("true", "1")
        with anyio.move_on_after(state.cluster.timing.bookmark if bookmarks else None) as scope:
            await state.ready.wait()
        if scope.cancelled_caught:
            await response.write(state.bookmark())
            return True
    if state.dropped:
        _abort(response)
        return False
    lines, state.queue = state.queue, deque()
    state.ready = anyio.Event()
    if fault is None:
        state.sent += len(lines)
        await response.write(b"".join(lines))
        return True
    for line in lines:
        if state.sent >= fault[1]:
            return await _spoil(state, response, fault[0], line)
        state.sent += 1
        await response.write(line)
    return True


async def _spoil(state: _Watch, response: web.StreamResponse, kind: str, line: bytes = b"") -> bool:
    if kind == "stall":
        await anyio.sleep_forever()
    if kind == "expire":
        version = state.cluster.store.version
        await response.write(_line("ERROR", json.dumps(expired(version - 1, version).status).encode()))
        return False
    if kind == "cut":
        while not line:
            if not state.queue:
                await state.ready.wait()
            line = state.queue.popleft()
        await response.write(line[: len(line) // 2])
    _abort(response)
    return False


def _abort(response: web.StreamResponse) -> None:
    transport = response._req.transport if response._req is not None else None  # noqa: SLF001 - no other way to it
    if transport is not None:
        transport.close()
