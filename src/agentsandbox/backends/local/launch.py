# SPDX-License-Identifier: Apache-2.0
"""
Start ``bwrap`` as root of a user namespace whose ids are those of nobody on the host.

A program of its own, run by root in place of ``bwrap`` and ended by becoming it. What ``bwrap`` is to show is put under
a private mount first: with ids mapped, so that files of root belong to root of the namespace, and reachable, although
the path to it may lead through a home directory that is closed to everybody else.

Usage: ``launch.py CONFIG``, a JSON object: ``base`` and ``count`` of the ids, ``argv`` of ``bwrap``, in which an
argument that begins with ``@N`` is replaced by where the N-th of ``sources`` is. The sources whose file system does not
let ids be mapped are written to the descriptor ``report``, as a JSON list.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import struct
import sys

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_REC, MS_PRIVATE = 16384, 1 << 18

# These have the same numbers on every architecture but alpha.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, AT_RECURSIVE, AT_EMPTY_PATH = 1, 0x8000, 0x1000
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_IDMAP = 1, 2, 0x00100000

STAGES = ("/tmp", "/mnt", "/run", "/var")  # noqa: S108 - covered by a private mount that nobody else sees

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Raise what the kernel said."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def make_namespace(base: int, count: int) -> int:
    """Return a descriptor of a new user namespace whose ids 0 … *count* are *base* … outside."""
    asks, told = os.pipe()
    waits, goes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(goes)
        try:
            check(libc.unshare(CLONE_NEWUSER), "new user namespace")
            os.write(told, b"+")
        except OSError as error:
            os.write(told, str(error).encode())
        os.read(waits, 1)
        os._exit(0)
    try:
        answer = os.read(asks, 1000)
        if answer != b"+":
            raise OSError(answer.decode())
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"0 {base} {count}")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    finally:
        for descriptor in (asks, told, waits, goes):
            os.close(descriptor)
        os.waitpid(pid, 0)


def take(source: str, namespace: int) -> tuple[int, bool]:
    """Return a read-only mount of *source* that is nowhere yet, and whether its ids are mapped."""
    # Without what is mounted below it: overlays cannot have such places in their layers.
    tree = check(
        libc.syscall(SYS_OPEN_TREE, -100, os.fsencode(source), OPEN_TREE_CLONE | os.O_CLOEXEC), f"open_tree {source}"
    )
    wishes = [(MOUNT_ATTR_IDMAP, namespace), (0, 0)]
    for flags, descriptor in wishes if may_map() else wishes[1:]:
        attributes = struct.pack("=QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | flags, 0, 0, descriptor)
        result = libc.syscall(SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
        if result == 0:
            return tree, bool(flags)
    check(result, f"mount_setattr {source}")
    raise AssertionError("not reached")


def may_map() -> bool:
    """Whether the layers of an overlay may have mapped ids: since Linux 5.19."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return found is not None and (int(found[1]), int(found[2])) >= (5, 19)


def stage(sources: list[str], namespace: int) -> tuple[list[str], list[str]]:
    """Show *sources* where everybody can reach them. Returns where, and those whose ids are not mapped."""
    check(libc.unshare(CLONE_NEWNS), "new mount namespace")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")
    taken = [(os.path.isdir(source), *take(source, namespace)) for source in sources]
    place = next(path for path in STAGES if os.path.isdir(path))
    check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"mode=755"), "mount tmpfs")
    places = [f"{place}/{number}" for number in range(len(sources))]
    for source, target, (is_directory, tree, _) in zip(sources, places, taken, strict=True):
        if is_directory:
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        result = libc.syscall(SYS_MOVE_MOUNT, tree, b"", -100, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
        check(result, f"move_mount {source}")
        os.close(tree)
    return places, [source for source, (_, _, mapped) in zip(sources, taken, strict=True) if not mapped]


def main() -> None:
    """Do it all; never returns."""
    config = json.loads(sys.argv[1])
    os.umask(0o022)
    if platform.machine() == "alpha":
        raise OSError("this architecture numbers its system calls in its own way")
    namespace = make_namespace(config["base"], config["count"])
    try:
        places, plain = stage(config["sources"], namespace)
    except PermissionError:  # root without CAP_SYS_ADMIN: the paths themselves may do
        places = plain = config["sources"]
    os.write(config["report"], json.dumps(plain).encode())
    os.set_inheritable(config["report"], False)  # noqa: FBT003
    argv = []
    for word in config["argv"]:
        number, slash, rest = word[1:].partition("/")
        argv.append(places[int(number)] + slash + rest if word.startswith("@") else word)
    check(libc.setns(namespace, CLONE_NEWUSER), "enter user namespace")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"launch: {error}")
