# SPDX-License-Identifier: Apache-2.0
"""Putting the layers of an image on top of each other, in a directory that nothing in them can point out of."""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from pathlib import Path

__all__ = ["Unpacker"]

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"

MAX_LINKS = 40
"""How many links a path may lead through: the kernel's limit."""

NOBODY = 65534
LAST_ID = 65535


class Unpacker:
    """
    Unpack layers, the lowest first.

    Args:
        root: The directory to make.
        own_ids: Whether files get the owners that the layers name; otherwise they are ours.

    """

    def __init__(self, root: Path, *, own_ids: bool) -> None:
        self._root = str(root)
        self._own_ids = own_ids
        self._modes: dict[str, int] = {}
        self._times: dict[str, float] = {}
        os.makedirs(self._root, 0o755)

    def apply(self, archive: tarfile.TarFile) -> None:
        """
        Put a layer on top.

        Raises:
            ValueError: If it names a place outside.

        """
        made: set[str] = set()
        for member in archive:
            parts = _parts(member.name)
            if not parts:
                if member.isdir():
                    self._modes[self._root] = member.mode
                continue
            directory = self._directory(parts[:-1])
            name = parts[-1]
            if name == OPAQUE:
                for entry in os.listdir(directory):
                    self._remove(os.path.join(directory, entry), made)
            elif name.startswith(WHITEOUT):
                self._remove(os.path.join(directory, name[len(WHITEOUT) :]), made)
            else:
                self._member(archive, member, os.path.join(directory, name), made)

    def finish(self) -> None:
        """Give directories their permissions and times, which had to wait until they were full."""
        for path, mode in sorted(self._modes.items(), reverse=True):
            if os.path.isdir(path) and not os.path.islink(path):
                os.utime(path, (self._times.get(path, 0), self._times.get(path, 0)))
                os.chmod(path, mode)

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, made: set[str]) -> None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return  # devices and pipes: a sandbox has its own
        there = _kind(path)
        if there is not None and not (member.isdir() and stat.S_ISDIR(there)):
            self._remove(path, set())
        made.add(path)
        if member.isdir():
            if there is None or not stat.S_ISDIR(there):
                os.mkdir(path, 0o700)
            self._modes[path] = member.mode
            self._times[path] = member.mtime
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            parts = _parts(member.linkname)
            target = os.path.join(self._directory(parts[:-1]), parts[-1])
            os.link(target, path, follow_symlinks=False)
            return
        else:
            content = archive.extractfile(member)
            assert content is not None
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                shutil.copyfileobj(content, file, 1024 * 1024)
        if self._own_ids:
            os.lchown(path, _id(member.uid), _id(member.gid))
        if member.isreg():
            os.chmod(path, member.mode)
        if not member.isdir():
            os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _directory(self, parts: list[str]) -> str:
        """Return the real directory that *parts* lead to, with links followed as if the root were the system's."""
        path, waiting, links = self._root, list(reversed(parts)), 0
        while waiting:
            part = waiting.pop()
            if part == "..":
                if path != self._root:
                    path = os.path.dirname(path)
                continue
            onward = os.path.join(path, part)
            there = _kind(onward)
            if there is not None and stat.S_ISLNK(there):
                links += 1
                if links > MAX_LINKS:
                    raise ValueError(f"{'/'.join(parts)} leads through too many links")
                target = os.readlink(onward)
                if target.startswith("/"):
                    path = self._root
                waiting += [word for word in reversed(target.split("/")) if word not in ("", ".")]
                continue
            if there is None:
                os.mkdir(onward, 0o700)
                self._modes[onward] = 0o755
            elif not stat.S_ISDIR(there):
                raise ValueError(f"{'/'.join(parts)} leads through a file")
            path = onward
        return path

    def _remove(self, path: str, made: set[str]) -> None:
        """Remove what lower layers have at *path*, and keep what this one has made."""
        there = _kind(path)
        if there is None or path in made:
            return
        if not stat.S_ISDIR(there):
            os.unlink(path)
            return
        if any(other.startswith(path + "/") for other in made):
            for entry in os.listdir(path):
                self._remove(os.path.join(path, entry), made)
            return
        shutil.rmtree(path)
        for other in [other for other in self._modes if other == path or other.startswith(path + "/")]:
            del self._modes[other]


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"a layer has a path that leads out of it: {name!r}")
    return parts


def _kind(path: str) -> int | None:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _id(number: int) -> int:
    return number if 0 <= number <= LAST_ID else NOBODY
