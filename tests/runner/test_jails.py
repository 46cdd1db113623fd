# SPDX-License-Identifier: Apache-2.0
"""What a runner says that is asked for jails, and may or can not make any; where it can, see ``tests/contract``."""

from __future__ import annotations

import os
import socket
import subprocess
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from agentsandbox.backends.kubernetes.jailing import MODULES, JailOptions
from agentsandbox.protocol import bootstrap, frames
from agentsandbox.protocol.connection import Connection

from .conftest import NONCE, Driver

PROGRAM = """
import os
from agentsandbox.protocol.runner.jailer import run
from agentsandbox.protocol.runner.loop import serve
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
serve((0, 1), nonce=%r, base_env={}, workdir="/", jails=run)
"""


class Ordinary(Driver):
    """A runner that is to make jails, and is an ordinary user that may not."""

    def __init__(self, python: str, path: Path) -> None:
        program = path / "program.py"
        program.write_bytes(bootstrap.source(MODULES) + (PROGRAM % NONCE).encode())
        self.config: dict[str, Any] = {}
        self.socket, theirs = socket.socketpair()
        arguments = [python, "-I", "-S", "-B", str(program)]
        self.process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
        theirs.close()
        self.connection = Connection(frames.TO_DRIVER)
        self.last = 0
        self.frames = deque()
        self.facts: dict[str, Any] = {}


def arguments(**more: Any) -> dict[str, Any]:
    """Return what a jail is asked for with."""
    options = JailOptions()
    nothing = {"workdir": None, "user": None, "network": False, "storage": None, "path": ""}
    given = {"name": "jail-1", "number": 1, "nonce": "n", "env": {}, "limits": options.limits(), **nothing, **more}
    return {"groups": options.groups(slots=8, memory=None), **given}


@pytest.fixture
def ordinary(python: str, tmp_path: Path) -> Any:
    """A runner of its own."""
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if directory.stat().st_uid == os.getuid() and directory != Path("/tmp"):
            directory.chmod(0o755)
    with Ordinary(python, tmp_path) as driver:
        yield driver


def test_a_kernel_that_refuses_is_told_with_the_step(ordinary: Driver) -> None:
    """The command ends with the reason in its report, nothing is left, and the runner goes on."""
    result = ordinary.run(stdin=b"", builtin="jail", args=arguments())

    assert 1 == result.exit["code"]
    assert {"stage": "new mount namespace", "errno": 1, "left": []} == result.exit["report"]
    assert b"fine\n" == ordinary.run(script="echo fine").stdout


def test_a_runner_that_is_to_make_none_refuses(driver: Driver) -> None:
    """Whoever asks for a jail in a sandbox gets none."""
    result = driver.run(stdin=b"", builtin="jail", args=arguments())

    assert ("bad_request", "this runner makes no jails") == (result.exit["kind"], result.exit["message"])
