# SPDX-License-Identifier: Apache-2.0
"""
The program inside a sandbox: one loop that starts commands, passes their bytes on, and cleans up behind them.

Nothing is imported once :func:`serve` runs: a runner that was forked into another root finds no modules there.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Optional, Tuple, Union

from agentsandbox.protocol import frames
from agentsandbox.protocol.connection import Connection

from . import kernel
from .attaching import Door, refusal
from .family import Family
from .poller import Poller
from .pristine import Vault
from .requests import Request, seconds_of_grace
from .signals import Signals
from .spawn import StartFailed
from .starting import Starter
from .stream import Stream
from .timers import Timers
from .users import NoUser

if TYPE_CHECKING:
    from .commands import Command

HIGH_WATER = 512 * 1024
"""Stop reading output while so many bytes wait for the stream: what is queued delays every other command."""

KEEP_AT_MOST = 16 * 1024 * 1024
"""Stop reading output while the driver has not acknowledged so many bytes, in all."""

FLUSH_AT = 64 * 1024
"""Write to the stream at once when so many bytes are queued, else at the end of the turn."""


class Runner:
    """
    The state of a runner.

    Args:
        nonce: What a driver must know in order to attach.
        base_env: The environment of commands; ``PATH``, ``HOME``, ``USER`` and ``LOGNAME`` are added where missing.
        workdir: Their working directory.
        user: Who they run as, by name or id; ``None`` is whoever the runner is.
        accept: A listening socket for streams beside the first one. With it the runner waits for another driver when
            its stream ends; without it, it kills everything and returns.
        handed: Whether those who connect to it hand over a stream, as against being one.
        facts: What else a driver is told.
        uppers: Where overlays are mounted, and descriptors of their upper directories: see :class:`.pristine.Vault`.
        jails: What keeps a jail: see :func:`.jailer.run`; ``None`` where there are none.
        witness: What every end of a command tells of the place that it shares with others.

    """

    def __init__(
        self,
        *,
        nonce: str,
        base_env: Mapping[str, str],
        workdir: str,
        user: Union[str, int, None] = None,
        accept: Optional[int] = None,
        handed: bool = False,
        facts: Optional[Mapping[str, Any]] = None,
        uppers: Optional[Mapping[str, int]] = None,
        jails: Optional[Callable[[Mapping[str, Any], int], int]] = None,
        witness: Optional[Callable[[], Dict[str, Any]]] = None,
    ) -> None:
        self.timers = Timers()
        self.connection = Connection(frames.TO_RUNNER)
        self.poller = Poller(kernel.seal_descriptors())
        self.family = Family()
        self.vault = Vault(uppers or {})
        self.jails = jails
        self.witness = witness
        self.facts = kernel.facts()
        self._starter = Starter(base_env, workdir, user)
        self.facts.update(
            home=self._starter.default.home,
            workdir=workdir,
            user=self._starter.default.name,
            users=self._starter.may_change,
        )
        self.facts.update(facts or {})
        kernel.forbid_tracing()
        self._last = 0
        self._stream: Optional[Stream] = None
        self._queued = 0
        self._ending = False
        self.code = 0
        """What its driver wants it to exit with."""
        self._door = Door(self, nonce, accept, handed=handed)
        self._outlives = accept is not None

    def __repr__(self) -> str:
        state = "attached" if self._stream is not None else "detached"
        return "<Runner [%s | %r | %r]>" % (state, self.family, self.connection)

    # The loop.

    def run(self, stream: Optional[Stream]) -> None:
        """Serve until the end: of the stream, if nobody else can attach, or by SHUTDOWN or a signal."""
        self.signals = Signals(self.poller, child=self.family.reap, end=self._stop)
        os.umask(0o022)
        self.poller.read_outputs(self._read_outputs)
        if stream is not None:
            self._door.greet(stream)
        try:
            while not self._ending:
                self.poller.poll(self.timers.until_next())
                self.timers.run()
                self.flush()
        except frames.FrameError as error:
            self._refuse(str(error))
        finally:
            self._end()
            self.signals.close()

    def _stop(self) -> None:
        self._ending = True

    def _end(self) -> None:
        self.family.kill()
        # Only now: who sees the stream end may rely on everything being dead.
        self._door.close()
        if self._stream is not None:
            self._close_stream()

    def _read_outputs(self, _events: int) -> None:
        self.poller.begin_turn()
        while not self._full() and self.poller.next_output():
            if self._queued >= FLUSH_AT:
                self.flush()

    def _full(self) -> bool:
        return (
            self._stream is not None and self._stream.pending + self._queued >= HIGH_WATER
        ) or self.connection.unacknowledged >= KEEP_AT_MOST

    # The stream.

    def send(self, kind: int, command: int, payload: bytes = b"") -> None:
        """Queue a frame."""
        self.connection.send(kind, command, payload)
        self._queued += len(payload) + frames.HEADER.size

    def flush(self) -> None:
        """Write what can be written, and read output only as long as there is room for it."""
        stream, chunks = self._stream, self.connection.data_to_send()
        self._queued = 0
        if stream is not None and (chunks or stream.pending):
            if stream.write(chunks):
                self._watch_stream(stream)
            else:
                self._detach()
        self.poller.put_off(off=self._full())

    def _watch_stream(self, stream: Stream) -> None:
        wants = stream.pending > 0
        if wants == stream.polled:
            return
        stream.polled = wants
        if stream.writer == stream.reader:
            self.poller.watch(stream.reader, select.EPOLLIN | (select.EPOLLOUT if wants else 0), self._stream_event)
        elif wants:
            self.poller.watch(stream.writer, select.EPOLLOUT, lambda _events: None)  # the turn ends with a flush
        else:
            self.poller.unwatch(stream.writer)

    def _stream_event(self, events: int) -> None:
        if events & ~select.EPOLLOUT:
            self._receive()

    def _receive(self) -> None:
        assert self._stream is not None
        data = self._stream.read()
        if data is None:
            return
        if not data:
            self._detach()
            return
        self.received(data)

    def received(self, data: bytes) -> None:
        """Act on bytes of the attached stream."""
        for frame in self.connection.receive_data(data):
            self._act(frame)

    def attach(self, stream: Stream, received: int) -> None:
        """A driver that knows the nonce is there: it replaces whoever was."""
        if self._stream is not None:
            self._close_stream()
        self._stream = stream
        self.connection.send(
            frames.WELCOME,
            0,
            frames.dump({"version": frames.VERSION, "received": self.connection.received, "facts": self.facts}),
        )
        self.connection.attach(received)
        self.poller.watch(stream.reader, select.EPOLLIN, self._stream_event)

    def _detach(self) -> None:
        self._close_stream()
        if not self._outlives:
            self._ending = True

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        self.connection.detach()
        if stream is not None:
            self.close(stream)

    def close(self, stream: Stream) -> None:
        """Close a stream."""
        self.poller.unwatch(stream.reader)
        self.poller.unwatch(stream.writer)
        stream.close()

    def turned_away(self) -> None:
        """A stream was turned away; if nobody else can come, that is the end."""
        if not self._outlives and self._stream is None:
            self._ending = True

    def _refuse(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.write(self.connection.data_to_send() + refusal(reason))

    # What the driver says.

    def _act(self, frame: frames.Frame) -> None:
        kind, number = frame.type, frame.command
        if kind == frames.START:
            self._start(number, frame.payload)
        elif kind == frames.PING:
            self.send(frames.PONG, 0, frame.payload)
        elif kind == frames.PONG:
            pass
        elif kind == frames.SHUTDOWN:
            code = frames.load(frame.payload).get("code") if frame.payload else 0
            self.code = code if isinstance(code, int) and 0 <= code < 256 else 0
            self._ending = True
        elif kind == frames.HELLO:
            raise frames.FrameError("a second HELLO on the same stream")
        elif not 0 < number <= self._last:
            raise frames.FrameError("frame of type %d for command %d, which was never started" % (kind, number))
        else:
            self._act_on_command(kind, frame)

    def _act_on_command(self, kind: int, frame: frames.Frame) -> None:
        command = self.family.commands.get(frame.command)
        if kind == frames.CREDIT:
            if len(frame.payload) != frames.AMOUNT.size:
                raise frames.FrameError("credit of %d bytes" % len(frame.payload))
            if command is not None:
                command.grant(frames.AMOUNT.unpack(frame.payload)[0])
        elif kind == frames.KILL:
            try:
                grace = seconds_of_grace(frames.load(frame.payload) if frame.payload else {})
            except StartFailed as error:
                raise frames.FrameError(str(error)) from error
            if command is not None:
                command.kill("killed", grace)
        elif command is None:
            pass  # it has ended; its EXIT is on the way
        elif kind == frames.STDIN:
            command.feed(frame.payload)
        elif kind == frames.STDIN_END:
            command.stdin.end()

    def relay(self) -> Optional[int]:
        """Return the process that holds our stream open, if one does."""
        if self._stream is None or self._stream.relay is None:
            return None
        with socket.socket(fileno=os.dup(self._stream.relay)) as connection:
            return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def _start(self, number: int, payload: bytes) -> None:
        if number <= self._last:
            raise frames.FrameError("command %d comes after command %d" % (number, self._last))
        self._last = number
        value = frames.load(payload)
        try:
            command = self._starter.start(self, number, Request(value))
        except StartFailed as error:
            self.send(frames.FAILED, number, frames.dump(error.report()))
            return
        self.family.add(command)
        self.send(frames.STARTED, number, frames.dump({"pid": command.pid}))

    def finished(self, command: Command, report: Dict[str, Any]) -> None:
        """A command is over."""
        self.family.remove(command)
        self.send(frames.EXIT, command.number, frames.dump(report))


def serve(stream: Union[int, Tuple[int, int], Stream, None], **settings: Any) -> int:
    """
    Run commands for whoever is at the other end of a stream, until it is over.

    Must be called in the main thread of a process that has nothing else to do.

    Args:
        stream: A connected socket, or a descriptor to read from and one to write to; ``None`` waits for *accept*.
        settings: Those of :class:`Runner`.

    Returns:
        What to exit with: 0, or what the driver asked for when it ended the runner.

    If there is no such user, or the runner cannot become that one, the stream is refused.

    """
    ends = (stream, stream) if isinstance(stream, int) else stream
    first = Stream(*ends) if isinstance(ends, tuple) else ends
    try:
        runner = Runner(**settings)
    except (NoUser, StartFailed) as error:
        if first is None:
            raise
        first.write(refusal(str(error)))
        first.close()
        return 1
    runner.run(first)
    return runner.code


def main(config: Mapping[str, Any]) -> None:
    """
    Serve by configuration, over standard input and output.

    Args:
        config: ``nonce``, ``base_env``, ``workdir`` and ``user`` of :class:`Runner`; ``listen``: a path for a listening
            socket, if more than the first stream may come.

    """
    stream = (fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    serve(
        stream,
        nonce=config["nonce"],
        base_env=config.get("base_env") or {},
        workdir=config.get("workdir") or "/",
        user=config.get("user"),
        accept=listen(config["listen"]) if config.get("listen") else None,
    )


def listen(path: str) -> int:
    """Return a listening socket; whoever connects still has to know the nonce."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen(64)
    return listener.detach()
