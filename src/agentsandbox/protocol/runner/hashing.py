# SPDX-License-Identifier: Apache-2.0
"""A second process that reads most of the files, where all of them have to be read."""

from __future__ import annotations

import hashlib
import marshal
import os
import struct
from typing import Dict, List, Optional, Set

from .scan import O_FILE, Stamps, Tree, open_path, sha256

WORTH_IT = 2000
"""So many files have to be read before a process pays for itself."""

OURS = 5
"""Of so many directories the files of one are left to who looks at all of them: that takes as long as reading most."""

DIGEST, SIZE = 8, 7


class Helper:
    """
    Compares the contents of its share of the directories while somebody else looks at everything.

    Args:
        tree: What is expected.
        stamps: Where the files were kept.
        mute: Devices whose files have to be read.

    """

    def __init__(self, tree: Tree, stamps: Stamps, mute: Set[int]) -> None:
        self.paths: Set[str] = set()
        """The directories that it answers for."""
        self.count = 0
        """How many files these hold."""
        self._pid = self._reader = -1
        if not mute or len(os.sched_getaffinity(0)) < 2:
            return
        todo = {path: _regular(tree, stamps, mute, path) for path in tree if path}
        if sum(map(len, todo.values())) < WORTH_IT:
            return
        full = [path for path in sorted(todo, key=lambda path: (len(todo[path]), path)) if todo[path]]
        share = [path for number, path in enumerate(full, 1) if number % OURS]
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                answer = {path: _different(tree, path, todo[path]) for path in share}
                view = memoryview(marshal.dumps({path: names for path, names in answer.items() if names}, 2))
                while view:
                    view = view[os.write(writer, view) :]
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        self.paths = set(share)
        self.count = sum(len(todo[path]) for path in share)
        self._pid, self._reader = pid, reader
        self._todo = todo

    def result(self) -> Dict[str, List[str]]:
        """Return the names, by directory, that are not what they are to be; all of them if it did not finish."""
        if self._pid < 0:
            return {}
        parts = []
        while True:
            part = os.read(self._reader, 1 << 16)
            if not part:
                break
            parts.append(part)
        os.close(self._reader)
        pid, self._pid = self._pid, -1
        if os.waitpid(pid, 0)[1] != 0:
            return {path: self._todo[path] for path in self.paths}
        found: Dict[str, List[str]] = marshal.loads(b"".join(parts))
        return found


def _regular(tree: Tree, stamps: Stamps, mute: Set[int], path: str) -> List[str]:
    known = stamps.get(path) or {}
    return [
        name
        for name, entry in tree[path].items()
        if entry[0] == "f" and struct.unpack_from("=Q", known.get(name) or bytes(8))[0] in mute
    ]


def _different(tree: Tree, path: str, names: List[str]) -> List[str]:
    entries = tree[path]
    try:
        fd = open_path(path)
    except OSError:
        return names
    try:
        return [name for name in names if not same_contents(fd, name, entries[name][SIZE], entries[name][DIGEST])]
    finally:
        os.close(fd)


def same_contents(parent: int, name: str, size: int, digest: bytes) -> Optional[bool]:
    """Whether a regular file has these contents; ``None`` if it cannot be read as it is."""
    try:
        fd = os.open(name, O_FILE, dir_fd=parent)
    except OSError:
        return None
    try:
        data = os.read(fd, min(size, 1 << 16) + 1)
        if len(data) == size:
            return hashlib.sha256(data).digest() == digest
        os.lseek(fd, 0, os.SEEK_SET)
        return sha256(fd, size) == digest
    except OSError:
        return None
    finally:
        os.close(fd)
