# SPDX-License-Identifier: Apache-2.0
"""What a command is asked to do, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from agentsandbox.errors import CommandFailed, ConfigurationError

__all__ = ["DEFAULT_OUTPUT_LIMIT", "DEFAULT_TIMEOUT", "Command", "ExecResult", "OutputSizes", "ProcessInfo"]

DEFAULT_TIMEOUT = 300.0
"""How long a command may run, in seconds, when nothing is said: long for a test suite, short for a hang."""

DEFAULT_OUTPUT_LIMIT = 10 * 1024 * 1024
"""How much output of each stream is kept, in bytes, when nothing is said (the limit of Inspect AI)."""


def _argv(command: str | list[str] | tuple[str, ...]) -> str | tuple[str, ...]:
    return command if isinstance(command, str) else tuple(command)


def _positive(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not value > 0:
        raise ConfigurationError(f"{attribute.name} must be above 0, not {value!r}")


@attrs.frozen(kw_only=True)
class Command:
    """One command as it goes to a runner."""

    command: str | tuple[str, ...] = attrs.field(converter=_argv)
    """A shell script, or an argument vector."""
    cwd: str | None = None
    """Working directory, relative to the sandbox's; ``None`` is the sandbox's."""
    env: Mapping[str, str] = attrs.field(factory=dict)
    """Variables on top of the sandbox's environment."""
    secrets: Mapping[str, str] = attrs.field(factory=dict, repr=lambda value: f"<{len(value)} secrets>")
    """More of them that nobody is shown."""
    user: str | int | None = None
    """User name or id; ``None`` is the sandbox's."""
    timeout: float | None = attrs.field(default=DEFAULT_TIMEOUT, validator=_positive)
    """Seconds the command may run."""
    no_output_timeout: float | None = attrs.field(default=None, validator=_positive)
    """Seconds it may stay silent."""
    output_limit: int = attrs.field(default=DEFAULT_OUTPUT_LIMIT, validator=_positive)
    """Bytes kept of each stream: half from the beginning, half from the end."""
    merge: bool = False
    """Whether standard error goes into standard output, in order."""

    @command.validator
    def _command(self, _: object, value: str | tuple[str, ...]) -> None:
        if not value:
            raise ConfigurationError("the command is empty; give a shell script or a list of arguments")
        for word in (value,) if isinstance(value, str) else value:
            if not isinstance(word, str):
                raise ConfigurationError(f"a command is a string or a list of strings, not {word!r} inside {value!r}")
            if "\0" in word:
                raise ConfigurationError("a command cannot contain a NUL character; pass such bytes by stdin or a file")

    @env.validator
    def _env(self, _: object, value: Mapping[str, str]) -> None:
        for key, text in value.items():
            if not isinstance(key, str) or not isinstance(text, str):
                raise ConfigurationError(f"environment variables are strings, not {key!r}: {text!r}")
            if not key or "=" in key or "\0" in key or "\0" in text:
                raise ConfigurationError(f"{key!r} is no valid environment variable")


@attrs.frozen(kw_only=True)
class OutputSizes:
    """How many bytes a command really wrote, whether kept or not."""

    stdout: int = 0
    """Bytes written to standard output."""
    stderr: int = 0
    """Bytes written to standard error."""


@attrs.frozen(kw_only=True)
class ProcessInfo:
    """A process seen in a sandbox."""

    pid: int
    """Its id inside the sandbox."""
    command: str
    """Its command line, shortened."""


@attrs.frozen(kw_only=True)
class ExecResult:
    """What a command that ended left behind."""

    exit_code: int
    """The exit code; 128 + n when signal n ended it."""
    stdout: bytes = attrs.field(default=b"", repr=lambda value: f"<{len(value)} bytes>")
    """Standard output: all of it, or its head and its tail when :attr:`truncated`."""
    stderr: bytes = attrs.field(default=b"", repr=lambda value: f"<{len(value)} bytes>")
    """Standard error, likewise."""
    truncated: bool = False
    """Whether either stream exceeded the output limit, so that its middle is missing."""
    sizes: OutputSizes = OutputSizes()
    """True sizes of both streams, in bytes."""
    wall_seconds: float = 0.0
    """From start to end, on the sandbox's monotonic clock."""
    cpu_seconds: float | None = None
    """User and system time of the command and the children it waited for."""
    peak_memory_bytes: int | None = None
    """The largest resident set of any one process of it."""
    leftovers: tuple[ProcessInfo, ...] = ()
    """Processes it started that outlived it. They die at reset."""

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Standard error as text; what is not UTF-8 is replaced."""
        return self.stderr.decode("utf-8", "replace")

    def check(self) -> ExecResult:
        """
        Return the result itself if the exit code is 0.

        Raises:
            CommandFailed: If it is not.

        """
        if self.exit_code:
            raise CommandFailed(self)
        return self
