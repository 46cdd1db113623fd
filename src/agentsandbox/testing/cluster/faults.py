# SPDX-License-Identifier: Apache-2.0
"""Faults to order: what requests, watches and exec streams shall suffer, how often, and a log of what was asked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agentsandbox.testing.cluster.replies import Json

__all__ = ["ExecFault", "Faults", "RequestFault", "RequestRecord", "WatchFault"]


@attrs.define(kw_only=True)
class RequestRecord:
    """One request that arrived."""

    at: float
    """When, on the event loop's clock, in seconds."""
    method: str
    """Its HTTP method."""
    path: str
    """Its path."""
    query: tuple[tuple[str, str], ...]
    """Its query, in order."""
    authorization: str
    """Its credentials."""
    body: Any = None
    """What came with it, parsed."""
    status: int = 0
    """How it was answered; 0 until then, and for a connection that was cut."""

    def get(self, name: str) -> str | None:
        """Return a parameter of the query."""
        return next((value for key, value in self.query if key == name), None)


@attrs.define(eq=False, kw_only=True)
class _Fault:
    times: int | None = 1
    """How often it still happens; ``None`` is always."""
    hits: int = 0
    """How often it has happened."""

    def take(self) -> bool:
        """Use it once, if it is not used up."""
        if self.times is not None:
            if self.times <= 0:
                return False
            self.times -= 1
        self.hits += 1
        return True

    def end(self) -> None:
        """Let it happen no more."""
        self.times = 0


F = TypeVar("F", bound=_Fault)


@attrs.define(eq=False, kw_only=True)
class RequestFault(_Fault):
    """What happens to requests that match."""

    method: str
    path: re.Pattern[str]
    status: int | None = None
    """Answer with it; ``None`` lets the request pass, once *delay* is over."""
    body: Json | str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)
    delay: float = 0.0
    """Seconds before anything else."""
    cut: str = ""
    """``before`` or ``after``: close the connection without an answer, before or after the request takes effect."""
    stalled: anyio.Event | None = None
    """Wait for it before anything else."""

    def matches(self, method: str, path: str) -> bool:
        """Return whether a request is meant."""
        return self.method in ("*", method) and self.path.search(path) is not None


@attrs.define(eq=False, kw_only=True)
class WatchFault(_Fault):
    """What happens to watches that are opened from now on."""

    path: re.Pattern[str]
    events: int = 0
    """After so many events."""
    kind: str = "drop"
    """``drop`` ends it, ``stall`` says no more, ``expire`` says 410 and ends it, ``cut`` breaks an event in two."""


@attrs.define(eq=False, kw_only=True)
class ExecFault(_Fault):
    """What happens to exec streams that match."""

    pod: re.Pattern[str]
    command: re.Pattern[str]
    status: int | None = None
    """Refuse the handshake with it."""
    body: str = ""
    """And with these words."""
    silent: bool = False
    """Say nothing from *after_bytes* of output on, and do not close."""
    cut: bool = False
    """Close with 1006 and without a status, after *after_bytes* of output or *after_seconds*."""
    after_bytes: int | None = None
    after_seconds: float | None = None
    discard_stdin: int = 0
    """Throw the first messages of standard input away."""
    frame: int | None = None
    """Cut output into messages of this size; -1 joins all that the command writes into one."""
    split_status: int | None = None
    """Send the status in two messages, the first of that many bytes."""
    idle: float | None = None
    """Close the connection when the client sends nothing, not even a ping, for so many seconds."""
    status_frame: bytes | None = None
    """Send this in place of the real status."""


class Faults:
    """
    Faults of one cluster. Each is used up after *times*, and the one that was ordered first comes first.

    ``cluster.faults.answer("POST", r"/pods$", 429, headers={"Retry-After": "1"}, times=3)``
    """

    def __init__(self) -> None:
        self.requests: list[RequestFault] = []
        self.watches: list[WatchFault] = []
        self.execs: list[ExecFault] = []
        self.protocols: tuple[str, ...] = ("v5.channel.k8s.io", "v4.channel.k8s.io")
        """What exec streams speak, best first. Empty: every handshake is refused."""

    def __repr__(self) -> str:
        open_ = [sum(one.times != 0 for one in kind) for kind in (self.requests, self.watches, self.execs)]
        return "<Faults [{} requests, {} watches, {} execs]>".format(*open_)

    def clear(self) -> None:
        """Order nothing any more; what is stalled goes on."""
        for fault in self.requests:
            if fault.stalled is not None:
                fault.stalled.set()
        every: list[list[Any]] = [self.requests, self.watches, self.execs]
        for kind in every:
            for one in kind:
                one.end()
            kind.clear()
        self.protocols = ("v5.channel.k8s.io", "v4.channel.k8s.io")

    def answer(
        self,
        method: str,
        path: str,
        status: int,
        *,
        body: Json | str | None = None,
        reason: str = "",
        message: str = "",
        headers: Mapping[str, str] | None = None,
        times: int | None = 1,
    ) -> RequestFault:
        """
        Answer requests in the server's stead.

        Args:
            method: HTTP method; ``*`` is every one.
            path: Regular expression, searched in the path.
            status: HTTP status.
            body: A Status or text; by default a Status of *reason* and *message*.
            reason: Of the Status.
            message: Of the Status.
            headers: Of the answer, such as ``Retry-After``.
            times: How many; ``None`` is all.

        """
        if body is None:
            body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            body |= {"message": message or f"scripted fault {status}", "reason": reason, "code": status}
        return self._request(
            RequestFault(
                method=method, path=re.compile(path), status=status, body=body, headers=dict(headers or {}), times=times
            )
        )

    def throttle(self, method: str, path: str, *, retry_after: str | float = 1, times: int | None = 1) -> RequestFault:
        """Answer 429 as the server's own flow control does."""
        message = "the server has received too many requests and has asked us to try again later"
        headers = {"Retry-After": str(retry_after)}
        return self.answer(method, path, 429, reason="TooManyRequests", message=message, headers=headers, times=times)

    def exceed_quota(self, *, name: str = "sandboxes", times: int | None = 1) -> RequestFault:
        """Refuse Pods as a quota does."""
        message = f'pods "x" is forbidden: exceeded quota: {name}, requested: pods=1, used: pods=9, limited: pods=9'
        return self.answer("POST", r"/pods$", 403, reason="Forbidden", message=message, times=times)

    def delay(self, method: str, path: str, seconds: float, *, times: int | None = 1) -> RequestFault:
        """Answer later."""
        return self._request(RequestFault(method=method, path=re.compile(path), delay=seconds, times=times))

    def stall(self, method: str, path: str, *, times: int | None = 1) -> RequestFault:
        """Do not answer until the fault's ``stalled`` event is set."""
        return self._request(RequestFault(method=method, path=re.compile(path), stalled=anyio.Event(), times=times))

    def cut(self, method: str, path: str, *, after: bool = False, times: int | None = 1) -> RequestFault:
        """Close the connection without an answer; with *after*, once the request has taken effect."""
        fault = RequestFault(method=method, path=re.compile(path), cut="after" if after else "before", times=times)
        return self._request(fault)

    def watch(self, path: str = "", *, kind: str = "drop", events: int = 0, times: int | None = 1) -> WatchFault:
        """Spoil watches: see :class:`WatchFault`."""
        if kind not in ("drop", "stall", "expire", "cut"):
            raise ValueError(f"no such fault of a watch: {kind!r}")
        fault = WatchFault(path=re.compile(path), kind=kind, events=events, times=times)
        self.watches.append(fault)
        return fault

    def exec(self, *, pod: str = "", command: str = "", times: int | None = 1, **options: Any) -> ExecFault:
        """Spoil exec streams: see :class:`ExecFault` for the *options*; *pod* and *command* are searched for."""
        fault = ExecFault(pod=re.compile(pod), command=re.compile(command), times=times, **options)
        self.execs.append(fault)
        return fault

    def take_request(self, method: str, path: str) -> RequestFault | None:
        """Use up the first fault that a request suffers."""
        return _take(fault for fault in self.requests if fault.matches(method, path))

    def take_watch(self, path: str) -> WatchFault | None:
        """Use up the first fault that a watch suffers."""
        return _take(fault for fault in self.watches if fault.path.search(path))

    def take_exec(self, pod: str, command: str) -> ExecFault | None:
        """Use up the first fault that an exec stream suffers."""
        return _take(one for one in self.execs if one.pod.search(pod) and one.command.search(command))

    def _request(self, fault: RequestFault) -> RequestFault:
        self.requests.append(fault)
        return fault


def _take(faults: Iterable[F]) -> F | None:
    return next((fault for fault in faults if fault.take()), None)
