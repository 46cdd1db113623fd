# SPDX-License-Identifier: Apache-2.0
"""One command in flight as the driver sees it: fed by the reader, which never waits for anybody."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

from agentsandbox.protocol.frames import (
    AMOUNT,
    CREDIT,
    EXIT,
    MAX_DATA,
    STARTED,
    STDERR,
    STDIN,
    STDIN_END,
    STDOUT,
    Frame,
    FrameError,
)
from agentsandbox.session.output import HeadTail
from agentsandbox.session.replies import Exit, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.session.link import Link

__all__ = ["STDIN_CREDIT", "STREAM_NAMES", "WINDOW", "Call", "Chunks"]

WINDOW = 1024 * 1024
"""Output a command may send before it needs credit, in bytes, both streams together."""

STDIN_CREDIT = 1024 * 1024
"""Standard input that may be sent before the runner gives credit, in bytes; both sides know it."""

MAX_UNACKNOWLEDGED = 16 * 1024 * 1024
"""Bytes that the link keeps for sending again beyond which no more standard input is read."""

MERGE_BELOW = 32 * 1024
"""Output is queued in pieces of at least so many bytes when its consumer is slow."""

MAX_PIECES = 256
"""Queued pieces beyond which order between the two streams is given up, so that tiny writes cannot fill the memory."""

STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Chunks:
    """Output that waits for its consumer. Bounded by the command's credit, however small the pieces it comes in."""

    __slots__ = ("_last", "_pieces")

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, bytearray]] = deque()
        self._last: dict[int, bytearray] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def push(self, kind: int, data: bytes) -> None:
        """Add output of the stream *kind*."""
        last = self._last.get(kind)
        newest = bool(self._pieces) and self._pieces[-1][1] is last
        if last is not None and len(last) < MERGE_BELOW and (newest or len(self._pieces) > MAX_PIECES):
            last += data
            return
        piece = bytearray(data)
        self._last[kind] = piece
        self._pieces.append((kind, piece))

    def pop(self) -> tuple[int, bytes]:
        """Take the oldest piece."""
        kind, piece = self._pieces.popleft()
        if self._last.get(kind) is piece:
            del self._last[kind]
        return kind, bytes(piece)

    def clear(self) -> None:
        """Forget everything."""
        self._pieces.clear()
        self._last.clear()


class Call:
    """
    The state of one command.

    Args:
        number: Its id on the link.
        link: Where its frames go.
        window: Credit that it has been given for output, in bytes.
        limit: Bytes of each stream to keep.
        queues: Where output waits for a consumer, by stream; ``None`` when it is only kept.
        stdin: Standard input, if it is in memory; sent as credit comes in.
        streams_stdin: Whether standard input comes piece by piece through :meth:`feed`.
        on_started: Called by the reader when the command has started.

    """

    __slots__ = (
        "_allowed",
        "_changed",
        "_link",
        "_offset",
        "_on_started",
        "_owed",
        "_stdin",
        "_unread_since",
        "_window",
        "abandoned",
        "allowance",
        "began",
        "done",
        "exit",
        "input_open",
        "input_room",
        "kept",
        "lost",
        "number",
        "pid",
        "queues",
        "raised",
        "refusal",
        "sizes",
    )

    def __init__(
        self,
        number: int,
        link: Link,
        *,
        window: int,
        limit: int,
        queues: dict[int, Chunks] | None = None,
        stdin: bytes | None = None,
        streams_stdin: bool = False,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        self._link = link
        self._window = window
        self._allowed = window
        self._owed = 0
        self._stdin = memoryview(stdin) if stdin is not None else None
        self._offset = 0
        self._on_started = on_started
        self._changed: anyio.Event | None = None
        self._unread_since = 0.0
        self.number = number
        self.queues = queues
        self.kept = {STDOUT: HeadTail(limit), STDERR: HeadTail(limit)}
        self.sizes = {STDOUT: 0, STDERR: 0}
        self.input_open = stdin is not None or streams_stdin
        self.input_room = STDIN_CREDIT
        self.pid: int | None = None
        self.began = 0.0
        self.allowance: float | None = None
        """Seconds after :attr:`began` by which it has ended, or the runner does not do its work."""
        self.exit: Exit | None = None
        self.refusal: Refusal | None = None
        self.lost = False
        self.abandoned = False
        self.raised: Exception | None = None
        """What a callback of the caller raised: the command is to be killed and this to be passed on."""
        self.done = anyio.Event()
        """Set when nothing more will come: it exited, never started, or the session is lost."""

    def __repr__(self) -> str:
        state = (
            "lost" if self.lost else "refused" if self.refusal else "exited" if self.exit else
            "killed" if self.abandoned else "running" if self.pid else "starting"
        )  # fmt: skip
        return f"<Call {self.number} [{state}, {self.sizes[STDOUT]} + {self.sizes[STDERR]} bytes]>"

    # What the reader does.

    def receive(self, frame: Frame) -> None:
        """
        Take a frame of this command.

        Raises:
            FrameError: If it does not fit: more output than there was credit for, a second start, …

        """
        kind = frame.type
        if kind in STREAM_NAMES:
            self._output(kind, frame.payload)
        elif kind == CREDIT:
            self.input_room += AMOUNT.unpack(frame.payload)[0]
            self.pump()
            self.notify()
        elif kind == STARTED:
            if self.pid is not None:
                raise FrameError(f"command {self.number} started twice")
            self.pid = Exit.started(frame.payload)
            self.began = self._link.last_received
            self._run_on_started()
            self.notify()
        elif kind == EXIT:
            end = Exit.parse(frame.payload)
            if self.pid is None:
                raise FrameError(f"command {self.number} ended before it started")
            if end.sizes != (self.sizes[STDOUT], self.sizes[STDERR]):
                raise FrameError(f"output of command {self.number} is incomplete")
            self.exit = end
            self.finish()
        else:  # FAILED: the link accepts no other type
            if self.pid is not None:
                raise FrameError(f"command {self.number} failed to start after it had started")
            self.refusal = Refusal.parse(frame.payload)
            self.finish()

    def finish(self, *, lost: bool = False) -> None:
        """Nothing more will come."""
        self.lost = lost
        self.input_open = False
        self._stdin = None
        self.done.set()
        self.notify()

    def pump(self) -> None:
        """Send as much of the standard input in memory as there is credit for."""
        if self._stdin is None:
            return
        while self._offset < len(self._stdin):
            size = self.input_size()
            if not size:
                return
            part = self._stdin[self._offset : self._offset + size].tobytes()
            self._offset += len(part)
            self.input_room -= len(part)
            self._link.send(STDIN, self.number, part)
        self._stdin = None
        self.end_input()

    def _run_on_started(self) -> None:
        if self._on_started is None:
            return
        try:
            self._on_started()
        except Exception as error:  # noqa: BLE001  the caller's, and passed on to it; it must not end the reader
            self.fail(error)

    def _output(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size > self._allowed:
            raise FrameError(f"command {self.number} sent more output than it had credit for")
        if not size:
            return
        self._allowed -= size
        self.sizes[kind] += size
        if self.abandoned:
            self.consumed(size)
        elif self.queues is None:
            self.kept[kind].append(data)
            self.consumed(size)
        else:
            if self.unread == size:
                self._unread_since = self._link.last_received
            self.queues[kind].push(kind, data)
            self.notify()

    # What the caller's task does.

    @property
    def unread(self) -> int:
        """Bytes of output that arrived and that nobody has taken."""
        return self._window - self._allowed - self._owed

    def input_size(self) -> int:
        """How many bytes of standard input may be sent in one frame now."""
        return min(MAX_DATA, self.input_room) if self._link.unacknowledged < MAX_UNACKNOWLEDGED else 0

    def feed(self, data: bytes | memoryview) -> int:
        """Send the beginning of *data*, as much as may go now; return how much that was."""
        part = bytes(data[: self.input_size()])
        if part:
            self.input_room -= len(part)
            self._link.send(STDIN, self.number, part)
        return len(part)

    def end_input(self) -> None:
        """Send the end of standard input. Idempotent."""
        if self.input_open:
            self.input_open = False
            self._link.send(STDIN_END, self.number)

    def consumed(self, size: int) -> None:
        """Give back credit for output that was consumed."""
        self._owed += size
        if self.queues is not None and self.allowance is not None and not self.unread:
            # The time that it had to wait for its consumer is not its own.
            self.allowance += anyio.current_time() - self._unread_since
        if self._owed >= self._window // 2 and self.exit is None:
            self._allowed += self._owed
            self._link.send(CREDIT, self.number, AMOUNT.pack(self._owed))
            self._owed = 0

    def abandon(self) -> None:
        """Nobody wants its output any more: throw it away, so that it cannot hold up the end of the command."""
        self.abandoned = True
        self._stdin = None
        self.input_open = False
        if self.queues is not None:
            for queue in self.queues.values():
                queue.clear()
            self.consumed(self.unread)

    def fail(self, error: Exception) -> None:
        """Note what the caller's own code raised, for the task that waits."""
        if self.raised is None:
            self.raised = error
        self.notify()

    def notify(self) -> None:
        """Wake who waits for a change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    @property
    def changed(self) -> anyio.Event:
        """An event that is set at the next change."""
        if self._changed is None:
            self._changed = anyio.Event()
        return self._changed
