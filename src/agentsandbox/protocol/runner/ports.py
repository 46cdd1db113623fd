# SPDX-License-Identifier: Apache-2.0
"""
Ports that the kernel keeps for a minute after a connection has ended: nobody else can bind them meanwhile.

No right is needed to end that. Whoever connects once more from the port at the other end is answered by the old
connection, takes that for a mistake and resets it.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import List, Tuple

TIME_WAIT = "06"

WITHIN = 2.0
"""Seconds that all of them may take."""


def release() -> None:
    """Forget every connection of this network namespace that has ended already. What does not work is left as it is."""
    limit = time.monotonic() + WITHIN
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for ours, theirs in _ended(name):
            if time.monotonic() > limit:
                return
            try:
                _reset(family, ours, theirs)
            except OSError:
                continue


def _ended(name: str) -> List[Tuple[Tuple[str, int], Tuple[str, int]]]:
    try:
        with open("/proc/net/" + name) as table:
            lines = [line.split() for line in table.readlines()[1:]]
    except OSError:
        return []
    return [(_address(line[1]), _address(line[2])) for line in lines if line[3] == TIME_WAIT]


def _address(words: str) -> Tuple[str, int]:
    text, _, port = words.partition(":")
    data = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data), int(port, 16)


def _reset(family: int, ours: Tuple[str, int], theirs: Tuple[str, int]) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        client.bind(theirs)
        client.connect_ex(ours)
