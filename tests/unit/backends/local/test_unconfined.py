# SPDX-License-Identifier: Apache-2.0
"""Ending processes and removing directories that no namespace confines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agentsandbox.protocol.runner import unconfined


def test_closed_directories_are_removed(tmp_path: Path) -> None:
    """Directories that took all permissions from their owner, one in another, are removed; links are not followed."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    doomed = tmp_path / "doomed"
    (doomed / "a/b/c").mkdir(parents=True)
    (doomed / "a/b/c/file").touch()
    (doomed / "a/link").symlink_to(kept)
    for place in ("a/b/c", "a/b", "a"):
        (doomed / place).chmod(0)

    assert unconfined.remove(str(doomed)) is None
    assert not doomed.exists()
    assert (kept / "file").exists()


def test_nothing_to_remove_is_fine(tmp_path: Path) -> None:
    """A directory that is gone already, or was never made, is no error."""
    assert unconfined.remove(None) is None
    assert unconfined.remove(str(tmp_path / "gone")) is None


KEEPER = """
import os, subprocess, sys
from agentsandbox.protocol.runner import jail, unconfined
jail.prctl(jail.PR_SET_CHILD_SUBREAPER, 1)
known = subprocess.Popen(["sleep", "1000"])
subprocess.run(["sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & setsid sleep 1000 & exit 0"])
while len(unconfined.descendants(os.getpid())) < 5:
    pass
unconfined.kill_strays({known.pid})
print(unconfined.descendants(os.getpid()) == [known.pid])
known.kill()
known.wait()
unconfined.kill(known.pid)
"""


def test_strays_are_ended_and_others_are_not() -> None:
    """Orphans of a sandbox that is gone are ended with all below them; a process that is known lives on."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", KEEPER], capture_output=True, check=False, env=environment, timeout=50
    )

    assert (result.returncode, result.stdout) == (0, b"True\n"), result.stderr
