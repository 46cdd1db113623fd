# SPDX-License-Identifier: Apache-2.0
"""Which ids of the host the processes of sandboxes run as."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["RANGE_SIZE", "SLOTS", "Ids", "choose", "usable_range"]

FIRST, LAST = 524288, 1879048191
"""The ids that systemd reserves for containers, see its "Users, Groups, UIDs and GIDs": no account has one of them."""

INSIDE = 65536
"""How many ids a sandbox has."""

SLOTS = 4096
"""Beyond them, one id a sandbox under which the kernel counts its processes; so many sandboxes a parent can have."""

RANGE_SIZE = 2 * INSIDE
"""Ids are taken in blocks of this size."""

OURSELVES = Path("/proc/self")

CAP_SETGID, CAP_SETUID = 6, 7


@attrs.define(eq=False)
class Ids:
    """Ids in use by one parent of sandboxes."""

    kind: str
    """``range``: a block of ids that nobody else has; ``single``: the driver's own."""
    base: int = 0
    """The first of the block."""
    lock: socket.socket | None = attrs.field(default=None, repr=False)
    """Held as long as the block is in use."""

    def release(self) -> None:
        """Give the block back."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None


def usable_range() -> bool:
    """
    Return whether this process can give sandboxes ids of their own: root of the whole machine, not of a container.

    Raises:
        ConfigurationError: If it is root of the whole machine and cannot: its own id is never given to a sandbox.

    """
    if os.geteuid() != 0 or not _whole_machine():
        return False
    capabilities = _effective_capabilities()
    if not (capabilities >> CAP_SETUID & 1 and capabilities >> CAP_SETGID & 1):
        raise ConfigurationError(
            "the local backend runs as root without CAP_SETUID and CAP_SETGID, so that it cannot give sandboxes ids of "
            'their own; run it as an ordinary user, grant the capabilities, or choose isolation="none"'
        )
    return True


def choose() -> Ids:
    """Take ids for one parent of sandboxes."""
    if not usable_range():
        return Ids("single")
    taken = {block for uid in _uids_in_use() for block in (uid // RANGE_SIZE,)}
    blocks = range(-(-FIRST // RANGE_SIZE), (LAST + 1) // RANGE_SIZE)
    while True:
        block = random.choice(blocks)  # noqa: S311 - a collision is noticed
        if block in taken:
            continue
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # A name without a file: the kernel forgets it with its holder, however that ends.
            lock.bind(f"\0agentsandbox/ids/{block}")
        except OSError:
            lock.close()
            taken.add(block)
            continue
        return Ids("range", block * RANGE_SIZE, lock)


def _whole_machine() -> bool:
    for name in ("uid_map", "gid_map"):
        rows = [[int(word) for word in row.split()] for row in (OURSELVES / name).read_text().splitlines()]
        if not any(first == outside and first <= FIRST and first + count > LAST for first, outside, count in rows):
            return False
    return True


def _effective_capabilities() -> int:
    for line in (OURSELVES / "status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _uids_in_use() -> set[int]:
    found = set()
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                try:
                    found.add(entry.stat().st_uid)
                except FileNotFoundError:
                    continue
    return found
