# SPDX-License-Identifier: Apache-2.0
"""Archives of directories on this side: made for any ``tar``, and read as what a stranger sent."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from agentsandbox.errors import StreamBroken

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pack", "unpack"]

MAX_HEADER = 1024 * 1024
"""Bytes that the name or the attributes of one member may take."""

EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
"""Members that :mod:`tarfile` reads into memory whole."""


def pack(source: Path, file: IO[bytes]) -> int:
    """
    Write an archive of regular files, directories and symbolic links.

    Args:
        source: The directory.
        file: Where to.

    Returns:
        Its size, in bytes.

    """

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        archive.inodes.clear()  # type: ignore[attr-defined]  # hard links become files
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member if member.isreg() or member.isdir() or member.issym() else None

    # Small tar programs know GNU's way of long names, and not that of POSIX.
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(source, arcname=".", filter=plain)
    return file.tell()


class _Member(tarfile.TarInfo):
    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENSIONS and self.size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


def unpack(file: IO[bytes], target: Path) -> None:
    """
    Unpack an archive from a sandbox. Nothing is written outside of *target*, nor through a link that was in it.

    Args:
        file: The archive.
        target: A directory; made if it does not exist.

    Raises:
        PermissionError: If a member would leave *target*.
        StreamBroken: If it is no archive.

    """
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member, errors="surrogateescape") as archive:
            for member in _harmless(archive, target):
                archive.extract(member, target, filter="data")
    except tarfile.FilterError as error:
        raise PermissionError(errno.EPERM, f"refused: {error}", error.tarinfo.name) from error
    except tarfile.TarError as error:
        raise StreamBroken("damaged", f"the archive is damaged: {error}") from error


def _harmless(archive: tarfile.TarFile, target: Path) -> Iterator[tarfile.TarInfo]:
    links: set[str] = set()
    for member in archive:
        name = os.path.normpath(member.name)
        parts = name.split("/")
        if any("/".join(parts[: count + 1]) in links for count in range(len(parts))):
            raise tarfile.OutsideDestinationError(member, str(target))
        if member.islnk():
            _copy(member, target, links)
        elif member.issym():
            links.add(name)
            yield member
        elif member.isreg() or member.isdir():
            yield member
        archive.members.clear()  # type: ignore[attr-defined]


def _copy(member: tarfile.TarInfo, target: Path, links: set[str]) -> None:
    """Make a copy of a file that came before: a hard link would tie two files together here."""
    first, second = os.path.normpath(member.linkname), os.path.normpath(member.name)
    for name in (first, second):
        if name.startswith(("/", "../")) or name == "..":
            raise tarfile.OutsideDestinationError(member, str(target))
    parts = first.split("/")
    if first in links:
        os.symlink(os.readlink(target / first), target / second)  # noqa: PTH115, PTH211
        links.add(second)
    elif any("/".join(parts[: count + 1]) in links for count in range(len(parts))):
        raise tarfile.OutsideDestinationError(member, str(target))
    else:
        shutil.copy2(target / first, target / second, follow_symlinks=False)
