# SPDX-License-Identifier: Apache-2.0
"""
Directories as tar streams: regular files, directories and symbolic links, and nothing that leads out of the directory.

Every name is opened below its directory without following links, so what an episode left in the way cannot redirect it.

This module runs on both sides, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile
from typing import Any, Callable, Dict, Iterator, List, Set, Tuple

BLOCK = 512
CHUNK = 1024 * 1024

FOLLOW_NOT = os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | FOLLOW_NOT


MAX_HEADER = 1024 * 1024
"""Bytes that the name or the attributes of one member may take: :mod:`tarfile` reads them into memory whole."""

MAX_TRAILER = 1024 * 1024
"""Bytes behind the end of an archive that are still taken for padding."""

PAX_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENSIONS = (*PAX_HEADERS, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


class Malformed(Exception):
    """The stream is no whole archive."""


class Refused(Malformed):
    """The archive holds a member that nobody should unpack."""


def pack(path: bytes, out: int, *, style: int = tarfile.PAX_FORMAT) -> Dict[str, Any]:
    """
    Write the contents of a directory as a tar stream.

    Args:
        path: The directory.
        out: Where to.
        style: How long names are written: ``tarfile.GNU_FORMAT`` for small tar programs, which know no other way.

    """
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    writer = _Writer(out, style)
    count = _pack_directory(top, b"", path, writer)
    writer.end()
    return {"entries": count, "size": writer.size}


def _pack_directory(fd: int, prefix: bytes, place: bytes, writer: _Writer) -> int:
    count = 0
    try:
        for text in sorted(os.listdir(fd)):
            name = os.fsencode(text)
            where = os.path.join(place, name)
            try:
                count += _pack_entry(fd, name, prefix + name, where, writer)
            except OSError as error:
                if isinstance(error, BrokenPipeError):
                    raise
                if error.filename is None or isinstance(error.filename, int) or error.filename == name:
                    error.filename = where
                raise
    finally:
        os.close(fd)
    return count


def _pack_entry(directory: int, name: bytes, member: bytes, where: bytes, writer: _Writer) -> int:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    info = tarfile.TarInfo(member.decode("utf-8", "surrogateescape"))
    info.mode = stat.S_IMODE(status.st_mode)
    info.mtime = int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        writer.header(info)
        return 1 + _pack_directory(os.open(name, DIRECTORY, dir_fd=directory), member + b"/", where, writer)
    if stat.S_ISLNK(status.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(name, dir_fd=directory).decode("utf-8", "surrogateescape")
        writer.header(info)
        return 1
    if not stat.S_ISREG(status.st_mode):
        return 0
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | FOLLOW_NOT, dir_fd=directory)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return 0
        info.size = left = status.st_size
        writer.header(info)
        while left:
            part = os.read(fd, min(left, CHUNK))
            if not part:
                raise OSError(errno.EIO, "it shrank while it was read", where)
            writer.data(part)
            left -= len(part)
        writer.pad(info.size)
    finally:
        os.close(fd)
    return 1


class _Writer:
    """A tar stream on its way out; small members are gathered."""

    def __init__(self, fd: int, style: int) -> None:
        self.size = 0
        self._fd = fd
        self._style = style
        self._held: List[bytes] = []
        self._held_size = 0

    def header(self, info: tarfile.TarInfo) -> None:
        self.data(info.tobuf(self._style, "utf-8", "surrogateescape"))  # type: ignore[arg-type]

    def data(self, data: bytes) -> None:
        self.size += len(data)
        self._held.append(data)
        self._held_size += len(data)
        if self._held_size >= CHUNK:
            self._flush()

    def pad(self, size: int) -> None:
        if size % BLOCK:
            self.data(bytes(BLOCK - size % BLOCK))

    def end(self) -> None:
        self.data(bytes(2 * BLOCK))
        self._flush()

    def _flush(self) -> None:
        view = memoryview(b"".join(self._held))
        self._held, self._held_size = [], 0
        while view:
            view = view[os.write(self._fd, view) :]


def unpack(path: bytes, source: int, *, modes: int = 0o7777, foreign: bool = False) -> Dict[str, Any]:
    """
    Create the members of a tar stream below a directory.

    Args:
        path: The directory; made if need be.
        source: Where the stream comes from.
        modes: The permissions that members may have.
        foreign: Whether some ``tar`` has made it, and not :func:`pack`: hard links then become copies, devices and
            the like are left out, and files can be read and written by whoever unpacks them.

    Raises:
        Malformed: If the stream is no archive or ends early.
        Refused: If it holds a member that leads out of the directory; unless *foreign*, also a hard link, a device or
            the like.

    """
    os.makedirs(path, exist_ok=True)
    tree = _Tree(path, modes, 0o600 if foreign else 0)
    reader = _Reader(source)
    try:
        archive = tarfile.open(  # type: ignore[call-overload]  # noqa: SIM115
            fileobj=reader,
            mode="r|",
            bufsize=CHUNK,
            tarinfo=_Member,
            encoding="utf-8",
            errors="surrogateescape",
        )
        count = _unpack(archive, tree, foreign=foreign)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, IndexError, KeyError, RecursionError) as error:
        raise Malformed("not a complete tar archive: %s" % error) from error
    reader.drain()
    tree.finish()
    return {"entries": count, "size": reader.size}


def _unpack(archive: tarfile.TarFile, tree: _Tree, *, foreign: bool) -> int:
    count = 0
    left_out: Set[bytes] = set()
    while True:
        info = archive.next()
        if info is None:  # the end mark: everything else has raised
            return count
        archive.members = []  # type: ignore[attr-defined] # they would all be kept
        parts = _parts(info.name)
        count += 1
        if info.isdir():
            tree.directory(parts, info.mode)
        elif not parts:
            raise Refused("%r is no name for a file" % info.name)
        elif info.isreg() and not info.issparse():
            file = archive.extractfile(info)
            assert file is not None
            tree.file(parts, info, file)
        elif info.issym():
            _check_link(parts, info.linkname)
            tree.link(parts, info.linkname.encode("utf-8", "surrogateescape"))
        elif foreign and (info.isdev() or (info.islnk() and b"/".join(_parts(info.linkname)) in left_out)):
            left_out.add(b"/".join(parts))
        elif foreign and info.islnk():
            tree.copy(parts, info, _parts(info.linkname))
        else:
            raise Refused("%r is neither a regular file nor a directory nor a symbolic link" % info.name)


class _Member(tarfile.TarInfo):
    """
    A header. Where ``tarfile`` takes rubbish or a missing end mark for the end of the archive, this does not.

    One that would be read into memory whole has a limit.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENSIONS and self.size > MAX_HEADER:
            raise Malformed("a header of %d bytes" % self.size)
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise Malformed("not a complete tar archive: %s" % error) from error


def _parts(name: str) -> List[bytes]:
    if name.startswith("/"):
        raise Refused("%r is an absolute name" % name)
    parts = [part for part in name.encode("utf-8", "surrogateescape").split(b"/") if part not in (b"", b".")]
    if b".." in parts or any(b"\0" in part for part in parts):
        raise Refused("%r leads out of the directory" % name)
    return parts


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


class _Tree:
    """The directory that is filled. The directory of the last member stays open, as most members are neighbours."""

    def __init__(self, path: bytes, allowed: int, always: int) -> None:
        self._path = path
        self._allowed = allowed
        self._always = always
        self._top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._at: Tuple[bytes, ...] = ()
        self._fd = self._top
        self._modes: List[Tuple[List[bytes], int]] = []

    def directory(self, parts: List[bytes], mode: int) -> None:
        if parts:
            parent = self._enter(parts[:-1])
            self._make(parent, parts[-1], parts)
        self._modes.append((parts, mode & self._allowed))

    def file(self, parts: List[bytes], info: tarfile.TarInfo, file: Any) -> None:
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
            target = os.readlink(name, dir_fd=parent)
            _check_link(parts, target.decode("utf-8", "surrogateescape"))
            self.link(parts, target)
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


class _Reader:
    """Standard input as a file that only moves forward."""

    def __init__(self, fd: int) -> None:
        self.size = 0
        self._fd = fd

    def read(self, size: int) -> bytes:
        parts: List[bytes] = []
        while size > 0:
            part = os.read(self._fd, size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
            self.size += len(part)
        return b"".join(parts)

    def drain(self) -> None:
        """Take the padding behind the archive, so that the sender can finish."""
        end = self.size
        while self.read(CHUNK):
            if self.size - end > MAX_TRAILER:
                raise Malformed("data behind the end of the archive")
