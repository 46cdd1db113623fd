# SPDX-License-Identifier: Apache-2.0
"""What is outside of the scope of a reset: nothing there is restored, and every change must show."""

from __future__ import annotations

import hashlib
import marshal
import os
import stat
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Set, Tuple

from .scan import O_DIRECTORY, O_FILE, Scanner, attributes, get_flags, join, sha256, stamp, walk
from .sealing import ancestors


class Around:
    """
    Fingerprints every directory that is not in the scope.

    Args:
        scope: Directories that are compared in another way.
        excluded: Directories that are not looked at.
        uppers: Where overlays are mounted of which it is enough to look at what is on top, and descriptors of that.

    """

    def __init__(self, scope: Collection[str], excluded: Collection[str], uppers: Mapping[str, int]) -> None:
        self._scope = frozenset(scope)
        self._excluded = frozenset(excluded)
        self._above = ancestors(scope) | {"/"}
        self._holding = ancestors(excluded)
        self._uppers = {place: fd for place, fd in uppers.items() if place not in self._above}
        self._found: Dict[str, bytes] = {}
        self._weak: Set[str] = set()

    def look(self, scanner: Scanner, weak: Optional[Iterable[str]] = None) -> Tuple[Dict[str, bytes], Set[str]]:
        """
        Look everywhere, or at some directories only.

        Args:
            scanner: What looks.
            weak: Directories that somebody but root might change, when nobody was root: nothing else can have changed.

        Returns:
            Directory → fingerprint of its entries, and the directories that somebody but root might change.

        """
        self._found, self._weak = {}, set()
        if weak is None:
            self._tree(scanner, "/", enter_readable)
        for path in weak or ():
            if self._covered(path):
                continue
            try:
                fd = enter_readable(path, None)
            except OSError:
                continue
            if fd >= 0:
                try:
                    self._found[path] = self._fingerprint(scanner, fd, path, [])
                finally:
                    os.close(fd)
        for place, upper in self._uppers.items():
            self._tree(scanner, place, _from_top(upper))
        self._weak.update(path for path in self._found if self._covered(path))
        return self._found, self._weak

    def _covered(self, path: str) -> bool:
        return any(path == place or path.startswith(place.rstrip("/") + "/") for place in self._uppers)

    def _tree(self, scanner: Scanner, root: str, enter: Callable[[str, Optional[int]], int]) -> None:
        for fd, path, below in walk(root, enter):
            self._found[path] = self._fingerprint(scanner, fd, path, below)

    def _fingerprint(self, scanner: Scanner, fd: int, path: str, below: List[str]) -> bytes:
        facts: List[Any] = []
        own = os.fstat(fd)
        weak = own.st_uid != 0 or bool(own.st_mode & 0o022)
        for name, status in scanner.directory(fd, path):
            mode = status.st_mode
            weak = weak or status.st_uid != 0 or (bool(mode & 0o022) and not stat.S_ISLNK(mode))
            if stat.S_ISDIR(mode):
                place = join(path, name)
                facts.append((name, mode, status.st_uid, status.st_gid))
                if place in self._scope or place in self._excluded:
                    continue
                untouched = place not in self._above and place not in self._holding and scanner.sealed(place, status)
                if place not in self._uppers and not untouched:
                    below.append(name)
                if place not in self._above and place not in scanner.mounts:
                    facts.append((status.st_ctime_ns, status.st_mtime_ns))
                    continue
                # Its change time moves with what is restored below it, on an overlay.
                child = enter_readable(name, fd)
                if child >= 0:
                    facts.append((get_flags(child), attributes(child)))
                    os.close(child)
            elif stat.S_ISREG(mode):
                facts.append((name, stamp(status)))
                if status.st_dev in scanner.mute:
                    facts.append(_contents(scanner, name, fd, status))
            elif stat.S_ISLNK(mode):
                facts.append((name, stamp(status)))
            else:
                # The times of a device are not those of a file: it may be everybody's.
                facts.append((name, mode, status.st_uid, status.st_gid, status.st_rdev))
        if weak:
            self._weak.add(path)
        return hashlib.blake2b(marshal.dumps(facts, 2), digest_size=16).digest()


def enter_readable(name: str, parent: Optional[int]) -> int:
    """Open a directory as it is; -1 if that is not allowed."""
    try:
        return os.open(name, O_DIRECTORY, dir_fd=parent)
    except PermissionError:
        return -1


def _from_top(top: int) -> Callable[[str, Optional[int]], int]:
    """Begin a walk at a directory of which there is a descriptor already."""
    return lambda name, parent: (
        os.open(".", O_DIRECTORY, dir_fd=top) if parent is None else enter_readable(name, parent)
    )


def _contents(scanner: Scanner, name: str, parent: int, status: os.stat_result) -> bytes:
    try:
        fd = os.open(name, O_FILE, dir_fd=parent)
    except PermissionError:
        return b"closed"
    try:
        scanner.hashed += 1
        return sha256(fd, status.st_size)
    finally:
        os.close(fd)
