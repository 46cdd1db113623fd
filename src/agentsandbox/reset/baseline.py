# SPDX-License-Identifier: Apache-2.0
"""What a sandbox was like before its first episode, as far as the driver has to know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.models.command import ProcessInfo
from agentsandbox.models.reset import ResetPolicy, ResetReport

if TYPE_CHECKING:
    from agentsandbox.session import Session

__all__ = ["SCOPE", "Baseline", "restore", "take"]

SCOPE = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run")  # noqa: S108 - inside sandboxes
"""Directories that everybody may write to; the working directory and the home are added by the runner."""

BASELINE_TIMEOUT = 300.0
"""Seconds that taking a baseline may take: the whole file system is read once."""


@attrs.frozen(kw_only=True)
class Baseline:
    """
    What was there.

    The contents stay in the sandbox, where only its runner can reach them; the hashes that prove them are here.
    """

    manifest: str
    """SHA-256 of the manifest: of every file's type, mode, owner, contents, and of everything outside the scope."""
    stamps: str
    """SHA-256 of the inode numbers and change times that the files have at present."""
    scope: tuple[str, ...]
    """Directories that are restored."""
    files: int
    """Files in them."""
    outside: int
    """Files elsewhere, of which changes are found."""
    copied: int
    """Bytes that are kept for being restored."""
    seconds: float
    """How long taking it took."""


async def take(session: Session, policy: ResetPolicy, *, whole: bool = False) -> tuple[Baseline | None, str]:
    """
    Have the runner note what is there. Nothing of an episode may run, or have run.

    Args:
        session: The sandbox.
        policy: What is in the scope.
        whole: Whether to look at every file outside of it also where it would be enough to look at the changes.

    Returns:
        What is to be remembered, or ``None`` and why nothing could be proved later.

    Raises:
        SandboxLost: If the sandbox is lost.

    """
    report = await session.builtin(
        "baseline",
        {
            "scope": [*SCOPE, *policy.scope],
            "exclude": list(policy.exclude),
            "copies": policy.copies_limit,
            "whole": whole,
        },
        timeout=BASELINE_TIMEOUT,
    )
    if report.get("verified") is not True:
        return None, str(report.get("reason"))[:2000]
    return (
        Baseline(
            manifest=str(report["manifest"]),
            stamps=str(report["stamps"]),
            scope=tuple(map(str, report["scope"])),
            files=int(report["files"]),
            outside=int(report["outside"]),
            copied=int(report["copied"]),
            seconds=float(report["seconds"]),
        ),
        "",
    )


async def restore(session: Session, baseline: Baseline, *, timeout: float) -> tuple[Baseline, ResetReport]:
    """
    Have the runner end everything that runs and put back what changed.

    Args:
        session: The sandbox.
        baseline: What it was like.
        timeout: Seconds that this may take.

    Returns:
        What it is like now, and what was done. Unless that is verified, the sandbox must not be used any more.

    Raises:
        CommandTimeout: If it took too long.
        SandboxLost: If the sandbox is lost.

    """
    arguments = {"manifest": baseline.manifest, "stamps": baseline.stamps}
    answer = await session.builtin("reset", arguments, timeout=timeout)
    report = _report(answer)
    return (attrs.evolve(baseline, stamps=str(answer["stamps"])) if report.verified else baseline), report


def _report(answer: Mapping[str, Any]) -> ResetReport:
    return ResetReport(
        rung="files",
        seconds=float(answer.get("seconds", 0.0)),
        changed=tuple(map(str, answer.get("changed") or ())),
        killed=tuple(ProcessInfo(pid=int(pid), command=str(command)) for pid, command in answer.get("killed") or ()),
        verified=answer.get("verified") is True and isinstance(answer.get("stamps"), str),
        reason=str(answer.get("reason") or ""),
        figures={
            name: float(value)
            for name, value in answer.items()
            if name in ("files", "hashed", "outside", "count", "scope_seconds", "outside_seconds")
        },
    )
