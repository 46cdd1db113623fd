# SPDX-License-Identifier: Apache-2.0
"""What runs in the sandbox, read from ``/proc``: whose descendant a process is, what it is called, whether it lives."""

from __future__ import annotations

import os
import sys
from typing import Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from .kernel import read_up_to

MARKER = b"AGENTSANDBOX_COMMAND"
"""The environment variable that tells which command a process belongs to, unless it hides it."""

MAX_CMDLINE = 200
"""How much of a command line is reported, in bytes."""

MAX_LISTED = 200
"""How many processes are reported, so that the report of a fork bomb fits into a frame."""

Key = Tuple[int, int]


class Process(NamedTuple):
    """One line of the process table. A process id with its start time is never used twice."""

    pid: int
    parent: int
    session: int
    start: int
    alive: bool

    @property
    def key(self) -> Key:
        """What it is known by."""
        return (self.pid, self.start)


Table = Dict[int, Process]


def visible() -> bool:
    """Whether ``/proc`` shows the processes of our own namespace."""
    try:
        return int(os.readlink("/proc/self")) == os.getpid()
    except (OSError, ValueError):
        return False


def read(pid: int) -> Optional[Process]:
    """Return one process, or ``None`` if there is none."""
    try:
        fd = os.open("/proc/%d/stat" % pid, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = os.read(fd, 4096)
    except OSError:  # it ended in between
        return None
    finally:
        os.close(fd)
    # The name is free text in parentheses: what follows the last of them is not.
    fields = content[content.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    # A process whose first thread has ended shows as a zombie while its other threads go on.
    alive = fields[0] not in (b"Z", b"X", b"x") or int(fields[17]) > 1
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), alive)


def table() -> Table:
    """Return every process that can be seen."""
    found: Table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def children_of_ours() -> Optional[List[int]]:
    """Return the runner's children from the kernel's own list, or ``None`` where it keeps none."""
    pid = os.getpid()
    try:
        fd = os.open("/proc/%d/task/%d/children" % (pid, pid), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return [int(word) for word in read_up_to(fd, sys.maxsize).split()]
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def marked(pid: int, command: int) -> bool:
    """Whether a process carries the marker of a command in the environment it was started with."""
    content = _content(pid, "environ", 1 << 20)
    return (b"\0" + content).find(b"\0%s=%d\0" % (MARKER, command)) >= 0


def describe(pid: int) -> str:
    """Return the command line of a process, shortened; its name in brackets if it has none."""
    line = _content(pid, "cmdline", 4096)[: MAX_CMDLINE * 4].replace(b"\0", b" ").strip()
    if not line:
        line = b"[" + _content(pid, "comm", 64).strip() + b"]"
    return line.decode("utf-8", "replace")[:MAX_CMDLINE]


def listed(found: Iterable[Process]) -> List[List[object]]:
    """Return processes as they are reported."""
    return [[process.pid, describe(process.pid)] for process in sorted(found)[:MAX_LISTED]]


def descendants(processes: Table, roots: Iterable[int]) -> Dict[int, Process]:
    """Return the processes with these ids and everything below them."""
    below: Dict[int, List[Process]] = {}
    for process in processes.values():
        below.setdefault(process.parent, []).append(process)
    found: Dict[int, Process] = {}
    todo = [processes[pid] for pid in roots if pid in processes]
    while todo:
        process = todo.pop()
        if process.pid not in found:
            found[process.pid] = process
            todo.extend(below.get(process.pid, ()))
    return found


def tree(
    processes: Table,
    *,
    main: int,
    command: int,
    runner: int,
    seen: Set[Key],
    foreign: Set[Key],
    others: Set[int],
    alone: bool,
) -> Dict[int, Process]:
    """
    Return what belongs to a command: its session, their descendants, and orphans that can be told to come from it.

    Args:
        processes: The process table.
        main: The process id, and so the session id, of the command.
        command: Its number.
        runner: Who orphans are given to.
        seen: Processes that were found to belong to it before.
        foreign: Processes that earlier commands left behind.
        others: Main processes of other commands.
        alone: Whether no other command is active, so that an unknown orphan can only be this one's.

    """
    roots = []
    for process in processes.values():
        if process.pid == runner or process.pid in others or process.key in foreign:
            continue
        if (
            process.session == main
            or process.key in seen
            or (process.parent == runner and (alone or marked(process.pid, command)))
        ):
            roots.append(process.pid)
    return descendants(processes, roots)


def _content(pid: int, name: str, limit: int) -> bytes:
    try:
        fd = os.open("/proc/%d/%s" % (pid, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return read_up_to(fd, limit)
    except OSError:
        return b""
    finally:
        os.close(fd)
