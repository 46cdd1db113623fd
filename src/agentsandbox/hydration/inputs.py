# SPDX-License-Identifier: Apache-2.0
"""Images to plan for, from a CSV file or from an OCI layout on disk; and lists of those that a registry knows."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.manifest import PLATFORM, Platform, Resolution, digest_of, entries_of, read
from agentsandbox.hydration.records import ImageUse
from agentsandbox.models.image import ImageManifest, Layer
from agentsandbox.models.reference import Reference, parse_reference

__all__ = ["Wanted", "from_csv", "from_oci_layout", "read_list"]

_COLUMNS = ("image", "size", "base", "base_size", "layers", "rollouts", "seconds")
_LIST_COLUMNS = ("image", "rollouts", "seconds")
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@attrs.frozen(kw_only=True)
class Wanted:
    """An image that somebody else has to say the layers of, and what is done with it in a batch."""

    reference: Reference
    """Where it is."""
    rollouts: int = attrs.field(default=1, validator=attrs.fields(ImageUse).rollouts.validator)
    """Episodes of it."""
    seconds: float = attrs.field(default=60.0, validator=attrs.fields(ImageUse).seconds.validator)
    """What one of them takes, the time to make its sandbox fresh included."""

    def made_of(self, layers: tuple[Layer, ...]) -> ImageUse:
        """Say what it is made of."""
        image = ImageManifest(name=self.reference.name, layers=layers)
        return ImageUse(image=image, rollouts=self.rollouts, seconds=self.seconds)


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


def read_list(path: Path, *, rollouts: int = 1, seconds: float = 60.0) -> tuple[Wanted, ...]:
    """
    Read a list of images that a registry knows: one reference a line, or a CSV file with a header.

    Empty lines and what follows a ``#`` at the beginning of a line are left out. The first of the other lines is a
    header if it is ``image`` or begins with it and a comma; the columns are ``image``, ``rollouts`` and ``seconds``.

    Args:
        path: The file.
        rollouts: For images that name none.
        seconds: Likewise.

    Raises:
        ConfigurationError: If it cannot be read, naming the line.

    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    lines = [
        (number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"
    ]
    columns = [name.strip() for name in lines[0][1].split(",")] if lines else []
    if columns[:1] != ["image"]:
        columns = []
    if unknown := [name for name in columns if name not in _LIST_COLUMNS]:
        raise ConfigurationError(f"{path} has a column {unknown[0]!r}; known are {', '.join(_LIST_COLUMNS)}")
    found: dict[str, Wanted] = {}
    for number, line in lines[1:] if columns else lines:
        cells = [cell.strip() for cell in line.split(",")]
        try:
            if len(cells) > max(1, len(columns)):
                raise ValueError("one image a line; for more columns, the first line is image,rollouts,seconds")
            row = dict(zip(columns or ["image"], cells, strict=False))
            one = Wanted(
                reference=parse_reference(row["image"]),
                rollouts=int(row.get("rollouts") or rollouts),
                seconds=float(row.get("seconds") or seconds),
            )
            if one.reference.name in found:
                raise ValueError(f"{one.reference.name!r} appears twice")
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from error
        found[one.reference.name] = one
    if not found:
        raise ConfigurationError(f"{path} has no images")
    return tuple(found.values())


def from_oci_layout(
    path: Path, *, rollouts: int = 1, seconds: float = 60.0, platform: str = PLATFORM
) -> tuple[ImageUse, ...]:
    """
    Read images from a directory in the OCI image layout: their manifests are enough, the layers need not be there.

    Args:
        path: The directory, with ``index.json`` and ``blobs``.
        rollouts: Episodes of each image.
        seconds: What one takes, on average.
        platform: Of images that are there for several: ``OS/ARCHITECTURE`` or ``OS/ARCHITECTURE/VARIANT``.

    Raises:
        ConfigurationError: If it is no OCI layout, or a manifest is damaged.

    """
    runs = Platform(name=platform)
    index = read(_file(path / "index.json"), f"no OCI layout: {path / 'index.json'}")
    targets = {}
    for entry in entries_of(index, "manifests", str(path)):
        digest = digest_of(entry, str(path))
        said = entry.get("annotations")
        names = [said.get(key) for key in _NAMES] if isinstance(said, dict) else []
        targets[next((name for name in names if name and isinstance(name, str)), digest)] = digest
    if not targets:
        raise ConfigurationError(f"{path} has no images")
    return tuple(
        ImageUse(
            image=ImageManifest(name=name, layers=_layers_in(path, name, digest, runs)),
            rollouts=rollouts,
            seconds=seconds,
        )
        for name, digest in targets.items()
    )


def _layers_in(path: Path, name: str, digest: str, platform: Platform) -> tuple[Layer, ...]:
    way = Resolution(target=digest, platform=platform, where=f"{path}: {name}")
    while way.layers is None:
        way.take(_file(path / "blobs" / way.target.replace(":", "/")))
    return way.layers


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"no OCI layout: cannot read {path}: {error}") from error
