# SPDX-License-Identifier: Apache-2.0
"""
Directories as tar streams: regular files, directories and symbolic links, and nothing that leads out of the directory.

This module runs on both sides, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from typing import Any, Dict, List, Set

from .tree import CHUNK, DIRECTORY, FOLLOW_NOT, Malformed, Refused, Tree

__all__ = ["Malformed", "Refused", "pack", "unpack"]

BLOCK = 512

MAX_HEADER = 1024 * 1024
"""Bytes that the name or the attributes of one member may take: :mod:`tarfile` reads them into memory whole."""

MAX_TRAILER = 1024 * 1024
"""Bytes behind the end of an archive that are still taken for padding."""

PAX_HEADERS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENSIONS = (*PAX_HEADERS, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


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
    tree = Tree(path, modes, 0o600 if foreign else 0)
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


def _unpack(archive: tarfile.TarFile, tree: Tree, *, foreign: bool) -> int:
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
