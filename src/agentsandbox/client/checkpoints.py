# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints are kept: a directory, or whatever fsspec has a file system for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import attrs

from agentsandbox.errors import CheckpointError, ConfigurationError
from agentsandbox.session.changes import Entry, check_tree
from agentsandbox.session.files import in_thread

__all__ = ["CheckpointStore", "Manifest", "as_store"]

VERSION = 1
CHUNK = 1024 * 1024

_ID = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://).*", re.DOTALL)


@attrs.frozen
class Manifest:
    """Everything in some directories, but the contents of files."""

    scope: tuple[str, ...]
    """The directories."""
    entries: Mapping[str, Entry]
    """What is in them, by path."""
    skipped: tuple[str, ...] = attrs.field(default=(), eq=False)
    """What could not be kept."""

    @classmethod
    def of(cls, scope: Sequence[str], entries: Mapping[str, Entry]) -> Manifest:
        """
        Leave out what is no property of the contents.

        Sockets and devices are nobody's without their process and their machine; how many names a file has outside, and
        when a directory of the scope itself was last written to, is not ours to restore.
        """
        kept = {path: entry for path, entry in entries.items() if entry.kind != "o" or stat.S_ISFIFO(entry.mode)}
        groups: dict[str, list[str]] = {}
        for path, entry in kept.items():
            if entry.group:
                groups.setdefault(entry.group, []).append(path)
        first = {path: min(group) for group in groups.values() if len(group) > 1 for path in group}
        kept = {path: attrs.evolve(entry, links=1, group=first.get(path, "")) for path, entry in kept.items()}
        for root in scope:
            kept[root] = attrs.evolve(kept[root], modified=0)
        return cls(tuple(scope), kept, tuple(sorted(set(entries) - set(kept))))

    def dump(self) -> bytes:
        """Return its canonical form, whose SHA-256 is its id."""
        entries = {path: entry.plain() for path, entry in self.entries.items()}
        value = {"version": VERSION, "scope": list(self.scope), "entries": entries}
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")

    @property
    def id(self) -> str:
        """SHA-256 of the canonical form."""
        return hashlib.sha256(self.dump()).hexdigest()

    @property
    def files(self) -> Iterator[tuple[str, Entry]]:
        """The regular files."""
        return ((path, entry) for path, entry in sorted(self.entries.items()) if entry.kind == "f")

    @property
    def size(self) -> int:
        """Bytes in its files."""
        return sum(entry.size for _, entry in self.files)


class _Place(Protocol):
    def size(self, key: str) -> int | None: ...

    def open(self, key: str) -> AbstractContextManager[BinaryIO]: ...

    def writing(self, key: str) -> AbstractContextManager[BinaryIO]: ...


class CheckpointStore:
    """
    Checkpoints and the contents that they share.

    What is written appears whole or not at all, and what has the same contents is the same file, so that any number of
    writers can share a store.

    Args:
        location: A directory, or a URL such as ``s3://bucket/prefix``, which needs the extra ``checkpoints``.
        options: Arguments for the file system of the URL.

    Raises:
        ConfigurationError: If there is no such file system.

    """

    def __init__(self, location: str | os.PathLike[str], **options: Any) -> None:
        self.location = os.fspath(location)
        """Where it is."""
        self._place = _open(self.location, options)
        self._known: set[str] = set()

    def __repr__(self) -> str:
        return f"<CheckpointStore {self.location!r}>"

    async def load(self, id: str) -> Manifest:
        """
        Return the manifest of a checkpoint.

        Raises:
            CheckpointError: If there is none of that id, or it is damaged.

        """
        manifest: Manifest = await in_thread(self._load, id)
        return manifest

    async def missing(self, files: Mapping[str, int]) -> set[str]:
        """Return which of these contents, SHA-256 and size, are not there."""

        def look() -> set[str]:
            with self._errors("looked at"):
                return {digest for digest, size in files.items() if not self._has(digest, size)}

        found: set[str] = await in_thread(look)
        return found

    async def check(self, files: Mapping[str, tuple[int, str]]) -> None:
        """
        Read contents and make sure that they are what they are called.

        Args:
            files: SHA-256, and the size and a path to speak of.

        Raises:
            CheckpointError: Naming the first that is missing or damaged.

        """

        def read() -> None:
            for digest, (size, path) in files.items():
                self.read(digest, size, path, lambda _: None)

        await in_thread(read)

    async def save(self, manifest: Manifest) -> str:
        """
        Write a manifest whose contents are all there.

        Returns:
            Its id.

        Raises:
            CheckpointError: If it cannot be written.

        """
        data = manifest.dump()
        id = hashlib.sha256(data).hexdigest()

        def write() -> None:
            with self._errors("written to"), self._place.writing(_manifest(id)) as file:
                file.write(data)

        await in_thread(write)
        return id

    # In a thread.

    def store(self, digest: str, size: int, source: BinaryIO) -> bool:
        """
        Write contents from *source*.

        Returns:
            Whether they were what they are called; if not, nothing was written.

        Raises:
            CheckpointError: If they cannot be written.

        """
        found, left = hashlib.sha256(), size
        try:
            with self._errors("written to"), self._place.writing(_blob(digest)) as file:
                while left and (part := source.read(min(left, CHUNK))):
                    found.update(part)
                    file.write(part)
                    left -= len(part)
                if left or found.hexdigest() != digest:
                    raise _Different
        except _Different:
            return False
        self._known.add(digest)
        return True

    def read(self, digest: str, size: int, path: str, take: Callable[[bytes], Any]) -> None:
        """
        Read contents.

        Raises:
            CheckpointError: If they are missing or damaged; what was taken until then is of no use.

        """
        found, read = hashlib.sha256(), 0
        try:
            with self._place.open(_blob(digest)) as file:
                while part := file.read(CHUNK):
                    found.update(part)
                    read += len(part)
                    take(part)
        except FileNotFoundError:
            raise CheckpointError(f"the contents {digest} of {path!r} are missing in {self.location}") from None
        except OSError as error:
            raise CheckpointError(f"the contents {digest} of {path!r} cannot be read: {error}") from error
        if read != size or found.hexdigest() != digest:
            raise CheckpointError(f"the contents {digest} of {path!r} are damaged in {self.location}")

    def _has(self, digest: str, size: int) -> bool:
        if digest not in self._known and self._place.size(_blob(digest)) == size:
            self._known.add(digest)
        return digest in self._known

    def _load(self, id: str) -> Manifest:
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise CheckpointError(f"{id!r:.100} is no id of a checkpoint: 64 hexadecimal digits are one")
        try:
            with self._place.open(_manifest(id)) as file:
                data = file.read()
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint {id} in {self.location}") from None
        except OSError as error:
            raise CheckpointError(f"checkpoint {id} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != id:
            raise CheckpointError(f"checkpoint {id} is damaged in {self.location}")
        try:
            value = json.loads(data)
            if value["version"] != VERSION:
                raise CheckpointError(f"checkpoint {id} is of version {value['version']!r:.100}, and not of {VERSION}")
            entries = {path: Entry.parse(entry) for path, entry in value["entries"].items()}
            scope = tuple(value["scope"])
            check_tree(scope, entries)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"checkpoint {id} is no manifest: {error}") from error
        return Manifest(scope, entries)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.location} cannot be {what}: {error.strerror or error}") from error


class _Different(Exception):
    """What arrived is not what was asked for."""


def as_store(store: CheckpointStore | str | os.PathLike[str] | None) -> CheckpointStore:
    """
    Take a store in any of its forms.

    Raises:
        ConfigurationError: If there is none.

    """
    if isinstance(store, CheckpointStore):
        return store
    if store is None:
        raise ConfigurationError(
            "where are checkpoints kept? give a directory or URL, here or as checkpoints= of the pool"
        )
    return CheckpointStore(store)


def _manifest(id: str) -> str:
    return f"checkpoints/{id[:2]}/{id}.json"


def _blob(digest: str) -> str:
    return f"contents/{digest[:2]}/{digest}"


def _open(location: str, options: Mapping[str, Any]) -> _Place:
    if not location:
        raise ConfigurationError("a store of checkpoints is a directory or a URL, and this one is empty")
    if not _URL.fullmatch(location):
        if options:
            raise ConfigurationError(f"{location!r} is a directory, which takes no options")
        return _Directory(Path(location))
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigurationError(
            f"{location!r} needs fsspec, of the extra 'checkpoints': pip install 'agentsandbox[checkpoints]'; "
            "a directory needs nothing"
        ) from None
    try:
        system, root = url_to_fs(location, **options)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"there is no file system for {location!r}: {error}") from error
    if "file" in ((system.protocol,) if isinstance(system.protocol, str) else system.protocol):
        return _Directory(Path(root))
    return _Remote(system, root)


class _Directory:
    def __init__(self, root: Path) -> None:
        self._root = root

    def size(self, key: str) -> int | None:
        try:
            return (self._root / key).stat().st_size
        except FileNotFoundError:
            return None

    def open(self, key: str) -> AbstractContextManager[BinaryIO]:
        return (self._root / key).open("rb")

    @contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class _Remote:
    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root.rstrip("/")

    def size(self, key: str) -> int | None:
        try:
            return int(self._system.info(f"{self._root}/{key}")["size"])
        except FileNotFoundError:
            return None

    def open(self, key: str) -> AbstractContextManager[BinaryIO]:
        file: AbstractContextManager[BinaryIO] = self._system.open(f"{self._root}/{key}", "rb")
        return file

    @contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        path = f"{self._root}/{key}"
        part = f"{path}.{secrets.token_hex(8)}.part"
        # Gathered here first: what is sent is then sent whole, and a name that is there is never half of something.
        with tempfile.SpooledTemporaryFile(max_size=8 * CHUNK) as held:
            yield held  # type: ignore[misc]
            held.seek(0)
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._system.open(part, "wb") as file:
                    shutil.copyfileobj(held, file, CHUNK)
                self._system.mv(part, path)
            except BaseException:
                if self._system.exists(part):
                    self._system.rm_file(part)
                raise
