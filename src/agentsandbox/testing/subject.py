# SPDX-License-Identifier: Apache-2.0
"""What every conformance check is given, and what it looks with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

    from agentsandbox.client import Lease

__all__ = ["HANG_GUARD", "NotApplicable", "Source", "processes", "raises"]

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
    lines = (await lease.exec(script, timeout=HANG_GUARD)).text.splitlines()
    return [line.strip() for line in lines if line.strip() and any(needle in line for needle in needles or ("",))]
