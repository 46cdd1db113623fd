# SPDX-License-Identifier: Apache-2.0
"""
What a file system holds: a manifest to compare with later, and stamps that tell cheaply what cannot have changed.

Names are the file system's own bytes, as ``surrogateescape`` text. Directories are opened one below the other and never
through a link, so that nothing that changes meanwhile leads elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import stat
import struct
import time
from operator import itemgetter
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from .mounts import by_place
from .sealing import Sealed
from .storing import CHUNK, Store

MAX_DEPTH = 500
"""How deep directories may be nested: each level holds a descriptor."""

FS_IOC_GETFLAGS, FS_IOC_SETFLAGS = 0x80086601, 0x40086602
USER_FLAGS = 0x6283C4FF
"""
The flags of ``chattr`` that users may change, but for the one that says how the blocks of a file are listed: the disk
below an image may have that one, and the one on top of it may not.
"""

KERNEL_TYPES = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl"),
        *("nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "selinuxfs", "sysfs", "tracefs"),
    )
)
"""File systems that hold no files: what of them matters is looked at in its own way."""

O_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
O_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Stamp = bytes
"""Where a file is kept and when that last changed; equal stamps are the same file, unchanged."""

Entry = Tuple[Any, ...]
"""
One name of a manifest: kind, mode, owner, group, modification time (ns), flags, extended attributes, and what the kind
has beside: ``f`` size, SHA-256, place of its copy, group of hard links, whether it has holes, number of links;
``l`` target; ``o`` device number; ``d`` nothing.
"""

Tree = Dict[str, Dict[str, Entry]]
"""Directory → name → what is there."""

Stamps = Dict[str, Dict[str, Stamp]]
"""Directory → name → its stamp."""


# One object each is what makes tens of thousands of them quick to write and to read.
pack_directory = struct.Struct("=qqQQQ").pack
pack_file = struct.Struct("=QQqqQQQQQ").pack


class Unverifiable(Exception):
    """Something is as it cannot be compared or restored; the text says what."""


def stamp(status: os.stat_result) -> Stamp:
    """Return what changes whenever a file does; inode numbers of directories are not kept by all file systems."""
    if stat.S_ISDIR(status.st_mode):
        return pack_directory(status.st_ctime_ns, status.st_mtime_ns, status.st_mode, status.st_uid, status.st_gid)
    return pack_file(
        status.st_dev,
        status.st_ino,
        status.st_ctime_ns,
        status.st_mtime_ns,
        status.st_size,
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_nlink,
    )


def join(directory: str, name: str) -> str:
    """Return the path of a name."""
    return directory + name if directory == "/" else directory + "/" + name


def open_directory(name: str, parent: Optional[int] = None) -> int:
    """Open a directory, one whose owner took its own permissions as well."""
    try:
        return os.open(name, O_DIRECTORY, dir_fd=parent)
    except PermissionError:
        with Permitted(name, parent, 0o500):
            return os.open(name, O_DIRECTORY, dir_fd=parent)


def open_file(name: str, parent: int) -> int:
    """Open a regular file for reading, one whose owner took its own permissions as well."""
    try:
        return os.open(name, O_FILE, dir_fd=parent)
    except PermissionError:
        with Permitted(name, parent, 0o400):
            return os.open(name, O_FILE, dir_fd=parent)


class Permitted:
    """Permissions that are added for a moment, to a file that is ours."""

    def __init__(self, name: str, parent: Optional[int], bits: int) -> None:
        self._fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        self._bits = bits
        self._mode = stat.S_IMODE(os.fstat(self._fd).st_mode)

    def __enter__(self) -> None:
        try:
            os.chmod("/proc/self/fd/%d" % self._fd, self._mode | self._bits)
        except OSError:
            os.close(self._fd)
            raise

    def __exit__(self, *_: object) -> None:
        os.chmod("/proc/self/fd/%d" % self._fd, self._mode)
        os.close(self._fd)


def get_flags(fd: int) -> int:
    """Return the flags of ``chattr`` that a user may change."""
    try:
        return int(struct.unpack("=I", fcntl.ioctl(fd, FS_IOC_GETFLAGS, b"\0" * 4))[0]) & USER_FLAGS
    except OSError:
        return 0


def set_flags(fd: int, flags: int) -> None:
    """Set the flags of ``chattr`` that a user may change, and leave the others as they are."""
    present = int(struct.unpack("=I", fcntl.ioctl(fd, FS_IOC_GETFLAGS, b"\0" * 4))[0])
    fcntl.ioctl(fd, FS_IOC_SETFLAGS, struct.pack("=I", present & ~USER_FLAGS | flags))


def attributes(fd: int) -> Tuple[Tuple[str, bytes], ...]:
    """Return the extended attributes of an open file."""
    try:
        return tuple((name, os.getxattr(fd, name)) for name in sorted(os.listxattr(fd)))
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return ()
        raise


def sha256(fd: int, size: int, copy: Optional[Callable[[bytes], None]] = None) -> bytes:
    """Return the SHA-256 of an open file, and hand its contents on."""
    digest = hashlib.sha256()
    while True:
        part = os.read(fd, CHUNK if size >= CHUNK else size + 1)
        if not part:
            return digest.digest()
        digest.update(part)
        if copy is not None:
            copy(part)
        if len(part) <= size < CHUNK:
            size -= len(part)


class Scanner:
    """
    Looks at files, and remembers where looking is not enough.

    Args:
        mute: Devices on which a write through a memory map leaves no trace in the inode: contents are compared there.
        store: Where to keep copies of what is looked at.
        older: What :func:`.sealing.older_than` said.

    """

    def __init__(self, mute: Set[int], store: Optional[Store] = None, older: int = 0) -> None:
        self.mute = mute
        self.store = store
        self.older = older
        self.files = 0
        self.hashed = 0
        self.newest = 0
        self.mounts = by_place()
        self._over = {os.path.dirname(place) for place in self.mounts}
        self.sealed = Sealed(older, self.mounts)
        self._groups: Dict[Tuple[int, int], str] = {}

    def skipped(self, path: str) -> bool:
        """Whether what is mounted there cannot be changed by an episode, or holds no files."""
        mount = self.mounts.get(path)
        return mount is not None and (mount.read_only or mount.kind in KERNEL_TYPES)

    def entry(self, name: str, parent: int, path: str, status: os.stat_result) -> Entry:
        """Describe one name, with a copy of its contents if there is a store."""
        mode = status.st_mode
        common = (mode, status.st_uid, status.st_gid, status.st_mtime_ns)
        if stat.S_ISREG(mode):
            return ("f",) + common + self._file(name, parent, path, status)
        if stat.S_ISDIR(mode):
            fd = open_directory(name, parent)
            try:
                return ("d",) + common + (get_flags(fd), attributes(fd))
            finally:
                os.close(fd)
        if stat.S_ISLNK(mode):
            return ("l",) + common + (0, (), os.readlink(name, dir_fd=parent))
        return ("o",) + common + (0, (), status.st_rdev)

    def _file(self, name: str, parent: int, path: str, status: os.stat_result) -> Tuple[Any, ...]:
        fd = open_file(name, parent)
        try:
            store, start = self.store, -1
            self.hashed += 1
            if store is not None and store.room(min(status.st_size, status.st_blocks * 512)):
                start = store.end
                digest = sha256(fd, status.st_size, store.add)
                if store.end != start + status.st_size:
                    raise Unverifiable("%s changes while it is read" % path)
            else:
                digest = sha256(fd, status.st_size)
            group = ""
            if status.st_nlink > 1:
                group = self._groups.setdefault((status.st_dev, status.st_ino), path)
            sparse = status.st_blocks * 512 < status.st_size
            return (get_flags(fd), attributes(fd), status.st_size, digest, start, group, sparse, status.st_nlink)
        finally:
            os.close(fd)

    def directory(self, fd: int, path: str) -> List[Tuple[str, os.stat_result]]:
        """List an open directory in order, without what :meth:`skipped` says."""
        with os.scandir(fd) as entries:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
        found.sort(key=itemgetter(0))
        self.files += len(found)
        if path in self._over:
            found = [item for item in found if not self.skipped(join(path, item[0]))]
        for _, status in found:
            self.newest = max(self.newest, status.st_ctime_ns)
        return found


def walk(
    root: str, enter: Callable[[str, Optional[int]], int] = open_directory
) -> Iterator[Tuple[int, str, List[str]]]:
    """
    Go through directories from the top.

    Args:
        root: Where to begin.
        enter: Opens a directory, or returns -1 for one that is not to be looked into.

    Yields:
        A descriptor, a path, and a list to be filled with the names of the directories to go into.

    """
    stack: List[Tuple[int, str, List[str]]] = []
    fd, path = enter(root, None), root
    try:
        while fd >= 0:
            below: List[str] = []
            yield fd, path, below
            below.reverse()
            stack.append((fd, path, below))
            fd = -1
            if len(stack) > MAX_DEPTH:
                raise Unverifiable("%s is nested too deeply" % path[:200])
            while stack and fd < 0:
                parent, above, names = stack[-1]
                if names:
                    name = names.pop()
                    fd, path = enter(name, parent), join(above, name)
                else:
                    os.close(stack.pop()[0])
    finally:
        if fd >= 0:
            os.close(fd)
        for entry in stack:
            os.close(entry[0])


def open_path(path: str) -> int:
    """Open a directory by its path, none of whose parts may be a link."""
    fd = os.open("/", O_DIRECTORY)
    names = [name for name in path.split("/") if name]
    for number, name in enumerate(names):
        above = fd
        try:
            if number == len(names) - 1:
                return open_directory(name, above)
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        finally:
            os.close(above)
    return fd


def enter_scope(name: str, parent: Optional[int]) -> int:
    """Open a directory of the scope."""
    return open_path(name) if parent is None else open_directory(name, parent)


def take(scanner: Scanner, roots: List[str]) -> Tuple[Tree, Stamps]:
    """
    Describe everything below some directories; they themselves are the names of the empty path.

    Args:
        scanner: What looks.
        roots: The directories.

    """
    tree: Tree = {"": {}}
    stamps: Stamps = {"": {}}
    for root in roots:
        for fd, path, below in walk(root, enter_scope):
            if path == root:
                own = os.fstat(fd)
                tree[""][root] = (
                    "d",
                    own.st_mode,
                    own.st_uid,
                    own.st_gid,
                    own.st_mtime_ns,
                    get_flags(fd),
                    attributes(fd),
                )
                stamps[""][root] = stamp(own)
                scanner.newest = max(scanner.newest, own.st_ctime_ns)
            entries = tree[path] = {}
            known = stamps[path] = {}
            for name, status in scanner.directory(fd, path):
                entries[name] = scanner.entry(name, fd, join(path, name), status)
                known[name] = stamp(status)
                if stat.S_ISDIR(status.st_mode):
                    below.append(name)
    return tree, stamps


def silent_devices(places: List[str]) -> Set[int]:
    """
    Find the devices on which writing through a memory map, after a read through it, leaves no trace in the inode.

    Args:
        places: Directories to try in; where nothing can be created, an episode cannot either.

    """
    tries: List[Tuple[int, mmap.mmap, int, int]] = []
    for place in places:
        try:
            fd = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
        os.write(fd, bytes(mmap.PAGESIZE))
        memory = mmap.mmap(fd, mmap.PAGESIZE)
        assert memory[0] == 0
        status = os.fstat(fd)
        tries.append((fd, memory, status.st_dev, status.st_ctime_ns))
    tick(max((began for _, _, _, began in tries), default=0))
    silent = set()
    for fd, memory, device, began in tries:
        memory[0] = 1
        if os.fstat(fd).st_ctime_ns == began:
            silent.add(device)
        memory.close()
        os.close(fd)
    return silent


def tick(newest: int) -> None:
    """Wait until whatever changes gets a later change time than *newest*."""
    coarse = getattr(time, "CLOCK_REALTIME_COARSE", 5)
    limit = time.monotonic() + 0.1
    while time.clock_gettime_ns(coarse) <= newest and time.monotonic() < limit:
        time.sleep(0.001)
