# SPDX-License-Identifier: Apache-2.0
"""Credentials that were given to a sandbox are taken out of everything that is kept or told of it."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["LEAST", "MASK", "Redactor", "check_secret", "check_secrets"]

MASK = "[redacted]"

LEAST = 4
"""Characters that a credential must have at least: a shorter one cannot be told from other text."""

_LINE = 16
"""Characters of one line of a credential, such as a key, that are a credential by themselves."""


def check_secrets(secrets: Mapping[str, str] | None) -> dict[str, str]:
    """
    Refuse what cannot be a credential in a variable, without ever showing it.

    Raises:
        ConfigurationError: Naming the variable.

    """
    if secrets is not None and not isinstance(secrets, Mapping):
        raise ConfigurationError(
            f"secrets is a mapping of names of variables to values, not a {type(secrets).__name__}"
        )
    for name, value in (secrets or {}).items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigurationError(f"{name!r} is no name of a variable")
        check_secret(value, name)
    return dict(secrets or {})


def check_secret(value: object, name: str) -> None:
    """
    Refuse what cannot be a credential.

    Raises:
        ConfigurationError: Naming what it is for.

    """
    if not isinstance(value, str):
        raise ConfigurationError(f"secret {name!r} is a {type(value).__name__}, not a string")
    if "\0" in value:
        raise ConfigurationError(f"secret {name!r} contains a NUL character")
    if len(value) < LEAST:
        raise ConfigurationError(f"secret {name!r} is shorter than {LEAST} characters, and could not be redacted")


class Redactor:
    """Knows credentials, and takes them out of text, in the usual spellings."""

    def __init__(self) -> None:
        self._spellings: set[str] = set()
        self._text: re.Pattern[str] | None = None
        self._data: re.Pattern[bytes] | None = None
        self._count = 0

    def __repr__(self) -> str:
        return f"<Redactor [{self._count} secrets]>"

    def __bool__(self) -> bool:
        return self._count > 0

    def learn(self, values: Iterable[str]) -> None:
        """Know these from now on."""
        before = len(self._spellings)
        for value in values:
            if value not in self._spellings:
                self._count += 1
                self._spellings |= _spellings(value)
        if len(self._spellings) == before:
            return
        ordered = sorted(self._spellings, key=lambda text: (-len(text), text))
        self._text = re.compile("|".join(map(re.escape, ordered)))
        raw = [text.encode("utf-8", "surrogatepass") for text in ordered]
        self._data = re.compile(b"|".join(map(re.escape, raw)))

    def text(self, value: str) -> str:
        """Return text without them."""
        return value if self._text is None else self._text.sub(MASK, value)

    def data(self, value: bytes) -> bytes:
        """Return bytes without them."""
        return value if self._data is None else self._data.sub(MASK.encode(), value)

    def value(self, value: Any) -> Any:
        """Return text, bytes and what the usual containers hold without them; anything else as it is."""
        if not self:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            return self.data(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(inner) for key, inner in value.items()}
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.value(inner) for inner in value)
        return value

    def error(self, error: BaseException) -> None:
        """Take them out of an exception, its attributes, and the ones that led to it."""
        seen: set[int] = set()
        todo: list[BaseException | None] = [error] if self else []
        while todo:
            one = todo.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            todo += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                todo += one.exceptions
                continue
            one.args = self.value(one.args)
            if isinstance(one, OSError):
                one.strerror, one.filename = self.value(one.strerror), self.value(one.filename)
            for name, inner in list(vars(one).items()):
                if isinstance(inner, (str, bytes)):
                    setattr(one, name, self.value(inner))
                elif attrs.has(type(inner)) and hasattr(inner, "stderr"):
                    kept = {"stdout": self.data(inner.stdout), "stderr": self.data(inner.stderr)}
                    setattr(one, name, attrs.evolve(inner, **kept))


def _spellings(value: str) -> set[str]:
    """Return how a value may be written in logs, scripts, URLs and JSON."""
    raw = value.encode("utf-8", "surrogatepass")
    found = {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    found |= {shlex.quote(value), quote(raw, safe=""), quote(raw)}
    found |= {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}
    found |= {line.strip() for line in value.splitlines() if len(line.strip()) >= _LINE}
    return found
