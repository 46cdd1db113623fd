# SPDX-License-Identifier: Apache-2.0
"""A session that takes time and does nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.errors import CommandTimeout, OutputLimitExceeded, SandboxLost, UsageError
from agentsandbox.models.command import ExecResult

if TYPE_CHECKING:
    from agentsandbox.models.command import Command

__all__ = ["SimulatedSession", "duration"]


def duration(command: str | tuple[str, ...]) -> tuple[float, int]:
    """
    Say what a simulated command takes and how it ends.

    ``sleep SECONDS`` takes as long as it says, ``false`` and ``exit N`` fail; everything else succeeds at once.

    Returns:
        Seconds and the exit code.

    """
    words = command if isinstance(command, tuple) else tuple(shlex.split(command))
    if words[:1] == ("sleep",) and len(words) == 2:
        return float(words[1]), 0
    if words[:1] == ("exit",) and len(words) == 2:
        return 0.0, int(words[1])
    return 0.0, 1 if words == ("false",) else 0


class SimulatedSession:
    """
    Commands that take virtual time, and files in memory.

    Args:
        round_trip: Seconds between asking for a command and its start.

    """

    def __init__(self, round_trip: float) -> None:
        self.round_trip = round_trip
        self.lost: SandboxLost | None = None
        """Why it is of no use any more."""
        self._files: dict[str, bytes] = {}
        self._running: dict[anyio.CancelScope, None] = {}  # in order: losing them must repeat

    @property
    def alive(self) -> bool:
        """Whether commands can be given to it."""
        return self.lost is None

    def lose(self, error: SandboxLost) -> None:
        """Give the sandbox up: whoever waits for a command is told so at once."""
        self.lost = self.lost or error
        for scope in tuple(self._running):
            scope.cancel()

    async def exec(
        self,
        command: Command,
        *,
        stdin: Any = None,  # noqa: ARG002 - nobody reads it
        on_output: Any = None,  # noqa: ARG002 - there is none
        on_started: Callable[[], None] | None = None,
        require_complete: bool = False,  # noqa: ARG002 - likewise
    ) -> ExecResult:
        """
        Run a command: see :func:`duration`.

        Raises:
            CommandTimeout: If it would take longer than it may.
            SandboxLost: If the sandbox is lost meanwhile.

        """
        seconds, code = duration(command.command)
        await self._pass(self.round_trip)
        if on_started is not None:
            on_started()
        if command.timeout is not None and seconds > command.timeout:
            await self._pass(command.timeout)
            raise CommandTimeout("timeout", command.timeout, command.timeout)
        if seconds:
            await self._pass(seconds)
        return ExecResult(exit_code=code, wall_seconds=seconds)

    async def open_process(self, command: Command) -> Any:
        """Refuse: there is nothing to talk to."""
        raise UsageError(f"a simulated sandbox has no processes to talk to: {command.command!r}")

    async def read_file(self, path: str, *, user: str | int | None = None, limit: int | None = None) -> bytes:  # noqa: ARG002
        """Return what was written."""
        await self._pass(self.round_trip)
        if path not in self._files:
            raise FileNotFoundError(f"no such file: {path}")
        if limit is not None and len(self._files[path]) > limit:
            raise OutputLimitExceeded(limit)
        return self._files[path]

    async def write_file(
        self,
        path: str,
        data: bytes,
        *,
        mode: int | None = None,  # noqa: ARG002
        user: str | int | None = None,  # noqa: ARG002
    ) -> None:
        """Keep something."""
        await self._pass(self.round_trip)
        self._files[path] = data

    async def upload_dir(self, source: Path, target: str, *, user: str | int | None = None) -> None:  # noqa: ARG002
        """Take a moment."""
        await self._pass(self.round_trip)

    async def download_dir(self, source: str, target: Path, *, user: str | int | None = None) -> None:  # noqa: ARG002
        """Take a moment."""
        await self._pass(self.round_trip)

    async def ping(self, timeout: float = 5.0) -> float:  # noqa: ARG002 - it is faster
        """Answer."""
        await self._pass(self.round_trip)
        return self.round_trip

    async def _pass(self, seconds: float) -> None:
        if self.lost is None:
            with anyio.CancelScope() as scope:
                self._running[scope] = None
                try:
                    await anyio.sleep(seconds)
                finally:
                    self._running.pop(scope, None)
        if self.lost is not None:
            raise SandboxLost(self.lost.reason, self.lost.detail)

    def __repr__(self) -> str:
        return f"<SimulatedSession [{self.lost.reason if self.lost else 'attached'}, {len(self._running)} running]>"
