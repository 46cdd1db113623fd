# SPDX-License-Identifier: Apache-2.0
"""
What a killed driver may leave, and how to tell it from anything else.

A parent of sandboxes ends with its driver, and the kernel removes what it confined. This is for the moment until then,
and for directories of sandboxes that nothing confined.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agentsandbox.errors import UsageError

__all__ = ["remove", "started"]

PREFIX = "agentsandbox-"
"""What names of directories of unconfined sandboxes begin with; the run's id follows."""

END_LIMIT = 10.0
"""Seconds that a killed process may take to end."""


def started(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; ``None`` if there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


async def remove(receipt: Mapping[str, Any]) -> list[str]:
    """
    End the parents that a receipt names, and remove their directories.

    A process is the run's if its id and its start agree with the receipt: a process id alone may have been given away
    again. A directory is the run's if its name has the run's id and its owner is this user.

    Raises:
        UsageError: If the driver still runs.

    """
    run_id, driver = str(receipt["run_id"]), receipt.get("driver", {})
    if driver and not receipt.get("ended") and started(int(driver["pid"])) == driver["started"]:
        raise UsageError(f"run {run_id} is still going on (process {driver['pid']}); stop it first")
    removed = []
    for entry in receipt.get("created", ()):
        pid = int(entry["pid"])
        if started(pid) == entry["started"]:
            await _end(pid)
            removed.append(f"ended process {pid}")
        removed += await anyio.to_thread.run_sync(_remove_directories, Path(entry["directory"]), run_id)
    return removed


def _remove_directories(parent: Path, run_id: str) -> list[str]:
    removed = []
    for path in sorted(parent.glob(f"{PREFIX}{glob.escape(run_id)}-*")):
        if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
            shutil.rmtree(path)
            removed.append(f"removed {path}")
    return removed


async def _end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        with anyio.fail_after(END_LIMIT):
            await anyio.wait_readable(descriptor)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
