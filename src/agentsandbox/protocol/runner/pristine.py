# SPDX-License-Identifier: Apache-2.0
"""
Remember what a sandbox is like before its first episode, and make it like that again.

Everything is kept in files without a name that only the runner has open; whoever asks for a reset shows the hashes that
it was given, so that nothing is restored that is not what was there.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import marshal
import os
import stat
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from agentsandbox.protocol import frames

from . import processes, surroundings
from .around import Around
from .mounts import by_place
from .restore import Restorer
from .scan import MAX_DEPTH, Scanner, Unverifiable, join, silent_devices, take, tick
from .sealing import ancestors, older_than
from .storing import Store

NOT_FIRST = "the runner is not the first process of a namespace"

MOST_REPORTED = 100
"""How many paths are named; all are counted."""

MAX_REPORT = 48 * 1024
"""How long a report may be, in bytes: nobody reads it before we have ended, and a pipe takes 64 KiB."""

STORES = ("/var/tmp", "/tmp", "/dev/shm")
"""Where the copies are kept: on disk rather than in memory."""

MANIFEST, STAMPS, COPIES = 3, 4, 5
"""Descriptors of a child that takes a baseline or resets."""


class Vault:
    """
    What the runner keeps between a baseline and the resets.

    Args:
        uppers: Where overlays are mounted whose lower layers nobody can change, and descriptors of what is on top.

    """

    def __init__(self, uppers: Mapping[str, int]) -> None:
        self.uppers = dict(uppers)
        self.first = os.getpid() == 1
        """Whether all that we can signal is the sandbox's; asked of the runner itself, whose child may be anybody's."""
        self.descriptors: Tuple[int, ...] = ()
        self.relay: Optional[processes.Key] = None
        self.home = ""
        """That of the sandbox's own user."""
        self.users: Set[int] = set()
        """Ids that commands ran as since the last time that everything was as it is to be."""

    def __repr__(self) -> str:
        return "<Vault [%s]>" % ("filled" if self.descriptors else "empty")

    def open(self, relay: Optional[int]) -> None:
        """Make room for a baseline, in place of an older one."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = ()
        self.users = set()
        process = None if relay is None else processes.read(relay)
        self.relay = None if process is None else process.key
        self.descriptors = (_nameless(()), _nameless(()), _nameless(STORES))


def run(builtin: str, path: bytes, args: Dict[str, Any], report: int, vault: Vault) -> int:
    """
    Do what was asked, in a child of the runner with all of its rights, and report on it.

    Args:
        builtin: ``baseline`` or ``reset``.
        path: The working directory.
        args: ``baseline``: ``scope`` and ``exclude``, lists of directories; ``copies``: how many bytes to keep;
            ``whole``: whether to look at everything although looking at the changes would do. ``reset``: ``manifest``
            and ``stamps``: the hashes that are expected.
        report: Where the report goes to.
        vault: What the runner keeps; its descriptors are :data:`MANIFEST` and the following.

    Returns:
        The exit code.

    """
    gc.disable()  # what it finds in here lives as long as we do
    sys.setrecursionlimit(3 * MAX_DEPTH + 1000)
    began = time.monotonic()
    answer: Dict[str, Any] = {"changed": [], "killed": []}
    try:
        if builtin == "baseline":
            _baseline(path, args, vault, answer)
        else:
            _reset(args, vault, answer)
        answer.update(verified=True, reason="")
    except Unverifiable as error:
        answer.update(verified=False, reason=str(error))
    except OSError as error:
        place = error.filename or ""
        if isinstance(place, bytes):
            place = place.decode("utf-8", "surrogateescape")
        answer.update(verified=False, reason=("%s: " % place if place else "") + (error.strerror or str(error)))
    except (MemoryError, RecursionError) as error:
        answer.update(verified=False, reason=type(error).__name__)
    answer["changed"] = list(dict.fromkeys(answer["changed"]))
    answer["count"] = len(answer["changed"])
    answer["changed"] = answer["changed"][:MOST_REPORTED]
    answer["reason"] = answer["reason"][:2000]
    answer["seconds"] = time.monotonic() - began
    data = frames.dump(answer)
    while len(data) > MAX_REPORT:
        for name in ("changed", "killed"):
            answer[name] = answer[name][: len(answer[name]) // 2]
        data = frames.dump(answer)
    os.write(report, data)
    return 0


def _baseline(path: bytes, args: Dict[str, Any], vault: Vault, answer: Dict[str, Any]) -> None:
    root = os.geteuid() == 0 or 0 in vault.users
    if not vault.first:
        raise Unverifiable(NOT_FIRST)
    may_be_root = root or not surroundings.status().get("NoNewPrivs")
    reason = surroundings.obstacle(may_be_root=may_be_root, relay=vault.relay)
    if reason:
        raise Unverifiable(reason)
    surroundings.wait_alone(vault.relay)
    wanted = [os.fsdecode(path), vault.home] + list(args["scope"])
    scope = _roots(wanted)
    excluded = {os.path.realpath(place) for place in args["exclude"]}
    store = Store(COPIES, args["copies"])
    places = scope + [place for place, mount in by_place().items() if not mount.read_only]
    mute = silent_devices([place for place in places if os.path.isdir(place)])
    older = 0 if args.get("whole") or vault.uppers else older_than(by_place()["/"])
    scanner = Scanner(mute, store, older)
    tree, stamps = take(scanner, scope)
    store.flush()
    os.ftruncate(COPIES, store.end)
    scanner.store = None
    inside, watched = scanner.files, scanner.hashed
    around = Around(scope, excluded, {} if args.get("whole") else vault.uppers)
    rest, weak = around.look(scanner)
    manifest = {
        "tree": tree,
        "outside": rest,
        "weak": sorted(weak),
        "excluded": sorted(excluded),
        "whole": bool(args.get("whole")),
        "mute": sorted(mute),
        "older": older,
        "surroundings": surroundings.take(),
    }
    answer.update(
        manifest=_write(MANIFEST, manifest),
        stamps=_write(STAMPS, stamps),
        scope=scope,
        files=inside,
        outside=scanner.files - inside,
        hashed=watched,
        copied=store.used,
        mute=bool(mute),
    )
    tick(scanner.newest)


def _reset(args: Dict[str, Any], vault: Vault, answer: Dict[str, Any]) -> None:
    if not vault.first:
        raise Unverifiable(NOT_FIRST)
    if not vault.descriptors:
        raise Unverifiable("baseline missing")
    manifest = _read(MANIFEST, args["manifest"])
    stamps = _read(STAMPS, args["stamps"])
    answer["killed"] = surroundings.kill_all(vault.relay)
    began = time.monotonic()
    known = manifest["surroundings"]
    removed = surroundings.remove_ipc(known["ipc"])
    answer["changed"] = removed
    surroundings.clear_keys(sorted(vault.users | {os.geteuid()}))
    differences = surroundings.compare(known, manifest["excluded"])
    if differences:
        raise Unverifiable("; ".join(differences[:20]))
    scanner = Scanner(set(manifest["mute"]), older=manifest["older"])
    scope = list(manifest["tree"][""])
    restorer = Restorer(scanner, manifest["tree"], stamps, COPIES)
    restorer.changed = removed
    restorer.run()
    answer["scope_seconds"] = time.monotonic() - began
    answer["files"], answer["hashed"] = scanner.files, scanner.hashed
    began = time.monotonic()
    quick = not scanner.older and 0 not in vault.users and bool(surroundings.status().get("NoNewPrivs"))
    before = manifest["outside"]
    around = Around(scope, set(manifest["excluded"]), {} if manifest["whole"] else vault.uppers)
    after, _ = around.look(scanner, manifest["weak"] if quick else None)
    if quick:
        before = {path: before[path] for path in manifest["weak"]}
    answer["outside_seconds"] = time.monotonic() - began
    answer["outside"] = scanner.files - answer["files"]
    if before != after:
        places = sorted(path for path in set(before) | set(after) if before.get(path) != after.get(path))
        if scanner.older:  # the copies that directories got because of what is below them are no change of their own
            found = ancestors(places)
            places = [path for path in places if path not in found]
        answer["changed"] = answer["changed"] + [join(path, "*") for path in places]
        raise Unverifiable("changed outside of the scope: %s" % ", ".join(places[:10]))
    surroundings.check_alone()
    surroundings.check_room()
    answer["stamps"] = _write(STAMPS, restorer.stamps)
    tick(scanner.newest)


def _roots(wanted: List[str]) -> List[str]:
    """Return the directories of the scope, without those that others hold or that do not exist."""
    places = sorted({os.path.realpath(place) for place in wanted if place and os.path.isdir(place)} - {"/"})
    return [
        place
        for place in places
        if not any(place.startswith(other + "/") for other in places)
        and not stat.S_ISLNK(os.lstat(place).st_mode)
        and os.access(place, os.R_OK | os.X_OK)
    ]


def _write(fd: int, value: Any) -> str:
    data = marshal.dumps(value, 2)
    os.ftruncate(fd, 0)
    view, offset = memoryview(data), 0
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
    return hashlib.sha256(data).hexdigest()


def _read(fd: int, expected: str) -> Any:
    size = os.fstat(fd).st_size
    data = b""
    while len(data) < size:
        part = os.pread(fd, size - len(data), len(data))
        if not part:
            break
        data += part
    if not data:
        raise Unverifiable("baseline missing")
    if hashlib.sha256(data).hexdigest() != expected:
        raise Unverifiable("the baseline is not the one that was taken")
    return marshal.loads(data)


def _nameless(places: Tuple[str, ...]) -> int:
    for place in places:
        try:
            return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
    if hasattr(os, "memfd_create"):
        return os.memfd_create("baseline")
    for place in STORES:
        try:
            return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            continue
    raise OSError(errno.ENOSPC, "there is nowhere to keep a baseline")
