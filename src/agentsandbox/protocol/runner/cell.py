# SPDX-License-Identifier: Apache-2.0
"""
The walls of a jail inside a container: namespaces, a root file system above the container's own, and no way back.

Unlike :mod:`.jail`, whose parent lives in a boundary made for it, this works with what a container runtime leaves: its
masked files stay masked, what the cluster mounts stays visible, and the system calls that its filter forbids
(``pivot_root`` among them) are not needed. This module keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import stat
from typing import Any, Dict, List, Mapping, Optional

from . import jail
from .mounts import Mount, table

MS_RDONLY, MS_REMOUNT, MS_MOVE = 1, 32, 8192

STAGE = b"/.jail"
"""An empty directory of the container, made by its first jail; no jail shows it."""

SPECIAL = ("/proc", "/sys", "/dev")
"""Directories of the kernel, which are mounted anew."""

KEPT_CAPABILITIES = tuple(number for number in jail.KEPT_CAPABILITIES if number != 18)
"""Of those that mean something inside only; not the one to change roots, as ours was moved and not exchanged."""

COPIED = 1024 * 1024
"""Files that the cluster mounts into the container, such as ``/etc/hosts``, are copied up to this size, in bytes."""

FLAGS = {
    "ro": MS_RDONLY,
    "nosuid": jail.MS_NOSUID,
    "nodev": jail.MS_NODEV,
    "noexec": jail.MS_NOEXEC,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}


def enter(args: Mapping[str, Any], directory: Optional[str], channel: socket.socket) -> Dict[str, int]:
    """
    Confine the calling process, the first of its PID namespace.

    Args:
        args: See :func:`.jailer.run`; of ``limits``: ``disk_limit`` and ``inodes`` for what it may write in memory,
            ``max_processes`` for each of its users but root, ``open_files``, ``address_space``.
        directory: Where it writes; ``None`` for memory.
        channel: To the keeper, which alone may map ids.

    Returns:
        Descriptors of what was written over the root file system, by where it is mounted.

    Raises:
        JailError: If the kernel refused a step.

    """
    limits = args["limits"]
    jail.write_text("/proc/self/oom_score_adj", "1000")  # before everything that drives it
    jail.leave_keys()
    jail.unshare(jail.CLONE_NEWNS | jail.CLONE_NEWIPC | jail.CLONE_NEWUTS, "mount, IPC and UTS")
    uppers = build_root(limits, directory)
    socket.sethostname("sandbox")
    jail.limits(limits)
    # Opened now, to be written from inside of the namespaces that they are about: their directory is read-only then.
    kernel = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in ("/proc/sys/user",)]
    _mask_proc()
    slot = _own_id(args["number"])
    os.setgroups([])
    os.setresgid(slot, slot, slot)
    jail.limit(resource.RLIMIT_NPROC, limits["max_processes"])
    os.setresuid(slot, slot, slot)
    jail.prctl(jail.PR_SET_DUMPABLE, 1)  # or the keeper may not write the maps
    jail.unshare(jail.CLONE_NEWUSER | (0 if args["network"] else jail.CLONE_NEWNET), "user and network")
    channel.send(b"map")
    if not channel.recv(16):
        raise jail.JailError("map the ids of the user namespace", errno.EPERM)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if not args["network"]:
        jail.loopback_up()
    jail.write_text("/proc/self/fd/%d/max_user_namespaces" % kernel[0], "0")
    os.close(kernel[0])
    jail.prctl(jail.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of users undoes it
    jail.prctl(jail.PR_SET_NO_NEW_PRIVS, 1)
    jail.drop_capabilities(KEPT_CAPABILITIES)
    jail.prctl(jail.PR_SET_DUMPABLE, 0)
    return uppers


def _own_id(number: int) -> int:
    """Return an id that nobody else uses: the kernel counts a jail's processes as its maker's."""
    with open("/proc/self/uid_map") as file:
        most = max(int(line.split()[0]) + int(line.split()[2]) for line in file)
    return most - 2048 + number % 1024


def build_root(limits: Mapping[str, Any], directory: Optional[str]) -> Dict[str, int]:
    """Mount a layer over the container's root file system, and make it the root of this mount namespace."""
    old_mask = os.umask(0)
    there = table()
    jail.mount(b"none", b"/", b"", jail.MS_REC | jail.MS_PRIVATE)
    stage = hidden = STAGE
    if directory is not None:
        stage, hidden = os.fsencode(directory), os.fsencode(os.path.dirname(directory))
    else:
        try:
            os.mkdir(STAGE, 0o700)
        except FileExistsError:
            pass
        options = "size=%d,nr_inodes=%d,mode=0755" % (limits["disk_limit"], limits["inodes"])
        jail.mount(b"tmpfs", STAGE, b"tmpfs", jail.MS_NOSUID | jail.MS_NODEV, options.encode())
    root = stage + b"/root"
    os.mkdir(root, 0o755)
    uppers: Dict[str, int] = {}
    try:
        _overlay("/", root, stage, uppers)
    except jail.JailError as error:
        if error.errno != errno.EINVAL:
            raise
        # In a user namespace the mounts below it may not be uncovered: what has none is done by itself.
        jail.mount(root, root, b"", jail.MS_BIND)  # only what is mounted can be moved
        _like(os.stat("/"), root)
        places = [mount.place for mount in there]
        for name in sorted(os.listdir("/")):
            path = "/" + name
            if (path in SPECIAL and path in places) or path == os.fsdecode(hidden):
                continue
            _cover(path, root, stage, uppers, places)
    old = os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir(root)
    _furnish(there, os.fsdecode(hidden))
    # The root of the namespace stays below ours, where no path leads; what held our layers is taken out of it.
    jail.mount(b".", b"/", b"", MS_MOVE)
    os.chroot(b".")
    os.chdir("/")
    here = os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.fchdir(old)
    if directory is None:
        jail.unmount(STAGE[1:])
    os.fchdir(here)
    os.close(old)
    os.close(here)
    if os.path.isdir(hidden):
        os.rmdir(hidden)
    os.umask(old_mask)
    return uppers


def _overlay(place: str, root: bytes, stage: bytes, uppers: Dict[str, int]) -> None:
    upper, work = stage + b"/upper%d" % len(uppers), stage + b"/work%d" % len(uppers)
    for path in (upper, work):
        if not os.path.isdir(path):  # else left of a try that was refused
            os.mkdir(path, 0o755)
    _like(os.stat(place), upper)
    words = os.fsencode(place).replace(b"\\", b"\\\\").replace(b":", b"\\:").replace(b",", b"\\,"), upper, work
    data = b"lowerdir=%s,upperdir=%s,workdir=%s" % words + (b"" if _first_namespace() else b",userxattr")
    target = root + os.fsencode(place.rstrip("/"))
    jail.mount(b"overlay", target, b"overlay", jail.MS_NOSUID | jail.MS_NODEV, data)
    uppers[place] = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _cover(place: str, root: bytes, stage: bytes, uppers: Dict[str, int], places: List[str]) -> None:
    """Show one entry of the container's root, and what is below it, so that writing to it changes ours only."""
    target, status = root + os.fsencode(place), os.lstat(place)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(place), target)
    elif stat.S_ISDIR(status.st_mode):
        os.mkdir(target, 0o755)
        _like(status, target)
        if place in places:
            return  # shown as it is, later
        if not any(other.startswith(place + "/") for other in places):
            _overlay(place, root, stage, uppers)
            return
        for name in sorted(os.listdir(place)):
            _cover(place + "/" + name, root, stage, uppers, places)
    elif stat.S_ISREG(status.st_mode):
        shutil.copyfile(place, target)
        _like(status, target)


def _like(status: os.stat_result, path: bytes) -> None:
    os.chown(path, status.st_uid, status.st_gid)
    os.chmod(path, stat.S_IMODE(status.st_mode))


def _first_namespace() -> bool:
    with open("/proc/self/uid_map") as file:
        return file.read().split() == ["0", "0", "4294967295"]


def _furnish(there: List[Mount], hidden: str) -> None:
    """
    Mount what belongs above the root.

    The working directory is that root; absolute paths are the container's. What is mounted at *hidden* is not shown.
    """
    for name, mode in (("proc", 0o555), ("sys", 0o555), ("dev", 0o755)):
        if not os.path.isdir(name):
            os.mkdir(name, mode)
    if any(mount.place == "/sys" for mount in there):
        jail.mount(b"/sys", b"sys", b"", jail.MS_BIND | jail.MS_REC)
        for mount in there:
            if _below(mount.place, "/sys") and "ro" not in mount.options:
                read_only(mount.place[1:], mount.options)  # or jails could leave something for each other there
    shown: List[str] = []
    for mount in there:
        if mount.place == "/" or any(_below(mount.place, place) for place in SPECIAL + (hidden,)):
            continue
        _show(mount, shown)
    _devices()
    jail.mount(b"proc", b"proc", b"proc", jail.MS_NOSUID | jail.MS_NODEV | jail.MS_NOEXEC)
    _cover_proc(there)


def _below(path: str, place: str) -> bool:
    return path == place or path.startswith(place + "/")


def _show(mount: Mount, shown: List[str]) -> None:
    """Show what the cluster mounted: a small file as a copy, so that it is every jail's own, the rest read-only."""
    relative = mount.place[1:]
    if not any(_below(mount.place, place) for place in shown):
        status = os.lstat(mount.place)
        if stat.S_ISREG(status.st_mode) and status.st_size <= COPIED:
            with open(mount.place, "rb") as source, open(relative, "wb") as target:
                target.write(source.read())
            return
        jail.mount(os.fsencode(mount.place), os.fsencode(relative), b"", jail.MS_BIND | jail.MS_REC)
        shown.append(mount.place)
    if "ro" not in mount.options:
        read_only(relative, mount.options)


def _devices() -> None:
    jail.mount(b"tmpfs", b"dev", b"tmpfs", jail.MS_NOSUID | jail.MS_NOEXEC, b"size=65536k,mode=0755")
    for name, mode in (("pts", 0o755), ("shm", 0o1777), ("mqueue", 0o755)):
        os.mkdir("dev/" + name, mode)
    for name, target in jail.DEVICE_LINKS:
        os.symlink(target, "dev/" + name)
    for name in jail.DEVICES:
        if os.path.exists("/dev/" + name):
            path = b"dev/" + name.encode()
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
            jail.mount(b"/" + path, path, b"", jail.MS_BIND)
            # Its mode is everybody's. A device can be written all the same.
            read_only(os.fsdecode(path), ["nosuid", "noexec"])
    no = jail.MS_NOSUID | jail.MS_NOEXEC
    jail.mount(b"mqueue", b"dev/mqueue", b"mqueue", no | jail.MS_NODEV)
    jail.mount(b"devpts", b"dev/pts", b"devpts", no, b"newinstance,ptmxmode=0666,mode=0620")


_MASKED: List[Mount] = []


def _cover_proc(there: List[Mount]) -> None:
    """Hide of the new ``/proc`` what the runtime hides of the container's."""
    for mount in there:
        if not mount.place.startswith("/proc/"):
            continue
        relative = mount.place[1:]
        if not os.path.lexists(relative):
            continue
        if mount.kind == "proc":
            _MASKED.append(mount)  # read-only, once what has to be written is written
        else:
            jail.mount(os.fsencode(mount.place), os.fsencode(relative), b"", jail.MS_BIND)
            read_only(relative, mount.options)


def _mask_proc() -> None:
    """Make read-only what the runtime makes read-only."""
    while _MASKED:
        mount = _MASKED.pop()
        path = os.fsencode(mount.place)
        jail.mount(path, path, b"", jail.MS_BIND)
        read_only(mount.place, ["nosuid", "nodev", "noexec"])


def read_only(path: str, options: List[str]) -> None:
    """Let nobody write to what is mounted there; its other options stay."""
    remount(path, options + ["ro"])


def remount(path: str, options: List[str]) -> None:
    """Change the options of what is mounted there, in this namespace."""
    flags = MS_REMOUNT | jail.MS_BIND
    for option in options:
        flags |= FLAGS.get(option, 0)
    jail.mount(b"none", os.fsencode(path), b"", flags)
