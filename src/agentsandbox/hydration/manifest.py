# SPDX-License-Identifier: Apache-2.0
"""What an image's manifest says, wherever it was read: one rule for a layout on disk and for registries."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.image import Layer
from agentsandbox.models.reference import is_digest

__all__ = ["MEDIA_TYPES", "PLATFORM", "Platform", "Resolution", "digest_of", "entries_of", "read", "verify"]

_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
MEDIA_TYPES = (*_INDEXES, *_MANIFESTS)
"""What can be read."""

PLATFORM = "linux/amd64"
"""What nodes run, if nothing is said."""

_MOST_LAYERS = 500
"""Layers of an image: Linux stacks no more of them on each other (``OVL_MAX_STACK`` of overlayfs)."""

_DEEPEST = 4
"""Documents from a name to an image's own manifest: an index may be in an index."""


def _os_and_architecture(_: object, __: object, value: str) -> None:
    parts = value.split("/")
    if not 2 <= len(parts) <= 3 or not all(part.isalnum() for part in parts):
        raise ConfigurationError(f"{value!r} is no platform such as linux/amd64 or linux/arm64/v8")


@attrs.frozen(kw_only=True)
class Platform:
    """What nodes run."""

    name: str = attrs.field(validator=_os_and_architecture)
    """``OS/ARCHITECTURE`` or ``OS/ARCHITECTURE/VARIANT``."""

    def rank(self, entry: Mapping[str, Any]) -> int | None:
        """Return how well an entry of an index suits: 0 is best, and ``None`` is not at all."""
        annotations = entry.get("annotations")
        if isinstance(annotations, dict) and "vnd.docker.reference.type" in annotations:
            return None  # about another entry, such as how it was built
        wanted = [*self.name.split("/"), ""][:3]
        said = _said(entry)
        if any(one and one != other for one, other in zip(said[:2], wanted[:2], strict=True)):
            return None
        if wanted[2] and said[2] not in (wanted[2], ""):
            return None
        return 2 * said[:2].count("") + (said[2] != wanted[2])


def _said(entry: Mapping[str, Any]) -> list[str]:
    platform = entry.get("platform")
    said = platform if isinstance(platform, dict) else {}
    return [str(said.get(key) or "") for key in ("os", "architecture", "variant")]


@attrs.define(kw_only=True)
class Resolution:
    """The way from a name to the layers of one image: says what to fetch and is given it, until they are known."""

    target: str
    """The tag or digest to fetch next; to begin with, of the image."""
    platform: Platform
    """What nodes run."""
    where: str
    """What the image is called, for messages."""
    layers: tuple[Layer, ...] | None = attrs.field(default=None, init=False)
    """What was looked for, once it is known: each layer once, the base first."""
    _taken: int = attrs.field(default=0, init=False)

    def take(self, body: bytes) -> None:
        """
        Go on with what was fetched.

        Raises:
            ConfigurationError: If it is not what its digest says, or says not what the image is made of.

        """
        if is_digest(self.target):
            verify(self.target, body, self.where)
        document = read(body, self.where)
        entry = _choose(document, self.platform, self.where)
        self._taken += 1
        if entry is None:
            self.layers = _layers(document, self.where)
        elif self._taken == _DEEPEST:
            raise ConfigurationError(f"{self.where}: an index in an index, {_DEEPEST} deep")
        else:
            self.target = digest_of(entry, self.where)


def read(body: bytes, where: str) -> dict[str, Any]:
    """
    Read a document.

    Raises:
        ConfigurationError: If it is none that says what an image is made of.

    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: no manifest, but {len(body)} bytes that are no JSON") from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"{where}: no manifest: it holds no object")
    return document


def verify(digest: str, body: bytes, where: str) -> None:
    """
    Make sure that a document is the one that was asked for.

    Raises:
        ConfigurationError: If it is not.

    """
    algorithm, _, expected = digest_of({"digest": digest}, where).partition(":")
    found = hashlib.new(algorithm, body).hexdigest()
    if found != expected:
        raise ConfigurationError(f"{where}: what {digest} should be has the digest {algorithm}:{found}")


def digest_of(entry: Mapping[str, Any], where: str) -> str:
    """
    Return the digest that an entry names.

    Raises:
        ConfigurationError: If it names none that can be verified.

    """
    digest = entry.get("digest")
    if not isinstance(digest, str) or not is_digest(digest):
        raise ConfigurationError(f"{where}: what should be a digest is no digest")
    return digest


def _choose(document: Mapping[str, Any], platform: Platform, where: str) -> Mapping[str, Any] | None:
    """
    Choose from an index.

    Entries that say nothing of their platform, or a part of it, suit every one, but less well than one that says it.

    Args:
        document: The document.
        platform: What nodes run.
        where: What it is, for messages.

    Returns:
        The entry of the platform; ``None`` if the document is an image's own manifest.

    Raises:
        ConfigurationError: If there is no image for the platform, or it is neither.

    """
    if document.get("schemaVersion") == 1 or "fsLayers" in document:
        raise ConfigurationError(
            f"{where}: in Docker's schema 1, which says no sizes: push the image again with a tool of today"
        )
    index, manifest = "manifests" in document, "layers" in document
    if not index and not manifest:
        raise ConfigurationError(f"{where}: no manifest of an image: it lacks 'layers'")
    # What one tool takes for an index and another for a manifest is a known way to show them different images.
    if (index and manifest) or document.get("mediaType") in (_MANIFESTS if index else _INDEXES):
        raise ConfigurationError(f"{where}: no manifest of an image: an index and a manifest at once")
    if manifest:
        return None
    entries = entries_of(document, "manifests", where)
    ranked = [(rank, number) for number, entry in enumerate(entries) if (rank := platform.rank(entry)) is not None]
    if not ranked:
        said = {"/".join(_said(entry)[:2]) for entry in entries}
        has = ", ".join(sorted(one for one in said if re.fullmatch("[a-z0-9]{1,20}/[a-z0-9_]{1,20}", one))[:8])
        raise ConfigurationError(f"{where}: no image for {platform.name}" + (f", only for {has}" if has else ""))
    return entries[min(ranked)[1]]


def _layers(document: Mapping[str, Any], where: str) -> tuple[Layer, ...]:
    """
    Return the layers that an image's own manifest lists, each once, the base first.

    Raises:
        ConfigurationError: If it lists none, or not what they weigh.

    """
    entries = entries_of(document, "layers", where)
    if not 0 < len(entries) <= _MOST_LAYERS:
        raise ConfigurationError(f"{where}: an image of {len(entries)} layers")
    found: dict[str, Layer] = {}
    for number, entry in enumerate(entries, 1):
        digest, size = entry.get("digest"), entry.get("size")
        if not isinstance(digest, str) or not 0 < len(digest) <= 256:
            raise ConfigurationError(f"{where}: layer {number} lacks 'digest'")
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 2**63:
            raise ConfigurationError(f"{where}: layer {number} lacks 'size'")
        # One that is not compressed takes what it says; for the others it is estimated where all layers are made.
        plain = str(entry.get("mediaType")).endswith(".tar")
        found.setdefault(digest, Layer(digest=digest, size=size, unpacked=size if plain else -1))
    return tuple(found.values())


def entries_of(document: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """
    Return a list of objects that a document holds.

    Raises:
        ConfigurationError: If it holds something else there.

    """
    entries = document.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigurationError(f"{where}: {key!r} is no list of objects")
    return entries
