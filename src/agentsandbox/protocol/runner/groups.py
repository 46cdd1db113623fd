# SPDX-License-Identifier: Apache-2.0
"""
Control groups for jails, where a container may make some below its own, and what they tell about its memory.

Only groups of the first version are made: of the second, a container's own group would have to be emptied first, and
then nobody could enter the container from outside. This module keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Any, Dict, List, Mapping, Optional

from . import cell, jail, mounts

LIMITS = {"cpu": "cpu.shares", "pids": "pids.max", "memory": "memory.limit_in_bytes"}

BASES = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
"""Where a container reads how many of its processes were killed for memory, by the version of control groups."""

LOOK = 0.005
"""Seconds between two tries to remove a group whose last process is on its way out."""

FULL = 16 * 1024 * 1024
"""A file system with less free space than this, in bytes, counts as full."""


class Group:
    """
    The control groups of one jail.

    Args:
        places: Kind → directory.

    """

    def __init__(self, places: Dict[str, str]) -> None:
        self._places = places

    def __repr__(self) -> str:
        return "<Group [%s]>" % ", ".join(self.kinds)

    @property
    def kinds(self) -> List[str]:
        """What they limit."""
        return sorted(self._places)

    def join(self) -> None:
        """Be in them, with all that the calling process will start."""
        for place in self._places.values():
            jail.write_text(place + "/cgroup.procs", "0")

    def remove(self, within: float) -> List[str]:
        """Remove them; return what is still there after so many seconds."""
        left = []
        deadline = time.monotonic() + within
        for place in self._places.values():
            while True:
                try:
                    os.rmdir(place)
                except OSError as error:
                    if error.errno == errno.EBUSY and time.monotonic() < deadline:
                        time.sleep(LOOK)
                        continue
                    if error.errno != errno.ENOENT:
                        left.append(place)
                break
        return left


def make(name: str, limits: Mapping[str, Optional[int]]) -> Optional[Group]:
    """
    Make groups for a jail, in a mount namespace of the caller's own.

    Args:
        name: The jail's.
        limits: How many processes, ``pids``, and how many bytes, ``memory``, it may have, and its share of the
            processors as against the others', ``cpu``; ``None`` makes no such group.

    Returns:
        The groups that could be made; ``None`` if there are none.

    """
    places: Dict[str, str] = {}
    for mount in mounts.table():
        kind = mount.place.rpartition("/")[2].partition(",")[0]
        if mount.kind != "cgroup" or limits.get(kind) is None:
            continue
        place = mount.place + "/" + name
        try:
            cell.remount(mount.place, [option for option in mount.options if option != "ro"])
            os.mkdir(place, 0o755)
            jail.write_text("%s/%s" % (place, LIMITS[kind]), str(limits[kind]))
        except (OSError, jail.JailError):
            continue
        places[kind] = place
    return Group(places) if places else None


class Witness:
    """
    What every end of a command in a jail tells of the container: whether its memory or its disk was short.

    Args:
        name: The jail's.
        kinds: What control groups of its own limit.
        shared: Whether what it writes goes to a file system that it shares with others.

    """

    def __init__(self, name: str, kinds: List[str], *, shared: bool) -> None:
        self._shared = shared
        self._base = next((path for path in BASES if os.path.exists(path)), None)
        self._own = "/sys/fs/cgroup/memory/" + name if "memory" in kinds else None
        self._killed = self._failed = 0
        self._from_outside = 0

    def __repr__(self) -> str:
        return "<Witness [%r]>" % self()

    def __call__(self) -> Dict[str, Any]:
        """
        Say what was short for all.

        Returns:
            ``oom``: how many processes were killed for the memory of the container, as far as can be seen from here,
            and not for the jail's own; ``full``: whether the disk that it shares is.

        """
        found: Dict[str, Any] = {"oom": self._from_outside}
        if self._own is not None:
            # The kernel counts a kill where its victim was, and a shortage where the limit is.
            killed = count(self._own + "/memory.oom_control")
            failed = _number(self._own + "/memory.failcnt")
            if killed > self._killed and failed == self._failed:
                self._from_outside += killed - self._killed
            self._killed, self._failed = killed, failed
            found["oom"] = self._from_outside
        if self._base is not None:
            found["oom"] += count(self._base)
        if self._shared:
            room = os.statvfs("/")
            found["full"] = room.f_bavail * room.f_frsize < FULL
        return found


def count(path: str) -> int:
    """Return how many processes a group's file says were killed for memory."""
    try:
        with open(path, "rb") as file:
            for line in file:
                words = line.split()
                if words[:1] == [b"oom_kill"]:
                    return int(words[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0


def _number(path: str) -> int:
    try:
        with open(path, "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
