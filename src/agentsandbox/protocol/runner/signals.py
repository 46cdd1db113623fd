# SPDX-License-Identifier: Apache-2.0
"""Signals to the runner: children that end, and the wish that it ends itself."""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING, Any, Callable, FrozenSet

from . import kernel

if TYPE_CHECKING:
    from .poller import Poller

KEPT = frozenset((signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ))
"""Cannot be changed, or are ignored by the interpreter, which gives commands their defaults again."""

HARMLESS = frozenset((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""A terminal sends them to everybody; whether the runner ends is for its driver to say."""


class Signals:
    """
    Handlers for the time that a runner runs.

    Args:
        poller: Who waits for them.
        child: Called when children may have ended.
        end: Called on TERM.

    """

    def __init__(self, poller: Poller, *, child: Callable[[], None], end: Callable[[], None]) -> None:
        self.blocked: FrozenSet[int] = frozenset()
        """Signals that are blocked here, and must not be in commands."""
        self._child = child
        self._end = end
        self._term = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        poller.watch(self._reader, select.EPOLLIN, self._woken)
        first = os.getpid() == 1
        for number in range(1, signal.NSIG):
            if number in KEPT:
                continue
            try:
                if number == signal.SIGCHLD or (number in HARMLESS and not first):
                    signal.signal(number, _noted)
                elif signal.getsignal(number) not in (signal.SIG_DFL, None):
                    # Commands would inherit what is ignored. The first process does not die of its defaults.
                    signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        fd = kernel.signal_descriptor(signal.SIGTERM) if first else None
        if fd is None:
            signal.signal(signal.SIGTERM, self._terminated)
            return
        # TERM from inside is most likely a `pkill` of something else, and must not end the sandbox.
        self.blocked = frozenset((signal.SIGTERM,))
        signal.pthread_sigmask(signal.SIG_BLOCK, self.blocked)
        self._descriptor = fd
        poller.watch(fd, select.EPOLLIN, self._told)

    def close(self) -> None:
        """Listen no longer."""
        signal.set_wakeup_fd(-1)

    def _told(self, _events: int) -> None:
        if kernel.from_outside(self._descriptor):
            self._end()

    def _terminated(self, _number: int, _frame: Any) -> None:
        # Not taken from the wake-up pipe: a child that has not become its program yet writes to that one, too.
        self._term = True

    def _woken(self, _events: int) -> None:
        try:
            numbers = os.read(self._reader, 4096)
        except BlockingIOError:
            return
        if signal.SIGCHLD in numbers:
            self._child()
        if self._term:
            self._end()


def _noted(_number: int, _frame: Any) -> None:
    """The wake-up pipe has it."""
