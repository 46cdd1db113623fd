# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG002  what is refused has its arguments all the same
"""A session with a sandbox that has not even a shell: one connection a command."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote_plus

import anyio
import anyio.lowlevel

from agentsandbox.errors import (
    ConfigurationError,
    ControlPlaneError,
    OutputLimitExceeded,
    SandboxLost,
    StartError,
    StreamBroken,
)
from agentsandbox.models.command import ExecResult, OutputSizes
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.session.calls import OnOutput, Stdin, given, hand, limit_of
from agentsandbox.session.levels.ending import final
from agentsandbox.session.levels.exchange import Exchange
from agentsandbox.session.levels.refusals import start_error
from agentsandbox.session.loss import told
from agentsandbox.session.streams import close

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from anyio.abc import TaskStatus

    from agentsandbox.models.command import Command
    from agentsandbox.transport.exec import Connect

__all__ = ["ARGV_LIMIT", "DirectSession"]

ARGV_LIMIT = 2048
"""Bytes that an argument vector may take in a URL: servers and proxies cut from 4 KiB on."""

NO_PROGRAM = "/.agentsandbox/no-such-program"
"""Nobody has it. That the runtime says so shows that there is one, and what the connection can do."""

KILLED = 128 + signal.SIGKILL
"""The exit code of a command that was killed, by whomever."""


class DirectSession:
    """
    What a sandbox without a shell can do, with the interface of :class:`agentsandbox.session.Session` where it can.

    There is no way to kill a command: when one runs too long or its caller is cancelled, the sandbox is given up as
    ``unkillable``. When a connection ends without saying how the command did, it is given up likewise.

    Args:
        connect: Starts a command in the sandbox over a new connection.
        keep_alive: Seconds of silence after which idle timers on the way are reset.
        confirm: Makes sure that the sandbox is still there after a command of it was killed: the end of a container
            looks like the end of a command. It raises :exc:`SandboxLost` if it is not.

    """

    level = ExecLevel.DIRECT

    def __init__(
        self, connect: Connect, *, keep_alive: float = 30.0, confirm: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._connect = connect
        self._confirm = confirm
        self._keep_alive = keep_alive
        self._ends_stdin: bool | None = None
        self._lost: SandboxLost | None = None
        self._running: set[Exchange] = set()
        self._started = False
        self._over = anyio.Event()
        self._count = 0

    def __repr__(self) -> str:
        state = self._lost.reason if self._lost else "ready" if self._started else "new"
        return f"<DirectSession [{state}, {len(self._running)} of {self._count} commands running]>"

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the sandbox is like: nothing can be asked."""
        return MappingProxyType({"level": str(self.level), "python": None, "users": False, "workdir": None})

    @property
    def alive(self) -> bool:
        """Whether commands can be given to it, as far as is known without asking."""
        return self._lost is None and self._started

    @property
    def lost(self) -> SandboxLost | None:
        """Why it is of no use any more; ``None`` while it is."""
        return self._lost

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Serve until the session is closed or lost. Start it with ``await group.start(…)``.

        Raises:
            SandboxLost: Only while starting: if no command can be started there.

        """
        await self.ping(30.0)
        self._started = True
        task_status.started()
        try:
            await self._over.wait()
        finally:
            self._lose(StreamBroken("closed", "the session was closed"))

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

        A background process that holds standard output holds up the call, too. Processor time, memory and leftovers are
        not known.

        Raises:
            ConfigurationError: If it asks for what cannot be had here: ``cwd``, ``env``, ``user``, ``merge``, more
                arguments than fit into a URL, or standard input where the server cannot end it.
            StartError: If the command is a script: there is no shell to run it; or if it could not be started.
            OutputLimitExceeded: If *require_complete* and the output exceeds the limit.
            StreamBroken: If the connection ended without a status: the outcome is unknown.
            SandboxLost: With the reason ``unkillable`` and the partial output, if a time limit fired; or if the sandbox
                was lost otherwise.

        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        argv = self._argv(command)
        whole, pieces = given(stdin)
        exchange = await self._open(command, argv, stdin=stdin is not None, queue=on_output is not None)
        if on_started is not None:
            exchange.on_started = on_started
        began = anyio.current_time()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(exchange.run)
                source = whole if pieces is None else pieces
                if source is not None:
                    group.start_soon(exchange.feed, source)
                if on_output is not None:
                    await self._follow(exchange, on_output)
                await exchange.done.wait()
                group.cancel_scope.cancel()
            if exchange.raised is not None:
                raise exchange.raised
            result = self._outcome(exchange, command, anyio.current_time() - began)
            if result.exit_code == KILLED and self._confirm is not None:
                await self._confirm_end(result)
        except BaseException:
            self._abandon(exchange)
            raise
        finally:
            self._running.discard(exchange)
            await exchange.aclose()
        if require_complete and result.truncated:
            raise OutputLimitExceeded(command.output_limit, result)
        return result

    async def open_process(self, command: Command, *, window: int = 0) -> NoReturn:
        """
        Refuse: a live process that cannot be killed is no use.

        Raises:
            ConfigurationError: Always.

        """
        self._refuse("live processes")

    async def read_file(self, path: str, *, user: str | int | None = None, limit: int | None = None) -> NoReturn:
        """Refuse: see :meth:`write_file`."""
        self._refuse("files")

    async def write_file(
        self, path: str, data: bytes, *, mode: int | None = None, user: str | int | None = None
    ) -> NoReturn:
        """
        Refuse: nothing in the sandbox could read or write a file.

        Raises:
            ConfigurationError: Always.

        """
        self._refuse("files")

    async def upload_dir(self, source: Path, target: str, *, user: str | int | None = None) -> NoReturn:
        """Refuse: see :meth:`write_file`."""
        self._refuse("files")

    async def download_dir(self, source: str, target: Path, *, user: str | int | None = None) -> NoReturn:
        """Refuse: see :meth:`write_file`."""
        self._refuse("files")

    async def ping(self, timeout: float = 5.0) -> float:
        """
        Have the runtime look for a program that does not exist.

        Args:
            timeout: Seconds to wait for its answer.

        Returns:
            Seconds until the answer.

        Raises:
            StreamBroken: If none came in time, or none that makes sense.
            SandboxLost: If the sandbox is lost.

        """
        if self._lost is not None:
            raise self._loss()
        begin = anyio.current_time()
        try:
            with anyio.fail_after(timeout):
                connection = await self._connect([NO_PROGRAM])
                try:
                    while True:
                        await connection.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
                    status = final(connection, error)
                finally:
                    await close(connection, 1.0)
        except TimeoutError as error:
            raise StreamBroken("silent", f"no answer to a ping within {timeout:g} s") from error
        self._ends_stdin = connection.protocol.startswith("v5.")
        if status is None or (status.exit_code is None and start_error(status, NO_PROGRAM) is None):
            raise StreamBroken("exec_failed", status.message if status else "the connection ended without a status")
        return anyio.current_time() - begin

    def lose(self, error: SandboxLost) -> None:
        """Give the sandbox up because somebody has seen that it is gone: whoever waits for it is told so at once."""
        self._lose(error)

    async def aclose(self, *, shutdown: bool = False, code: int = 0) -> None:
        """
        Close the session. Commands that still run get :exc:`StreamBroken`, and go on. Idempotent.

        Args:
            shutdown: Of no effect: nothing in the sandbox could be asked to end.
            code: Likewise.

        """
        self._lose(StreamBroken("closed", "the session was closed"))
        await anyio.lowlevel.checkpoint_if_cancelled()

    # Inside.

    def _argv(self, command: Command) -> tuple[str, ...]:
        what = command.command
        if isinstance(what, str):
            raise StartError(
                "this sandbox has no shell to run a script with (exec level 'direct'): give a list of arguments",
                subject=what[:200],
            )
        given = {"cwd": command.cwd, "env": command.env, "user": command.user, "merge": command.merge}
        for name, value in given.items():
            if value not in (None, False) and value != {}:
                raise ConfigurationError(f"{name}={value!r}: not possible at exec level 'direct', without a shell")
        size = sum(len("&command=") + len(quote_plus(word)) for word in what)
        if size > ARGV_LIMIT:
            raise ConfigurationError(
                f"the arguments take {size} bytes in a URL; at exec level 'direct' at most {ARGV_LIMIT} are possible"
            )
        return what

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigurationError(f"{what} are not possible at exec level 'direct': this sandbox has no shell")

    async def _open(self, command: Command, argv: tuple[str, ...], *, stdin: bool, queue: bool) -> Exchange:
        if self._lost is not None:
            raise self._loss()
        if stdin and self._ends_stdin is None:
            await self.ping()
        if stdin and not self._ends_stdin:
            raise ConfigurationError(
                "this server cannot end a command's standard input (protocol v4): at exec level 'direct' give none"
            )
        self._count += 1
        try:
            connection = await self._connect(argv, stdin=stdin)
        except BaseException as error:
            if isinstance(error, SandboxLost):
                self._lose(error)
            elif not isinstance(error, ControlPlaneError) or getattr(error, "ambiguous", False):
                # Nobody refused it, so it may have been started, and nobody can tell.
                why = "a command may have been started over a connection that was not made"
                self._lose(SandboxLost("unkillable", why))
            raise
        exchange = Exchange(connection, command, keep_alive=self._keep_alive, queue=queue)
        self._running.add(exchange)
        return exchange

    async def _follow(self, exchange: Exchange, on_output: OnOutput) -> None:
        try:
            while piece := await exchange.next_piece():
                await hand(on_output, *piece)
        except Exception as error:  # noqa: BLE001  the caller's, and passed on to it without the group around it
            exchange.fail(error)

    def _outcome(self, exchange: Exchange, command: Command, wall: float) -> ExecResult:
        stdout, stderr = exchange.kept
        truncated = stdout.truncated or stderr.truncated
        sizes = OutputSizes(stdout=stdout.size, stderr=stderr.size)
        kept = stdout.take(), stderr.take()
        if exchange.limit is not None:
            seconds = limit_of(command, exchange.limit)
            what = "no output for" if exchange.limit == "no_output" else "ran longer than"
            self._lose(
                SandboxLost("unkillable", f"a command {what} {seconds:g} s; without a shell it cannot be killed")
            )
            raise self._loss(*kept)
        status = exchange.status
        if status is None:
            self._lose(StreamBroken("stream_ended", "the connection of a command ended without its exit code"))
            raise self._loss(*kept)
        if status.exit_code is None:
            refusal = start_error(status, command.command[0])
            if refusal is not None:
                raise refusal
            self._lose(SandboxLost("exec_failed", status.message or status.reason))
            raise self._loss(*kept)
        exchange.started()
        return ExecResult(
            exit_code=status.exit_code,
            stdout=kept[0],
            stderr=kept[1],
            truncated=truncated,
            sizes=sizes,
            wall_seconds=wall,
        )

    async def _confirm_end(self, result: ExecResult) -> None:
        assert self._confirm is not None
        try:
            await self._confirm()
        except SandboxLost as error:
            self._lose(error)
            raise self._loss(result.stdout, result.stderr) from error

    def _abandon(self, exchange: Exchange) -> None:
        """Give the sandbox up if a command of it may still run."""
        if exchange.connection.status is None:
            self._lose(SandboxLost("unkillable", "a command was abandoned; without a shell it cannot be killed"))

    def _lose(self, error: SandboxLost) -> None:
        if self._lost is None:
            self._lost = error
            self._over.set()
            for exchange in self._running:
                exchange.done.set()

    def _loss(self, stdout: bytes = b"", stderr: bytes = b"") -> SandboxLost:
        assert self._lost is not None
        return told(self._lost, stdout, stderr)
