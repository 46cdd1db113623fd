# SPDX-License-Identifier: Apache-2.0
"""Where the API server is and how to prove who we are to it; kept fresh for every connection by one refresher."""

from __future__ import annotations

import base64
import ipaddress
import json
import math
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import attrs

from agentsandbox.errors import ApiUnavailable, ConfigurationError

__all__ = ["Credential", "Credentials", "Target", "discover", "proxy_for"]

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REREAD = 60.0
"""Projected tokens are replaced on disk; client-go reads them again once a minute, and so do we."""
_MARGIN = 60.0
_MARGIN_SHARE = 0.2
_PLUGIN_TIMEOUT = 60.0
_FLOOR = 1.0
"""A server that rejects what was just renewed must not make every caller run the plugin again."""

Clock = Callable[[], float]


@attrs.frozen(kw_only=True, eq=False)
class Credential:
    """One proof of who we are. Compared by identity: a renewed one is another one."""

    authorization: str | None = attrs.field(default=None, repr=False)
    """The header, or ``None`` with client certificates alone."""
    ssl: ssl.SSLContext | None = attrs.field(default=None, repr=False)
    """What connections trust and present; ``None`` for plain HTTP."""
    renew_at: float = math.inf
    """When to fetch the next one, on the event loop's clock."""
    expires_at: float = math.inf
    """When it is certainly useless, on the event loop's clock."""


@attrs.frozen(kw_only=True)
class Target:
    """Which API server, and which part of it."""

    host: str
    """Base URL; may have a path."""
    context: str
    """The kubeconfig context, or ``in-cluster``."""
    namespace: str
    """The namespace to work in."""
    server_name: str | None = None
    """Name to expect in the server's certificate, if it is not the host's."""
    proxy: str | None = None
    """HTTP proxy to go through."""


@attrs.define(eq=False, repr=False)
class Credentials:
    """
    The present credential, renewed ahead of its expiry and when the server rejects it.

    However many callers find it stale at once, one of them renews it and the others take the result.

    Args:
        held: The first credential.
        load: Fetches a fresh one; raises :exc:`ConfigurationError` with the reason if it cannot.

    """

    _held: Credential
    _load: Callable[[], Awaitable[Credential]]
    _lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)
    _renewed_at: float = attrs.field(default=-math.inf, init=False)
    _failed: tuple[float, str] | None = attrs.field(default=None, init=False)
    renewals: int = attrs.field(default=0, init=False)
    """How many were fetched after the first."""

    def __repr__(self) -> str:
        return f"<Credentials renewals={self.renewals}{' failing' if self._failed else ''}>"

    async def current(self) -> Credential:
        """
        Return a credential that is good now, as far as one can know.

        Raises:
            ApiUnavailable: If it has expired and cannot be renewed.

        """
        held, now = self._held, anyio.current_time()
        if now < held.renew_at or (now < held.expires_at and self._lock.locked()):
            return held
        try:
            return await self.renew(held)
        except ApiUnavailable:
            if anyio.current_time() < held.expires_at:
                return held
            raise

    async def renew(self, stale: Credential) -> Credential:
        """
        Replace a credential that is about to expire or was rejected.

        Args:
            stale: The one that the caller used; if somebody else has replaced it meanwhile, nothing is fetched.

        Raises:
            ApiUnavailable: If it cannot be renewed.

        """
        async with self._lock:
            now = anyio.current_time()
            if self._held is not stale or now - self._renewed_at < _FLOOR:
                return self._held
            if self._failed is not None and now - self._failed[0] < _FLOOR:
                raise ApiUnavailable(self._failed[1])
            try:
                # Shielded: a caller that is cancelled must not leave a half-read plugin behind for the others.
                with anyio.fail_after(_PLUGIN_TIMEOUT, shield=True):
                    fresh = await self._load()
            except (ConfigurationError, TimeoutError) as error:
                text = f"the credentials could not be renewed: {str(error) or f'no answer in {_PLUGIN_TIMEOUT:g} s'}"
                self._failed = (anyio.current_time(), text)
                raise ApiUnavailable(text) from error
            self._held, self._renewed_at, self._failed = fresh, anyio.current_time(), None
            self.renewals += 1
            return fresh


async def discover(*, context: str | None, namespace: str | None, kubeconfig: str | None) -> tuple[Target, Credentials]:
    """
    Find the API server as kubectl does: a kubeconfig if there is one, else the service account of the Pod we run in.

    Args:
        context: The kubeconfig context; ``None`` is the current one.
        namespace: ``None`` is the context's, else ``default``.
        kubeconfig: Path, or several joined by ``:``; ``None`` is ``$KUBECONFIG``, else ``~/.kube/config``.

    Raises:
        ConfigurationError: If there is neither, or it cannot be used; the message says what is wrong.

    """
    paths = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    found = _any_file(paths)
    if not found and (kubeconfig or context or "KUBERNETES_SERVICE_HOST" not in os.environ):
        raise ConfigurationError(
            f"no kubeconfig at {paths}, and this is no Pod with a service account: give kubeconfig= or set KUBECONFIG"
        )
    source = _Kubeconfig(paths, context) if found else _ServiceAccount()
    credential, config = await source.load()
    target = Target(
        host=str(config.host).rstrip("/"),
        context=source.context,
        namespace=namespace or source.namespace or "default",
        server_name=getattr(config, "tls_server_name", None),
        proxy=proxy_for(str(config.host), getattr(config, "proxy", None), os.environ),
    )

    async def load() -> Credential:
        return (await source.load())[0]

    return target, Credentials(credential, load)


@attrs.define(eq=False)
class _Kubeconfig:
    paths: str
    _wanted: str | None
    context: str = ""
    namespace: str | None = None
    _loader: Any = None

    async def load(self) -> tuple[Credential, Any]:
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config import ConfigException, load_kube_config

        config = Configuration()
        try:
            # Read anew each time, as the file may have changed. Not for the two providers that keep their tokens in
            # the loader: a refresh token may be good only once.
            if self._loader is not None and self._loader.provider in ("gcp", "oidc"):
                await self._loader.load_and_set(config)
            else:
                self._loader = await load_kube_config(
                    config_file=self.paths,
                    context=self._wanted,
                    client_configuration=config,
                    persist_config=False,
                )
            entry = self._loader.current_context or {}
            self.context = str(entry.get("name", ""))
            self.namespace = (entry.get("context") or {}).get("namespace")
            return _credential(config, getattr(self._loader, "exec_plugin_expiry", None)), config
        # The loader asserts and indexes its way through a file that people write by hand.
        except (ConfigException, AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            where = f", context {self._wanted}" if self._wanted else ""
            raise ConfigurationError(f"kubeconfig {self.paths}{where}: {_first_line(error)}") from error


@attrs.define(eq=False)
class _ServiceAccount:
    context: str = "in-cluster"
    namespace: str | None = None

    async def load(self) -> tuple[Credential, Any]:
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config import ConfigException, load_incluster_config

        config = Configuration()
        try:
            load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=config,
                try_refresh_token=False,
                token_filename=str(_SERVICE_ACCOUNT / "token"),
                cert_filename=str(_SERVICE_ACCOUNT / "ca.crt"),
            )
            own = _SERVICE_ACCOUNT / "namespace"
            self.namespace = own.read_text().strip() if own.is_file() else None
            return _credential(config, None, reread=_REREAD), config
        except (ConfigException, OSError, ValueError) as error:
            raise ConfigurationError(f"service account: {_first_line(error)}") from error


def _credential(config: Any, expiry: Any, *, reread: float = math.inf) -> Credential:
    header = config.api_key.get("BearerToken") or config.api_key.get("authorization")
    header = header.strip() if header else None
    now = anyio.current_time()
    expires = expiry.timestamp() if expiry is not None else _jwt_expiry(header)
    left = math.inf if expires is None else expires - time.time()
    return Credential(
        authorization=header,
        ssl=_ssl_context(config) if str(config.host).startswith("https") else None,
        renew_at=now + min(reread, left - min(_MARGIN, _MARGIN_SHARE * left) if left < math.inf else left),
        expires_at=now + left,
    )


def _ssl_context(config: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=config.ssl_ca_cert)
    # Cluster authorities are often made without the extensions that this flag, on by default since 3.13, demands;
    # every other client of Kubernetes accepts them.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if config.cert_file:
        context.load_cert_chain(config.cert_file, keyfile=config.key_file)
    if not config.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _jwt_expiry(header: str | None) -> float | None:
    parts = (header or "").removeprefix("Bearer ").split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (LookupError, TypeError, ValueError):
        return None


def proxy_for(host: str, configured: str | None, environ: Any) -> str | None:
    """
    Choose the proxy for an API server: the kubeconfig's, else the environment's unless ``NO_PROXY`` covers it.

    Networks such as ``10.0.0.0/8`` count in ``NO_PROXY``, as they do for kubectl.

    Args:
        host: The server's URL.
        configured: ``proxy-url`` of the kubeconfig.
        environ: The environment.

    Raises:
        ConfigurationError: If it is not an HTTP proxy.

    """
    url = urlsplit(host)
    proxy = configured
    if not proxy:
        variable = f"{url.scheme}_proxy"
        proxy = environ.get(variable) or environ.get(variable.upper())
        exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
        if not proxy or _covers(exempt, url.hostname or "", url.port):
            return None
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise ConfigurationError(f"proxy {proxy.rsplit('@')[-1]}: only http:// and https:// proxies are supported")
    return proxy


def _covers(exempt: str, name: str, port: int | None) -> bool:
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        ip = None
    if name == "localhost" or (ip is not None and ip.is_loopback):
        return True
    for entry in filter(None, (entry.strip() for entry in exempt.split(","))):
        if entry == "*" or entry in (name, f"{name}:{port}"):
            return True
        # "example.com" covers its subdomains as well; ".example.com" and "*.example.com" nothing but them.
        if ip is None and name.endswith("." + entry.removeprefix("*").lstrip(".")):
            return True
        if ip is not None and _contains(entry, ip):
            return True
    return False


def _contains(network: str, ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return ip in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _any_file(paths: str) -> bool:
    return any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:256]
