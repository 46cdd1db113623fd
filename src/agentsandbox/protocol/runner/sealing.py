# SPDX-License-Identifier: Apache-2.0
"""
Directories of an image that nobody has touched, told by one look at the directory itself.

On an overlay, whatever changes below a directory of a lower layer first gives that directory a copy in the uppermost
layer, and the copy's change time is that moment. So a directory that is older than the uppermost layer, and has the
stamp that it had, holds what it held, all the way down. There is one exception: with ``index=on``, a file is copied up
through any of its hard links, so nothing is concluded then.
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, Collection, Iterable, Set

from .kernel import _libc as libc

if TYPE_CHECKING:
    from .mounts import Mount

STATX = {"x86_64": 332, "aarch64": 291, "riscv64": 291, "ppc64le": 383, "s390x": 379, "armv7l": 397, "i686": 383}
AT_FDCWD = -100
STATX_BTIME = 0x800
BORN = struct.Struct("=80xqI")
"""Where the time of birth is in a ``struct statx`` of 256 bytes."""

START_WITHIN = 10.0
"""
Seconds from the making of the uppermost layer to the first process. What changed within so long before that layer is
not concluded from either: a clock that was put back meanwhile would make what is in it look older than it is.
"""


class Sealed:
    """
    Tells which directories need not be looked into as long as their own stamps are what they were.

    Args:
        older: What :func:`older_than` said.
        mounts: Where something is mounted: what is below that is elsewhere.

    """

    def __init__(self, older: int, mounts: Iterable[str]) -> None:
        self._older = older
        self._holding = ancestors(mounts) if older else set()
        self._root = os.stat("/").st_dev if older else -1

    def __call__(self, path: str, status: os.stat_result) -> bool:
        """Whether that is so for a directory."""
        return status.st_ctime_ns < self._older and status.st_dev == self._root and path not in self._holding


def ancestors(places: Iterable[str]) -> Set[str]:
    """Return every directory that holds one of these places, at whatever depth."""
    found = set()
    for place in places:
        above = place
        while above != "/":
            above = os.path.dirname(above)
            found.add(above)
    return found


def older_than(root: Mount) -> int:
    """
    Return the change time, in nanoseconds, before which a directory of the root file system is in a lower layer.

    Args:
        root: What is mounted at ``/``.

    Returns:
        The time; 0 if nothing can be concluded from the age of a directory here.

    """
    if root.kind != "overlay" or _links_share_copies(root.settings):
        return 0
    born = _birth("/")
    if not born:
        return 0
    # The first process began after the layer was made, on a clock that nobody sets.
    with open("/proc/1/stat", "rb") as file:
        began = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", 7)) - began
    before = time.time() - born / 1e9 - age
    return born - int(START_WITHIN * 1e9) if -0.1 <= before <= START_WITHIN else 0


def _links_share_copies(options: Collection[str]) -> bool:
    if "index=on" in options or "nfs_export=on" in options:
        return True
    if "index=off" in options:
        return False
    try:
        with open("/sys/module/overlay/parameters/index") as file:
            return file.read().strip() != "N"
    except OSError:
        return True


def _birth(path: str) -> int:
    """Return when a file was made, in nanoseconds; 0 if that is not known."""
    number = STATX.get(os.uname().machine)
    if libc is None or number is None:
        return 0
    import ctypes

    answer = ctypes.create_string_buffer(256)
    if libc.syscall(number, AT_FDCWD, os.fsencode(path), 0, STATX_BTIME, answer) != 0:
        return 0
    if not struct.unpack_from("=I", answer)[0] & STATX_BTIME:
        return 0
    seconds, nanoseconds = BORN.unpack_from(answer)
    return int(seconds * 10**9 + nanoseconds)
