# SPDX-License-Identifier: Apache-2.0
"""Removing what an episode made, however deep, closed or large it is."""

from __future__ import annotations

import errno
import os
import stat

from .scan import open_directory


def remove(parent: int, name: str, status: os.stat_result) -> None:
    """Remove whatever it is. However deep a directory is, it is taken apart at the top."""
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    todo, number = [name], 0
    while todo:
        current = todo[-1]
        fd = open_directory(current, parent)
        try:
            own = os.fstat(fd)
            if own.st_mode & 0o700 != 0o700 and own.st_uid == os.geteuid():
                os.fchmod(fd, 0o700)
            with os.scandir(fd) as entries:
                below = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for child, is_directory in below:
                if not is_directory:
                    os.unlink(child, dir_fd=fd)
                    continue
                try:
                    os.rmdir(child, dir_fd=fd)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EACCES):
                        raise
                    moved = ".agentsandbox-%s-%d" % (os.urandom(6).hex(), number)
                    number += 1
                    _movable(fd, child)
                    os.rename(child, moved, src_dir_fd=fd, dst_dir_fd=parent)
                    todo.insert(0, moved)
        finally:
            os.close(fd)
        os.rmdir(current, dir_fd=parent)
        todo.remove(current)


def _movable(parent: int, name: str) -> None:
    """Moving a directory changes its entry for the one above, which its own mode must allow."""
    fd = open_directory(name, parent)
    try:
        status = os.fstat(fd)
        if status.st_mode & 0o700 != 0o700 and status.st_uid == os.geteuid():
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
