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
from typing import Any, Dict, List, Mapping

from . import ports, surroundings

SHARED = (b"/dev/shm", b"/dev/mqueue")
"""File systems of the Pod."""

MOUNTED = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf")
"""Files of the Pod."""

FEW = 20
"""So many names of what is left are told."""

UNWANTED = ("KUBERNETES_",)
"""Beginnings of variables that the cluster adds to the image's own: they differ from Pod to Pod."""


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
        for kind, present in surroundings.system_v().items():
            for number in present:
                surroundings.remove_object(kind, number)
        left += ["%s:%d" % (kind, number) for kind, present in surroundings.system_v().items() for number in present]
        ports.release()
        left += ["%s:%s" % socket[:2] for socket in surroundings.sockets() if socket[2] == "closing"]
    return {"left": left[:FEW], "files": {path: _digest(path) for path in MOUNTED}}


def environment(more: Mapping[str, str]) -> Dict[str, str]:
    """Return what commands see: the container's own variables and those of the sandbox."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(UNWANTED)}
    env.update(more)
    return env


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


def _digest(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None
