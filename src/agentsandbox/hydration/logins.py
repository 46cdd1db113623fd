# SPDX-License-Identifier: Apache-2.0
"""Credentials for registries, from where ``docker login`` leaves them: its configuration file, or its helpers."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.reference import DOCKER_HUB

__all__ = ["Login", "Logins"]

_HUB_KEY = "https://index.docker.io/v1/"
"""What ``docker login`` writes down when no registry is named."""

_HELPER_TIMEOUT = 60.0
"""Seconds that a helper gets: it may have to ask a cloud for a password."""

_TOKEN_USER = "<token>"  # noqa: S105 - what helpers call the user of an identity token


@attrs.frozen(kw_only=True, repr=False)
class Login:
    """A name and a password, or an identity token. Nothing of it is ever shown."""

    user: str = ""
    """The name."""
    password: str = ""
    """The password."""
    identity_token: str = ""
    """Instead of both: what a token server gives tokens for."""

    @property
    def basic(self) -> str:
        """Name and password as a header; empty if there are none."""
        pair = f"{self.user}:{self.password}"
        return f"Basic {base64.b64encode(pair.encode()).decode()}" if self.user and self.password else ""

    def __repr__(self) -> str:
        return "<Login>"


@attrs.define(eq=False, repr=False)
class Logins:
    """
    All credentials that there are. They are looked for when a registry asks for some, once for each.

    Args:
        path: The configuration file; ``None`` is ``config.json`` in ``$DOCKER_CONFIG`` or ``~/.docker``.

    """

    path: Path | None = None
    _found: dict[str, Login | ConfigurationError | None] = attrs.field(factory=dict, init=False)
    _lock: anyio.Lock = attrs.field(factory=anyio.Lock, init=False)

    async def of(self, registry: str) -> Login | None:
        """
        Return the credentials for a registry; ``None`` if there are none.

        Raises:
            ConfigurationError: If the file is damaged, or a helper does not do what it is for.

        """
        async with self._lock:
            if registry not in self._found:
                try:
                    self._found[registry] = await self._look_up(registry)
                except ConfigurationError as error:
                    self._found[registry] = error
        found = self._found[registry]
        if isinstance(found, ConfigurationError):
            raise ConfigurationError(str(found)) from found
        return found

    async def _look_up(self, registry: str) -> Login | None:
        path = self.path or Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
        config = _read(path)
        helpers = {_host(key): name for key, name in _mapping(config, "credHelpers", path).items()}
        helper = helpers.get(registry) or config.get("credsStore")
        if helper:
            login = await _ask(helper, _HUB_KEY if registry == DOCKER_HUB else registry)
            if login is not None:
                return login
        # The very name comes before whatever else is of the same host.
        entries = _mapping(config, "auths", path)
        keys = [key for key in entries if key == registry] + [key for key in entries if _host(key) == registry]
        found = (_of_entry(entries[key], f"{path}: the entry for {registry}") for key in keys)
        return next((login for login in found if login is not None), None)

    def __repr__(self) -> str:
        return f"<Logins [{len(self._found)} registries asked for]>"


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        # Neither the text nor a part of it belongs into a message.
        raise ConfigurationError(f"cannot read {path}: it is no JSON") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"cannot read {path}: it holds no object")
    return config


def _mapping(config: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}: {key} is no object")
    return found


def _host(key: str) -> str:
    """Return the registry that a key is about: older tools wrote down URLs."""
    host = re.sub("^https?://", "", key).partition("/")[0]
    return DOCKER_HUB if host in ("index.docker.io", "registry-1.docker.io") else host


def _of_entry(entry: object, where: str) -> Login | None:
    """Read what the file itself says; it says nothing where a helper is asked."""
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where} is no object")
    said = {key: value for key in ("auth", "username", "password", "identitytoken") if (value := entry.get(key))}
    if not all(isinstance(value, str) for value in said.values()):
        raise ConfigurationError(f"{where} is damaged: log in again")
    user, password = said.get("username", ""), said.get("password", "")
    if "auth" in said:
        try:
            pair = base64.b64decode(said["auth"], validate=True).decode()
        except ValueError:
            raise ConfigurationError(f"{where} is damaged: log in again") from None
        user, colon, password = pair.partition(":")
        if not colon:
            raise ConfigurationError(f"{where} is damaged: log in again")
        password = password.strip("\0")
    if token := said.get("identitytoken", ""):
        return Login(user=user, identity_token=token)
    return Login(user=user, password=password) if user and password else None


async def _ask(helper: object, server: str) -> Login | None:
    """Run a credential helper. What it prints is secret, whatever becomes of it."""
    if not isinstance(helper, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", helper):
        raise ConfigurationError(f"{helper!r} is no name of a credential helper")
    program = f"docker-credential-{helper}"
    try:
        with anyio.fail_after(_HELPER_TIMEOUT):
            done = await anyio.run_process([program, "get"], input=server.encode(), check=False)
    except TimeoutError:
        raise ConfigurationError(f"{program} gave no credentials for {server} in {_HELPER_TIMEOUT:g} s") from None
    except OSError as error:
        raise ConfigurationError(f"cannot run {program}, which has the credentials: {error.strerror}") from error
    if done.returncode:
        if b"credentials not found" in done.stdout + done.stderr:
            return None
        raise ConfigurationError(f"{program} failed for {server}: exit code {done.returncode}")
    try:
        said = json.loads(done.stdout)
        user, secret = said["Username"], said["Secret"]
    except (LookupError, TypeError, ValueError):
        raise ConfigurationError(f"{program} gave no credentials for {server}: not what helpers print") from None
    if not isinstance(user, str) or not isinstance(secret, str):
        raise ConfigurationError(f"{program} gave no credentials for {server}: not what helpers print")
    return Login(identity_token=secret) if user == _TOKEN_USER else Login(user=user, password=secret)
