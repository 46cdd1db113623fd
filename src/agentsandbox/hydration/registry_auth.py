# SPDX-License-Identifier: Apache-2.0
"""What registries want to be shown before they answer: nothing, a password, or a token from somewhere else."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import ConfigurationError, PermissionDenied, ProtocolError
from agentsandbox.hydration.registry_http import refusal

if TYPE_CHECKING:
    from agentsandbox.hydration.logins import Login, Logins
    from agentsandbox.hydration.registry_http import Answer, Http
    from agentsandbox.models.reference import Reference

__all__ = ["Authorizer", "Challenge", "challenge_of", "denied"]

_CLIENT = "agentsandbox"
_ANSWER_LIMIT = 64 * 1024
"""Bytes of a token server's answer."""
_LONGEST_TOKEN = 16 * 1024
"""Characters: servers take no longer headers."""
_LIFETIME = 60.0
"""Seconds that a token is good for when its server does not say, as the specification has it."""
_MARGIN = 0.8
"""Share of its life for which a token is used."""

_PARAMETER = re.compile(
    r"""
    (?:^|[\s,]) (?P<key>[A-Za-z][\w-]*) \s*=\s* (?: "(?P<quoted>(?:[^"\\]|\\.)*)" | (?P<plain>[^\s,"]+) )
    | (?:^|,) \s* (?P<scheme>[A-Za-z][\w-]*) (?= \s | , | $ )
    """,
    re.VERBOSE,
)


@attrs.frozen(kw_only=True)
class Challenge:
    """What a registry asks for."""

    bearer: bool
    """A token; or else a name and a password."""
    realm: str = ""
    """Where to get the token."""
    service: str = ""
    """Whom the token is for."""
    scope: str = ""
    """What the token is for."""


def challenge_of(headers: Iterable[str]) -> Challenge | None:
    """
    Choose from what a registry takes: a token rather than a password.

    Args:
        headers: ``WWW-Authenticate``, each with one or several.

    Returns:
        What to do; ``None`` if none of it is known here.

    """
    found: list[tuple[str, dict[str, str]]] = []
    for header in headers:
        for match in _PARAMETER.finditer(header):
            if match["scheme"]:
                found.append((match["scheme"].lower(), {}))
            elif found:
                value = match["plain"] or re.sub(r"\\(.)", r"\1", match["quoted"] or "")
                found[-1][1].setdefault(match["key"].lower(), value)
    for scheme in ("bearer", "basic"):
        for name, said in found:
            if name == scheme:
                known = {key: said.get(key, "") for key in ("realm", "service", "scope")}
                return Challenge(bearer=scheme == "bearer", **known)
    return None


@attrs.frozen(kw_only=True, repr=False)
class _Token:
    header: str
    until: float


@attrs.define(eq=False, repr=False)
class Authorizer:
    """
    Says what to send to registries, and keeps what was good for as long as it is.

    Args:
        http: The connections.
        logins: The credentials.

    """

    http: Http
    logins: Logins
    _challenges: dict[str, Challenge] = attrs.field(factory=dict, init=False)
    _tokens: dict[tuple[str, str], _Token] = attrs.field(factory=dict, init=False)
    _locks: dict[tuple[str, str], anyio.Lock] = attrs.field(factory=lambda: defaultdict(anyio.Lock), init=False)

    async def header(self, reference: Reference) -> str | None:
        """Return what to send at first: nothing, until the registry has asked for something."""
        challenge = self._challenges.get(reference.registry)
        return None if challenge is None else await self._obtain(reference, attrs.evolve(challenge, scope=""))

    async def renew(self, reference: Reference, answer: Answer, used: str | None) -> str:
        """
        Return what to send after a refusal.

        Args:
            reference: The image.
            answer: The refusal.
            used: What was sent.

        Raises:
            PermissionDenied: If there is nothing better.
            ConfigurationError: If credentials cannot be had, or would not be safe on their way.
            ControlPlaneError: If a token server does not answer.

        """
        registry = reference.registry
        challenge = challenge_of(answer.headers.getall("WWW-Authenticate", ()))
        if challenge is None:
            raise PermissionDenied(f"{registry} asks for neither a token nor a password", status=401)
        self._challenges[registry] = challenge
        key = (registry, challenge.scope or _scope(reference))
        if used is not None and (token := self._tokens.get(key)) is not None and token.header == used:
            del self._tokens[key]
        header = await self._obtain(reference, challenge)
        if header == used:
            raise denied(reference, login=True)
        return header

    async def _obtain(self, reference: Reference, challenge: Challenge) -> str:
        registry, scope = reference.registry, challenge.scope or _scope(reference)
        if not challenge.bearer:
            login = await self._login(registry, self.http.base(registry))
            if login is None or not login.basic:
                raise PermissionDenied(f"{registry} asks for a password: docker login {registry}", status=401)
            return login.basic
        async with self._locks[registry, scope]:
            token = self._tokens.get((registry, scope))
            if token is None or token.until <= anyio.current_time():
                token = await self._fetch(reference, challenge, scope)
                self._tokens[registry, scope] = token
            return token.header

    async def _login(self, registry: str, url: str) -> Login | None:
        login = await self.logins.of(registry)
        if login is not None and not self.http.safe(url):
            raise ConfigurationError(f"the credentials for {registry} are not sent without TLS")
        return login

    async def _fetch(self, reference: Reference, challenge: Challenge, scope: str) -> _Token:
        registry = reference.registry
        if not re.match("https?://", challenge.realm, re.IGNORECASE):
            raise ProtocolError(f"{registry} sends for tokens to something that is no URL of http or https")
        url = self.http.follow(challenge.realm, self.http.base(registry))
        login = await self._login(registry, str(url))
        begun = anyio.current_time()
        if login is not None and login.identity_token:
            form = {
                "grant_type": "refresh_token",
                "service": challenge.service,
                "scope": scope,
                "client_id": _CLIENT,
                "refresh_token": login.identity_token,
            }
            answer = await self.http.ask(str(url), form=form, limit=_ANSWER_LIMIT)
        else:
            query = [("service", challenge.service)] if challenge.service else []
            query += [("scope", one) for one in scope.split()]
            answer = await self.http.ask(
                str(url.with_query([*url.query.items(), *query])),
                authorization=login.basic if login is not None else None,
                limit=_ANSWER_LIMIT,
            )
        if answer.status in (401, 403):
            raise denied(reference, login=login is not None)
        if answer.status != 200:
            raise refusal(answer, f"a token for {registry}")
        return _read(answer, begun)

    def __repr__(self) -> str:
        return f"<Authorizer [{len(self._challenges)} registries ask, {len(self._tokens)} tokens]>"


def denied(reference: Reference, *, login: bool) -> PermissionDenied:
    """Say that an image is not shown, as registries do not say of private ones whether they exist."""
    registry = reference.registry
    what = f"the credentials for {registry} may not read it" if login else f"it is private: docker login {registry}"
    return PermissionDenied(f"no such image, or {what}", status=401)


def _scope(reference: Reference) -> str:
    return f"repository:{reference.repository}:pull"


def _read(answer: Answer, begun: float) -> _Token:
    try:
        said = json.loads(answer.body)
        token = said.get("token") or said.get("access_token")
        seconds = said.get("expires_in")
    except (AttributeError, ValueError, RecursionError):
        token = seconds = None
    if not isinstance(token, str) or not re.fullmatch(rf"[!-~]{{1,{_LONGEST_TOKEN}}}", token):
        # Not even from the error before: it holds the answer.
        raise ProtocolError(f"{answer.host} gives no token that can be sent") from None
    good = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
    return _Token(header=f"Bearer {token}", until=begun + _MARGIN * (float(seconds) if good else _LIFETIME))
