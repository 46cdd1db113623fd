# SPDX-License-Identifier: Apache-2.0
"""Ending process trees: TERM, a grace period, KILL, and then a look whether nothing is left."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Dict, List, Set

from . import processes

if TYPE_CHECKING:
    from .commands import Command
    from .loop import Runner
    from .processes import Process

FIRST_LOOK, LAST_LOOK = 0.001, 0.05
"""How long to wait before looking again, in seconds: at first, and at most."""

GIVE_UP = 3.0
"""What is still there so many seconds after KILL cannot be killed."""

ROUNDS = 10
"""How often to look for children that were born while their parents were being stopped."""


class TreeKill:
    """The end of one command's tree. It calls ``command.killed`` with what cannot be killed when the rest is gone."""

    def __init__(self, runner: Runner, command: Command, grace: float) -> None:
        self.done = False
        self._runner = runner
        self._command = command
        self._now = runner.timers.now
        self._deadline = self._now() + grace
        self._give_up = 0.0
        self._wait = FIRST_LOOK
        if grace > 0:
            alive = self._alive()
            self._send(signal.SIGTERM, alive)
            self._send(signal.SIGCONT, alive)  # a stopped process acts on it only then
        self._timer = runner.timers.after(0 if grace <= 0 else FIRST_LOOK, self.look)

    def hurry(self, grace: float) -> None:
        """Somebody asks again: the shorter grace counts."""
        if not self.done and self._now() + grace < self._deadline:
            self._deadline = self._now() + grace
            self.look()

    def look(self) -> None:
        """See what is left, and go on to the next step if its time has come."""
        if self.done:
            return
        self._timer.cancel()
        began = self._now()
        alive = self._alive()
        if not alive and self._command.ended is not None:
            self._end([])
            return
        if self._give_up:
            if began >= self._give_up:
                self._end(alive)
                return
            self._send(signal.SIGKILL, alive)
        elif began >= self._deadline:
            self._destroy(alive)
            self._give_up = began + GIVE_UP
            self._wait = FIRST_LOOK
        # Looking takes its share of the loop's time, and no more, also where there are thousands of processes.
        cost = self._now() - began
        self._wait = min(LAST_LOOK, self._wait * 2)
        until = self._give_up or self._deadline
        self._timer = self._runner.timers.after(
            max(4 * cost, min(self._wait, max(0.0, until - self._now()))), self.look
        )

    def _destroy(self, alive: List[Process]) -> None:
        stopped: Set[processes.Key] = set()
        # Parents that are stopped have no more children, and stay where their children can be found through them.
        for _ in range(ROUNDS):
            fresh = [process for process in alive if process.key not in stopped]
            if not fresh:
                break
            stopped.update(process.key for process in fresh)
            self._send(signal.SIGSTOP, fresh)
            alive = self._alive()
        self._send(signal.SIGKILL, alive)

    def _send(self, number: int, targets: List[Process]) -> None:
        for process in targets:
            send(process.pid, number)
        if not self._runner.family.sees:
            send(-self._command.pid, number)  # its process group at least

    def _alive(self) -> List[Process]:
        # In order of age, mostly: who is told first does not see its children end.
        return sorted(process for process in self._runner.family.tree_of(self._command).values() if process.alive)

    def _end(self, survivors: List[Process]) -> None:
        self.done = True
        self._command.killed(survivors)


def send(pid: int, number: int) -> None:
    """Send a signal; that the process is gone or may not be signalled shows in the next look."""
    try:
        os.kill(pid, number)
    except OSError:
        pass


def kill_everything(known: Dict[int, int]) -> None:
    """
    Kill all that descends from the runner, and wait until it is gone or :data:`GIVE_UP` seconds have passed.

    Args:
        known: Process ids of which the runner knows that they are its own, with their start time (0: its own child).

    """
    deadline = time.monotonic() + GIVE_UP
    first = os.getpid() == 1
    while True:
        if first:
            # Everything in the namespace but the first process: nothing can escape by forking.
            send(-1, signal.SIGKILL)
        elif processes.visible():
            table = processes.table()
            roots = [pid for pid, start in known.items() if pid in table and table[pid].start == start]
            below = processes.descendants(table, [os.getpid()] + roots)
            below.pop(os.getpid(), None)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in below:
                    send(pid, number)
        else:
            for pid, start in known.items():
                if start == 0:
                    for target in (-pid, pid):
                        send(target, signal.SIGKILL)
        while True:
            try:
                pid = os.wait4(-1, os.WNOHANG)[0]
            except ChildProcessError:
                return
            if pid == 0:
                break
            known.pop(pid, None)
        if time.monotonic() > deadline:
            return
        time.sleep(0.002)
