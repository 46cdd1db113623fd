# SPDX-License-Identifier: Apache-2.0
"""One command from its start to its EXIT frame: pipes, credit, time limits, what it leaves behind."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Set

from agentsandbox.protocol import frames

from . import processes
from .killing import TreeKill
from .pipes import PIPE, Input, Output, enlarge, readable_bytes

if TYPE_CHECKING:
    from .loop import Runner
    from .requests import Request
    from .timers import Timer

DRAIN_QUIET = 0.1
"""After the main process has ended, output may pause for so long, in seconds, …"""

DRAIN_TOTAL = 0.25
"""… and take so long in all, before its background children are left behind."""


SMALL = 2048
"""Output of fewer bytes at a time, …"""

REST = 0.004
"""… is not read on for so long, in seconds: lines that are written one by one come together then."""


class Command:
    """
    A command that was started.

    Args:
        runner: Whose command it is.
        number: Its number.
        request: What was asked for.
        pid: Its main process.
        outputs: Where it writes to.
        stdin: Where it reads from, if it was given standard input.
        report: Where a builtin writes its report to.
        began: When it was started.

    """

    def __init__(
        self,
        runner: Runner,
        number: int,
        request: Request,
        pid: int,
        *,
        outputs: List[Output],
        stdin: Optional[int],
        report: Optional[int],
        began: float,
    ) -> None:
        self.runner = runner
        self.number = number
        self.pid = pid
        self.seen: Set[processes.Key] = set()
        self.limit: Optional[str] = None
        self.builtin = report is not None
        self.outputs = outputs
        self.stdin = Input(runner, number, stdin)
        self.credit = request.window
        self.began = self.active = began
        self.ended: Optional[float] = None
        self._no_output = request.no_output_timeout
        self._grace = request.grace
        self._report = report
        self._status = 0
        self._usage: Any = None
        self._survivors: List[List[object]] = []
        self._open = len(outputs)
        self._drain: Optional[Timer] = None
        self._drain_end = 0.0
        self._kill: Optional[TreeKill] = None
        self._rest: Optional[Timer] = None
        self._timers: List[Timer] = []
        if request.timeout is not None:
            self._timers.append(runner.timers.after(request.timeout, self._total_timeout))
        if self._no_output is not None:
            self._timers.append(runner.timers.after(self._no_output, self._no_output_timeout))
        if self.credit:
            for output in outputs:
                self._poll(output)

    def __repr__(self) -> str:
        return "<Command %d [pid %d, %s, %d bytes of credit]>" % (
            self.number,
            self.pid,
            "running" if self.ended is None else "ended",
            self.credit,
        )

    # Output.

    def grant(self, amount: int) -> None:
        """The driver takes so many bytes more."""
        if self.credit == 0 and amount:
            self.active = max(self.active, self.runner.timers.now())
            for output in self.outputs:
                if output.fd >= 0:
                    self._poll(output)
        self.credit += amount

    def feed(self, data: bytes) -> None:
        """Pass on standard input; what it is answered is not kept waiting."""
        self.stdin.feed(data)
        self._wake()

    def _wake(self) -> None:
        """Read on after a rest."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
            if self.credit:
                for output in self.outputs:
                    if output.fd >= 0:
                        self._poll(output)

    def _poll(self, output: Output) -> None:
        if not output.polled:
            output.polled = True
            self.runner.poller.watch_output(output.fd, lambda _events: self._readable(output))

    def _pause(self) -> None:
        for output in self.outputs:
            if output.polled:
                output.polled = False
                self.runner.poller.unwatch_output(output.fd)

    def _readable(self, output: Output) -> None:
        """Read once, so that every command gets its turn."""
        if output.fd < 0 or not output.polled:
            return
        wanted = min(self.credit, output.chunk)
        try:
            data = os.read(output.fd, wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(output)
        else:
            size = len(data)
            self.credit -= size
            output.total += size
            if output.owed:
                output.owed = max(0, output.owed - size)
            self.active = self.runner.timers.now()
            self.runner.send(output.kind, self.number, data)
            if size == wanted == PIPE and output.chunk == PIPE:
                output.chunk = frames.MAX_DATA
                enlarge(output.fd)
            if not self.credit:
                self._pause()
            elif size < SMALL and self.ended is None:
                self._pause()
                self._rest = self.runner.timers.after(REST, self._wake)
        if self.ended is not None:
            self._settle()

    def _close(self, output: Output) -> None:
        if output.polled:
            output.polled = False
            self.runner.poller.unwatch_output(output.fd)
        os.close(output.fd)
        output.fd = -1
        self._open -= 1

    # The end.

    def main_ended(self, status: int, usage: Any) -> None:
        """The main process is gone: what is in the pipes is still its own."""
        self.ended = self.runner.timers.now()
        self._status = status
        self._usage = usage
        for timer in self._timers:
            timer.cancel()
        self._wake()
        events = self._close_ended()
        for output in self.outputs:
            if output.fd >= 0 and output.fd in events:
                output.owed = readable_bytes(output.fd)
        if self._kill is not None:
            self._kill.look()
        else:
            self._settle()

    def _close_ended(self) -> Dict[int, int]:
        """Close the pipes that are at their end, also without credit to read them; return the events of all."""
        poll = select.poll()
        for output in self.outputs:
            if output.fd >= 0:
                poll.register(output.fd, select.POLLIN)
        events = dict(poll.poll(0))
        for output in self.outputs:
            if output.fd >= 0 and events.get(output.fd, 0) and not events[output.fd] & select.POLLIN:
                self._close(output)
        return events

    def _settle(self) -> None:
        if self.ended is None or (self._kill is not None and not self._kill.done):
            return
        if not self._open:
            self._finish()
            return
        if any(output.owed for output in self.outputs):
            if self.limit == "killed" and not self.credit:
                self._finish()  # who asked for its end does not wait for its words
            return
        if self._drain is None and not self.credit:
            self._close_ended()
            if not self._open:
                self._finish()
                return
        now = self.runner.timers.now()
        if self._drain is None:
            self._drain_end = now + DRAIN_TOTAL
        else:
            self._drain.cancel()
        deadline = min(max(self.active, self.ended) + DRAIN_QUIET, self._drain_end)
        self._drain = self.runner.timers.after(max(0.0, deadline - now), self._finish)

    def _finish(self) -> None:
        if self._drain is not None:
            self._drain.cancel()
        self.stdin.close()
        code, signal_number = os.WEXITSTATUS(self._status), None
        if os.WIFSIGNALED(self._status):
            signal_number = os.WTERMSIG(self._status)
            code = 128 + signal_number
        totals = {frames.STDOUT: 0, frames.STDERR: 0}
        for output in self.outputs:
            totals[output.kind] += output.total
        left = self.runner.family.left_by(self)
        usage = self._usage
        report = self._read_report()
        if report is None and self.runner.witness is not None:
            report = {"place": self.runner.witness()}
        assert self.ended is not None
        self.runner.finished(
            self,
            {
                "code": code,
                "signal": signal_number,
                "limit": self.limit,
                "wall": self.ended - self.began,
                "cpu": usage.ru_utime + usage.ru_stime,
                "memory": usage.ru_maxrss * 1024,
                "stdout": totals[frames.STDOUT],
                "stderr": totals[frames.STDERR],
                "leftovers": [] if self._survivors else left,
                "survivors": self._survivors,
                "report": report,
            },
        )
        self._pause()
        for output in self.outputs:
            if output.fd >= 0:
                self.runner.poller.discard(output.fd)

    def _read_report(self) -> Optional[Dict[str, Any]]:
        if self._report is None:
            return None
        chunks = []
        try:
            while True:
                chunk = os.read(self._report, PIPE)
                if not chunk:
                    break
                chunks.append(chunk)
        except OSError:
            pass
        os.close(self._report)
        return frames.load(b"".join(chunks)) if chunks else None

    # Limits.

    def _total_timeout(self) -> None:
        self.kill("total", self._grace)

    def _no_output_timeout(self) -> None:
        assert self._no_output is not None
        if any(output.fd >= 0 and readable_bytes(output.fd) for output in self.outputs):
            self.active = self.runner.timers.now()  # it is not silent: it is not being read
        left = self.active + self._no_output - self.runner.timers.now()
        if left <= 0:
            self.kill("no_output", self._grace)
        else:
            self._timers = [timer for timer in self._timers if timer.callback is not None]
            self._timers.append(self.runner.timers.after(left, self._no_output_timeout))

    def kill(self, limit: str, grace: float) -> None:
        """End the whole tree; the first reason counts, the shortest grace."""
        if self._kill is not None:
            self._kill.hurry(grace)
            return
        self.limit = limit
        for timer in self._timers:
            timer.cancel()
        if self._drain is not None:
            self._drain.cancel()
            self._drain = None
        self._kill = TreeKill(self.runner, self, grace)

    def killed(self, survivors: List[processes.Process]) -> None:
        """The tree is gone, except for what could not be killed."""
        self._survivors = processes.listed(survivors)
        if self.ended is None and survivors:
            # Its main process cannot be killed: nobody will ever see it end.
            self.runner.family.give_up(self)
            self.main_ended(9, NO_USAGE)
            return
        self._settle()


class _NoUsage:
    ru_utime = ru_stime = 0.0
    ru_maxrss = 0


NO_USAGE = _NoUsage()
