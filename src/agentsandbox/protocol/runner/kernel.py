# SPDX-License-Identifier: Apache-2.0
"""What the runner asks of the kernel for itself, and what it tells about it."""

from __future__ import annotations

import os
import struct
import sys
from typing import Any, Dict, Optional, Sequence

_libc: Any
try:
    import ctypes

    _libc = ctypes.CDLL(None, use_errno=True)
except (ImportError, OSError):  # an interpreter built without it: everything here can be done without
    _libc = None

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
CAPABILITY_VERSION = 0x20080522

SIGNAL_INFO = struct.Struct("=IiiI")
"""The beginning of a signalfd_siginfo: number, error, code, sender."""

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def read_up_to(fd: int, limit: int) -> bytes:
    """Read to the end, or until there is as much as the limit."""
    chunks, size = [], 0
    while size < limit:
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def last_error() -> int:
    """Return the error number of the last call to the C library."""
    return 0 if _libc is None else ctypes.get_errno()


def become_subreaper() -> bool:
    """Be given the orphans of all that we start; the first process of a namespace is anyway."""
    return os.getpid() == 1 or _prctl(PR_SET_CHILD_SUBREAPER, 1)


def forbid_tracing() -> bool:
    """Let no process of the same user trace us or read our memory, where the nonce is."""
    return _prctl(PR_SET_DUMPABLE, 0)


def live_as(uid: int, gid: int, groups: Sequence[int]) -> bool:
    """
    Be that user in all that a new program inherits, and keep every capability and the way back for ourselves.

    A program that is executed from then on is that user and nothing more, without a step between fork and exec: so it
    can be started by vfork, where a fork would copy the page tables of the interpreter. Signals that it could send us
    reach the first process of a namespace only if that has a handler for them, and our memory is closed by
    :func:`forbid_tracing`.
    """
    if _libc is None:
        return False
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, twice
    try:
        if _libc.capget(header, words):
            return False
        os.setgroups(groups)
        os.setresgid(gid, gid, 0)
        os.setresuid(uid, uid, 0)
        words[0], words[3] = words[1], words[4]
        if _libc.capset(header, words):
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            return False
    except (AttributeError, OSError):
        return False
    return forbid_tracing()


def seal_descriptors() -> int:
    """Let no command inherit a descriptor that we were given; return the highest."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except (OSError, ValueError):
        numbers = list(range(256))
    highest = 2
    for fd in numbers:
        if fd > 2:
            try:
                os.set_inheritable(fd, False)
            except OSError:
                continue
            highest = max(highest, fd)
    return highest


def signal_descriptor(number: int) -> Optional[int]:
    """
    Return a descriptor that tells who sends a signal, for the first process of a namespace.

    The signal must be blocked. With its default disposition it then reaches only this descriptor, and while it is
    unblocked, so that commands do not inherit the blocking, the kernel drops it.
    """
    if _libc is None or os.getpid() != 1:
        return None
    words = (ctypes.c_uint64 * 16)()
    words[0] = 1 << (number - 1)
    try:
        fd = int(_libc.signalfd(-1, words, os.O_NONBLOCK | os.O_CLOEXEC))
    except AttributeError:
        return None
    return fd if fd >= 0 else None


def from_outside(fd: int) -> bool:
    """Whether a signal came from outside the namespace: who is inside, and may do so by accident, has a number."""
    try:
        while True:
            sender = SIGNAL_INFO.unpack_from(os.read(fd, 128))[3]
            if sender == 0:
                return True
    except BlockingIOError:
        return False


def facts() -> Dict[str, Any]:
    """Return what a driver may want to know about the place."""
    system = os.uname()
    return {
        "python": "%d.%d.%d" % sys.version_info[:3],
        "implementation": sys.implementation.name,
        "executable": sys.executable,
        "pid": os.getpid(),
        "uid": os.getuid(),
        "gid": os.getgid(),
        "kernel": system.release,
        "machine": system.machine,
        "boot_id": _boot_id(),
        "namespaces": {name: inode for name in NAMESPACES for inode in [_namespace(name)] if inode is not None},
    }


def _prctl(option: int, value: int) -> bool:
    if _libc is None:
        return False
    try:
        return int(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)) == 0
    except (AttributeError, OSError):
        return False


def _boot_id() -> Optional[str]:
    try:
        # Bytes, because the codec that a text file is opened with may not have been imported yet.
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().decode("ascii").strip()
    except OSError:
        return None


def _namespace(name: str) -> Optional[int]:
    try:
        return int(os.readlink("/proc/self/ns/" + name).partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return None
