# SPDX-License-Identifier: Apache-2.0
"""Waiting for descriptors. What commands write has its turns, and can be put off as a whole."""

from __future__ import annotations

import os
import select
from collections import deque
from typing import Callable, Deque, Dict

Handler = Callable[[int], None]

BATCH = 64
"""How many events one turn takes."""

RUBBISH = 256 * 1024
"""How much of what nobody wants is read in one turn, in bytes."""


class Poller:
    """
    Descriptors and who is to be called for them.

    Args:
        highest: The highest descriptor that is open already.

    """

    def __init__(self, highest: int) -> None:
        self.highest = highest
        """The highest descriptor there ever was."""
        self._handlers: Dict[int, Handler] = {}
        self._epoll = select.epoll()
        # Output has an epoll of its own, so that all of it is put off by one call.
        self._outputs = select.epoll()
        self._ready: Deque[int] = deque()
        self._reading = False
        self._rubbish = bytearray()

    def __repr__(self) -> str:
        return "<Poller [%d descriptors%s]>" % (len(self._handlers), "" if self._reading else ", output put off")

    def poll(self, timeout: float) -> None:
        """Wait until something happens, at most so many seconds (-1: for ever), and call who waits for it."""
        handlers = self._handlers
        for fd, events in self._epoll.poll(timeout, BATCH):
            handler = handlers.get(fd)
            if handler is not None:
                handler(events)

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Call back when something happens on a descriptor; replaces what was asked for before."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler
        self.highest = max(self.highest, fd)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def read_outputs(self, turn: Handler) -> None:
        """Name who is called when there is output; it calls :meth:`next_output` as often as it likes."""
        self._reading = True
        self.watch(self._outputs.fileno(), select.EPOLLIN, turn)

    def put_off(self, *, off: bool) -> None:
        """Read no output for a while, or again."""
        if off is self._reading:
            self._reading = not off
            self._epoll.modify(self._outputs.fileno(), 0 if off else select.EPOLLIN)

    def begin_turn(self) -> None:
        """Line up who has output. Who was left over from the turn before comes first."""
        if not self._ready:
            self._ready.extend(fd for fd, _ in self._outputs.poll(0, BATCH))

    def next_output(self) -> bool:
        """Let the next in line read once; false if there is none."""
        if not self._ready:
            return False
        handler = self._handlers.get(self._ready.popleft())
        if handler is not None:
            handler(select.EPOLLIN)
        return True

    def watch_output(self, fd: int, handler: Handler) -> None:
        """Call back when output can be read, in turns with all other output."""
        self._outputs.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler
        self.highest = max(self.highest, fd)

    def unwatch_output(self, fd: int) -> None:
        """Forget such a descriptor, before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._outputs.unregister(fd)

    def discard(self, fd: int) -> None:
        """Read a pipe and throw its content away, so that who holds it neither blocks nor dies; close it at its end."""
        if not self._rubbish:  # not before it is needed: a fresh runner is as small as can be
            self._rubbish = bytearray(RUBBISH)

        def read(_events: int) -> None:
            try:
                if os.readv(fd, [self._rubbish]):
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            self.unwatch_output(fd)
            os.close(fd)

        self.watch_output(fd, read)
