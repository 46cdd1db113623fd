# SPDX-License-Identifier: Apache-2.0
"""What is mounted where."""

from __future__ import annotations

import os
from typing import Dict, List, NamedTuple

TABLE = "/proc/self/mountinfo"


class Mount(NamedTuple):
    """One line of the table of mounts."""

    place: str
    options: List[str]
    """Of the mount."""
    kind: str
    settings: List[str]
    """Of the file system, wherever it is mounted."""

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written there."""
        return "ro" in self.options or "ro" in self.settings


def table() -> List[Mount]:
    """Return what is mounted in this namespace, parents first."""
    found = []
    with open(TABLE, "rb") as file:
        for line in file:
            before, _, after = line.decode("utf-8", "surrogateescape").rstrip("\n").partition(" - ")
            fields, rest = before.split(" "), after.split(" ")
            place = fields[4]
            if "\\" in place:
                raw = place.encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1")
                place = os.fsdecode(raw)
            found.append(Mount(place, fields[5].split(","), rest[0], rest[2].split(",")))
    return found


def by_place() -> Dict[str, Mount]:
    """Return what is mounted, by place; the last one where several are on top of each other."""
    return {mount.place: mount for mount in table()}
