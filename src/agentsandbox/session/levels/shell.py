# SPDX-License-Identifier: Apache-2.0
"""A session with a sandbox that has a POSIX shell and no Python."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from agentsandbox.errors import ConfigurationError, OutputLimitExceeded, SandboxLost, StreamBroken
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.session.calls import OnOutput, Stdin, given, hand
from agentsandbox.session.levels import files
from agentsandbox.session.levels.commands import Commands
from agentsandbox.session.levels.control import Control
from agentsandbox.session.levels.process import FIRST_POLL, LAST_POLL, Feed, ShellProcess, Tail
from agentsandbox.session.levels.results import outcome
from agentsandbox.session.levels.store import Store
from agentsandbox.session.output import HeadTail
from agentsandbox.session.streams import closing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anyio.abc import TaskStatus

    from agentsandbox.models.command import Command, ExecResult
    from agentsandbox.session.levels.call import Call
    from agentsandbox.transport.exec import Connect

__all__ = ["ShellSession"]

CLEAN_AFTER = 16
"""Commands whose remains are removed together: that takes a process."""

LARGE = 1024 * 1024
"""Bytes of output that are removed at once."""


class ShellSession:
    """
    Commands and files of a sandbox through its ``sh``, with the interface of :class:`agentsandbox.session.Session`.

    One connection serves all requests; bulky data goes over others. Commands outlive connections: when one is lost, a
    new one finds the commands again, by records in files. A command is started at most once.

    Args:
        connect: Starts a command in the sandbox over a new connection.
        shell: The shell there: a name or a path.
        env: Variables of every command, on top of those that the sandbox gives.
        workdir: Where commands start and relative paths begin; ``None`` is the directory that the shell starts in.
        heartbeat: Seconds of silence after which the shell is asked for an answer, and idle timers are reset.
        heartbeat_timeout: Seconds it has to give one.

    """

    level = ExecLevel.SHELL

    def __init__(
        self,
        connect: Connect,
        *,
        shell: str = "sh",
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        heartbeat: float = 15.0,
        heartbeat_timeout: float = 30.0,
    ) -> None:
        self._commands = Commands(env or {})
        self._control = self._commands.control = Control(
            connect,
            shell=shell,
            workdir=workdir,
            heartbeat=heartbeat,
            heartbeat_timeout=heartbeat_timeout,
            tell=self._commands.tell,
            on_attached=self._commands.on_attached,
            on_lost=self._commands.on_lost,
        )
        self._commands.store = Store(self._control)
        self._finished: list[Call] = []

    def __repr__(self) -> str:
        control = self._control
        state = control.lost.reason if control.lost else "attached" if control.attached else "detached"
        running = f"{len(self._commands)} of {self._commands.count} commands running"
        return f"<ShellSession [{state}, connection {control.connections}, {running}]>"

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the sandbox is like: among others ``shell``, ``uid``, ``home``, ``workdir``, ``missing`` programs."""
        facts: dict[str, Any] = dict(self._control.facts)
        if facts:
            facts["uid"] = int(facts["uid"]) if facts.get("uid", "").isdigit() else None
            facts["users"] = bool(facts.pop("switch", ""))
            facts["missing"] = sorted(self._control.missing)
            facts["level"] = str(self.level)
            facts["python"] = None
        return facts

    @property
    def alive(self) -> bool:
        """Whether commands can be given to it, as far as is known without asking."""
        return self._control.lost is None and self._control.connections > 0

    @property
    def lost(self) -> SandboxLost | None:
        """Why it is of no use any more; ``None`` while it is."""
        return self._control.lost

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Connect and serve until the session is closed or lost. Start it with ``await group.start(…)``.

        Raises:
            SandboxLost: Only while starting: if there is no shell, or no directory that it can write.

        """
        failure: SandboxLost | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._commands.tend)
            try:
                await self._control.run(task_status=task_status)
            except SandboxLost as error:
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

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
        Run a command to its end. See :meth:`agentsandbox.session.Session.exec`.

        Unlike there, a slow *on_output* does not make the command wait: its output is in a file.

        Raises:
            StartError: If the command could not be started: nothing ran.
            CommandTimeout: If a time limit fired; the command is dead, its partial output is attached.
            OutputLimitExceeded: If *require_complete* and the output exceeds the limit, or if it is more than can be
                kept in the sandbox.
            StreamBroken: If the connection was lost and no other could be made.
            SandboxLost: If the sandbox was lost otherwise.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        whole, pieces = given(stdin)
        call = self._commands.register(command, on_started)
        size = 0
        heads: tuple[HeadTail, HeadTail] | None = None
        try:
            if whole is not None:
                call.staged = True
                await self._commands.store.stage(f"{call.number}.in", whole)
            mode = "null" if stdin is None else "live" if pieces is not None else "file"
            await self._commands.start(call, mode)
            if on_output is not None:
                heads = HeadTail(command.output_limit), HeadTail(command.output_limit)
            if pieces is not None:
                await self._feed_and_follow(call, pieces, heads, on_output)
            elif heads is not None and on_output is not None:
                await self._follow(call, heads, on_output)
            else:
                await self._commands.wait(call)
            if call.raised is not None:
                raise call.raised
            if heads is None:
                result = await outcome(self._commands.store, call)
            else:
                sizes = heads[0].size, heads[1].size
                result = await outcome(self._commands.store, call, (heads[0].take(), heads[1].take()), sizes)
            size = result.sizes.stdout + result.sizes.stderr
        except BaseException:
            await self._commands.kill(call)
            raise
        finally:
            self._commands.release(call)
            await self._clean(call, size)
        if require_complete and result.truncated:
            raise OutputLimitExceeded(command.output_limit, result)
        return result

    async def open_process(self, command: Command, *, window: int = 0) -> ShellProcess:  # noqa: ARG002
        """
        Start a command whose streams are read and written while it runs.

        Args:
            command: What to run. Its output limit does not apply.
            window: Of no effect here: the command does not wait for a reader.

        Returns:
            The process. Use it as a context manager, or call its ``aclose()``.

        Raises:
            StartError: If the command could not be started: nothing ran.
            SandboxLost: If the sandbox was lost.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        call = self._commands.register(command)
        try:
            await self._commands.start(call, "live")
            while call.pid is None and not call.done.is_set():
                await call.changed.wait()
            if call.pid is None:
                await outcome(self._commands.store, call)
        except BaseException:
            await self._commands.kill(call)
            self._commands.release(call)
            await self._clean(call)
            raise
        return ShellProcess(self._commands, call, self._clean)

    async def _feed_and_follow(
        self,
        call: Call,
        pieces: AsyncIterable[bytes],
        heads: tuple[HeadTail, HeadTail] | None,
        on_output: OnOutput | None,
    ) -> None:
        feed = Feed(self._commands, call)

        async def send() -> None:
            try:
                async with closing(pieces):
                    async for piece in pieces:
                        await feed.send(piece)
                await feed.end()
            except anyio.BrokenResourceError:
                pass  # it reads no more
            except Exception as error:  # noqa: BLE001  passed on by exec()
                call.raised = call.raised or error
                call.notify()

        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(send)
            try:
                if heads is not None and on_output is not None:
                    await self._follow(call, heads, on_output)
                else:
                    await self._commands.wait(call)
            except Exception as error:  # noqa: BLE001  raised below, without the group around it
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _follow(self, call: Call, heads: tuple[HeadTail, HeadTail], on_output: OnOutput) -> None:
        """Hand output to the callback as it comes, in the caller's task, until there is no more."""
        tails = [Tail(self._commands, call, name) for name in ("out", "err")]
        pause = FIRST_POLL
        while call.raised is None:
            done = call.settled
            some = False
            for tail, head, name in zip(tails, heads, ("stdout", "stderr"), strict=True):
                while data := await tail.read():
                    some = True
                    head.append(data)
                    await hand(on_output, name, data)
                    if not done:
                        break
            if done:
                return
            pause = FIRST_POLL if some else min(pause * 1.5, LAST_POLL)
            with anyio.move_on_after(pause):
                await self._commands.wait(call)
        if call.raised is not None:
            raise call.raised

    async def _clean(self, call: Call, size: int = LARGE) -> None:
        """Have the remains of commands removed, now and then."""
        self._finished.append(call)
        if size >= LARGE or len(self._finished) >= CLEAN_AFTER:
            finished, self._finished = self._finished, []
            with anyio.move_on_after(5, shield=True):
                await self._commands.clean(*finished)

    # Files.

    async def read_file(self, path: str, *, user: str | int | None = None, limit: int | None = None) -> bytes:
        """Return the contents of a file. See :meth:`agentsandbox.session.Session.read_file`."""
        self._only_one_user(user)
        return await files.read_file(self._commands, path, limit=limit)

    async def write_file(
        self, path: str, data: bytes, *, mode: int | None = None, user: str | int | None = None
    ) -> None:
        """
        Write a file whole or not at all: under another name, verified, then renamed.

        See :meth:`agentsandbox.session.Session.write_file`. Size is verified always, SHA-256 if the sandbox can.
        """
        self._only_one_user(user)
        await files.write_file(self._commands, path, bytes(data), mode=mode)

    async def upload_dir(self, source: Path, target: str, *, user: str | int | None = None) -> None:
        """Copy the contents of a directory into the sandbox. See :meth:`agentsandbox.session.Session.upload_dir`."""
        self._only_one_user(user)
        await files.upload_dir(self._commands, source, target)

    async def download_dir(self, source: str, target: Path, *, user: str | int | None = None) -> None:
        """Copy a directory out of the sandbox. See :meth:`agentsandbox.session.Session.download_dir`."""
        self._only_one_user(user)
        await files.download_dir(self._commands, source, target)

    def _only_one_user(self, user: str | int | None) -> None:
        if user is not None and str(user) not in (self._control.facts.get("uid"), self._control.facts.get("user")):
            raise ConfigurationError(
                f"user={user!r}: at exec level 'shell' files are read and written as the sandbox's own user"
            )

    async def ping(self, timeout: float = 5.0) -> float:
        """
        Ask the shell for an answer.

        Args:
            timeout: Seconds to wait for it.

        Returns:
            Seconds until the answer.

        Raises:
            StreamBroken: If none came in time. The session goes on; its own heartbeat decides about it.
            SandboxLost: If the sandbox is lost.

        """
        begin = anyio.current_time()
        try:
            with anyio.fail_after(timeout):
                await self._control.request(":")
        except TimeoutError as error:
            raise StreamBroken("silent", f"no answer to a ping within {timeout:g} s") from error
        return anyio.current_time() - begin

    def lose(self, error: SandboxLost) -> None:
        """Give the sandbox up because somebody has seen that it is gone: whoever waits for it is told so at once."""
        self._control.lose(error)

    async def aclose(self, *, shutdown: bool = False, code: int = 0) -> None:
        """
        Close the session. Commands that still run get :exc:`StreamBroken`. Idempotent.

        Args:
            shutdown: Also ask the first process of the sandbox to end, and so the sandbox, if it can still be reached.
            code: With *shutdown*: what it should end with, if it can do so: only 42, and else 0.

        """
        if self._control.attached and self._control.lost is None:
            end = f"kill -s {'USR1' if code else 'TERM'} 1;" if shutdown else ""
            with anyio.move_on_after(1.0, shield=True):
                with suppress(SandboxLost):
                    await self._control.request(f'rm -rf "$_aS";{end}')
        await self._control.aclose()
