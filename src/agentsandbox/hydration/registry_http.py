# SPDX-License-Identifier: Apache-2.0
"""Single requests to registries and to what they refer to: bounded, verified, and careful with whom they tell what."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs

from agentsandbox.backends.kubernetes.credentials import proxy_for
from agentsandbox.backends.kubernetes.refusals import connection_errors, error_of, unavailable
from agentsandbox.backends.kubernetes.sockets import resolver
from agentsandbox.errors import ConfigurationError, InfrastructureError, ProtocolError
from agentsandbox.models.reference import DOCKER_HUB, parse_reference

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

__all__ = ["Answer", "Http", "refusal"]

_HUB_HOST = "registry-1.docker.io"
_TIMEOUT = 30.0
"""Seconds for a request and its answer."""
_CONNECT_TIMEOUT = 10.0
_REDIRECTS = 5
_CHUNK = 64 * 1024


@attrs.frozen(kw_only=True)
class Answer:
    """What a server said."""

    status: int
    """The HTTP status."""
    headers: Any = attrs.field(repr=False)
    """Its headers; some may be there more than once."""
    body: bytes = attrs.field(repr=False)
    """All of it."""
    host: str
    """Who said it."""
    foreign: bool = False
    """Whether that is somebody else than was asked, after a redirect: he is told no credentials."""


@attrs.define(eq=False, repr=False)
class Http:
    """The connections. Made by :meth:`open`."""

    _session: aiohttp.ClientSession
    _plain: frozenset[str]

    @classmethod
    @asynccontextmanager
    async def open(cls, *, plain_http: Iterable[str], ca_file: Path | None, connections: int) -> AsyncIterator[Http]:
        """
        Open a session.

        Args:
            plain_http: Registries that are asked without TLS: ``HOST`` or ``HOST:PORT``.
            ca_file: Certificates that are trusted besides the system's, or those in ``$SSL_CERT_FILE``.
            connections: At a time.

        Raises:
            ConfigurationError: If the event loop is not asyncio's, or something cannot be used.

        """
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigurationError("registries need aiohttp: pip install kubernetes-asyncio") from error
        plain = frozenset(plain_http)
        for host in plain:
            if parse_reference(f"{host}/x").registry != host:
                raise ConfigurationError(f"{host!r} is no registry to ask without TLS: give HOST or HOST:PORT")
        trusted = ssl.create_default_context()
        if ca_file is not None:
            try:
                trusted.load_verify_locations(ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigurationError(
                    f"cannot read certificates from {ca_file}: {error.strerror or error}"
                ) from error
        try:
            connector = aiohttp.TCPConnector(limit=connections, ssl=trusted, resolver=resolver())
        except RuntimeError as error:
            raise ConfigurationError("registries are asked on asyncio, not on trio") from error
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT, sock_connect=_CONNECT_TIMEOUT)
        jar = aiohttp.DummyCookieJar()
        headers = {"User-Agent": "agentsandbox", "Accept-Encoding": "identity"}
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=jar, headers=headers, auto_decompress=False
        ) as session:
            yield cls(session, plain)

    def base(self, registry: str) -> str:
        """Return the URL of a registry: without TLS only on this machine, or where the user says so."""
        host = _HUB_HOST if registry == DOCKER_HUB else registry
        name = _name(f"http://{host}")
        return f"{'http' if _loopback(name) or self._is_plain(host, name) else 'https'}://{host}"

    def safe(self, url: str) -> bool:
        """Return whether nobody can listen on the way."""
        return url.startswith("https://") or _loopback(_name(url))

    def follow(self, text: str, before: str) -> URL:
        """
        Read a URL that a server refers to.

        Args:
            text: It, maybe relative.
            before: The URL that was asked.

        Raises:
            ProtocolError: If it is none of HTTP, names a user, or leaves TLS.

        """
        from yarl import URL

        try:
            origin = URL(before, encoded=True)
            url = origin.join(URL(text))
            host = url.host or ""
        except ValueError:
            url, host = URL(), ""
        if url.scheme not in ("http", "https") or not host or url.user or url.password:
            raise ProtocolError(f"{_name(before)} refers to something that is no URL of http or https")
        # What is on this machine is nobody's business who is not.
        here = _loopback(host) and origin.scheme == "http" and _loopback(_name(before))
        if url.scheme == "http" and not here and not self._is_plain(f"{host}:{url.port}", host):
            raise ProtocolError(f"{_name(before)} refers to {host}, and not over TLS")
        return url

    async def ask(
        self,
        url: str,
        *,
        limit: int,
        headers: Mapping[str, str] | None = None,
        authorization: str | None = None,
        form: Mapping[str, str] | None = None,
    ) -> Answer:
        """
        Send one request: POST with a form, and otherwise GET, whose redirects are followed.

        Args:
            url: Whom and what to ask.
            limit: Bytes that an answer may have.
            headers: To send.
            authorization: To send likewise, but to nobody else.
            form: To send to nobody else.

        Raises:
            ApiUnavailable: If there is no answer.
            ConfigurationError: If the server cannot be trusted.
            ProtocolError: If the answer is too large, or leads nowhere.

        """
        from yarl import URL

        target = URL(url, encoded=True)
        origin = target.origin()
        for _ in range(_REDIRECTS + 1):
            foreign = target.origin() != origin
            sent = dict(headers or {})
            if authorization and not foreign:
                sent["Authorization"] = authorization
            try:
                async with self._session.request(
                    "GET" if form is None else "POST",
                    target,
                    headers=sent,
                    data=form,
                    allow_redirects=False,
                    proxy=proxy_for(str(target.origin()), None, os.environ),
                ) as response:
                    location = response.headers.get("Location")
                    if form is not None or response.status not in (301, 302, 303, 307, 308) or not location:
                        return Answer(
                            status=response.status,
                            headers=response.headers,
                            body=await _read(response, limit),
                            host=target.host or "",
                            foreign=foreign,
                        )
            except connection_errors() as error:
                raise unavailable(error, write=False) from error
            target = self.follow(location, str(target))
        raise ProtocolError(f"{origin.host} redirects more than {_REDIRECTS} times")

    def _is_plain(self, host: str, name: str) -> bool:
        return host in self._plain or name in self._plain


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ProtocolError(f"{response.url.host} compresses its answer, which nobody asked for")
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        body += chunk
        if len(body) > limit:
            raise ProtocolError(f"{response.url.host} answers with more than {limit} bytes")
    return bytes(body)


def refusal(answer: Answer, what: str) -> InfrastructureError:
    """
    Turn an answer that is none into the error to raise.

    Of the server's words only its code is repeated: they may hold anything, such as what it was sent.

    Args:
        answer: The answer.
        what: What was asked for, for the message.

    """
    try:
        code = str(json.loads(answer.body)["errors"][0]["code"])
    except (LookupError, TypeError, ValueError, RecursionError):
        code = ""
    said = f" ({code})" if re.fullmatch("[A-Z][A-Z_]{1,39}", code) else ""
    message = f"{what}: {answer.host} answers with HTTP status {answer.status}{said}"
    return error_of(answer.status, {"message": message, "reason": said.strip(" ()")}, answer.headers)


def _name(url: str) -> str:
    return urlsplit(url).hostname or ""


def _loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
