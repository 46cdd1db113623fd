# SPDX-License-Identifier: Apache-2.0
"""What a lease remembers of its commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from agentsandbox.models.command import Command, ExecResult

__all__ = ["CommandEntry", "CommandLog", "as_words"]

_SHOWN = 500
"""Characters of a command that are kept: enough to recognise it; scripts can be megabytes."""


class CommandLog:
    """
    The commands of one lease, in the order in which they ended.

    Args:
        granted_at: What its times count from, in seconds on the driver's monotonic clock.
        redact: Takes credentials out of what is kept.

    """

    def __init__(self, granted_at: float, redact: Callable[[str], str] = str) -> None:
        self.granted_at = granted_at
        self.redact = redact
        self.first_started: float | None = None
        """When the first command started."""
        self.entries: list[Mapping[str, Any]] = []
        """One mapping a command."""

    def begin(self, command: Command, emit: Callable[..., None]) -> CommandEntry:
        """Open an entry for a command that is about to be sent."""
        return CommandEntry(self, command, emit)

    def __repr__(self) -> str:
        return f"<CommandLog [{len(self.entries)} commands]>"


class CommandEntry:
    """One command while it runs."""

    __slots__ = ("_began", "_command", "_emit", "_ended", "_log", "_started", "result")

    def __init__(self, log: CommandLog, command: Command, emit: Callable[..., None]) -> None:
        words = command.command
        text = log.redact(words) if isinstance(words, str) else shlex.join(map(log.redact, words))
        self._command = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        self._log = log
        self._emit = emit
        self._began = anyio.current_time()
        self._started: float | None = None
        self._ended = False
        self.result: ExecResult | None = None
        """What it came to, if it came to anything."""

    def started(self) -> None:
        """Note that it runs."""
        if self._started is None:
            self._started = anyio.current_time()
            if self._log.first_started is None:
                self._log.first_started = self._started
            self._emit("command.started", command=self._command)

    def end(self, error: BaseException | None) -> None:
        """Note that it is over; the result counts only without an error. What ended once does not end again."""
        if self._ended:
            return
        self._ended = True
        entry: dict[str, Any] = {"command": self._command}
        result = self.result if error is None else None
        if result is not None:
            entry["exit_code"] = result.exit_code
        elif error is not None:
            text = self._log.redact(str(error))
            entry["error"] = f"{type(error).__name__}: {text}" if text else type(error).__name__
        entry["started"] = None if self._started is None else self._started - self._log.granted_at
        began = self._began if self._started is None else self._started
        entry["wall"] = anyio.current_time() - began if result is None else result.wall_seconds
        if result is not None:
            entry["truncated"] = result.truncated
            entry["sizes"] = {"stdout": result.sizes.stdout, "stderr": result.sizes.stderr}
        self._log.entries.append(entry)
        self._emit("command.ended", **entry)


def as_words(command: str | Sequence[str]) -> str | tuple[str, ...]:
    """
    Take a command in either of its forms.

    Raises:
        ConfigurationError: If it is neither a string nor a list.

    """
    if isinstance(command, str):
        return command
    if not isinstance(command, Sequence):
        raise ConfigurationError(f"a command is a string or a list of strings, not {command!r}")
    return tuple(command)
