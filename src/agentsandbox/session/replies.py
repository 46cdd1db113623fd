# SPDX-License-Identifier: Apache-2.0
"""What a runner answers, checked field by field: it may be anybody's program by now."""

from __future__ import annotations

import math
import os
from typing import Any

import attrs

from agentsandbox.errors import (
    CommandNotExecutable,
    CommandNotFound,
    ConfigurationError,
    StartError,
    UserNotFound,
    WorkingDirectoryNotFound,
)
from agentsandbox.models.command import ProcessInfo
from agentsandbox.protocol.frames import FrameError, load

__all__ = ["Exit", "Refusal", "os_error"]

LIMITS = ("total", "no_output", "killed")

START_ERRORS: dict[str, type[StartError]] = {
    "not_found": CommandNotFound,
    "not_executable": CommandNotExecutable,
    "no_user": UserNotFound,
    "no_cwd": WorkingDirectoryNotFound,
    "too_large": StartError,
    "os_error": StartError,
}


def _integer(value: dict[str, Any], key: str, *, least: int = 0, most: int = 2**63) -> int:
    number = value.get(key)
    if type(number) is not int or not least <= number <= most:
        raise FrameError(f"{key} is {number!r:.100}")
    return number


def _optional(value: dict[str, Any], key: str) -> int | None:
    return None if value.get(key) is None else _integer(value, key)


def _seconds(value: dict[str, Any], key: str) -> float | None:
    number = value.get(key)
    if number is None:
        return None
    if type(number) not in (int, float) or not 0 <= number < math.inf:
        raise FrameError(f"{key} is {number!r:.100}")
    return float(number)


def _processes(value: dict[str, Any], key: str) -> tuple[ProcessInfo, ...]:
    entries = value.get(key) or ()
    try:
        found = tuple(ProcessInfo(pid=pid, command=command) for pid, command in entries)
    except (TypeError, ValueError) as error:
        raise FrameError(f"{key} is no list of processes") from error
    if not all(type(process.pid) is int and isinstance(process.command, str) for process in found):
        raise FrameError(f"{key} is no list of processes")
    return found


def _text(value: dict[str, Any], key: str) -> str:
    text = value.get(key, "")
    if not isinstance(text, str):
        raise FrameError(f"{key} is {text!r:.100}")
    return text


@attrs.frozen(kw_only=True)
class Exit:
    """The end of a command."""

    code: int
    """Exit code; 128 + n when signal n ended it."""
    limit: str | None
    """What made the runner kill it: ``total``, ``no_output`` or ``killed``."""
    wall: float
    """Seconds from start to end."""
    cpu: float | None
    """Seconds of processor time."""
    memory: int | None
    """Largest resident set, in bytes."""
    sizes: tuple[int, int]
    """Bytes of standard output and standard error."""
    leftovers: tuple[ProcessInfo, ...]
    """Processes of it that are still alive."""
    survivors: tuple[ProcessInfo, ...]
    """Processes of it that could not be killed."""
    report: dict[str, Any]
    """What a builtin has to say."""

    @classmethod
    def parse(cls, payload: bytes) -> Exit:
        """
        Read the payload of an EXIT frame.

        Raises:
            FrameError: If a field is missing or is not what it must be.

        """
        value = load(payload)
        limit, report = value.get("limit"), value.get("report")
        if limit is not None and limit not in LIMITS:
            raise FrameError(f"limit is {limit!r:.100}")
        if report is not None and not isinstance(report, dict):
            raise FrameError(f"report is {report!r:.100}")
        return cls(
            code=_integer(value, "code", most=255),
            limit=limit,
            wall=_seconds(value, "wall") or 0.0,
            cpu=_seconds(value, "cpu"),
            memory=_optional(value, "memory"),
            sizes=(_integer(value, "stdout"), _integer(value, "stderr")),
            leftovers=_processes(value, "leftovers"),
            survivors=_processes(value, "survivors"),
            report=report or {},
        )

    @staticmethod
    def started(payload: bytes) -> int:
        """
        Read the payload of a STARTED frame.

        Returns:
            The process id inside the sandbox.

        Raises:
            FrameError: If it has none.

        """
        return _integer(load(payload), "pid", least=1)


@attrs.frozen(kw_only=True)
class Refusal:
    """Why a command was not started."""

    kind: str
    """One of the kinds of :data:`START_ERRORS`, or ``bad_request``."""
    message: str
    """In the words of the operating system."""
    subject: str
    """The program, user or directory that it is about."""

    @classmethod
    def parse(cls, payload: bytes) -> Refusal:
        """
        Read the payload of a FAILED frame.

        Raises:
            FrameError: If the kind is unknown or a text is none.

        """
        value = load(payload)
        kind = value.get("kind")
        if kind != "bad_request" and (not isinstance(kind, str) or kind not in START_ERRORS):
            raise FrameError(f"kind is {kind!r:.100}")
        return cls(kind=kind, message=_text(value, "message"), subject=_text(value, "subject"))

    def error(self) -> StartError | ConfigurationError:
        """Return the exception to raise."""
        if self.kind == "bad_request":
            return ConfigurationError(self.message)
        return START_ERRORS[self.kind](self.message or self.kind, subject=self.subject)


def os_error(report: dict[str, Any], path: str) -> OSError | None:
    """
    Return Python's own exception for what a builtin reports.

    Args:
        report: The report.
        path: The path that the caller gave, if the report names no other.

    Returns:
        The exception, of the subclass that fits its ``errno``; ``None`` if the report is of a success.

    Raises:
        FrameError: If the report is malformed.

    """
    error = report.get("error")
    if error is None:
        return None
    if not isinstance(error, dict):
        raise FrameError(f"error is {error!r:.100}")
    number = _integer(error, "errno", most=4095)
    subject = _text(error, "path") or path
    message = _text(error, "message").removeprefix(f"{subject}: ")  # Python puts it at the end
    return OSError(number, message or os.strerror(number), subject)
