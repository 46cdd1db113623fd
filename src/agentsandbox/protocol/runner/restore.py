# SPDX-License-Identifier: Apache-2.0
"""Make a tree what its manifest says: compare, put back from the copies, and show that it is the same again."""

from __future__ import annotations

import os
import stat
from typing import Dict, List, Optional, Set, Tuple

from .hashing import Helper, same_contents
from .removing import remove
from .scan import (
    O_FILE,
    Entry,
    Scanner,
    Stamps,
    Tree,
    Unverifiable,
    attributes,
    get_flags,
    join,
    open_directory,
    open_file,
    open_path,
    set_flags,
    sha256,
    stamp,
)
from .storing import copy_back

KEPT, SIZE, DIGEST, START, GROUP, SPARSE, LINKS = 7, 7, 8, 9, 10, 11, 12
"""Places in an entry: what all kinds have ends before the first."""

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Restorer:
    """
    Compares and restores, once.

    Args:
        scanner: What looks.
        tree: How everything is to be.
        stamps: The stamps that it had when it was so.
        store: The file with the copies.

    """

    def __init__(self, scanner: Scanner, tree: Tree, stamps: Stamps, store: int) -> None:
        self.changed: List[str] = []
        """Paths that were not as they are to be."""
        self.stamps: Stamps = {}
        """The stamps that everything has now."""
        self._scanner = scanner
        self._tree = tree
        self._known = stamps
        self._store = store
        self._touched: Set[str] = set()
        self._dirty: Set[str] = set()
        self._broken: Set[str] = set()
        self._timeless: Set[str] = set()

    def run(self) -> None:
        """
        Restore, then verify.

        Raises:
            Unverifiable: If something cannot be restored, or is not the same afterwards.
            OSError: Likewise.

        """
        self.stamps = {**self._known, "": {}}
        self._helper = Helper(self._tree, self._known, self._scanner.mute)
        try:
            self._restore()
        finally:
            differences = self._helper.result()
        self._scanner.hashed += self._helper.count
        for path, names in differences.items():
            self._correct(path, names)
        if self._broken:
            self._link()
        for path in sorted(self._dirty):
            self._verify(path)

    def _restore(self) -> None:
        for root, entry in self._tree[""].items():
            fd = self._open(root)
            try:
                self._directory(fd, root)
                if stamp(os.fstat(fd)) != self._known[""].get(root):
                    self._own(fd, root, entry)
                self.stamps[""][root] = stamp(os.fstat(fd))
            finally:
                os.close(fd)

    def _correct(self, path: str, names: List[str]) -> None:
        """Put back files whose contents alone tell that they were changed."""
        fd = self._open(path)
        try:
            for name in names:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                own, entry = stamp(status), self._tree[path][name]
                if self.stamps[path].get(name) != own:
                    continue  # it was put back meanwhile
                self._scanner.hashed += 1
                if self._digest(name, fd, status.st_size) != entry[DIGEST]:
                    self._file(fd, name, path, entry, status)
        finally:
            os.close(fd)
        self._settle(path)

    def _settle(self, path: str) -> None:
        """Put right what a directory is itself, after something in it was changed."""
        fd = self._open(path)
        try:
            self._own(fd, path, self._entry(path), quiet=True)
            above, _, name = path.rpartition("/")
            place = ("", path) if path in self._tree[""] else (above or "/", name)
            self.stamps[place[0]][place[1]] = stamp(os.fstat(fd))
        finally:
            os.close(fd)

    def _open(self, path: str) -> int:
        try:
            return open_path(path)
        except OSError as error:
            raise Unverifiable("%s: %s" % (path, error.strerror)) from error

    # Comparing and putting back.

    def _directory(self, fd: int, path: str) -> None:
        wanted, known = self._tree[path], self._known.get(path) or {}
        mute, helped = self._scanner.mute, path in self._helper.paths
        stamps = self.stamps[path] = {}
        missing = set(wanted)
        if os.fstat(fd).st_mode & 0o500 != 0o500:
            self._unlock(fd, path)
        for name, status in self._scanner.directory(fd, path):
            entry, own = wanted.get(name), stamp(status)
            same = own == known.get(name)
            if entry is None or (not same and stat.S_IFMT(entry[1]) != stat.S_IFMT(status.st_mode)):
                self._unlock(fd, path)
                remove(fd, name, status)
                self.changed.append(join(path, name))
                continue
            missing.discard(name)
            if entry[0] == "f":
                if same and status.st_dev in mute and not helped:
                    self._scanner.hashed += 1
                    same = bool(same_contents(fd, name, entry[SIZE], entry[DIGEST]))
                if same:
                    stamps[name] = own
                else:
                    self._file(fd, name, path, entry, status)
            elif entry[0] == "d" and same and self._scanner.sealed(join(path, name), status):
                stamps[name] = own
            elif entry[0] == "d":
                child = open_directory(name, fd)
                try:
                    self._directory(child, join(path, name))
                    if stamp(os.fstat(child)) != known.get(name):
                        self._own(child, join(path, name), entry)
                    stamps[name] = stamp(os.fstat(child))
                finally:
                    os.close(child)
            elif same:
                stamps[name] = own
            else:
                self._other(fd, name, path, entry)
        for name in sorted(missing):
            self._unlock(fd, path)
            if join(path, name) not in self.changed[-1:]:
                self.changed.append(join(path, name))
            self._create(fd, name, path, wanted[name])

    def _digest(self, name: str, parent: int, size: int) -> bytes:
        try:
            fd = os.open(name, O_FILE, dir_fd=parent)
        except PermissionError:
            fd = open_file(name, parent)
        try:
            self._scanner.hashed += 1
            return sha256(fd, size)
        finally:
            os.close(fd)

    def _file(self, fd: int, name: str, path: str, entry: Entry, status: os.stat_result) -> None:
        place = join(path, name)
        same = status.st_size == entry[SIZE] and self._digest(name, fd, status.st_size) == entry[DIGEST]
        if entry[GROUP] or status.st_nlink != entry[LINKS]:
            if not entry[GROUP] and status.st_nlink > 1:
                same = False  # some other name leads to it as well: this one gets a file of its own
            elif entry[GROUP]:
                self._broken.add(entry[GROUP])
                self.changed.append(place)
                return
        if not same:
            self._unlock(fd, path)
            os.unlink(name, dir_fd=fd)
            self.changed.append(place)
            self._create(fd, name, path, entry)
            return
        file = open_file(name, fd)
        try:
            self._own(file, place, entry)
        finally:
            os.close(file)
        self._touched.add(place)
        self._dirty.add(path)

    def _other(self, fd: int, name: str, path: str, entry: Entry) -> None:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        self._dirty.add(path)
        if self._scanner.entry(name, fd, join(path, name), status) != entry:
            self._unlock(fd, path)
            os.unlink(name, dir_fd=fd)
            self.changed.append(join(path, name))
            self._create(fd, name, path, entry)
        self._touched.add(join(path, name))

    def _create(self, fd: int, name: str, path: str, entry: Entry) -> None:
        place, kind = join(path, name), entry[0]
        self._touched.add(place)
        if kind == "f":
            if entry[GROUP]:
                self._broken.add(entry[GROUP])
                return
            file = os.open(name, NEW_FILE, 0o600, dir_fd=fd)
            try:
                self._fill(file, place, entry)
                self._own(file, place, entry, quiet=True)
            finally:
                os.close(file)
        elif kind == "d":
            os.mkdir(name, 0o700, dir_fd=fd)
            child = open_directory(name, fd)
            try:
                self._directory(child, place)
                self._own(child, place, entry, quiet=True)
                self.stamps[path][name] = stamp(os.fstat(child))
            finally:
                os.close(child)
        else:
            if kind == "l":
                os.symlink(entry[KEPT], name, dir_fd=fd)
            else:
                os.mknod(name, entry[1], entry[KEPT], dir_fd=fd)
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if (status.st_uid, status.st_gid) != entry[2:4]:
                os.chown(name, entry[2], entry[3], dir_fd=fd, follow_symlinks=False)
            if kind == "o":
                handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                os.chmod("/proc/self/fd/%d" % handle, stat.S_IMODE(entry[1]))
                os.close(handle)
            os.utime(name, ns=(entry[4], entry[4]), dir_fd=fd, follow_symlinks=False)

    def _fill(self, file: int, place: str, entry: Entry) -> None:
        if entry[START] < 0:
            raise Unverifiable("%s is too large: no copy of it was kept" % place)
        if copy_back(self._store, file, entry[START], entry[SIZE], sparse=entry[SPARSE]) != entry[DIGEST]:
            raise Unverifiable("the copy of %s is damaged" % place)

    def _own(self, fd: int, place: str, entry: Entry, *, quiet: bool = False) -> None:
        """Give an open file or directory the owner, mode, flags, attributes and time that it is to have."""
        _, mode, uid, gid, modified, flags, wanted = entry[:KEPT]
        status = os.fstat(fd)
        differs = False
        if (status.st_uid, status.st_gid) != (uid, gid):
            os.fchown(fd, uid, gid)
            differs = True
        if get_flags(fd) != flags:
            set_flags(fd, flags)
            differs = True
        present = dict(attributes(fd))
        for name, value in wanted:
            if present.pop(name, None) != value:
                os.setxattr(fd, name, value)
                differs = True
        for name in present:
            os.removexattr(fd, name)
            differs = True
        if os.fstat(fd).st_mode != mode:
            os.fchmod(fd, stat.S_IMODE(mode))
            differs = True
        if os.fstat(fd).st_mtime_ns != modified:
            try:
                os.utime(fd, ns=(status.st_atime_ns, modified))
            except PermissionError:
                if entry[0] != "d":
                    raise
                # Somebody else's directory that everybody may write to: only its owner, or root, sets its time.
                self._timeless.add(place)
            differs = differs or entry[0] == "f"
        if differs and not quiet:
            self.changed.append(place)
        if entry[0] == "d":
            self._touched.add(place)
            self._dirty.add(place)

    def _unlock(self, fd: int, path: str) -> None:
        """Be able to change a directory of ours; its mode is put right when it is done."""
        self._dirty.add(path)
        status = os.fstat(fd)
        if status.st_mode & 0o700 != 0o700 and status.st_uid == os.geteuid():
            os.fchmod(fd, stat.S_IMODE(status.st_mode) | 0o700)

    def _link(self) -> None:
        """Make the hard links of the groups of which one was changed anew."""
        members: Dict[str, List[Tuple[str, str, Entry]]] = {}
        for path, entries in self._tree.items():
            for name, entry in entries.items():
                if entry[0] == "f" and entry[GROUP] in self._broken:
                    members.setdefault(entry[GROUP], []).append((path, name, entry))
        directories = set()
        for group in members.values():
            if len(group) != group[0][2][LINKS]:
                raise Unverifiable("%s has names outside the scope" % join(*group[0][:2]))
            source: Optional[str] = None
            for path, name, entry in group:
                directories.add(path)
                fd = open_path(path)
                try:
                    self._unlock(fd, path)
                    try:
                        os.unlink(name, dir_fd=fd)
                    except FileNotFoundError:
                        pass
                    if source is None:
                        source = join(path, name)
                        file = os.open(name, NEW_FILE, 0o600, dir_fd=fd)
                        self._fill(file, source, entry)
                        self._own(file, source, entry, quiet=True)
                    else:
                        os.link("/proc/self/fd/%d" % file, name, dst_dir_fd=fd, follow_symlinks=True)
                finally:
                    os.close(fd)
                self._touched.add(join(path, name))
            os.close(file)
        for path in sorted(directories, reverse=True):
            self._settle(path)

    # Showing that it is the same. Nothing runs meanwhile: what was found unchanged a moment ago still is.

    def _verify(self, path: str) -> None:
        """Look again at a directory in which something was changed."""
        wanted, seen = self._tree[path], self.stamps[path]
        fd = self._open(path)
        try:
            self._same(path, self._entry(path), fd)
            found = self._scanner.directory(fd, path)
            if [name for name, _ in found] != sorted(wanted):
                raise Unverifiable("%s does not have the same entries after it was restored" % path)
            for name, status in found:
                entry, place = wanted[name], join(path, name)
                if entry[0] == "d":
                    if place in self._touched:
                        child = open_directory(name, fd)
                        try:
                            self._same(place, entry, child)
                        finally:
                            os.close(child)
                elif place in self._touched:
                    now = self._scanner.entry(name, fd, place, status)
                    # Where the copy is, and what its group is called, is no property of the file.
                    if now[:START] != entry[:START] or now[LINKS:] != entry[LINKS:]:
                        raise Unverifiable("%s is not the same after it was restored" % place)
                elif seen.get(name) != stamp(status):
                    raise Unverifiable("%s changed while it was restored" % place)
                seen[name] = stamp(status)
        finally:
            os.close(fd)

    def _same(self, path: str, entry: Entry, fd: int) -> None:
        status = os.fstat(fd)
        modified = entry[4] if path in self._timeless else status.st_mtime_ns
        now = ("d", status.st_mode, status.st_uid, status.st_gid, modified, get_flags(fd), attributes(fd))
        if now != entry:
            raise Unverifiable("%s is not the same after it was restored" % path)
        self._scanner.newest = max(self._scanner.newest, status.st_ctime_ns)

    def _entry(self, path: str) -> Entry:
        if path in self._tree[""]:
            return self._tree[""][path]
        above, _, name = path.rpartition("/")
        return self._tree[above or "/"][name]
