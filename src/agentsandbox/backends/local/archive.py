# SPDX-License-Identifier: Apache-2.0
"""
From an archive or layout of an image to a directory with its root file system.

An image is unpacked once, into a directory named after its content. What is in it was made by somebody else: nothing of
it is followed out of that directory, no device is made, and every layer is compared with its digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import importlib
import json
import os
import platform
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from agentsandbox.backends.local.ids import usable_range
from agentsandbox.backends.local.images import Image, Source
from agentsandbox.backends.local.unpacker import Unpacker
from agentsandbox.errors import ImagePullFailed

__all__ = ["unpack"]

FORMAT = "1"
"""Part of the name of an unpacked image: another way of unpacking makes other directories."""

MAX_DOCUMENT = 16 * 1024 * 1024
"""The largest manifest or configuration, in bytes."""

MAX_INDEX_DEPTH = 4

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}


class Store(Protocol):
    """Where the parts of an image are."""

    def open(self, name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a part by its relative name; :exc:`KeyError` or :exc:`OSError` if there is none."""
        ...


class _Directory:
    def __init__(self, path: str) -> None:
        self._path = path

    def open(self, name: str) -> IO[bytes]:
        path = os.path.join(self._path, name)
        if not os.path.realpath(path).startswith(os.path.realpath(self._path) + "/"):
            raise KeyError(name)
        return open(path, "rb")


class _Archive:
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive

    def open(self, name: str) -> IO[bytes]:
        for candidate in (name, "./" + name):
            try:
                part = self._archive.extractfile(candidate)
            except KeyError:
                continue
            if part is not None:
                return part
        raise KeyError(name)


def unpack(source: Source, cache: Path) -> Image:
    """
    Unpack an image into the cache, unless it is there.

    Safe to call from any number of threads and processes at once: one unpacks, the others wait for it.

    Args:
        source: A layout or an archive.
        cache: The directory of the cache.

    Raises:
        ImagePullFailed: If it is damaged, or not for this machine.

    """
    try:
        with _store(source) as store:
            config_text, layers = _manifest(store)
            config = _document(config_text, "configuration")
            _check_platform(config, source)
            root = _cached(store, cache, config_text, config, layers)
    except (KeyError, TypeError, AttributeError, tarfile.TarError, EOFError, zlib.error) as error:
        raise _damaged(source, f"{type(error).__name__}: {error}") from error
    except (ValueError, gzip.BadGzipFile) as error:
        raise _damaged(source, str(error)) from error
    except OSError as error:
        raise ImagePullFailed(f"image {source.name!r} could not be unpacked: {error}") from error
    settings = config.get("config") or {}
    return Image(
        source=source,
        root=root,
        user=settings.get("User") or None,
        workdir=settings.get("WorkingDir") or None,
        env=dict(entry.split("=", 1) for entry in settings.get("Env") or () if "=" in entry),
    )


def _cached(
    store: Store,
    cache: Path,
    config_text: bytes,
    config: Mapping[str, Any],
    layers: list[tuple[str, str]],
) -> str:
    own_ids = usable_range()
    key = "-".join((hashlib.sha256(config_text).hexdigest(), FORMAT, "ids" if own_ids else "one"))
    images = cache / "images"
    images.mkdir(parents=True, exist_ok=True, mode=0o700)
    images.chmod(0o700)  # an image has programs that run as root: they are nobody else's
    final = images / key
    with _locked(images / f"{key}.lock"):
        if not final.is_dir():
            for rest in images.glob(f"{key}.part-*"):  # of an unpacker that was killed
                shutil.rmtree(rest)
            part = images / f"{key}.part-{secrets.token_hex(4)}"
            try:
                unpacker = Unpacker(part / "rootfs", own_ids=own_ids)
                for (name, digest), content in zip(layers, _diff_ids(config, layers), strict=True):
                    with store.open(name) as file:
                        _layer(file, digest, content, unpacker)
                unpacker.finish()
                part.rename(final)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    return str(final / "rootfs")


def _layer(file: IO[bytes], digest: str, content_digest: str, unpacker: Unpacker) -> None:
    packed: Any = _Hashing(file)
    start = packed.read(4, peek=True)
    if start.startswith(GZIP):
        plain: Any = gzip.GzipFile(fileobj=packed, mode="rb")
    elif start.startswith(ZSTD):
        plain = _zstd(packed)
    else:
        plain = packed
    content: Any = _Hashing(plain)
    with tarfile.open(fileobj=content, mode="r|") as archive:
        unpacker.apply(archive)
    for stream in (content, packed):
        while stream.read(1024 * 1024):
            pass
    if digest and packed.digest != digest:
        raise ValueError(f"a layer has digest {packed.digest}, and should have {digest}")
    if content.digest != content_digest:
        raise ValueError(f"the content of a layer has digest {content.digest}, and should have {content_digest}")


class _Hashing:
    """A stream that knows the digest of what was read from it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._ahead = b""

    def read(self, size: int = -1, *, peek: bool = False) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            if 0 <= size < len(data):
                data, self._ahead = data[:size], data[size:]
        else:
            data = self._file.read(size)
            self._hash.update(data)
        if peek:
            self._ahead = data
        return data

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


def _zstd(file: _Hashing) -> Any:
    for module, opener in (("compression.zstd", "ZstdFile"), ("zstandard", "open")):
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(module), opener)(file)
    raise ValueError("a layer is compressed with zstd: pip install zstandard, or use Python 3.14")


def _manifest(store: Store) -> tuple[bytes, list[tuple[str, str]]]:
    """Return the configuration, and the name and digest (if it has one) of every layer, the lowest first."""
    try:
        index = _document(_read(store, "index.json"), "index")
    except (KeyError, FileNotFoundError):
        manifests = _document(_read(store, "manifest.json"), "manifest", list)
        if len(manifests) != 1:
            raise ValueError(f"it holds {len(manifests)} images, and must hold one") from None
        return _read(store, manifests[0]["Config"]), [(name, "") for name in manifests[0]["Layers"]]
    manifest = index
    for _ in range(MAX_INDEX_DEPTH):
        if "layers" in manifest:
            break
        manifest = _document(_blob(store, _choose(manifest)["digest"]), "manifest")
    layers = [(_blob_name(layer["digest"]), layer["digest"]) for layer in manifest["layers"]]
    return _blob(store, manifest["config"]["digest"]), layers


def _choose(index: Mapping[str, Any]) -> dict[str, Any]:
    found = list(index["manifests"])
    if len(found) > 1:
        wanted = ARCHITECTURES.get(platform.machine(), platform.machine())
        found = [m for m in found if (m.get("platform") or {}).get("architecture") == wanted]
    if not found:
        raise ValueError("it holds no image for this machine")
    return dict(found[0])


def _check_platform(config: Mapping[str, Any], source: Source) -> None:
    wanted = ARCHITECTURES.get(platform.machine(), platform.machine())
    architecture, system = config.get("architecture") or wanted, config.get("os") or "linux"
    if (architecture, system) != (wanted, "linux"):
        message = f"image {source.name!r} is for {system} on {architecture}, and this is linux on {wanted}"
        raise ImagePullFailed(message, permanent=True)


def _diff_ids(config: Mapping[str, Any], layers: list[tuple[str, str]]) -> list[str]:
    found = list(config["rootfs"]["diff_ids"])
    if len(found) != len(layers):
        raise ValueError(f"it has {len(layers)} layers and {len(found)} digests of them")
    return found


def _blob_name(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{digest!r} is no sha256 digest")
    return f"blobs/{kind}/{value}"


def _blob(store: Store, digest: str) -> bytes:
    text = _read(store, _blob_name(digest))
    if "sha256:" + hashlib.sha256(text).hexdigest() != digest:
        raise ValueError(f"{digest} has other content than its name says")
    return text


def _read(store: Store, name: str) -> bytes:
    with store.open(name) as file:
        text = file.read(MAX_DOCUMENT + 1)
    if len(text) > MAX_DOCUMENT:
        raise ValueError(f"{name} is too large")
    return text


def _document(text: bytes, what: str, kind: type = dict) -> Any:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError(f"its {what} is malformed")  # noqa: TRY004 - the file's fault, not the caller's
    return value


def _damaged(source: Source, reason: str) -> ImagePullFailed:
    return ImagePullFailed(f"image {source.name!r} ({source.path}) is damaged or no image: {reason}", permanent=True)


@contextlib.contextmanager
def _store(source: Source) -> Iterator[Store]:
    if source.kind == "layout":
        yield _Directory(source.path)
    else:
        with tarfile.open(source.path) as archive:
            yield _Archive(archive)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
