# SPDX-License-Identifier: Apache-2.0
"""The cluster's clock, how long things take in it, and its ids."""

from __future__ import annotations

import random
import time
from email.utils import formatdate

import attrs

__all__ = ["Clock", "Names", "Timing"]


@attrs.define
class Clock:
    """Wall-clock time as the cluster has it."""

    offset: float = 0.0
    """How far it is ahead of this machine's, in seconds."""

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return time.time() + self.offset

    def stamp(self, later: float = 0.0) -> str:
        """Return the time as objects hold it."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.time() + later))

    def date(self) -> str:
        """Return the time as the header ``Date`` has it."""
        return formatdate(self.time(), usegmt=True)


@attrs.define(kw_only=True)
class Timing:
    """How long things take, in seconds. By default nothing takes longer than it must; changes count from then on."""

    schedule: float = 0.0
    """Until a Pod has a node."""
    sandbox: float = 0.0
    """Until it has its network."""
    start: float = 0.0
    """Until its container runs."""
    stop: float = 0.0
    """From the end of the processes to the end of the object."""
    observe: float = 0.05
    """Until the kubelet acts on a change of the spec. A container that ends meanwhile ends by itself."""
    back_off: float = 10.0
    """The first back-off before a container is started again; it doubles."""
    back_off_max: float = 300.0
    """Its ceiling."""
    pull_back_off: float = 10.0
    """The first back-off after a pull that failed; it doubles to *back_off_max*."""
    reset_back_off: float = 600.0
    """After a container has run so long, the back-off begins anew."""
    bookmark: float = 60.0
    """Between bookmarks of a watch."""
    second: float = 1.0
    """How long a second of a grace period or of a back-off lasts; less makes tests quick."""


class Names:
    """Random names and addresses, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - nothing secret
        self._address = 1

    def suffix(self) -> str:
        """Return five characters as ``generateName`` appends them."""
        return "".join(self._random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))

    def container_id(self) -> str:
        """Return the id of a new container."""
        return f"containerd://{self._random.getrandbits(256):064x}"

    def exec_id(self) -> str:
        """Return the id of a command in a container."""
        return f"{self._random.getrandbits(256):064x}"

    def address(self) -> str:
        """Return the address of a new Pod."""
        self._address += 1
        return f"10.244.{self._address >> 8 & 255}.{self._address & 255}"

    def choice(self, count: int) -> int:
        """Return a number below *count*."""
        return self._random.randrange(count)
