# SPDX-License-Identifier: Apache-2.0
"""
Ending sandboxes that no namespace confines: what the kernel does elsewhere is done here, process by process.

This module keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import Any, Callable, Dict, List, Optional, Set


def kill(pid: int) -> None:
    """Send SIGKILL, if there is such a process."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def parents() -> Dict[int, int]:
    """Return the parent of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                pass  # it ended meanwhile
    return found


def descendants(pid: int) -> List[int]:
    """Return every process below *pid*, the nearest first."""
    table = parents()
    found = [pid]
    for ancestor in found:
        found.extend(child for child, parent in table.items() if parent == ancestor)
    return found[1:]


def kill_strays(known: Set[int]) -> None:
    """End the children of this process that are not *known*: what a sandbox that is gone has left."""
    while True:
        own = os.getpid()
        strays = [pid for pid, parent in parents().items() if parent == own and pid not in known]
        if not strays:
            return
        for stray in strays:
            for pid in descendants(stray):
                kill(pid)
            kill(stray)
        for stray in strays:
            try:
                os.waitpid(stray, 0)
            except ChildProcessError:
                pass


def remove(directory: Optional[str]) -> Optional[str]:
    """Remove a directory, also one whose owner took its own permissions. Returns it if something is left of it."""
    if directory is None:
        return None

    tried: Set[str] = set()

    def again(_function: Callable[..., Any], path: str, _error: Any) -> None:
        if path in tried:
            return
        tried.add(path)
        try:
            os.chmod(os.path.dirname(path), 0o700)
            if os.path.isdir(path) and not os.path.islink(path):
                os.chmod(path, 0o700)
                shutil.rmtree(path, **handler)
            else:
                os.unlink(path)
        except OSError:
            pass  # what is left is told

    handler: Dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": again}
    shutil.rmtree(directory, **handler)
    return directory if os.path.lexists(directory) else None
