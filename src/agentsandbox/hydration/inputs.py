# SPDX-License-Identifier: Apache-2.0
"""Images to plan for, from a CSV file or from an OCI layout on disk."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.records import ImageUse
from agentsandbox.models.image import ImageManifest, Layer

__all__ = ["from_csv", "from_oci_layout"]

_COLUMNS = ("image", "size", "base", "base_size", "layers", "rollouts", "seconds")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


def from_csv(path: Path, *, rollouts: int = 1, seconds: float = 60.0) -> tuple[ImageUse, ...]:
    """
    Read images from a file with a header and one image a line.

    Columns: ``image``, and either ``size`` (bytes fetched) with ``base`` and ``base_size`` if it has a layer that
    others have as well (``size`` is without it then), or ``layers``: ``digest:bytes`` separated by spaces, the base
    first.
    ``rollouts`` and ``seconds`` (what one takes, on average) may be left out.

    Args:
        path: The file.
        rollouts: For images that name none.
        seconds: Likewise.

    Raises:
        ConfigurationError: If it cannot be read, naming the line.

    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or ()
            if "image" not in header or not {"size", "layers"} & set(header):
                raise ConfigurationError(
                    f"{path} needs the columns image and size, or image and layers, in its first line"
                )
            if unknown := [name for name in header if name not in _COLUMNS]:
                raise ConfigurationError(f"{path} has a column {unknown[0]!r}; known are {', '.join(_COLUMNS)}")
            uses = tuple(_use(path, reader.line_num, line, rollouts, seconds) for line in reader)
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    if not uses:
        raise ConfigurationError(f"{path} has no images")
    return uses


def _use(path: Path, number: int, line: Mapping[str, str], rollouts: int, seconds: float) -> ImageUse:
    try:
        name = (line["image"] or "").strip()
        if not name:
            raise ValueError("the image has no name")
        return ImageUse(
            image=ImageManifest(name=name, layers=tuple(_layers(name, line))),
            rollouts=int(line.get("rollouts") or rollouts),
            seconds=float(line.get("seconds") or seconds),
        )
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{path}, line {number}: {error}") from error


def _layers(name: str, line: Mapping[str, str]) -> Iterator[Layer]:
    if listed := (line.get("layers") or "").split():
        for item in listed:
            digest, _, size = item.rpartition(":")
            if not digest or not size.isdigit():
                raise ValueError(f"{item!r} is no layer such as sha256:0123:45000000")
            yield Layer(digest=digest, size=int(size))
        return
    if base := (line.get("base") or "").strip():
        yield Layer(digest=base, size=int(line.get("base_size") or 0))
    yield Layer(digest=f"own of {name}", size=int(line["size"]))


def from_oci_layout(path: Path, *, rollouts: int = 1, seconds: float = 60.0) -> tuple[ImageUse, ...]:
    """
    Read images from a directory in the OCI image layout: their manifests are enough, the layers need not be there.

    Args:
        path: The directory, with ``index.json`` and ``blobs``.
        rollouts: Episodes of each image.
        seconds: What one takes, on average.

    Raises:
        ConfigurationError: If it is no OCI layout, or a manifest is damaged.

    """
    index = _document(path / "index.json")
    manifests = {}
    for entry in index.get("manifests", ()):
        annotations = entry.get("annotations") or {}
        name = next((annotations[key] for key in _NAMES if annotations.get(key)), entry["digest"])
        manifests[name] = _manifest(path, entry)
    if not manifests:
        raise ConfigurationError(f"{path} has no images")
    try:
        return tuple(
            ImageUse(
                image=ImageManifest(
                    name=name,
                    layers=tuple(Layer(digest=layer["digest"], size=int(layer["size"])) for layer in found["layers"]),
                ),
                rollouts=rollouts,
                seconds=seconds,
            )
            for name, found in manifests.items()
        )
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: a manifest lacks {error}") from error


def _manifest(path: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    document = _document(_blob(path, entry))
    if document.get("mediaType") in _INDEXES or "manifests" in document:
        linux = [one for one in document["manifests"] if (one.get("platform") or {}).get("os", "linux") == "linux"]
        if not linux:
            raise ConfigurationError(f"{path}: {entry['digest']} has no image for Linux")
        document = _document(_blob(path, linux[0]))
    return document


def _blob(path: Path, entry: Mapping[str, Any]) -> Path:
    algorithm, _, digest = str(entry.get("digest", "")).partition(":")
    if not algorithm.isalnum() or not digest.isalnum():
        raise ConfigurationError(f"{path}: {entry.get('digest')!r} is no digest")
    return path / "blobs" / algorithm / digest


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no OCI layout: cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"no OCI layout: {path} holds no object")
    return document
