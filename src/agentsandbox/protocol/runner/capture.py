# SPDX-License-Identifier: Apache-2.0
"""
Show a driver what a sandbox holds, or what changed in it since its baseline, and make it hold that again.

Everything travels as lines of JSON with the contents of files between them, because there can be more of it than a
report holds. What is installed goes through the same restoring and verifying as a reset, and leaves the baseline alone.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import stat
import sys
from typing import Any, BinaryIO, Callable, Dict, List, Optional, Tuple

from agentsandbox.protocol import frames

from . import processes, surroundings
from .files import STDIN, STDOUT, failure, write_all
from .pristine import COPIES, MANIFEST, NOT_FIRST, STAMPS, STORES, Vault, _nameless, _read, _roots
from .restore import DIGEST, GROUP, KEPT, LINKS, SIZE, START, Restorer
from .scan import (
    MAX_DEPTH,
    Entry,
    Scanner,
    Tree,
    Unverifiable,
    enter_scope,
    join,
    open_directory,
    open_file,
    stamp,
    take,
)
from .storing import CHUNK, Store

FLUSH_AT = 256 * 1024

Answer = Dict[str, Any]


class TooLarge(Exception):
    """More than the driver wants to have."""

    def __init__(self, path: str, size: int, reason: str) -> None:
        super().__init__(path)
        self.report = {"too_large": path, "size": size, "reason": reason}


def run(builtin: str, path: bytes, args: Dict[str, Any], report: int, vault: Vault, relay: Optional[int]) -> int:
    """
    Do what was asked, in a child of the runner with all of its rights, and report on it.

    Args:
        builtin: One of :data:`WORK`.
        path: The working directory.
        args: ``scope``: directories; ``limit``: bytes to send at most; ``skip``: paths that are nobody's business;
            ``manifest`` and ``stamps``: the hashes of the baseline; ``kill``: whether to end every process first.
        report: Where the report goes to.
        vault: What the runner keeps.
        relay: The process that holds our stream open, if one does.

    Returns:
        The exit code.

    """
    gc.disable()
    sys.setrecursionlimit(3 * MAX_DEPTH + 1000)
    answer: Answer = {"verified": False, "reason": "", "touched": False}
    code = 0
    try:
        if not vault.first:
            raise Unverifiable(NOT_FIRST)  # what is around is somebody else's
        if args.get("kill"):
            process = None if relay is None else processes.read(relay)
            answer["killed"] = len(surroundings.kill_all(None if process is None else process.key))
        WORK[builtin](args, vault, answer)
        answer["verified"] = True
    except TooLarge as error:
        answer.update(error.report)
    except Unverifiable as error:
        answer["reason"] = str(error)[:2000]
    except OSError as error:
        told = failure(error, path)
        if builtin == "install":
            answer["reason"] = told["error"]["message"][:2000]  # the driver has to know whether it had begun
        else:
            answer.update(told)
            code = 1
    except (MemoryError, RecursionError, ValueError) as error:
        answer["reason"] = "%s: %s" % (type(error).__name__, str(error)[:500])
    os.write(report, frames.dump(answer))
    return code


class _Out:
    """Lines and contents on their way to the driver."""

    def __init__(self, limit: Optional[int]) -> None:
        self.size = 0
        self.limit = limit
        self._held: List[bytes] = []
        self._held_size = 0

    def line(self, value: Any, path: str = "") -> None:
        self.data(json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n", path)

    def data(self, data: bytes, path: str) -> None:
        self.size += len(data)
        if self.limit is not None and self.size > self.limit:
            raise TooLarge(path, len(data), "all changes together are over the limit")
        self._held.append(data)
        self._held_size += len(data)
        if self._held_size >= FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        write_all(STDOUT, b"".join(self._held))
        self._held, self._held_size = [], 0


def _plain(entry: Optional[Entry]) -> Any:
    """Turn an entry into what JSON can carry."""
    if entry is None:
        return None
    kind, mode, uid, gid, modified, flags, attributes = entry[:KEPT]
    common = [kind, mode, uid, gid, modified, flags, [[name, value.hex()] for name, value in attributes]]
    if kind == "f":
        return common + [entry[SIZE], entry[DIGEST].hex(), entry[GROUP], entry[LINKS]]
    return common + list(entry[KEPT:])


def _entry(plain: List[Any], copies: Dict[str, int], links: int) -> Entry:
    kind, mode, uid, gid, modified, flags, attributes = plain[:KEPT]
    common = (kind, mode, uid, gid, modified, flags, tuple((name, bytes.fromhex(value)) for name, value in attributes))
    if kind != "f":
        return common + tuple(plain[KEPT:])
    size, digest, group = plain[KEPT : KEPT + 3]
    return common + (size, bytes.fromhex(digest), copies.get(digest, -1), group, True, links)


def _capture(args: Dict[str, Any], _vault: Vault, answer: Answer) -> None:
    """Send what is in some directories."""
    scope = _roots(args["scope"])
    tree, _ = take(Scanner(set()), scope)
    out = _Out(args.get("limit"))
    skip = set(args.get("skip") or ())
    for directory in sorted(tree):
        for name in sorted(tree[directory]):
            path = join(directory, name) if directory else name
            if path not in skip:
                out.line([path, _plain(tree[directory][name])], path)
    out.flush()
    answer["scope"] = scope


def _contents(_args: Dict[str, Any], _vault: Vault, _answer: Answer) -> None:
    """Send the files whose paths come, one a line."""
    out = _Out(None)
    with os.fdopen(os.dup(STDIN), "rb") as wanted:
        for line in wanted:
            path = json.loads(line.decode())
            parent = enter_scope(os.path.dirname(path), None)
            try:
                fd = open_file(os.path.basename(path), parent)
            except OSError as error:
                error.filename = path
                raise
            finally:
                os.close(parent)
            try:
                left = os.fstat(fd).st_size
                out.line([path, left])
                while left:
                    part = os.read(fd, min(left, CHUNK))
                    if not part:
                        raise OSError(errno.ESTALE, "it changes while it is read", path)
                    out.data(part, path)
                    left -= len(part)
            finally:
                os.close(fd)
    out.flush()


def _install(_args: Dict[str, Any], _vault: Vault, answer: Answer) -> None:
    """Make directories hold what comes, and nothing else. Nothing is changed before everything has come."""
    with os.fdopen(os.dup(STDIN), "rb") as source:
        head = json.loads(source.readline().decode())
        plain = dict(json.loads(source.readline().decode()) for _ in range(head["entries"]))
        copies, store = _staged(source, head["blobs"])
    scope: List[str] = head["scope"]
    if _roots(scope) != scope:
        raise Unverifiable("%s: not all of these are directories here" % ", ".join(scope))
    members: Dict[str, int] = {}
    for entry in plain.values():
        if entry[0] == "f" and entry[KEPT + 2]:
            members[entry[KEPT + 2]] = members.get(entry[KEPT + 2], 0) + 1
    tree: Tree = {"": {}}
    for path in sorted(plain):
        entry = _entry(plain[path], copies, members.get(plain[path][KEPT + 2], 1) if plain[path][0] == "f" else 1)
        if path in scope:
            tree[""][path] = entry
        else:
            tree[os.path.dirname(path)][os.path.basename(path)] = entry
        if entry[0] == "d":
            tree[path] = {}
    answer["touched"] = True
    restorer = Restorer(Scanner(set()), tree, {"": {}}, store)
    restorer.run()
    answer["changed"] = len(set(restorer.changed))


def _staged(source: BinaryIO, count: int) -> Tuple[Dict[str, int], int]:
    """Take the contents of files into a file without a name; return where each is in it."""
    fd = _nameless(STORES)
    store, copies = Store(fd, sys.maxsize), {}
    for _ in range(count):
        digest, size = json.loads(source.readline().decode())
        copies[digest], found = store.end, hashlib.sha256()
        while size:
            part = source.read(min(size, CHUNK))
            if not part:
                raise ValueError("what is to be installed ends early")
            found.update(part)
            store.add(part)
            size -= len(part)
        if found.hexdigest() != digest:
            raise ValueError("%s did not arrive as it was sent" % digest)
    store.flush()
    os.ftruncate(fd, store.end)
    return copies, fd


def _changes(args: Dict[str, Any], vault: Vault, answer: Answer) -> None:
    """Send what is not as it was at the baseline, with the contents before and after."""
    if not vault.descriptors:
        raise Unverifiable("baseline missing")
    manifest = _read(MANIFEST, args["manifest"])
    comparison = _Comparison(manifest, _read(STAMPS, args["stamps"]), _Out(args["limit"]), set(args.get("skip") or ()))
    comparison.run()
    answer["scope"] = sorted(manifest["tree"][""])


class _Comparison:
    """Looks for changes, once."""

    def __init__(self, manifest: Dict[str, Any], stamps: Any, out: _Out, skip: Any) -> None:
        self._tree: Tree = manifest["tree"]
        self._stamps = stamps
        self._scanner = Scanner(set(manifest["mute"]))
        self._out = out
        self._skip = skip
        self._links: Dict[Tuple[int, int], List[str]] = {}

    def run(self) -> None:
        for root, entry in sorted(self._tree[""].items()):
            try:
                fd = enter_scope(root, None)
            except OSError:
                self._gone(root, entry)
                continue
            try:
                own = os.fstat(fd)
                self._tell(root, entry, ("d", own.st_mode, own.st_uid, own.st_gid, 0, entry[5], entry[6]))
                self._directory(fd, root)
            finally:
                os.close(fd)
        self._out.line({"links": sorted(sorted(names) for names in self._links.values() if len(names) > 1)})
        self._out.flush()

    def _directory(self, fd: int, path: str) -> None:
        wanted, known = self._tree.get(path, {}), self._stamps.get(path) or {}
        missing = set(wanted)
        for name, status in self._scanner.directory(fd, path):
            place, old = join(path, name), wanted.get(name)
            missing.discard(name)
            if place in self._skip:
                continue
            kind = stat.S_IFMT(status.st_mode)
            if stat.S_ISREG(kind) and status.st_nlink > 1:
                self._links.setdefault((status.st_dev, status.st_ino), []).append(place)
            unchanged = old is not None and stamp(status) == known.get(name)  # its type, too
            if unchanged and not stat.S_ISDIR(kind) and status.st_dev not in self._scanner.mute:
                continue
            self._tell(place, old, self._scanner.entry(name, fd, place, status), (fd, name))
            if old is not None and old[0] == "d" and not stat.S_ISDIR(kind):
                self._below_gone(place)
            if stat.S_ISDIR(kind):
                child = open_directory(name, fd)
                try:
                    self._directory(child, place)
                finally:
                    os.close(child)
        for name in sorted(missing):
            if join(path, name) not in self._skip:
                self._gone(join(path, name), wanted[name])

    def _gone(self, path: str, entry: Entry) -> None:
        self._tell(path, entry, None)
        if entry[0] == "d":
            self._below_gone(path)

    def _below_gone(self, path: str) -> None:
        for name, entry in sorted(self._tree.get(path, {}).items()):
            self._gone(join(path, name), entry)

    def _tell(
        self, path: str, old: Optional[Entry], new: Optional[Entry], place: Optional[Tuple[int, str]] = None
    ) -> None:
        if old is not None and new is not None and _same(old, new):
            return
        before = old if old is not None and old[0] == "f" else None
        after = new if new is not None and new[0] == "f" else None
        if before is not None and after is not None and before[DIGEST] == after[DIGEST]:
            before = after = None
        a = self._before(path, before) if before is not None else None
        b = self._after(path, *place) if after is not None and place is not None else None
        sizes = [-1 if data is None else len(data) for data in (a, b)]
        self._out.line([path, _plain(old), _plain(new)] + sizes, path)
        for data in (a, b):
            if data:
                self._out.data(data, path)

    def _before(self, path: str, entry: Entry) -> bytes:
        if entry[START] < 0:
            raise TooLarge(path, entry[SIZE], "the baseline has no copy of it")
        self._room(path, entry[SIZE])
        data = b""
        while len(data) < entry[SIZE]:
            part = os.pread(COPIES, entry[SIZE] - len(data), entry[START] + len(data))
            if not part:
                break
            data += part
        if hashlib.sha256(data).digest() != entry[DIGEST]:
            raise Unverifiable("the copy of %s is damaged" % path)
        return data

    def _after(self, path: str, parent: int, name: str) -> bytes:
        fd = open_file(name, parent)
        try:
            parts: List[bytes] = []
            size = 0
            while True:
                part = os.read(fd, CHUNK)
                if not part:
                    return b"".join(parts)
                parts.append(part)
                size += len(part)
                self._room(path, max(size, os.fstat(fd).st_size))
        finally:
            os.close(fd)

    def _room(self, path: str, size: int) -> None:
        if self._out.limit is not None and self._out.size + size > self._out.limit:
            raise TooLarge(path, size, "all changes together are over the limit")


def _same(old: Entry, new: Entry) -> bool:
    """Whether nothing changed but when it was changed."""
    if old[:4] != new[:4] or old[5:KEPT] != new[5:KEPT]:
        return False
    if old[0] == "f":
        return bool(old[DIGEST] == new[DIGEST] and old[LINKS] == new[LINKS])
    return bool(old[KEPT:] == new[KEPT:])


WORK: Dict[str, Callable[[Dict[str, Any], Vault, Answer], None]] = {
    "capture": _capture,
    "changes": _changes,
    "contents": _contents,
    "install": _install,
}
