# SPDX-License-Identifier: Apache-2.0
"""Which exec level an image gives: one connection tells where it has a shell, and a few more where it has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import SandboxLost, StreamBroken
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.session.levels.ending import final
from agentsandbox.session.levels.refusals import start_error
from agentsandbox.session.streams import STREAM_ERRORS, close
from agentsandbox.transport.exec import STDOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentsandbox.transport.exec import Connect
    from agentsandbox.transport.websocket import ExecStatus

__all__ = ["Probed", "probe"]

SHELLS = ("sh", "/busybox/sh")
"""Where a shell is: on the image's PATH, or where debugging variants of images without one keep it."""

PYTHONS = ("python3", "/usr/local/bin/python3", "/usr/bin/python3")
"""Where images without a shell keep an interpreter."""

LOOK = """\
exec 7>&2
for p in python3 python /testbed/.venv/bin/python /opt/miniconda3/envs/testbed/bin/python /opt/miniconda3/bin/python \
/opt/conda/bin/python /opt/venv/bin/python /root/.venv/bin/python /usr/local/bin/python3 /usr/bin/python3 \
"$HOME"/.pyenv/versions/*/bin/python /root/.pyenv/versions/*/bin/python /opt/pyenv/versions/*/bin/python
do p=$(command -v "$p")||continue
v=$("$p" -ISBc 'import sys,ctypes,zlib;print("%d.%d.%d"%sys.version_info[:3]);sys.exit(sys.version_info<(3,7))' \
</dev/null)&&{ printf 'python=%s\\nversion=%s\\n' "$p" "$v";break; }
done 2>/dev/null
printf 'shell=%s\\n' "$(command -v "$0")"
for p in setsid tar sha256sum env grep;do command -v "$p" >/dev/null 2>&1||printf 'missing=%s\\n' "$p";done
[ -r /proc/self/stat ]||printf 'missing=%s\\n' /proc
exit 0"""
"""Runs with a shell as ``$0``, and is short enough for a URL."""

ASK = "import sys,ctypes,zlib;print('version=%d.%d.%d'%sys.version_info[:3]);sys.exit(sys.version_info<(3,7))"


@attrs.frozen(kw_only=True)
class Probed:
    """What an image turned out to offer. It is the same for all sandboxes of the image."""

    level: ExecLevel
    """The best exec level."""
    shell: str = ""
    """Its shell, if it has one."""
    python: str = ""
    """Its interpreter of Python 3.7 or later, if it has one."""
    python_version: str = ""
    """The interpreter's version."""
    missing: tuple[str, ...] = ()
    """Small programs that it lacks and that are missed at exec level ``shell``."""


async def probe(connect: Connect, *, timeout: float = 30.0) -> Probed:
    """
    Tell what an image offers.

    Args:
        connect: Starts a command in a sandbox of it.
        timeout: Seconds that it may take.

    Raises:
        SandboxLost: If the sandbox or the way to it gives no sensible answer.
        InfrastructureError: If the connection is refused.

    """
    try:
        with anyio.fail_after(timeout):
            for shell in SHELLS:
                facts = await _ask(connect, [shell, "-c", LOOK, shell])
                if facts is not None:
                    return _probed(facts, shell)
            for python in PYTHONS:
                facts = await _ask(connect, [python, "-ISBc", ASK])
                if facts is not None and facts.get("version"):
                    version = facts["version"][0]
                    return Probed(level=ExecLevel.RUNNER, python=python, python_version=version)
    except TimeoutError as error:
        raise StreamBroken("silent", f"no answer within {timeout:g} s to what the image offers") from error
    return Probed(level=ExecLevel.DIRECT)


def _probed(facts: dict[str, list[str]], shell: str) -> Probed:
    missing = tuple(facts.get("missing", ()))
    python = facts.get("python", [""])[0]
    level = ExecLevel.RUNNER if python else ExecLevel.DIRECT if "/proc" in missing else ExecLevel.SHELL
    return Probed(
        level=level,
        shell=facts.get("shell", [""])[0] or shell,
        python=python,
        python_version=facts.get("version", [""])[0],
        missing=missing,
    )


async def _ask(connect: Connect, argv: Sequence[str]) -> dict[str, list[str]] | None:
    """Run a command that prints facts; ``None`` if there is no such program, or it is none that works."""
    output = bytearray()
    status: ExecStatus | None
    connection = await connect(argv)
    try:
        while True:
            channel, data = await connection.receive()
            if channel == STDOUT:
                output += data
    except STREAM_ERRORS as error:
        status = final(connection, error)
    finally:
        await close(connection)
    if status is None:
        raise StreamBroken("stream_ended", "the connection ended without a status")
    if status.exit_code is None:
        if start_error(status, argv[0]) is None:
            raise SandboxLost("exec_failed", status.message or status.reason)
        return None
    if status.exit_code != 0:
        return None
    facts: dict[str, list[str]] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        name, _, value = line.partition("=")
        facts.setdefault(name, []).append(value)
    return facts
