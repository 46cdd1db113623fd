# SPDX-License-Identifier: Apache-2.0
"""The driver's end of one runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from agentsandbox.errors import OutputLimitExceeded, SandboxLost, StreamBroken
from agentsandbox.models.command import Command
from agentsandbox.protocol.frames import STDERR, STDOUT
from agentsandbox.session import files, trees
from agentsandbox.session.call import WINDOW, Chunks
from agentsandbox.session.calls import Calls, OnOutput, Stdin, start
from agentsandbox.session.link import Link
from agentsandbox.session.process import Process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from anyio.abc import TaskStatus

    from agentsandbox.models.command import ExecResult
    from agentsandbox.session.pulse import Pulse
    from agentsandbox.transport import ByteStream

__all__ = ["OnOutput", "Session", "Stdin"]


class Session:
    """
    One runner: starts commands in its sandbox, moves files, and attaches again when the stream is lost.

    Args:
        stream: A stream to the runner.
        nonce: The secret that the runner expects.
        reopen: Opens another stream to the same runner, so that a lost one can be replaced; without it, the loss of the
            stream is the loss of the sandbox. It raises :exc:`SandboxLost` when trying again is useless.
        heartbeat: Seconds without a byte from the runner after which it is asked for one.
        heartbeat_timeout: Seconds that it has to answer, also when it is attached.
        pulse: What watches the clock for it and for others; ``None`` is a task of its own.
        on_place: Told what the end of each command says about a place that the sandbox shares with others, if it does.

    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        nonce: str,
        reopen: Callable[[], Awaitable[ByteStream]] | None = None,
        heartbeat: float = 15.0,
        heartbeat_timeout: float = 30.0,
        pulse: Pulse | None = None,
        on_place: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._calls = Calls()
        self._calls.on_place = on_place
        self._link = self._calls.link = Link(
            stream,
            nonce=nonce,
            reopen=reopen,
            heartbeat=heartbeat,
            heartbeat_timeout=heartbeat_timeout,
            deliver=self._calls.deliver,
            on_lost=self._calls.on_lost,
            pulse=pulse,
        )

    def __repr__(self) -> str:
        state = self.lost.reason if self.lost else "attached" if self._link.attached else "detached"
        running = f"{len(self._calls)} of {self._calls.count} commands running"
        return f"<Session [{state}, stream {self._link.streams}, {running}]>"

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the runner said about its sandbox when it was attached."""
        return self._link.facts

    @property
    def alive(self) -> bool:
        """Whether commands can be given to it, as far as is known without asking."""
        return self._link.lost is None and self._link.streams > 0

    @property
    def streams(self) -> int:
        """How many streams it took so far: more than before if it was attached again."""
        return self._link.streams

    @property
    def lost(self) -> SandboxLost | None:
        """Why it is of no use any more; ``None`` while it is."""
        return self._link.lost

    def lose(self, error: SandboxLost) -> None:
        """
        Give the sandbox up because somebody has seen that it is gone: whoever waits for it is told so at once.

        Args:
            error: What was seen; it becomes :attr:`lost`.

        """
        self._link.lose(error)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Attach to the runner and serve until the session is closed or lost. Start it with ``await group.start(…)``.

        Raises:
            SandboxLost: Only while starting: if the runner could not be attached.
            ProtocolError: Likewise, if what answers is no runner of this version.

        """
        await self._link.run(task_status=task_status)

    async def exec(
        self,
        command: Command,
        *,
        stdin: Stdin | None = None,
        on_output: OnOutput | None = None,
        on_started: Callable[[], None] | None = None,
        require_complete: bool = False,
    ) -> ExecResult:
        """
        Run a command to its end.

        When the call is cancelled, the command and everything that it started is killed before the call returns.

        Args:
            command: What to run.
            stdin: Standard input; empty if not given.
            on_output: Called with ``"stdout"`` or ``"stderr"`` and the next bytes of that stream. The command waits
                when the callback is slow. If it raises, the command is killed and the exception passed on.
            on_started: Called by the reader when the command has started. It must not block; what it raises is passed
                on when the command has ended.
            require_complete: Raise instead of returning a result whose output is truncated.

        Returns:
            The result, whatever the exit code.

        Raises:
            StartError: If the command could not be started: nothing ran.
            CommandTimeout: If a time limit fired; the command is dead, its partial output is attached.
            OutputLimitExceeded: If *require_complete* and the output exceeds the limit.
            StreamBroken: If the stream was lost: the outcome is unknown.
            SandboxLost: If the sandbox was lost otherwise.
            ProtocolError: If the runner broke the protocol.

        """
        call = await self._calls.run(
            start(command, stdin=stdin is not None),
            stdin=stdin,
            on_output=on_output,
            on_started=on_started,
            limit=command.output_limit,
        )
        result = self._calls.outcome(call, command)
        if require_complete and result.truncated:
            raise OutputLimitExceeded(command.output_limit, result)
        return result

    async def open_process(self, command: Command, *, window: int = WINDOW) -> Process:
        """
        Start a command whose streams are read and written while it runs.

        Args:
            command: What to run. Its output limit does not apply: what is read is not kept.
            window: Bytes of unread output, both streams together, beyond which the command has to wait.

        Returns:
            The process. Use it as a context manager, or call its ``aclose()``.

        Raises:
            StartError: If the command could not be started: nothing ran.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        queues = {STDOUT: Chunks(), STDERR: Chunks()}
        payload = start(command, stdin=True, window=window)
        return await self._open(payload, command, queues, window)

    async def open_builtin(self, name: str, arguments: Mapping[str, Any], *, window: int = WINDOW) -> Process:
        """
        Have the runner do what takes as long as its streams are used: ``jail``.

        Args:
            name: What.
            arguments: What it needs for that.
            window: Bytes of unread output beyond which it has to wait.

        Returns:
            The process; its ``report`` says more when it has ended.

        Raises:
            StartError: If it could not be started.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        command = Command(command=(name,), timeout=None)
        payload = start(command, stdin=True, window=window)
        del payload["argv"]
        payload |= {"builtin": name, "args": {"path": "", **arguments}}
        return await self._open(payload, command, {STDOUT: Chunks(), STDERR: Chunks()}, window)

    async def _open(self, payload: dict[str, Any], command: Command, queues: dict[int, Chunks], window: int) -> Process:
        call = self._calls.begin(payload, limit=1, window=window, queues=queues, streams_stdin=True)
        try:
            while call.pid is None and not call.done.is_set():
                await self._calls.wait(call, call.changed)
        except BaseException:
            await self._calls.kill(call)
            raise
        if call.pid is None:
            self._calls.outcome(call, command)
        return Process(self._calls, call, command)

    async def read_file(self, path: str, *, user: str | int | None = None, limit: int | None = None) -> bytes:
        """
        Return the contents of a file.

        Args:
            path: Its path; a relative one starts at the sandbox's working directory.
            user: Read it as this user; ``None`` is the sandbox's.
            limit: The largest size that is wanted, in bytes.

        Raises:
            OSError: Python's own for what went wrong, such as :exc:`FileNotFoundError`, with the path.
            OutputLimitExceeded: If the file is larger than *limit*.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        return await files.read_file(self._calls, path, user=user, limit=limit)

    async def write_file(
        self, path: str, data: bytes, *, mode: int | None = None, user: str | int | None = None
    ) -> None:
        """
        Write a file whole or not at all: under another name, verified by size and SHA-256, then renamed.

        Args:
            path: Its path; a relative one starts at the sandbox's working directory. Missing parents are made.
            data: The contents.
            mode: Permission bits; ``None`` keeps those of a file that exists.
            user: Write it as this user; ``None`` is the sandbox's.

        Raises:
            OSError: Python's own for what went wrong, such as :exc:`IsADirectoryError`, with the path.
            SandboxLost: If the sandbox or the stream to it was lost, or did not deliver what was sent.

        """
        await files.write_file(self._calls, path, data, mode=mode, user=user)

    async def upload_dir(self, source: Path, target: str, *, user: str | int | None = None) -> None:
        """
        Copy the contents of a directory into the sandbox: regular files, directories and symbolic links.

        Args:
            source: A directory on this side.
            target: A directory in the sandbox; made if it does not exist.
            user: Write as this user; ``None`` is the sandbox's.

        Raises:
            OSError: Python's own for what went wrong on either side, with the path.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        await trees.upload_dir(self._calls, source, target, user=user)

    async def download_dir(self, source: str, target: Path, *, user: str | int | None = None) -> None:
        """
        Copy the contents of a directory out of the sandbox. Nothing is written outside of *target*.

        Args:
            source: A directory in the sandbox.
            target: A directory on this side; made if it does not exist.
            user: Read as this user; ``None`` is the sandbox's.

        Raises:
            OSError: Python's own for what went wrong on either side, with the path.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        await trees.download_dir(self._calls, source, target, user=user)

    async def builtin(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout: float,
        stdin: Stdin | None = None,
        on_output: OnOutput | None = None,
    ) -> dict[str, Any]:
        """
        Have the runner do what is about the whole sandbox: ``baseline``, ``reset``, or what :mod:`.changes` is about.

        Args:
            name: What.
            arguments: What it needs for that.
            timeout: Seconds that it may take.
            stdin: What it is to read.
            on_output: Called with the next bytes of what it sends.

        Returns:
            Its report.

        Raises:
            CommandTimeout: If it took too long; it was stopped half-way.
            OSError: Python's own for what it could not do, with the path.
            SandboxLost: If the sandbox or the stream to it was lost.

        """
        _, report = await files.builtin(
            self._calls, name, "", dict(arguments), user=None, timeout=timeout, stdin=stdin, on_output=on_output
        )
        return report

    async def ping(self, timeout: float = 5.0) -> float:
        """
        Ask the runner for an answer.

        Args:
            timeout: Seconds to wait for it.

        Returns:
            Seconds until the answer.

        Raises:
            StreamBroken: If none came in time. The session goes on; its own heartbeat decides about it.
            SandboxLost: If the sandbox is lost.

        """
        try:
            return await self._link.ping(timeout)
        except TimeoutError as error:
            raise StreamBroken("silent", f"no answer to a ping within {timeout:g} s") from error

    async def aclose(self, *, shutdown: bool = False, code: int = 0) -> None:
        """
        Close the session. Commands that still run get :exc:`StreamBroken`. Idempotent.

        Args:
            shutdown: Also ask the runner to end, with everything it started, if it can still be reached.
            code: The exit code that it is asked for.

        """
        if shutdown:
            await self._link.shutdown(code)
        await self._link.aclose()
