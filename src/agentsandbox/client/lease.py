# SPDX-License-Identifier: Apache-2.0
"""The exclusive use of one sandbox by one attempt."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.client.command_log import CommandEntry, CommandLog, as_words
from agentsandbox.client.contents import LeaseContents
from agentsandbox.client.fence import fenced
from agentsandbox.client.process import LeasedProcess
from agentsandbox.errors import (
    CommandFailed,
    InfrastructureError,
    PoolClosed,
    ResetFailed,
    SandboxLost,
    StreamBroken,
    UsageError,
)
from agentsandbox.models.command import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, Command, ExecResult
from agentsandbox.models.timing import StartKind, TTFCSample

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from agentsandbox.client.checkpoints import CheckpointStore
    from agentsandbox.models.reset import ResetReport
    from agentsandbox.models.sandbox import Capabilities, Identity
    from agentsandbox.warmpool.engine import Engine
    from agentsandbox.warmpool.tenure import Tenure

__all__ = ["Lease"]


class Lease(LeaseContents):
    """
    The exclusive use of one sandbox, from :meth:`SandboxClient.acquire` to :meth:`release`.

    The sandbox's identity is compared before and after every command and file transfer: what ran anywhere else is never
    returned as a result. Use it as an async context manager to have it released.
    """

    def __init__(
        self,
        engine: Engine,
        tenure: Tenure,
        *,
        acquire_timeout: float | None = None,
        episode: str | None = None,
        attempt: int | None = None,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        super().__init__(checkpoints)
        self._engine = engine
        self._tenure: Tenure | None = tenure
        self._acquire_timeout = acquire_timeout
        self._resetting = False
        self._death: SandboxLost | None = None
        self._ended_at: float | None = None
        self._log = CommandLog(tenure.granted_at, self._redactor.text)
        self.episode = episode
        """The episode it was acquired for."""
        self.attempt = attempt
        """The attempt it was acquired for."""
        self.id = f"{tenure.grant.name}.{tenure.grant.generation}"
        """Unique in its run."""
        self.image = tenure.image
        """The image that was asked for."""
        self.start: StartKind = tenure.start
        """How its sandbox was come by."""
        self.reused = tenure.grant.reused
        """Whether its first sandbox had been used before, also when it was waited for."""
        self.requested_at = tenure.requested_at
        """When it was asked for, in seconds on the driver's monotonic clock."""
        self.granted_at = tenure.granted_at
        """When it was granted."""
        self.generation = 1
        """Counts the sandboxes it had: 1 until the first reset."""
        self._first_sandbox = tenure.sandbox.name
        self._adopt(tenure)

    def _adopt(self, tenure: Tenure) -> None:
        self._tenure = tenure
        self.sandbox: str = tenure.sandbox.name
        """The sandbox's name."""
        self.identity: Identity = tenure.sandbox.identity
        """Its identity when it was granted."""
        self.capabilities: Capabilities = tenure.sandbox.capabilities
        """What it can do."""
        self.node: str | None = tenure.sandbox.node
        """Where it is, if the backend has such a notion."""
        self._finalizer = weakref.finalize(self, self._engine.abandon, tenure)
        self._finalizer.atexit = False

    @property
    def ttfc(self) -> TTFCSample:
        """Time to first command; censored, and growing, as long as no command has started."""
        started = self._log.first_started
        end = started if started is not None else self._ended_at if self._ended_at is not None else anyio.current_time()
        stages = {"queue": self.granted_at - self.requested_at}
        return TTFCSample(
            seconds=end - self.requested_at,
            start=self.start,
            censored=started is None,
            stages=stages if started is None else {**stages, "start": started - self.granted_at},
            episode=self.episode,
            image=self.image,
            sandbox=self._first_sandbox,
        )

    @property
    def commands(self) -> tuple[Mapping[str, Any], ...]:
        """
        The command log, in the order in which commands ended.

        Each entry has ``command`` (shortened), ``exit_code`` or ``error``, ``started`` (seconds since the grant;
        ``None`` if it never did), ``wall`` (seconds), ``truncated`` and ``sizes``.
        """
        return tuple(self._log.entries)

    @property
    def released(self) -> bool:
        """Whether it was given back."""
        return self._ended_at is not None

    @property
    def lost(self) -> SandboxLost | None:
        """Why its sandbox is not to be used any more, if so."""
        return self._death or (self._tenure.lost if self._tenure is not None else None)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        no_output_timeout: float | None = None,
        output_limit: int = DEFAULT_OUTPUT_LIMIT,
        require_complete: bool = False,
        check: bool = False,
        on_output: Callable[[str, bytes], Awaitable[None] | None] | None = None,
        merge: bool = False,
    ) -> ExecResult:
        """
        Run a command and wait for its end.

        Args:
            command: A shell script as one string, or an argument vector.
            stdin: Standard input; empty and at its end if ``None``.
            cwd: Working directory, relative to the sandbox's.
            env: Variables on top of the sandbox's.
            secrets: More of them, for this command only, that appear in no log, event, record or error message.
            user: User name or id to run as.
            timeout: Seconds it may run; ``None`` for no limit.
            no_output_timeout: Seconds it may stay silent; ``None`` for no limit.
            output_limit: Bytes kept of each stream, half from its beginning and half from its end.
            require_complete: Whether output beyond the limit is an error.
            check: Whether an exit code other than 0 is an error.
            on_output: Called with ``"stdout"`` or ``"stderr"`` and each piece of output as it arrives.
            merge: Whether standard error goes into standard output.

        Returns:
            The result, whatever the exit code.

        Raises:
            ConfigurationError: If the arguments make no sense.
            StartError: If it could not be started: no such program, user or directory.
            CommandTimeout: If it ran or was silent for too long. Its processes are dead.
            CommandFailed: With ``check``, if the exit code is not 0.
            OutputLimitExceeded: With ``require_complete``, if the output did not fit.
            SandboxLost: If the sandbox is not the one it was. The lease is dead from then on.
            UsageError: If the lease was released.

        """
        tenure = self._current()
        request = Command(
            command=as_words(command),
            cwd=cwd,
            env=env or {},
            secrets={**self._given, **self._secrets(tenure, secrets)},
            user=user,
            timeout=timeout,
            no_output_timeout=no_output_timeout,
            output_limit=output_limit,
            merge=merge,
        )
        entry = self._log.begin(request, self._emit)
        async with self._fence(tenure, entry):
            result = await tenure.sandbox.session.exec(
                request, stdin=stdin, on_output=on_output, on_started=entry.started, require_complete=require_complete
            )
            entry.result = result
        if check and result.exit_code:
            # Its message has the end of what was printed, which may begin in the middle of a credential.
            raise CommandFailed(attrs.evolve(result, **self.redact({"stdout": result.stdout, "stderr": result.stderr})))
        return result

    async def open_process(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        merge: bool = False,
    ) -> LeasedProcess:
        """
        Start a command to talk to while it runs: ``async with await lease.open_process("cat") as process``.

        Args:
            command: A shell script as one string, or an argument vector.
            cwd: Working directory, relative to the sandbox's.
            env: Variables on top of the sandbox's.
            secrets: More of them, for this command only; see :meth:`exec`.
            user: User name or id to run as.
            timeout: Seconds it may run; ``None`` for no limit.
            merge: Whether standard error goes into standard output.

        Returns:
            The process, with ``stdin``, ``stdout``, ``stderr``, ``wait()`` and ``kill()``.

        Raises:
            StartError: If it could not be started.
            SandboxLost: If the sandbox is not the one it was.
            UsageError: If the lease was released.

        """
        tenure = self._current()
        request = Command(
            command=as_words(command),
            cwd=cwd,
            env=env or {},
            secrets={**self._given, **self._secrets(tenure, secrets)},
            user=user,
            timeout=timeout,
            merge=merge,
        )
        entry = self._log.begin(request, self._emit)
        async with self._fence(tenure, entry, ends=False):
            process = await tenure.sandbox.session.open_process(request)
            entry.started()

        async def settle(wait: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
            async with self._fence(tenure, entry):
                entry.result = await wait()
            return entry.result

        return LeasedProcess(process, settle, lambda: entry.end(None))

    async def read_file(self, path: str, *, user: str | int | None = None, limit: int | None = None) -> bytes:
        """
        Read a file.

        Args:
            path: Its path, relative to the sandbox's working directory.
            user: User to read as.
            limit: Bytes that it may have; ``None`` for any number.

        Raises:
            FileNotFoundError: And Python's other errors on files, with the path in the message.
            OutputLimitExceeded: If it is larger than ``limit``.

        """
        tenure = self._current()
        async with self._fence(tenure):
            return await tenure.sandbox.session.read_file(path, user=user, limit=limit)

    async def write_file(
        self, path: str, data: str | bytes, *, mode: int | None = None, user: str | int | None = None
    ) -> None:
        """
        Write a file in one step: readers see the old one or all of the new one.

        Args:
            path: Its path, relative to the sandbox's working directory.
            data: What to write; text as UTF-8.
            mode: Its permissions; ``None`` keeps those of an existing file.
            user: User to write as.

        Raises:
            PermissionError: And Python's other errors on files, with the path in the message.

        """
        tenure = self._current()
        content = data.encode() if isinstance(data, str) else data
        async with self._fence(tenure):
            await tenure.sandbox.session.write_file(path, content, mode=mode, user=user)

    async def upload_dir(self, source: str | Path, target: str, *, user: str | int | None = None) -> None:
        """Copy a directory of this machine into the sandbox."""
        tenure = self._current()
        async with self._fence(tenure):
            await tenure.sandbox.session.upload_dir(Path(source), target, user=user)

    async def download_dir(self, source: str, target: str | Path, *, user: str | int | None = None) -> None:
        """Copy a directory of the sandbox to this machine. What it holds is the episode's: trust none of it."""
        tenure = self._current()
        async with self._fence(tenure):
            await tenure.sandbox.session.download_dir(source, Path(target), user=user)

    async def alive(self) -> bool:
        """
        Ask the sandbox whether it still is the one it was, and answers.

        A sandbox that is another one is lost from then on; one that only does not answer in time may answer later.
        """
        if self._tenure is None or self.lost is not None:
            return False
        tenure, answered = self._tenure, True
        try:
            async with self._fence(tenure):
                try:
                    await tenure.sandbox.session.ping()
                except StreamBroken:
                    answered = False
        except (InfrastructureError, UsageError):
            return False
        return answered

    async def reset(self) -> ResetReport:
        """
        Make the sandbox like new, or get a new one, without giving up the lease.

        Returns:
            What was done.

        Raises:
            ResetFailed: If nothing worked. The lease is dead from then on.
            SandboxLost: If it was dead before.
            UsageError: If it was released, or is being reset.

        """
        tenure = self._current()
        began = anyio.current_time()
        placed, self._placed = self._placed, set()
        self._given = {}
        self._resetting = True
        self.generation += 1
        self._finalizer.detach()
        self._tenure = None
        report: ResetReport | None = None
        try:
            report = await self._engine.reset(tenure)
        except BaseException:
            self._death = SandboxLost("deleted", "its reset did not come to its end")
            raise
        finally:
            if report is None or (self.released and report.verified):
                self._resetting = False
                self._engine.release(tenure, discard=True)
        if report.verified:
            self._resetting = False
            if self.released:
                raise UsageError("the lease was released while it was reset")
            self._adopt(tenure)
            self._emit("lease.reset", rung=report.rung, seconds=report.seconds)
            return report
        try:
            tenure = await self._engine.replace(tenure, timeout=self._acquire_timeout)
        except BaseException as error:
            self._death = SandboxLost("deleted", "its reset did not come to its end")
            if isinstance(error, InfrastructureError) and not isinstance(error, PoolClosed):
                raise ResetFailed(f"no fresh sandbox of {self.image!r} could be had: {error}") from error
            raise
        finally:
            self._resetting = False
        if self.released:
            self._engine.release(tenure)
            raise UsageError("the lease was released while it was reset")
        self._adopt(tenure)
        seconds = anyio.current_time() - began
        # The holder has another sandbox, whichever way the old one goes.
        rung = "jail" if report.rung == "jail" else "replace"
        self._emit("lease.reset", rung=rung, seconds=seconds)
        return attrs.evolve(report, rung=rung, seconds=seconds, verified=True, secrets=tuple(sorted(placed)))

    async def release(self, *, discard: bool = False) -> None:
        """
        Give the sandbox back. What ran in it is killed. Releasing again does nothing.

        Args:
            discard: Whether the sandbox must not be used again even if it could be reset.

        """
        if self.released:
            return
        self._ended_at = anyio.current_time()
        self._finalizer.detach()
        tenure, self._tenure = self._tenure, None
        self._given = {}
        if tenure is not None:
            self._death = tenure.lost
            self._engine.release(tenure, discard=discard)
        self._emit("lease.released", discard=discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.release(discard=kind is not None)

    def _current(self) -> Tenure:
        if self.released:
            raise UsageError(f"lease {self.id} was released; acquire another one")
        if self._resetting:
            raise UsageError(f"lease {self.id} is being reset")
        if self._death is not None:
            raise _again(self._death)
        if self._engine.closed:
            raise UsageError(f"lease {self.id} is of a client that was closed")
        assert self._tenure is not None
        if self._tenure.lost is not None:
            raise _again(self._tenure.lost)
        return self._tenure

    def _fence(
        self, tenure: Tenure, entry: CommandEntry | None = None, *, ends: bool = True
    ) -> AbstractAsyncContextManager[None]:
        held, clean = lambda: self._tenure is tenure, self._redactor.error
        return fenced(self._engine, tenure, held, entry, ends=ends, clean=clean)

    def _emit(self, name: str, **data: Any) -> None:
        self._engine.emit(
            name,
            anyio.current_time(),
            sandbox=self.sandbox,
            episode=self.episode,
            attempt=self.attempt,
            **self.redact(data),
        )

    def __repr__(self) -> str:
        state = "released" if self.released else "resetting" if self._resetting else "lost" if self.lost else "leased"
        return f"<Lease {self.id!r} of {self.image!r} [{state}, {len(self._log.entries)} commands]>"


def _again(loss: SandboxLost) -> SandboxLost:
    return type(loss)(loss.reason, loss.detail)
