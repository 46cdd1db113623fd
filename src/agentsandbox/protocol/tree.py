# SPDX-License-Identifier: Apache-2.0
"""
A directory that is filled from a stream, and nothing that leads out of it.

Every name is opened below the directory without following links, so what an episode left in the way cannot redirect it.

This module runs on both sides, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from typing import Any, Callable, Iterator, List, Tuple

CHUNK = 1024 * 1024

FOLLOW_NOT = os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | FOLLOW_NOT


class Malformed(Exception):
    """The stream is no whole archive."""


class Refused(Malformed):
    """The archive holds a member that nobody should unpack."""


class Tree:
    """
    The directory that is filled. The directory of the last member stays open, as most members are neighbours.

    Args:
        path: The directory, which is there.
        allowed: The permissions that members may have.
        always: Those that every file has, whatever is said.

    """

    def __init__(self, path: bytes, allowed: int, always: int) -> None:
        self._path = path
        self._allowed = allowed
        self._always = always
        self._top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._at: Tuple[bytes, ...] = ()
        self._fd = self._top
        self._modes: List[Tuple[List[bytes], int]] = []

    def directory(self, parts: List[bytes], mode: int) -> None:
        """Make a directory, unless it is there; :meth:`finish` gives it its mode."""
        if parts:
            parent = self._enter(parts[:-1])
            self._make(parent, parts[-1], parts)
        self._modes.append((parts, mode & self._allowed))

    def file(self, parts: List[bytes], info: tarfile.TarInfo, file: Any) -> None:
        """Write a file anew."""
        parent = self._enter(parts[:-1])
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | FOLLOW_NOT
        with self._about(parts):
            fd = _anew(parent, parts[-1], lambda: os.open(parts[-1], flags, 0o600, dir_fd=parent))
            try:
                while True:
                    part = file.read(CHUNK)
                    if not part:
                        break
                    view = memoryview(part)
                    while view:
                        view = view[os.write(fd, view) :]
                if os.fstat(fd).st_size != info.size:
                    raise Malformed("%r ends early" % info.name)
                os.fchmod(fd, info.mode & self._allowed | self._always)
                os.utime(fd, (info.mtime, info.mtime))
            finally:
                os.close(fd)

    def link(self, parts: List[bytes], target: bytes) -> None:
        """Make a symbolic link anew."""
        _check_link(parts, target.decode("utf-8", "surrogateescape"))
        parent = self._enter(parts[:-1])
        with self._about(parts):
            _anew(parent, parts[-1], lambda: os.symlink(target, parts[-1], dir_fd=parent))

    def copy(self, parts: List[bytes], info: tarfile.TarInfo, source: List[bytes]) -> None:
        """Have what an earlier member is once more: a hard link would tie two files together."""
        name = source[-1] if source else b"."
        try:
            parent = self._enter(source[:-1], make=False)
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            raise Malformed("%r is a link to %r, which is not there" % (info.name, info.linkname)) from error
        if stat.S_ISLNK(status.st_mode):
            self.link(parts, os.readlink(name, dir_fd=parent))
            return
        if not stat.S_ISREG(status.st_mode):
            raise Refused("%r is a hard link to what is no file" % info.name)
        with open(os.open(name, os.O_RDONLY | FOLLOW_NOT, dir_fd=parent), "rb") as file:
            info.size, info.mode, info.mtime = status.st_size, stat.S_IMODE(status.st_mode), int(status.st_mtime)
            self.file(parts, info, file)

    def finish(self) -> None:
        """Give directories their modes, deepest first: one that may not be written had to be filled before."""
        for parts, mode in sorted(self._modes, key=lambda item: -len(item[0])):
            if parts:
                os.fchmod(self._enter(parts), mode)

    def _make(self, parent: int, name: bytes, parts: List[bytes]) -> None:
        with self._about(parts):
            try:
                os.mkdir(name, 0o777, dir_fd=parent)
            except FileExistsError:
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    os.unlink(name, dir_fd=parent)
                    os.mkdir(name, 0o777, dir_fd=parent)

    def _enter(self, parts: List[bytes], *, make: bool = True) -> int:
        wanted = tuple(parts)
        if wanted == self._at:
            return self._fd
        fd, start = self._top, 0
        if self._at and wanted[: len(self._at)] == self._at:
            fd, start = self._fd, len(self._at)
        for index in range(start, len(wanted)):
            try:
                with self._about(parts[: index + 1]):
                    below = self._open(fd, wanted[index], make=make)
            finally:
                if fd not in (self._top, self._fd):
                    os.close(fd)
            fd = below
        if self._fd not in (self._top, fd):
            os.close(self._fd)
        self._at, self._fd = wanted, fd
        return fd

    def _open(self, parent: int, name: bytes, *, make: bool) -> int:
        try:
            return os.open(name, DIRECTORY, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(name, 0o777, dir_fd=parent)
            return os.open(name, DIRECTORY, dir_fd=parent)

    @contextlib.contextmanager
    def _about(self, parts: List[bytes]) -> Iterator[None]:
        """Have errors name the member."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.path.join(self._path, *parts)) from None


def _anew(parent: int, name: bytes, make: Callable[[], Any]) -> Any:
    """Make something in the place of whatever file or link is there."""
    try:
        return make()
    except FileExistsError:
        os.unlink(name, dir_fd=parent)
        return make()


def _check_link(parts: List[bytes], target: str) -> None:
    """Refuse a link that leads out, counted by its words: nothing else can be known about it."""
    depth = len(parts) - 1 if target and not target.startswith("/") else -1
    for word in target.split("/"):
        if depth < 0:
            break
        if word == "..":
            depth -= 1
        elif word not in ("", "."):
            depth += 1
    if depth < 0:
        name = b"/".join(parts).decode("utf-8", "replace")
        raise Refused("the link %r leads to %r, out of the directory" % (name, target))
