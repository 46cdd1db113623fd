# SPDX-License-Identifier: Apache-2.0
"""Names of images, read as container tools read them."""

from __future__ import annotations

import re

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["DOCKER_HUB", "Reference", "is_digest", "parse_reference"]

DOCKER_HUB = "docker.io"
"""The registry of names that have none."""

_LONGEST_REPOSITORY = 255
"""Characters of a registry and a repository, as in the reference implementation of the distribution API."""

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[a-fA-F0-9:]+\])(?::(?P<port>[0-9]{{1,5}}))?")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[a-f0-9]{64}|sha384:[a-f0-9]{96}|sha512:[a-f0-9]{128}")


@attrs.frozen(kw_only=True)
class Reference:
    """Where an image is."""

    name: str
    """As it was written."""
    registry: str
    """Host, and port if one was given."""
    repository: str
    """The path there."""
    tag: str = "latest"
    """Which of the images there; without meaning when there is a digest."""
    digest: str | None = None
    """Of the image's manifest."""

    @property
    def target(self) -> str:
        """What the registry is asked for: the digest, or the tag if there is none."""
        return self.digest or self.tag

    def __str__(self) -> str:
        """Spell everything out."""
        return f"{self.registry}/{self.repository}{f'@{self.digest}' if self.digest else f':{self.tag}'}"


def is_digest(text: object) -> bool:
    """Return whether this is a digest that can be verified: of SHA-256, 384 or 512, in lower case."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def parse_reference(name: str) -> Reference:
    """
    Read the name of an image: ``[REGISTRY[:PORT]/]REPOSITORY[:TAG][@DIGEST]``.

    The first part is a registry if it has a dot, a colon or a capital, or is ``localhost``; without one it is Docker
    Hub, where a repository of one part is below ``library/``. The tag is ``latest`` if neither it nor a digest is
    given. These are the rules of the container tools' own parser.

    Args:
        name: The name.

    Raises:
        ConfigurationError: If it is none, with what is wrong about it.

    """
    if "://" in name:
        raise ConfigurationError(f"{name!r} is no image reference: leave out {name.partition('://')[0]}://")
    rest, at, digest = name.partition("@")
    if at and not is_digest(digest):
        raise ConfigurationError(f"{name!r} is no image reference: {digest!r} is no digest such as sha256:64 digits")
    registry, repository = _split(rest)
    repository, colon, tag = repository.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise ConfigurationError(f"{name!r} is no image reference: {tag!r} is no tag")
    found = _REGISTRY.fullmatch(registry)
    if not found or int(found["port"] or 0) > 65535:
        raise ConfigurationError(f"{name!r} is no image reference: {registry!r} is no registry")
    if not _REPOSITORY.fullmatch(repository):
        why = "has capitals" if _REPOSITORY.fullmatch(repository.lower()) else "is no repository"
        raise ConfigurationError(f"{name!r} is no image reference: {repository!r} {why}")
    if re.fullmatch("[a-f0-9]{64}", rest):
        raise ConfigurationError(f"{name!r} is no image reference: it is an image's id, which no registry knows")
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    if len(registry) + 1 + len(repository) > _LONGEST_REPOSITORY:
        raise ConfigurationError(f"{name[:60]!r}… is no image reference: over {_LONGEST_REPOSITORY} characters")
    return Reference(name=name, registry=registry, repository=repository, tag=tag or "latest", digest=digest or None)


def _split(name: str) -> tuple[str, str]:
    """Part the registry from the rest."""
    first, slash, rest = name.partition("/")
    if not slash or not (re.search(r"[.:]", first) or first == "localhost" or first != first.lower()):
        return DOCKER_HUB, name
    return (DOCKER_HUB if first == f"index.{DOCKER_HUB}" else first), rest
