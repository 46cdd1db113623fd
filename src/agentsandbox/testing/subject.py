# SPDX-License-Identifier: Apache-2.0
"""What every conformance check is given, and what it looks with."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from agentsandbox.models.sandbox import ExecLevel

if TYPE_CHECKING:
    from types import TracebackType

    from agentsandbox.client import Lease
    from agentsandbox.models.command import ExecResult

__all__ = ["HANG_GUARD", "LACKING", "Need", "NotApplicable", "Source", "need", "processes", "raises", "sh"]

HANG_GUARD = 60.0
"""Seconds after which a check gives up that waits for something that must happen."""

E = TypeVar("E", bound=BaseException)


class Source(Protocol):
    """Whatever grants leases: a :class:`~agentsandbox.SandboxClient` or a :class:`~agentsandbox.SandboxPool`."""

    async def acquire(self, image: str) -> Lease:
        """Grant a sandbox of *image*."""
        ...


class NotApplicable(Exception):
    """The sandbox does not claim the capability that a check is about, so its rule does not apply."""


class Need(StrEnum):
    """What a rule is about and not every exec level has."""

    SHELL = "scripts, cwd=, env= and merge="
    LONG_ARGUMENTS = "arguments of any length"
    FILES = "files and directories"
    KILLING = "an end to commands that run too long or are not wanted any more"
    LIVE_PROCESSES = "processes to talk to"
    LEFTOVERS = "a look at processes that outlive their command"
    REAPING = "a first process of ours, which reaps orphans"
    PROCESSOR_TIME = "the processor time of a command"
    PEAK_MEMORY = "the peak memory of a command"


LACKING = MappingProxyType(
    {
        ExecLevel.RUNNER: frozenset[Need](),
        ExecLevel.SHELL: frozenset({Need.PEAK_MEMORY}),
        ExecLevel.DIRECT: frozenset(Need),
    }
)
"""What an exec level cannot do at all: rules about it do not apply there."""


def need(lease: Lease, what: Need) -> None:
    """
    Go on only if the sandbox has it.

    Args:
        lease: The sandbox.
        what: What the rest of a rule is about.

    Raises:
        NotApplicable: If its exec level cannot have it.

    """
    level = lease.capabilities.exec_level
    if what in LACKING[level]:
        raise NotApplicable(f"exec level '{level}' has not: {what}")


async def sh(lease: Lease, script: str, **options: Any) -> ExecResult:
    """
    Run a script at any exec level: where a string is none, ``sh`` is a program like any other.

    Args:
        lease: The sandbox.
        script: What to run.
        options: Those of :meth:`agentsandbox.client.Lease.exec`.

    """
    strings = Need.SHELL not in LACKING[lease.capabilities.exec_level]
    return await lease.exec(script if strings else ["sh", "-c", script], **options)


class raises(Generic[E]):  # noqa: N801 - reads like pytest's, which a user's tests need not have
    """
    Expect an exception.

    Args:
        expected: Its type.
        match: Text that its message must contain.

    """

    value: E

    def __init__(self, expected: type[E], match: str = "") -> None:
        self._expected = expected
        self._match = match

    def __enter__(self) -> raises[E]:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> bool:
        if error is None:
            raise AssertionError(f"no {self._expected.__name__} was raised")
        if not isinstance(error, self._expected):
            return False
        if self._match not in str(error):
            raise AssertionError(f"{self._match!r} is not in the message {str(error)!r}")
        self.value = error
        return True


async def processes(lease: Lease, *needles: str) -> list[str]:
    """
    List command lines of processes in a sandbox, without needing ``ps`` there.

    Args:
        lease: The sandbox.
        needles: Only those that contain one of these texts; without any, all.

    """
    script = 'for f in /proc/[0-9]*/cmdline; do tr "\\000" " " < "$f"; echo; done 2>/dev/null'
    lines = (await sh(lease, script, timeout=HANG_GUARD)).text.splitlines()
    return [line.strip() for line in lines if line.strip() and any(needle in line for needle in needles or ("",))]
