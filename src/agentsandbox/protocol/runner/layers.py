# SPDX-License-Identifier: Apache-2.0
"""
The layers of an image that differ from what is on disk: what is hidden, and what is replaced.

With mapped ids, root in a sandbox may read whatever root's files the mounts show. So everything that the host keeps
from its own ordinary users is hidden before the first sandbox is made, by a layer above it in every overlay.

This module runs inside the boundary, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from . import mounts

MASKS = "/masks"
"""Where these layers are. Not reachable from a sandbox."""

MAX_ACCOUNTS = 4 * 1024 * 1024
"""Account files of an image are read up to this size, in bytes."""

LAST_SYSTEM_ID = 999
NOBODY = 65534

HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"


def build(plan: Dict[str, Any]) -> None:
    """
    Make the masks of all overlays of a plan.

    Each overlay comes as ``at``: where it is mounted in a sandbox; ``name``; ``source``: the directory below it;
    ``scan``: its parts that are searched for what must be hidden; ``accounts``: ``host`` or ``image`` if it has the
    account files; ``etc``: where these are in it; ``user``: name, id and home that they must have.

    It becomes where it is mounted and its lower layers, the uppermost first. One that cannot be an overlay, because
    something is mounted below it that an unprivileged process may not uncover, is copied if it holds the accounts, and
    shown read-only if not.
    """
    overlays = []
    for overlay in plan["overlays"]:
        source, kind = overlay["source"], overlay.get("accounts")
        covered = _mounted_below(source)
        if covered and kind != "host":
            plan["binds"].append(source)
            continue
        mask = MASKS + "/" + overlay["name"]
        os.makedirs(mask, 0o755)
        os.chmod(mask, stat.S_IMODE(os.stat(source).st_mode))
        if covered:
            copy(source, mask)
        else:
            for part in overlay.get("scan", ()):
                hide(source, part, mask)
        if kind:
            for path, (mode, text) in _accounts(source, overlay["etc"], kind, overlay["user"]).items():
                _write(_parents(source, path, mask), mode, text)
        lower = [mask] if os.listdir(mask) else []
        overlays.append([overlay["at"], lower if covered else lower + [source]])
    plan["overlays"] = overlays


def copy(source: str, target: str) -> None:
    """Copy what everybody may read."""
    for directory, directories, names in os.walk(source):
        there = os.path.join(target, os.path.relpath(directory, source))
        for name in directories + names:
            path, onto = os.path.join(directory, name), os.path.join(there, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(path), onto)
            elif stat.S_ISDIR(mode):
                if _open_to_all(mode):
                    os.mkdir(onto)
                    os.chmod(onto, stat.S_IMODE(mode) | 0o700)
                else:
                    directories.remove(name)
            elif stat.S_ISREG(mode) and _open_to_all(mode):
                shutil.copyfile(path, onto)
                os.chmod(onto, stat.S_IMODE(mode))


def hide(source: str, part: str, mask: str) -> None:
    """Hide everything below *part* of *source* that not everybody may read."""
    for directory, directories, names in os.walk(os.path.join(source, part)):
        for name in directories + names:
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                continue
            if _open_to_all(mode) and not stat.S_ISSOCK(mode):
                continue
            if name in directories:
                directories.remove(name)
            target = _parents(source, os.path.relpath(path, source), mask)
            if target is not None:
                os.mknod(target, stat.S_IFCHR, 0)  # how overlays say that something is not there


def _open_to_all(mode: int) -> bool:
    wanted = 0o005 if stat.S_ISDIR(mode) else 0o004
    return mode & wanted == wanted


def _mounted_below(source: str) -> bool:
    return any(mount.place.startswith(source + "/") for mount in mounts.table())


def _write(path: Optional[str], mode: int, text: str) -> None:
    if path is not None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))


def _parents(source: str, path: str, mask: str) -> Optional[str]:
    """Make the directories above *path* in *mask* like those in *source*. ``None`` if they are no directories there."""
    done = ""
    for part in path.split("/")[:-1]:
        done = os.path.join(done, part)
        try:
            status = os.lstat(os.path.join(source, done))
        except FileNotFoundError:
            os.makedirs(os.path.join(mask, done), 0o755, exist_ok=True)
            continue
        if not stat.S_ISDIR(status.st_mode):
            return None
        target = os.path.join(mask, done)
        if not os.path.isdir(target):
            os.mkdir(target)
            os.chmod(target, stat.S_IMODE(status.st_mode))
            if status.st_uid or status.st_gid:
                try:
                    os.chown(target, status.st_uid, status.st_gid)
                except OSError:  # an id that is not mapped here; then it belongs to root
                    pass
    target = os.path.join(mask, path)
    if os.path.lexists(target):
        os.unlink(target)  # a whiteout
    return target


def _accounts(source: str, prefix: str, kind: str, user: Sequence[Any]) -> Dict[str, Tuple[int, str]]:
    """
    Return account files that have the sandbox's user, by path.

    Of the host's accounts only those of the system are kept: who its people are is nobody's business.
    """
    etc, host = os.path.join(source, prefix), kind == "host"
    name, uid, home = user
    passwd, group = _lines(etc + "/passwd"), _lines(etc + "/group")
    if host:
        passwd, group = _of_system(passwd), _of_system(group)
        known = {line.split(":")[0] for line in passwd}
        group = [":".join(line.split(":")[:3] + [_members(line, known)]) for line in group]
    if not any(line.startswith("root:") for line in passwd):
        passwd.insert(0, "root:x:0:0:root:/root:/bin/sh")
    if not any(line.startswith("root:") for line in group):
        group.insert(0, "root:x:0:")
    if not any(line.startswith(name + ":") for line in passwd):
        passwd.append("%s:x:%d:%d:sandbox:%s:/bin/sh" % (name, uid, uid, home))
    if not any(line.startswith(name + ":") for line in group):
        group.append("%s:x:%d:" % (name, uid))
    files = {"passwd": (0o644, passwd), "group": (0o644, group)}
    if host:
        files["shadow"] = (0o600, [line.split(":")[0] + ":*:19000:0:99999:7:::" for line in passwd])
        files["gshadow"] = (0o600, [line.split(":")[0] + ":*::" for line in group])
    found = {key: (mode, "\n".join(lines) + "\n") for key, (mode, lines) in files.items()}
    found.update(hosts=(0o644, HOSTS), hostname=(0o644, "sandbox\n"))
    return {os.path.join(prefix, key): value for key, value in found.items()}


def _of_system(lines: List[str]) -> List[str]:
    kept = []
    for line in lines:
        fields = line.split(":")
        if len(fields) > 2 and fields[2].isdigit() and (int(fields[2]) <= LAST_SYSTEM_ID or int(fields[2]) == NOBODY):
            kept.append(line)
    return kept


def _members(line: str, known: Set[str]) -> str:
    fields = line.split(":")
    return ",".join(name for name in (fields[3].split(",") if len(fields) > 3 else ()) if name in known)


def _lines(path: str) -> List[str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return []
        return file.read(MAX_ACCOUNTS).decode("utf-8", "surrogateescape").splitlines()
