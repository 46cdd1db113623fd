# SPDX-License-Identifier: Apache-2.0
"""
What a container shares with the one before it in the same Pod, although its root file system is new.

The Pod keeps the IPC namespace with its shared memory, semaphores and message queues, the file system on ``/dev/shm``,
the network namespace with ports of connections that have just ended, and the files that the cluster mounts into
``/etc``. Nothing of an episode has run yet when this looks, and nothing that it finds is executed or believed.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Any, Dict, List

from . import ports, surroundings

_libc: Any
try:
    import ctypes

    _libc = ctypes.CDLL(None, use_errno=True)
except (ImportError, OSError):
    _libc = None

SHARED = (b"/dev/shm", b"/dev/mqueue")
"""File systems of the Pod."""

MOUNTED = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf")
"""Files of the Pod."""

FEW = 20
"""So many names of what is left are told."""

IPC_RMID = 0


def clean() -> Dict[str, Any]:
    """
    Remove what the Pod shares, if this is its first process, and say what is there now.

    Returns:
        ``left``: what could not be removed, by name; ``files``: the SHA-256 of each mounted file, ``None`` without it.

    """
    left: List[str] = []
    if os.getpid() == 1:  # anywhere else these belong to somebody
        for place in SHARED:
            _empty(place, left)
        for kind in ("shm", "msg", "sem"):
            for number in _objects(kind):
                _remove(kind, number)
            left += ["%s:%d" % (kind, number) for number in _objects(kind)]
        ports.release()
        left += ["%s:%s" % socket[:2] for socket in surroundings.sockets() if socket[2] == "closing"]
    return {"left": left[:FEW], "files": {path: _digest(path) for path in MOUNTED}}


def _empty(place: bytes, left: List[str]) -> None:
    try:
        names = os.listdir(place)
    except OSError:
        return
    for name in names:
        path = os.path.join(place, name)
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                os.chmod(path, 0o700)
                _empty(path, left)
                os.rmdir(path)
            else:
                os.unlink(path)
        except OSError:
            left.append(os.fsdecode(path).encode("utf-8", "replace").decode())


def _objects(kind: str) -> List[int]:
    try:
        with open("/proc/sysvipc/" + kind) as table:
            return [int(line.split()[1]) for line in table.readlines()[1:]]
    except (OSError, ValueError, IndexError):
        return []


def _remove(kind: str, number: int) -> None:
    if _libc is None:
        return
    try:
        if kind == "sem":
            _libc.semctl(number, 0, IPC_RMID, None)
        else:
            getattr(_libc, kind + "ctl")(number, IPC_RMID, None)
    except AttributeError:
        pass


def _digest(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None
