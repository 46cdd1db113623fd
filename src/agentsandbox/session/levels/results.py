# SPDX-License-Identifier: Apache-2.0
"""What came of a command of a shell session, read back from the sandbox."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import CommandTimeout, InfrastructureError, OutputLimitExceeded, SandboxLost, StreamBroken
from agentsandbox.models.command import ExecResult, OutputSizes, ProcessInfo
from agentsandbox.session.calls import limit_of

if TYPE_CHECKING:
    from agentsandbox.session.levels.call import Call
    from agentsandbox.session.levels.control import Control
    from agentsandbox.session.levels.store import Store

__all__ = ["SPOOL_LIMIT", "outcome", "processes"]

SPOOL_LIMIT = 2 * 1024**3
"""Bytes that a command's output may take in the sandbox: what is more would fill the disk of the node."""


async def processes(control: Control, pids: tuple[int, ...]) -> tuple[ProcessInfo, ...]:
    """Return the command lines of processes."""
    found = []
    for pid in pids[:100]:
        reply = await control.request(f"cat /proc/{pid}/cmdline 2>/dev/null")
        command = reply.data.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
        found.append(ProcessInfo(pid=pid, command=command[:200]))
    return tuple(found)


async def outcome(
    store: Store, call: Call, kept: tuple[bytes, bytes] | None = None, sizes: tuple[int, int] = (0, 0)
) -> ExecResult:
    """
    Return what came of a command that is done, or raise it.

    Args:
        store: Where its output is.
        call: The command.
        kept: Its output, if it was read already; else it is read now.
        sizes: If it was read already: how much it was.

    """
    control = store.control
    if control.lost is not None:
        raise control.loss(*(kept or (b"", b"")))
    command, record = call.command, call.record
    if call.refusal is not None and (call.refusal != "killed" or call.limit is None):
        if call.refusal == "no_state":
            control.lose(SandboxLost("no_state", "the directory with the state of commands is gone"))
            raise control.loss()
        raise call.error()
    if kept is None:
        kept, sizes = await _output(store, call)
    elapsed = record.wall if record else 0.0
    if call.limit in ("total", "no_output"):
        seconds = limit_of(command, call.limit)
        # Clocks differ, and the sandbox's has but hundredths: a limit that fired had passed.
        raise CommandTimeout(call.limit, seconds, max(elapsed, seconds), *kept)
    if call.limit == "spool":
        raise OutputLimitExceeded(SPOOL_LIMIT)
    if record is None:
        raise StreamBroken("killed", f"command {call.number} was killed before it started")
    if record.cut:
        detail = f"output of command {call.number} was not stored: a full disk, no process left, or our files removed"
        control.lose(SandboxLost("output_lost", detail))
        raise control.loss(*kept)
    return ExecResult(
        exit_code=record.code,
        stdout=kept[0],
        stderr=kept[1],
        truncated=max(sizes) > command.output_limit,
        sizes=OutputSizes(stdout=sizes[0], stderr=sizes[1]),
        wall_seconds=record.wall,
        cpu_seconds=record.cpu,
        leftovers=await processes(control, record.leftovers) if record.leftovers else (),
    )


async def _output(store: Store, call: Call) -> tuple[tuple[bytes, bytes], tuple[int, int]]:
    """Read what a command wrote: what is kept of it, and how much it was."""
    found: dict[str, tuple[bytes, int]] = {}

    async def one(name: str) -> None:
        with suppress(InfrastructureError):  # raised below, without the group around it
            found[name] = await store.whole(f"{call.number}.{name}", call.command.output_limit)

    # Both requests go out at once, so that they take one round trip.
    async with anyio.create_task_group() as group:
        group.start_soon(one, "err")
        await one("out")
    for name in ("out", "err"):
        if name not in found:
            found[name] = await store.whole(f"{call.number}.{name}", call.command.output_limit)
    stdout, stderr = found["out"], found["err"]
    return (stdout[0], stderr[0]), (stdout[1], stderr[1])
