# SPDX-License-Identifier: Apache-2.0
"""What an image name of the local backend stands for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["ACCEPTED", "HOST", "Image", "Source", "resolve"]

HOST = "host"

ACCEPTED = (
    'it must be "host", a directory with a root file system, an OCI image layout, or an OCI or docker archive (.tar)'
)


@attrs.frozen(kw_only=True)
class Source:
    """An image as it was named, checked and not yet unpacked."""

    name: str
    """The name as it was given."""
    kind: str
    """``host``, ``directory``, ``layout`` or ``archive``."""
    path: str = ""
    """Where it is; empty for the host."""


@attrs.frozen(kw_only=True)
class Image:
    """An image that sandboxes can be made from."""

    source: Source
    """Where it is from."""
    root: str = ""
    """Its root file system; empty for the host."""
    user: str | None = None
    """Who commands run as, if it says so."""
    workdir: str | None = None
    """Where commands start, if it says so."""
    env: Mapping[str, str] = attrs.field(factory=dict)
    """Its environment."""


def resolve(name: str) -> Source:
    """
    Say what an image name stands for.

    Raises:
        ConfigurationError: If it stands for nothing.

    """
    if name == HOST:
        return Source(name=name, kind=HOST)
    path = Path(os.path.expanduser(name))
    real = os.path.realpath(path)
    try:
        if path.is_dir():
            if (path / "oci-layout").is_file() and (path / "index.json").is_file():
                return Source(name=name, kind="layout", path=real)
            if not any((path / part).is_dir() for part in ("bin", "usr", "etc", "lib")):
                raise ConfigurationError(f"image {name!r} is a directory without a root file system; {ACCEPTED}")
            if real == "/":
                raise ConfigurationError(
                    f'image {name!r} is the root of this machine; use "host", which hides its secrets'
                )
            return Source(name=name, kind="directory", path=real)
        if path.is_file():
            return Source(name=name, kind="archive", path=real)
    except OSError as error:
        raise ConfigurationError(f"image {name!r} cannot be read: {error.strerror}") from error
    raise ConfigurationError(f"there is no image {name!r} for the local backend: {ACCEPTED}")


def prepare(source: Source, cache: Path) -> Image:
    """
    Make an image ready, unpacking it if need be.

    Args:
        source: The image.
        cache: Where unpacked images are kept.

    Raises:
        ImagePullFailed: If it is damaged or of an unknown kind.

    """
    if source.kind == HOST:
        return Image(source=source)
    if source.kind == "directory":
        return Image(source=source, root=source.path)
    from agentsandbox.backends.local.archive import unpack

    return unpack(source, cache)
