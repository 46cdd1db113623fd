# SPDX-License-Identifier: Apache-2.0
"""The commands of one session, from START to EXIT, and what happens to them when their caller goes away."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from agentsandbox.errors import (
    CommandTimeout,
    ConfigurationError,
    InfrastructureError,
    SandboxLost,
    StreamBroken,
)
from agentsandbox.models.command import Command, ExecResult, OutputSizes
from agentsandbox.protocol.frames import CREDIT, KILL, MAX_START, START, STDERR, STDOUT, Frame, FrameError, dump
from agentsandbox.session.call import STREAM_NAMES, WINDOW, Call, Chunks
from agentsandbox.session.streams import closing

if TYPE_CHECKING:
    from agentsandbox.session.link import Link

__all__ = ["Calls", "OnOutput", "Stdin", "given", "hand", "limit_of", "start"]

GRACE = 1.0
"""Seconds between TERM and KILL when a time limit fires."""

KILL_GRACE = 0.5
"""The same when the caller was cancelled."""

KILL_CONFIRM = 5.0
"""Seconds in which the runner has to confirm that a killed command is dead."""

BACKSTOP = 10.0
"""Seconds after a command must have been killed for its time limit in which the runner has to say so."""

Stdin = bytes | bytearray | memoryview | AsyncIterable[bytes]
OnOutput = Callable[[str, bytes], Awaitable[None] | None]


class Calls:
    """
    The commands that are in flight on one link.

    Args:
        link: The link. Set right after the link was made: the two need each other.

    """

    link: Link

    def __init__(self) -> None:
        self._running: dict[int, Call] = {}
        self.count = 0
        """How many commands were started."""
        self.on_place: Callable[[Mapping[str, Any]], None] | None = None
        """Told what the end of a command says about the place that its sandbox shares with others."""

    def __repr__(self) -> str:
        return f"<Calls [{len(self._running)} running of {self.count}]>"

    def __len__(self) -> int:
        return len(self._running)

    async def run(
        self,
        payload: dict[str, Any],
        *,
        stdin: Stdin | None = None,
        on_output: OnOutput | None = None,
        on_started: Callable[[], None] | None = None,
        limit: int,
    ) -> Call:
        """Start what *payload* describes and see it to its end; see :meth:`Session.exec`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        whole, pieces = given(stdin)
        queue = Chunks() if on_output is not None else None
        call = self.begin(
            payload,
            limit=limit,
            window=WINDOW,
            queues={STDOUT: queue, STDERR: queue} if queue is not None else None,
            stdin=whole,
            streams_stdin=pieces is not None,
            on_started=on_started,
        )
        try:
            if pieces is not None:
                await self._follow_and_feed(call, pieces, on_output)
            elif on_output is not None:
                await self._follow(call, on_output)
            else:
                await self.wait(call, call.done)
        except BaseException:
            await self.kill(call)
            raise
        if call.raised is not None:
            await self.kill(call)
            raise call.raised
        return call

    async def wait(self, call: Call, event: anyio.Event) -> None:
        """Wait for an event of a command, but not longer than the runner can take to end it."""
        if call.allowance is None:
            await event.wait()
            return
        while not event.is_set():
            now = anyio.current_time()
            due = call.began + call.allowance
            if call.unread or not self.link.attached:
                due = now + BACKSTOP  # it cannot end: nobody reads what it wrote, or nothing can arrive
            else:
                due = max(due, self.link.attached_at + BACKSTOP)
            if now >= due and not call.done.is_set():
                self.link.lose(StreamBroken("silent", f"the end of command {call.number} is overdue"))
                return
            with anyio.move_on_after(due - now):
                await event.wait()

    async def kill(self, call: Call) -> None:
        """Kill a command and wait, shielded, until that is confirmed; give the sandbox up if it is not."""
        if call.done.is_set():
            return
        call.abandon()
        self.link.send(KILL, call.number, dump({"grace": KILL_GRACE}))
        with anyio.move_on_after(KILL_CONFIRM, shield=True):
            await call.done.wait()
        if not call.done.is_set():
            detail = f"the death of command {call.number} was not confirmed within {KILL_CONFIRM:g} s"
            self.link.lose(SandboxLost("unkillable", detail))

    def outcome(self, call: Call, command: Command) -> ExecResult:
        """Return what came of a command that is done, or raise it."""
        if call.refusal is not None:
            raise call.refusal.error()
        stdout, stderr = call.kept[STDOUT], call.kept[STDERR]
        truncated = stdout.truncated or stderr.truncated
        kept = stdout.take(), stderr.take()
        end = call.exit
        if end is None or call.lost:
            raise self.loss(*kept)
        if end.limit in ("total", "no_output"):
            raise CommandTimeout(end.limit, limit_of(command, end.limit), end.wall, *kept)
        return ExecResult(
            exit_code=end.code,
            stdout=kept[0],
            stderr=kept[1],
            truncated=truncated,
            sizes=OutputSizes(stdout=end.sizes[0], stderr=end.sizes[1]),
            wall_seconds=end.wall,
            cpu_seconds=end.cpu,
            peak_memory_bytes=end.memory,
            leftovers=end.leftovers,
        )

    def loss(self, stdout: bytes = b"", stderr: bytes = b"") -> InfrastructureError:
        """Return the exception for a command that the loss of the session hit."""
        return self.link.loss(stdout, stderr)

    def begin(
        self,
        payload: dict[str, Any],
        *,
        limit: int,
        window: int,
        queues: dict[int, Chunks] | None,
        stdin: bytes | None = None,
        streams_stdin: bool = False,
        on_started: Callable[[], None] | None = None,
    ) -> Call:
        """Register a command and send its START, in one step: from here on it is known, and will be killed."""
        if self.link.lost is not None:
            raise self.loss()
        data = dump(payload)
        if len(data) > MAX_START:
            raise ConfigurationError(f"the command takes {len(data)} bytes; more than {MAX_START} belong into a file")
        self.count += 1
        call = Call(
            self.count,
            self.link,
            window=window,
            limit=limit,
            queues=queues,
            stdin=stdin,
            streams_stdin=streams_stdin,
            on_started=on_started,
        )
        if payload["timeout"] is not None:
            call.began = anyio.current_time()
            call.allowance = payload["timeout"] + GRACE + BACKSTOP
        self._running[call.number] = call
        self.link.send(START, call.number, data)
        call.pump()
        return call

    async def _follow(self, call: Call, on_output: OnOutput | None) -> None:
        """Hand output to the callback, in the caller's task, until the command is done."""
        queue = call.queues[STDOUT] if call.queues is not None else Chunks()
        while call.raised is None:
            while queue:
                kind, data = queue.pop()
                call.kept[kind].append(data)
                assert on_output is not None
                await hand(on_output, STREAM_NAMES[kind], data)
                call.consumed(len(data))
            if call.done.is_set():
                return
            await self.wait(call, call.changed)

    async def _follow_and_feed(self, call: Call, pieces: AsyncIterable[bytes], on_output: OnOutput | None) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._feed, call, pieces)
            try:
                await self._follow(call, on_output)
            except Exception as error:  # noqa: BLE001  passed on by run(), without the group around it
                call.fail(error)
            group.cancel_scope.cancel()

    async def _feed(self, call: Call, pieces: AsyncIterable[bytes]) -> None:
        try:
            async with closing(pieces):
                async for piece in pieces:
                    rest = memoryview(piece)
                    while rest:
                        if not call.input_open:
                            return
                        sent = call.feed(rest)
                        rest = rest[sent:]
                        if not sent:
                            await self.wait(call, call.changed)
            call.end_input()
        except Exception as error:  # noqa: BLE001  passed on by run()
            call.fail(error)

    # What the link calls.

    def deliver(self, frame: Frame) -> None:
        """Take a frame; :exc:`FrameError` if it does not fit."""
        call = self._running.get(frame.command)
        if call is not None:
            call.receive(frame)
            if call.done.is_set():
                del self._running[frame.command]
                if self.on_place is not None and call.exit is not None and "place" in call.exit.report:
                    self.on_place(call.exit.report["place"])
                if call.exit is not None and call.exit.survivors:
                    names = ", ".join(f"{process.pid} {process.command}" for process in call.exit.survivors[:5])
                    self.link.lose(SandboxLost("unkillable", names))
        elif frame.type != CREDIT or not 0 < frame.command <= self.count:  # credit may come late
            raise FrameError(f"frame of type {frame.type} for command {frame.command}, which does not run")

    def on_lost(self) -> None:
        """End every command: nothing more will come."""
        calls, self._running = self._running, {}
        for call in calls.values():
            call.finish(lost=True)


def start(command: Command, *, stdin: bool, window: int = WINDOW) -> dict[str, Any]:
    """Return the payload of START for a command."""
    what = command.command
    return {
        **({"script": what} if isinstance(what, str) else {"argv": list(what)}),
        "cwd": command.cwd,
        "env": {**command.env, **command.secrets},
        "user": command.user,
        "stdin": stdin,
        "merge": command.merge,
        "timeout": _finite(command.timeout),
        "no_output_timeout": _finite(command.no_output_timeout),
        "grace": GRACE,
        "window": window,
    }


def given(stdin: Stdin | None) -> tuple[bytes | None, AsyncIterable[bytes] | None]:
    """Tell standard input that is here as a whole from what comes piece by piece."""
    if isinstance(stdin, (bytes, bytearray, memoryview)):
        return bytes(stdin), None
    if stdin is None or isinstance(stdin, AsyncIterable):
        return None, stdin
    raise ConfigurationError(f"stdin is bytes or an async iterable of bytes, not {type(stdin).__name__}")


async def hand(on_output: OnOutput, name: str, data: bytes) -> None:
    """Hand output to the caller's callback, and wait for it if it wants that."""
    pending = on_output(name, data)
    if inspect.isawaitable(pending):
        await pending


def limit_of(command: Command, limit: str) -> float:
    """Return the seconds of a time limit that fired: ``total`` or ``no_output``."""
    return (command.timeout if limit == "total" else command.no_output_timeout) or 0.0


def _finite(seconds: float | None) -> float | None:
    return seconds if seconds is not None and math.isfinite(seconds) else None
