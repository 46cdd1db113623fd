# SPDX-License-Identifier: Apache-2.0
"""Copies of files in one file that has no name."""

from __future__ import annotations

import hashlib
import os
from typing import List

CHUNK = 1024 * 1024
ZEROS = bytes(CHUNK)
BLOCK = 4096


class Store:
    """
    Copies of files, one after the other in a file that nobody else can open.

    Args:
        fd: That file.
        limit: How much it may hold, in bytes.

    """

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self.end = 0
        """Where the next copy begins."""
        self.used = 0
        """Bytes that are kept: holes take no room."""
        self._limit = limit
        self._start = 0
        self._parts: List[bytes] = []
        self._waiting = 0

    def room(self, size: int) -> bool:
        """Whether so many bytes more can be kept."""
        return self.used + size <= self._limit

    def add(self, data: bytes) -> None:
        """Keep the next bytes. Where a whole chunk is zero, nothing is written."""
        self.end += len(data)
        if data == ZEROS:
            self.flush()
            self._start = self.end
            return
        self.used += len(data)
        self._parts.append(data)
        self._waiting += len(data)
        if self._waiting >= CHUNK:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        view = memoryview(b"".join(self._parts))
        while view:
            written = os.pwrite(self.fd, view, self._start)
            self._start += written
            view = view[written:]
        self._parts, self._waiting = [], 0


def copy_back(store: int, file: int, offset: int, left: int, *, sparse: bool) -> bytes:
    """
    Write a file from its copy.

    Args:
        store: The file with the copies.
        file: A new file.
        offset: Where the copy begins.
        left: Its size, in bytes.
        sparse: Whether to leave a hole wherever a block is zero.

    Returns:
        The SHA-256 of what was written.

    """
    digest, size = hashlib.sha256(), left
    while left:
        part = os.pread(store, min(CHUNK, left), offset)
        if not part:
            break
        digest.update(part)
        offset, left = offset + len(part), left - len(part)
        step = BLOCK if sparse and part != ZEROS else CHUNK
        for begin in range(0, len(part), step):
            block = part[begin : begin + step]
            if (sparse or len(block) == CHUNK) and block == ZEROS[: len(block)]:
                os.lseek(file, len(block), os.SEEK_CUR)
                continue
            view = memoryview(block)
            while view:
                view = view[os.write(file, view) :]
    os.ftruncate(file, size)
    return digest.digest()
