# SPDX-License-Identifier: Apache-2.0
"""The API server as raw JSON: requests, watches and websockets, with this library's errors and nobody's models."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import attrs

from agentsandbox.backends.kubernetes.credentials import Credential, Credentials, Target, discover
from agentsandbox.backends.kubernetes.refusals import (
    connection_errors,
    error_of,
    handshake_error,
    retry_after,
    status_of,
    unavailable,
)
from agentsandbox.backends.kubernetes.sockets import BODY_LIMIT, Refused, allow_files, refuse, resolver
from agentsandbox.errors import ApiUnavailable, ConfigurationError, ProtocolError

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Json", "KubernetesApi", "Params", "error_of", "retry_after"]

Json = dict[str, Any]
Params = Mapping[str, Any] | Sequence[tuple[str, Any]]

_REST_CONNECTIONS = 128
"""Plain calls are short, and the replenisher limits their rate; more at once only queue in the server instead."""
_SPARE_FILES = 128
"""For the rest of the process: event loop, journal, pipes, logs."""
_CONNECT_TIMEOUT = 15.0
_WATCH_TIMEOUT = 30.0
"""For the headers of a watch; its body may take for ever."""
_KEEPALIVE = 60.0
_READS = frozenset({"GET", "HEAD"})


@attrs.define(eq=False, repr=False)
class KubernetesApi:
    """
    One API server, spoken to with raw JSON. Make it with :meth:`connect` and end it with :meth:`aclose`.

    Nothing is retried here but a call whose credentials were rejected: only callers know what may be repeated.
    """

    _target: Target
    _credentials: Credentials
    _rest: aiohttp.ClientSession
    _streams: aiohttp.ClientSession
    max_connections: int
    """How many websockets may be open at a time."""
    _sockets: weakref.WeakSet[socket.socket] = attrs.field(factory=weakref.WeakSet, kw_only=True)
    protocol: str | None = attrs.field(default=None, init=False)
    """What was last agreed on for a websocket."""
    _date: tuple[str, float] | None = attrs.field(default=None, init=False)

    @classmethod
    async def connect(
        cls,
        *,
        context: str | None = None,
        namespace: str | None = None,
        kubeconfig: str | None = None,
        max_connections: int,
    ) -> KubernetesApi:
        """
        Prepare connections; the server itself is not spoken to yet.

        Args:
            context: The kubeconfig context; ``None`` is the current one, or the service account inside a Pod.
            namespace: ``None`` is the context's.
            kubeconfig: Path; ``None`` is ``$KUBECONFIG``, else ``~/.kube/config``.
            max_connections: How many websockets will be open at a time.

        Raises:
            ConfigurationError: If the event loop is not asyncio's, kubernetes-asyncio is missing, the process may not
                open that many files, or there is no usable configuration.

        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigurationError("backend 'kubernetes' runs on asyncio, not on trio") from None
        rest = min(max(max_connections, 8), _REST_CONNECTIONS)
        allow_files(max_connections, max_connections + rest + _SPARE_FILES)
        try:
            # The import takes most of a second.
            await anyio.to_thread.run_sync(__import__, "kubernetes_asyncio.config", limiter=anyio.CapacityLimiter(1))
            import aiohttp
        except ImportError as error:
            raise ConfigurationError(
                "backend 'kubernetes' needs kubernetes-asyncio: pip install kubernetes-asyncio"
            ) from error
        target, credentials = await discover(context=context, namespace=namespace, kubeconfig=kubeconfig)

        sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

        def socket_of(address: Any) -> socket.socket:
            made = socket.socket(*address[:3])
            sockets.add(made)
            return made

        # Older versions cannot be asked; then what is still closing is left to the end of the event loop.
        known = "socket_factory" in inspect.signature(aiohttp.TCPConnector).parameters
        own: dict[str, Any] = {"socket_factory": socket_of} if known else {}

        def session(limit: int, **options: Any) -> aiohttp.ClientSession:
            connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=_KEEPALIVE, resolver=resolver(), **own)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT)
            return aiohttp.ClientSession(connector=connector, timeout=timeout, **options)

        streams = session(max_connections, raise_for_status=refuse)
        # A handshake is a GET, and aiohttp sends those again by itself when the connection is lost: that would run the
        # command twice.
        streams._retry_connection = False  # noqa: SLF001
        return cls(
            target,
            credentials,
            session(rest),
            streams,
            max_connections,
            sockets=sockets,
        )

    @property
    def namespace(self) -> str:
        """The namespace to work in."""
        return self._target.namespace

    @property
    def context(self) -> str:
        """The kubeconfig context, or ``in-cluster``."""
        return self._target.context

    @property
    def host(self) -> str:
        """The server's base URL."""
        return self._target.host

    @property
    def clock_offset(self) -> float | None:
        """How far the server's clock is ahead of ours, in seconds, to its own resolution of one second."""
        if self._date is None:
            return None
        return parsedate_to_datetime(self._date[0]).timestamp() - self._date[1]

    def __repr__(self) -> str:
        state = "closed" if self._rest.closed else "open"
        return f"<KubernetesApi {self.context}/{self.namespace} max_connections={self.max_connections} {state}>"

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 30.0,
    ) -> Json:
        """
        Call the API server once.

        Args:
            method: The HTTP method.
            path: From ``/api`` or ``/apis`` on.
            params: The query; ``None`` values are left out, a list of pairs may repeat a name.
            body: To be sent as JSON.
            content_type: Of the body; patches have several.
            timeout: For the whole call, in seconds.

        Returns:
            The answer's JSON.

        Raises:
            ControlPlaneError: Its subclasses say what happened, see :func:`error_of`. A write whose outcome is unknown
                is an :exc:`ApiUnavailable` with ``ambiguous``.
            QuotaExceeded: If a quota is used up.

        """
        data = await self._send(method, path, params, body, content_type, timeout, accept="application/json")
        try:
            answer = json.loads(data)
        except ValueError as error:
            write = method not in _READS
            raise ApiUnavailable(status_of(data)["message"] or "an empty answer", ambiguous=write) from error
        if not isinstance(answer, dict):
            raise ApiUnavailable("the answer is not a JSON object", ambiguous=method not in _READS)
        return answer

    async def text(self, method: str, path: str, *, params: Params | None = None, timeout: float = 30.0) -> str:
        """Call the API server once for something that is not JSON, such as a log. Else like :meth:`request`."""
        data = await self._send(method, path, params, None, "", timeout, accept="*/*")
        return data.decode("utf-8", "replace")

    async def watch(self, path: str, *, params: Params) -> AsyncGenerator[Json, None]:
        """
        Yield the events of one watch connection, as they are, until the server ends it.

        Wrap it in :func:`contextlib.aclosing`. It may stay silent for as long as it likes; limits are the caller's.

        Args:
            path: Of the collection.
            params: The query; ``watch`` is added.

        Raises:
            ControlPlaneError: If the server refuses (410 is a :exc:`Conflict` with the reason ``Expired``) or the
                connection breaks.

        """
        query = [*_query(params), ("watch", "true")]
        credential = await self._credentials.current()
        response = await self._open(credential, "GET", path, query, timeout=_WATCH_TIMEOUT, endless=True)
        if response.status == 401:
            response.release()
            credential = await self._credentials.renew(credential)
            response = await self._open(credential, "GET", path, query, timeout=_WATCH_TIMEOUT, endless=True)
        async with response:
            refusal, rest = None, b""
            try:
                if response.status != 200:
                    refusal = await response.content.read(BODY_LIMIT)
                else:
                    async for chunk in response.content.iter_any():
                        *lines, rest = (rest + chunk).split(b"\n")
                        for line in lines:
                            if line:
                                yield json.loads(line)
                    if rest.strip():
                        yield json.loads(rest)
            except ValueError as error:
                raise ApiUnavailable("the watch was cut within an event") from error
            except connection_errors() as error:
                raise unavailable(error, write=False) from error
            if refusal is not None:  # some refusals are OSErrors, and none is a broken connection
                raise error_of(response.status, refusal, response.headers)

    async def websocket(
        self,
        path: str,
        *,
        params: Params,
        protocols: Sequence[str],
        heartbeat: float | None,
        max_size: int,
        timeout: float = 30.0,
    ) -> aiohttp.ClientWebSocketResponse:
        """
        Open a websocket, for instance to ``pods/exec``.

        Args:
            path: Of the subresource.
            params: The query. It may hold a command line, so it appears in no message.
            protocols: To offer, best first; the answer's is in ``protocol`` of what is returned.
            heartbeat: Seconds between pings; a missing pong closes the websocket.
            max_size: Of one message, in bytes; 0 is without limit.
            timeout: For the handshake, in seconds.

        Raises:
            ControlPlaneError: If the server refuses: as :func:`error_of` judges its status and words.
            ProtocolError: If what it answers is no websocket handshake.

        """
        import aiohttp

        credential = await self._credentials.current()
        for last in (False, True):
            try:
                with anyio.fail_after(timeout):
                    stream: aiohttp.ClientWebSocketResponse = await self._streams.ws_connect(
                        self._target.host + path,
                        params=_query(params),
                        protocols=protocols,
                        heartbeat=heartbeat,
                        max_msg_size=max_size,
                        **self._options(credential),
                    )
                    self.protocol = stream.protocol or self.protocol
                    return stream
            # "from None": the causes name the URL, and with it the command. And it may have started all the same.
            except Refused as refusal:
                if last or refusal.status != 401:
                    raise handshake_error(refusal.status, refusal.body, refusal.headers, protocols=protocols) from None
            except aiohttp.WSServerHandshakeError as error:
                raise ProtocolError(f"websocket handshake: {error.message}") from None
            except connection_errors() as error:
                raise unavailable(error, write=True) from None
            credential = await self._credentials.renew(credential)
        raise AssertionError("the second attempt returns or raises")

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        with anyio.move_on_after(5, shield=True):
            await self._streams.close()
            await self._rest.close()
            # Streams that were closed before may still wait for the other side's farewell.
            for one in tuple(self._sockets):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            while any(one.fileno() >= 0 for one in self._sockets):  # noqa: ASYNC110 - nothing tells
                await anyio.sleep(0.005)

    async def _send(
        self,
        method: str,
        path: str,
        params: Params | None,
        body: Any,
        content_type: str,
        timeout: float,
        *,
        accept: str,
    ) -> bytes:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"Accept": accept, **({"Content-Type": content_type} if data is not None else {})}
        write = method not in _READS
        query = _query(params or {})
        credential = await self._credentials.current()
        for last in (False, True):
            response = await self._open(credential, method, path, query, timeout=timeout, data=data, headers=headers)
            async with response:
                try:
                    answer = await response.read()
                except connection_errors() as error:
                    raise unavailable(error, write=write) from error
            if response.status < 300:
                if date := response.headers.get("Date"):
                    self._date = (date, time.time())
                return answer
            if last or response.status != 401:
                raise error_of(response.status, answer, response.headers, write=write)
            credential = await self._credentials.renew(credential)
        raise AssertionError("the second attempt returns or raises")

    async def _open(
        self,
        credential: Credential,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        *,
        timeout: float,
        endless: bool = False,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientResponse:
        import aiohttp

        total = None if endless else timeout
        try:
            with anyio.fail_after(timeout if endless else None):
                return await self._rest.request(
                    method,
                    self._target.host + path,
                    params=query,
                    data=data,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_TIMEOUT),
                    **self._options(credential, headers),
                )
        except connection_errors() as error:
            raise unavailable(error, write=method not in _READS) from error

    def _options(self, credential: Credential, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {"headers": dict(headers or {})}
        if credential.authorization:
            options["headers"]["Authorization"] = credential.authorization
        if credential.ssl is not None:
            options["ssl"] = credential.ssl
        if self._target.server_name:
            options["server_hostname"] = self._target.server_name
        if self._target.proxy:
            options["proxy"] = self._target.proxy
        return options


def _query(params: Params) -> list[tuple[str, str]]:
    pairs = params.items() if isinstance(params, Mapping) else params
    words = {True: "true", False: "false"}
    return [
        (name, words[value] if isinstance(value, bool) else str(value)) for name, value in pairs if value is not None
    ]
