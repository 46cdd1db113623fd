# SPDX-License-Identifier: Apache-2.0
"""From what a runner tells of a sandbox to what a person reads: a list of changes, and a patch."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentsandbox.client.patches import Budget, Side, is_binary, patch
from agentsandbox.models.changes import Change, ChangeKind, Diff

if TYPE_CHECKING:
    from agentsandbox.session.changes import Entry, Pair

__all__ = ["DIFF_LIMIT", "diff_of", "type_of"]

DIFF_LIMIT = 64 * 1024**2
"""Bytes that all names, old and new contents of one diff may take when nothing is said: it is held in memory."""

PLAIN_MODES = (0o644, 0o755)
"""What git knows of permissions."""

_TYPES = {"f": "file", "d": "directory", "l": "symlink"}
_OTHERS = {stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket"}


def type_of(entry: Entry) -> str:
    """Return what an entry is, in a word."""
    return _TYPES.get(entry.kind) or _OTHERS.get(stat.S_IFMT(entry.mode), "device")


def diff_of(pairs: Sequence[Pair], links: Sequence[Sequence[str]], *, root: str, scope: Sequence[str]) -> Diff:
    """
    Make a diff.

    Args:
        pairs: What changed.
        links: Names of files that have several.
        root: The directory that the patch is about.
        scope: The directories that were compared.

    """
    names = {name: tuple(other for other in group if other != name) for group in links for name in group}
    ordered = sorted(pairs, key=lambda pair: os.fsencode(pair.path))
    below = root.rstrip("/") + "/"
    inside = [pair for pair in ordered if pair.path.startswith(below)]
    gone: list[bytes] = []
    come: list[bytes] = []
    carried: set[str] = set()
    budget = Budget()
    for pair in inside:
        old, new = _side(pair.old, pair.before), _side(pair.new, pair.after)
        path = os.fsencode(pair.path[len(below) :])
        if _internal(path):
            continue
        if old is not None and new is not None and stat.S_IFMT(old.mode) == stat.S_IFMT(new.mode):
            if pair.before is None and pair.after is None and pair.new is not None and pair.new.kind == "f":
                old, new = Side(old.mode, b""), Side(new.mode, b"")  # the same contents, whatever they are
            if old != new:
                come += patch(path, old, new, budget)
        else:
            if old is not None:
                gone += patch(path, old, None, budget)
            if new is not None:
                come += patch(path, None, new, budget)
        if old is not None or new is not None:
            carried.add(pair.path)
    parents = _parents(carried, below)
    changes = tuple(_change(pair, names, below, parents) for pair in ordered)
    return Diff(changes=changes, patch=b"".join([*gone, *come]), root=root, scope=tuple(scope))


def _internal(path: bytes) -> bool:
    """Whether git keeps a name to itself, and takes no patch for it."""
    for name in path.lower().split(b"/"):
        plain = name.split(b":")[0].rstrip(b" .")
        if plain in (b".git", b"git~1") or name == b".gitmodules":
            return True
    return False


def _side(entry: Entry | None, content: bytes | None) -> Side | None:
    if entry is None or entry.kind not in ("f", "l"):
        return None
    if entry.kind == "l":
        return Side(0o120000, os.fsencode(entry.target))
    return Side(0o100755 if entry.mode & 0o100 else 0o100644, content or b"")


def _parents(paths: set[str], below: str) -> set[str]:
    found = set()
    for path in paths:
        above = posixpath.dirname(path)
        while above.startswith(below) and above not in found:
            found.add(above)
            above = posixpath.dirname(above)
    return found


def _change(pair: Pair, names: Mapping[str, tuple[str, ...]], below: str, parents: set[str]) -> Change:
    old, new = pair.old, pair.new
    kind = ChangeKind.ADDED if old is None else ChangeKind.DELETED if new is None else ChangeKind.MODIFIED
    links = names.get(pair.path, ())
    whole = pair.path.startswith(below) and not _internal(os.fsencode(pair.path[len(below) :]))
    whole = whole and not links and _goes(pair, parents) and _comes(pair, parents)
    return Change(
        path=pair.path,
        kind=kind,
        type=type_of(new) if new else None,
        old_type=type_of(old) if old else None,
        mode=stat.S_IMODE(new.mode) if new else None,
        old_mode=stat.S_IMODE(old.mode) if old else None,
        owner=(new.uid, new.gid) if new else None,
        old_owner=(old.uid, old.gid) if old else None,
        size=new.size if new and new.kind == "f" else None,
        old_size=old.size if old and old.kind == "f" else None,
        target=new.target if new and new.kind == "l" else None,
        old_target=old.target if old and old.kind == "l" else None,
        binary=is_binary(pair.before or b"") or is_binary(pair.after or b""),
        links=links,
        patched=whole,
    )


def _goes(pair: Pair, parents: set[str]) -> bool:
    """Whether a patch can take away what was there, as far as it has to go."""
    old, new = pair.old, pair.new
    if old is None or (new is not None and new.kind == old.kind):
        return True
    return old.kind in ("f", "l") or (old.kind == "d" and pair.path in parents)


def _comes(pair: Pair, parents: set[str]) -> bool:
    """Whether a patch can make what is there now, from what was."""
    old, new = pair.old, pair.new
    if new is None:
        return True
    if old is not None and old.kind == new.kind:
        kept = (old.uid, old.gid, old.flags, old.attributes) == (new.uid, new.gid, new.flags, new.attributes)
        if not kept or new.kind in ("d", "o") or old.links != new.links:
            return False
        return old.mode == new.mode or {stat.S_IMODE(old.mode), stat.S_IMODE(new.mode)} <= set(PLAIN_MODES)
    if new.attributes or new.flags or new.kind == "o":
        return False
    if new.kind == "d":
        return pair.path in parents and stat.S_IMODE(new.mode) == PLAIN_MODES[1]
    return new.kind == "l" or stat.S_IMODE(new.mode) in PLAIN_MODES
