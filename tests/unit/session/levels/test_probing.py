# SPDX-License-Identifier: Apache-2.0
"""What an image offers is found out with few connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from shells import shell_sandbox
from test_direct import Scripted, refusal

from agentsandbox.errors import SandboxLost, StreamBroken
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.session.levels import Probed, probe
from agentsandbox.transport.websocket import ExecStatus

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("backend")]


class Image:
    """Answers by program; what is not in the image is refused in the runtime's words."""

    def __init__(self, **programs: tuple[bytes, int]) -> None:
        self.programs = programs
        self.asked: list[str] = []

    async def __call__(self, command: Sequence[str], *, stdin: bool = False) -> Any:
        assert not stdin
        self.asked.append(command[0])
        if command[0] not in self.programs:
            return Scripted([], refusal(f'"{command[0]}": executable file not found in $PATH'), "v5.channel.k8s.io")
        output, code = self.programs[command[0]]
        # One byte at a time: pieces may be of any size.
        return Scripted([(1, bytes((byte,))) for byte in output], ExecStatus(exit_code=code), "v5.channel.k8s.io")


async def test_an_image_with_python() -> None:
    """A shell finds the Python: one connection."""
    image = Image(sh=(b"python=/usr/bin/python3\nversion=3.11.2\nshell=/bin/sh\n", 0))
    assert await probe(image) == Probed(
        level=ExecLevel.RUNNER, shell="/bin/sh", python="/usr/bin/python3", python_version="3.11.2"
    )
    assert image.asked == ["sh"]


async def test_an_image_with_a_shell_only() -> None:
    """A shell finds no Python: one connection, and what else is missing is named."""
    image = Image(sh=(b"shell=/bin/sh\nmissing=setsid\nmissing=tar\n", 0))
    assert await probe(image) == Probed(level=ExecLevel.SHELL, shell="/bin/sh", missing=("setsid", "tar"))
    assert image.asked == ["sh"]


async def test_an_image_with_python_and_no_shell() -> None:
    """A Python where images without a shell have it counts too."""
    image = Image(**{"/usr/bin/python3": (b"version=3.12.1\n", 0)})
    found = await probe(image)
    assert (found.level, found.python, found.python_version) == (ExecLevel.RUNNER, "/usr/bin/python3", "3.12.1")


async def test_an_image_with_nothing() -> None:
    """Nothing but the runtime's refusals: one connection a command is left."""
    image = Image()
    assert await probe(image) == Probed(level=ExecLevel.DIRECT)
    assert len(image.asked) == 5


async def test_an_old_python_does_not_count() -> None:
    """A Python that is too old for the runner is none."""
    image = Image(python3=(b"version=3.5.0\n", 1))
    assert (await probe(image)).level is ExecLevel.DIRECT


async def test_an_unknown_answer_is_no_answer() -> None:
    """A connection without a status, or with one about something else, says nothing about the image."""

    async def silent(_: Sequence[str], *, stdin: bool = False) -> Any:
        return Scripted([], None, "v5.channel.k8s.io")

    async def broken(_: Sequence[str], *, stdin: bool = False) -> Any:
        status = ExecStatus(exit_code=None, reason="InternalError", message="container not running")
        return Scripted([], status, "v5.channel.k8s.io")

    with pytest.raises(StreamBroken):
        await probe(silent)
    with pytest.raises(SandboxLost, match="container not running"):
        await probe(broken)


async def test_a_real_shell() -> None:
    """The code that looks is right for each real shell, and short enough for a URL."""
    for name in ("dash", "bash", "busybox"):
        async with shell_sandbox(name) as (_, connect, __):
            found = await probe(connect)
            assert found.shell
            assert found.level in (ExecLevel.RUNNER, ExecLevel.SHELL)
            assert (found.level is ExecLevel.RUNNER) == bool(found.python)


async def test_what_a_broken_connection_says_is_not_believed() -> None:
    """Facts that did not arrive whole decide nothing about an image, whatever its shell's exit code is."""

    async def broken(command: Sequence[str], *, stdin: bool = False) -> Any:
        connection = Scripted([(1, b"shell=/bin/sh\n")], ExecStatus(exit_code=0), "v5.channel.k8s.io")
        connection.breaks = True
        return connection

    with pytest.raises(StreamBroken, match="without a status"):
        await probe(broken)
