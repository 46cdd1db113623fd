# SPDX-License-Identifier: Apache-2.0
"""
The system calls that a container runtime forbids to containers, forbidden again to a jail.

A container that may make jails has a capability with which its runtime lets these calls through, for everybody in it.
The kernel would refuse them to a jail for want of capabilities; here they do not get that far. This module keeps to the
standard library and to Python 3.7.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Dict, List, Sequence, Tuple

from . import jail

PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

LOAD, JUMP, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in what the kernel shows of a call."""

NEW_NAMESPACES = 0x7E020000
X32 = 0x40000000

NEW_EVERYWHERE = (428, 429, 430, 431, 432, 433, 442, 443)
"""open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, quotactl_fd"""

CLONE3 = 435
"""It takes its flags from memory, where a filter cannot look. Libraries do without when there is no such call."""

X86_64, I386, AARCH64, ARM = 0xC000003E, 0x40000003, 0xC00000B7, 0x40000028

CALLS: Dict[int, Tuple[int, Sequence[int]]] = {
    X86_64: (56, (103, 165, 166, 170, 171, 179, 212, 272, 298, 300, 308, 321)),
    I386: (120, (21, 22, 52, 74, 103, 121, 131, 253, 310, 336, 338, 346, 357)),
    AARCH64: (220, (18, 39, 40, 60, 97, 116, 161, 162, 241, 262, 268, 280)),
    ARM: (120, (21, 22, 52, 74, 103, 121, 131, 249, 337, 364, 367, 375, 386)),
}
"""
Architecture → clone, and mount, umount, setns, unshare, bpf, perf_event_open, fanotify_init, lookup_dcookie, quotactl,
syslog, sethostname and setdomainname, in the order of their numbers.
"""

MACHINES = {"x86_64": (X86_64, I386), "aarch64": (AARCH64, ARM)}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def program(architectures: Sequence[int]) -> bytes:
    """Return the filter for a machine that runs programs of these architectures, as the kernel takes it."""
    code = [_step(LOAD, ARCHITECTURE)]
    for architecture in architectures:
        block = _block(architecture)
        code += [_step(EQUAL, architecture, 1, 0), _step(JUMP, len(block)), *block]
    code.append(_step(RETURN, FAIL | errno.EPERM))  # whatever else there may be
    return b"".join(code)


def _block(architecture: int) -> List[bytes]:
    clone, others = CALLS[architecture]
    code = [_step(LOAD, NUMBER)]
    if architecture == X86_64:
        code += [_step(AT_LEAST, X32, 0, 1), _step(RETURN, FAIL | errno.EPERM)]
    for number in (*others, *NEW_EVERYWHERE):
        code += [_step(EQUAL, number, 0, 1), _step(RETURN, FAIL | errno.EPERM)]
    code += [_step(EQUAL, CLONE3, 0, 1), _step(RETURN, FAIL | errno.ENOSYS)]
    code += [_step(EQUAL, clone, 0, 4), _step(LOAD, FIRST_ARGUMENT), _step(AND, NEW_NAMESPACES)]
    code += [_step(EQUAL, 0, 1, 0), _step(RETURN, FAIL | errno.EPERM)]
    code.append(_step(RETURN, ALLOW))
    return code


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, then, otherwise, value)


def apply() -> bool:
    """
    Filter the calls of this process, and of all that it will start, for good. It must have given up new privileges.

    Returns:
        Whether this machine is one that is known here, and its kernel can do it.

    """
    architectures = MACHINES.get(os.uname().machine)
    if architectures is None:
        return False
    code = program(architectures)
    whole = _Program(len(code) // 8, code)
    number = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    return int(jail.libc.prctl(PR_SET_SECCOMP, number, ctypes.byref(whole), 0, 0)) == 0
