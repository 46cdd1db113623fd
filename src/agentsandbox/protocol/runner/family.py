# SPDX-License-Identifier: Apache-2.0
"""The processes of all commands: who has ended, whose descendant is whose, and what was left behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List, Set, Tuple

from . import kernel, processes
from .killing import kill_everything

if TYPE_CHECKING:
    from .commands import Command


class Family:
    """What a runner knows of the processes below it."""

    def __init__(self) -> None:
        self.adopts = kernel.become_subreaper()
        """Whether orphans become our children."""
        self.sees = processes.visible()
        """Whether processes can be seen at all."""
        self.commands: Dict[int, Command] = {}
        """The commands that are not over, by number."""
        self._by_pid: Dict[int, Command] = {}
        self._left: Set[processes.Key] = set()
        self._childless = True

    def __repr__(self) -> str:
        return "<Family [%d commands, %d left behind]>" % (len(self.commands), len(self._left))

    def add(self, command: Command) -> None:
        """A command was started."""
        self._childless = False
        self.commands[command.number] = self._by_pid[command.pid] = command

    def remove(self, command: Command) -> None:
        """A command is over."""
        del self.commands[command.number]

    def give_up(self, command: Command) -> None:
        """Its main process cannot be killed: nobody will see it end."""
        self._by_pid.pop(command.pid, None)

    def reap(self) -> None:
        """Take leave of every child that has ended, our own and adopted ones."""
        ended: List[Tuple[Command, int, Any]] = []
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                break
            if pid == 0:
                break
            command = self._by_pid.pop(pid, None)
            if command is not None:
                ended.append((command, status, usage))
        for command, status, usage in ended:
            command.main_ended(status, usage)

    def tree_of(self, command: Command) -> Dict[int, processes.Process]:
        """Return the processes of a command that can be seen."""
        if not self.sees:
            return {}
        table = processes.table()
        self._left &= {process.key for process in table.values()}
        alone = not command.builtin and not any(
            other is not command and not other.builtin for other in self.commands.values()
        )
        found = processes.tree(
            table,
            main=command.pid,
            command=command.number,
            runner=os.getpid(),
            seen=command.seen,
            foreign=self._left,
            others={other.pid for other in self._by_pid.values() if other is not command},
            alone=alone and self.adopts,
        )
        command.seen = {process.key for process in found.values()}
        return found

    def left_by(self, command: Command) -> List[List[object]]:
        """Return what a command that has ended leaves running, and remember it."""
        if command.builtin or not self.sees:
            return []
        if self.adopts:
            # Whatever its processes left behind is our child now, or below one.
            if self._childless:
                return []
            children = processes.children_of_ours()
            if children is not None:
                known = {pid for pid, _ in self._left}
                if not any(pid not in self._by_pid and pid not in known for pid in children):
                    return []
        found = [process for process in self.tree_of(command).values() if process.alive]
        self._left.update(process.key for process in found)
        return processes.listed(found)

    def kill(self) -> None:
        """Kill everybody, and wait for that."""
        self.reap()
        if self.adopts and self._childless:
            return
        known = {command.pid: 0 for command in self._by_pid.values()}
        known.update(self._left)
        for command in self.commands.values():
            known.update(command.seen)
        kill_everything(known)
