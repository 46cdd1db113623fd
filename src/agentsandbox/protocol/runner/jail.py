# SPDX-License-Identifier: Apache-2.0
"""
Turn a freshly forked process into the first process of a sandbox of its own.

The parent (:mod:`.host`) lives in a user namespace in which it is root and nothing of the host is writable. It makes
the PID namespace before it forks; the child does the rest here: mount, IPC, UTS and network namespaces, a root file
system on a throw-away memory file system, and last a nested user namespace, so that being root in the sandbox means
nothing for the mounts and namespaces that confine it.

This module runs inside sandboxes, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import socket
import struct
from typing import Any, Dict, Optional, Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38

SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 1

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217, "armv7l": 218, "i686": 217}
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280, "armv7l": 311, "i686": 288}
KEYCTL_JOIN_SESSION_KEYRING = 1

# What the default profile of container runtimes leaves to root, without the making of device nodes.
KEPT_CAPABILITIES = (
    0,  # CHOWN
    1,  # DAC_OVERRIDE
    3,  # FOWNER
    4,  # FSETID
    5,  # KILL
    6,  # SETGID
    7,  # SETUID
    8,  # SETPCAP
    10,  # NET_BIND_SERVICE
    13,  # NET_RAW
    18,  # SYS_CHROOT
    29,  # AUDIT_WRITE
    31,  # SETFCAP
)
LAST_CAPABILITY = 63

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)

STAGE = b"/jail"
"""Where the parent keeps an empty directory: each sandbox mounts its memory file system there, in its own namespace."""

UPPERS: Dict[str, int] = {}
"""
Where overlays are mounted, and a descriptor of what each has on top of its lower layers. Only the first process has
them: what an episode changed there can be seen without looking at what it cannot change.
"""

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
libc.unshare.argtypes = (ctypes.c_int,)
libc.setns.argtypes = (ctypes.c_int, ctypes.c_int)


class JailError(Exception):
    """A step failed. ``stage`` says which, in words; ``errno`` is the kernel's."""

    def __init__(self, stage: str, number: int) -> None:
        super().__init__("%s: %s" % (stage, os.strerror(number)))
        self.stage = stage
        self.errno = number


def _check(result: int, stage: str) -> None:
    if result < 0:
        raise JailError(stage, ctypes.get_errno())


def mount(source: bytes, target: bytes, kind: bytes, flags: int = 0, data: bytes = b"") -> None:
    """Mount, or say what could not be mounted where."""
    if libc.mount(source, target, kind, flags, data) < 0:
        number = ctypes.get_errno()
        raise JailError("mount %s on %s" % (kind.decode() or os.fsdecode(source), os.fsdecode(target)), number)


def unshare(flags: int, stage: str) -> None:
    """Leave namespaces for new ones."""
    _check(libc.unshare(flags), "new %s namespace" % stage)


def setns(descriptor: int, kind: int, stage: str) -> None:
    """Enter a namespace."""
    _check(libc.setns(descriptor, kind), "enter %s namespace" % stage)


def prctl(option: int, value: int) -> None:
    """Set an attribute of the calling process."""
    _check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl %d" % option)


def set_name(name: bytes) -> None:
    """Set what ``ps`` and ``top`` on the host show."""
    _check(libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0), "set the name of the process")


def pivot_root(new: bytes, old: bytes) -> None:
    """Exchange the root file system."""
    _check(libc.syscall(_PIVOT_ROOT.get(os.uname().machine, -1), new, old), "pivot_root")


def unmount(path: bytes) -> None:
    """Take a mount out of this namespace, also one that is in use."""
    _check(libc.umount2(path, MNT_DETACH), "unmount %s" % os.fsdecode(path))


def leave_keys() -> None:
    """Have a session keyring of one's own: keys of the driver's are the driver's. Refused where the kernel has none."""
    libc.syscall(_KEYCTL.get(os.uname().machine, -1), KEYCTL_JOIN_SESSION_KEYRING, None)


def drop_capabilities(kept: Sequence[int]) -> None:
    """Keep only these capabilities, in every set and for good."""
    mask = 0
    for number in range(LAST_CAPABILITY + 1):
        if number in kept:
            mask |= 1 << number
        elif libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
            if ctypes.get_errno() == errno.EINVAL:  # beyond the last one that this kernel has
                break
            raise JailError("drop capability %d" % number, ctypes.get_errno())
    header = struct.pack("=Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    sets = struct.pack("=6I", low, low, 0, high, high, 0)
    _check(libc.capset(header, sets), "drop capabilities")


def loopback_up() -> None:
    """Start the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            flags = struct.unpack("16sh", fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))[:18])[1]
            fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
        except OSError as error:
            raise JailError("start the loopback interface", error.errno or 0) from error


def write_text(path: str, text: str) -> None:
    """Write a small file of the kernel in one call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _make(entries: Sequence[Sequence[Any]], root: bytes = b"") -> None:
    """
    Create what is not there, parents first.

    Args:
        entries: ``["dir", path, mode, uid, gid]``, ``["link", path, target]`` or ``["file", path]``.
        root: Where paths begin.

    """
    for entry in entries:
        path = root + os.fsencode(entry[1])
        try:
            if entry[0] == "link":
                os.symlink(os.fsencode(entry[2]), path)
                continue
            if entry[0] == "file":
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
                continue
            os.mkdir(path, entry[2])  # the umask is 0
            if entry[3] or entry[4]:
                os.chown(path, entry[3], entry[4])
        except FileExistsError:
            continue
        except OSError as error:
            raise JailError("create %s" % entry[1], error.errno or 0) from error


def _devices(stage: bytes) -> None:
    """Mount a small /dev. Sources are relative: the working directory is the old root."""
    home = stage + b"/dev"
    os.mkdir(home, 0o755)
    for name, mode in (("pts", 0o755), ("shm", 0o1777), ("mqueue", 0o755)):
        os.mkdir(home + b"/" + name.encode(), mode)
    for name, target in DEVICE_LINKS:
        os.symlink(target, home + b"/" + name.encode())
    for name in DEVICES:
        os.close(os.open(home + b"/" + name.encode(), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    mount(home, b"/dev", b"", MS_BIND)
    for name in DEVICES:
        mount(b"dev/" + name.encode(), b"/dev/" + name.encode(), b"", MS_BIND)
    # Without a place to see them, queues would be there all the same.
    mount(b"mqueue", b"/dev/mqueue", b"mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    mount(b"devpts", b"/dev/pts", b"devpts", MS_NOSUID | MS_NOEXEC, b"newinstance,ptmxmode=0666,mode=0620")


def build_root(plan: Dict[str, Any]) -> None:
    """
    Mount the root file system that *plan* describes, and make it the root of this mount namespace.

    One memory file system of limited size takes every write; nothing else is writable, and its upper layers cannot be
    reached from the sandbox.
    """
    old_mask = os.umask(0)
    mount(b"none", b"/", b"", MS_REC | MS_PRIVATE)
    options = "size=%d,nr_inodes=%d,mode=0755" % (plan["disk_limit"], plan["inodes"])
    mount(b"tmpfs", STAGE, b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
    root = STAGE + b"/root"
    os.mkdir(root, 0o755)
    if plan["skeleton"]:
        mount(root, root, b"", MS_BIND)
        _make(plan["skeleton"], root)
    for number, (target, lower) in enumerate(plan["overlays"]):
        upper, work = STAGE + b"/upper%d" % number, STAGE + b"/work%d" % number
        os.mkdir(upper, 0o755)
        os.mkdir(work, 0o755)
        data = b"lowerdir=%s,upperdir=%s,workdir=%s,userxattr" % (os.fsencode(":".join(lower)), upper, work)
        mount(b"overlay", root + os.fsencode(target.rstrip("/")), b"overlay", MS_NOSUID | MS_NODEV, data)
        UPPERS[target] = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    # From here on an absolute path is one of the sandbox, whatever links its image holds; a relative one is of the old
    # root, which is the working directory.
    old_root = os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir(root)
    pivot_root(b".", b".")
    os.fchdir(old_root)
    os.close(old_root)
    _make(plan["entries"])
    for path in plan["binds"]:
        mount(os.fsencode(path.lstrip("/")), os.fsencode(path), b"", MS_BIND | MS_REC)
    _devices(STAGE.lstrip(b"/"))
    mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    unmount(b".")
    os.chdir("/")
    os.umask(old_mask)


def limit(name: int, value: Optional[int]) -> None:
    """Lower a resource limit for good; ``None`` leaves it."""
    if value is not None:
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(name, (value, value))


def limits(plan: Dict[str, Any]) -> None:
    """Apply the resource limits of *plan*, all but that of processes."""
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, plan["open_files"])
    limit(resource.RLIMIT_AS, plan["address_space"])


def enter(plan: Dict[str, Any], channel: socket.socket) -> Dict[str, int]:
    """
    Confine the calling process, which must be the first of its PID namespace.

    Args:
        plan: What :mod:`.host` was told, and the slot that it chose; ``nested``: capabilities to keep beside the usual
            ones, so that jails can be made inside.
        channel: To the parent, which alone may write the id maps of the nested user namespace: ``map`` asks for them,
            the answer is anything.

    Returns:
        The inode numbers of the namespaces.

    Raises:
        JailError: If the kernel refused a step.

    """
    # When memory runs out, the kernel is to end what runs in a sandbox and not what drives it.
    write_text("/proc/self/oom_score_adj", "500")
    leave_keys()
    unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET, "mount, IPC, UTS and network")
    build_root(plan)
    loopback_up()
    socket.sethostname(plan["hostname"])
    write_text("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")
    limits(plan)
    slot = plan["slot"]
    if slot is not None:
        # The kernel counts the processes of a nested user namespace, whoever they are in it, as the one who made it,
        # up to the limit that the maker had. An id of its own makes that a limit of this sandbox.
        os.setgroups([])
        os.setresgid(slot, slot, slot)
        limit(resource.RLIMIT_NPROC, plan["max_processes"])
        os.setresuid(slot, slot, slot)
        prctl(PR_SET_DUMPABLE, 1)  # or the parent may not write the maps
    unshare(CLONE_NEWUSER, "user")
    channel.send(b"map")
    if not channel.recv(16):
        raise JailError("map the ids of the user namespace", errno.EPERM)
    if slot is not None:
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
    else:
        limit(resource.RLIMIT_NPROC, plan["max_processes"])
    nested = tuple(plan.get("nested") or ())
    if not nested:
        write_text("/proc/sys/user/max_user_namespaces", "0")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities(KEPT_CAPABILITIES + nested if slot is not None else ())
    prctl(PR_SET_DUMPABLE, 0)  # nobody in the sandbox may look into its first process
    return {name: os.stat("/proc/self/ns/" + name).st_ino for name in ("pid", "mnt", "net", "user")}
