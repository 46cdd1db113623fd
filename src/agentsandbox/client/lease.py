# SPDX-License-Identifier: Apache-2.0
"""The exclusive use of one sandbox by one attempt."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.client.command_log import CommandLog, as_words
from agentsandbox.client.contents import LeaseContents
from agentsandbox.client.process import LeasedProcess
from agentsandbox.errors import CommandFailed
from agentsandbox.models.command import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, Command, ExecResult
from agentsandbox.models.timing import TTFCSample

if TYPE_CHECKING:
    from agentsandbox.client.checkpoints import CheckpointStore
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
        super().__init__(engine, tenure, acquire_timeout=acquire_timeout, episode=episode, attempt=attempt)
        self._store = checkpoints
        self._log = CommandLog(tenure.granted_at, self._redactor.text)
        self._first_sandbox = self.sandbox

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
        request = self._request(
            tenure,
            command,
            env,
            secrets,
            cwd=cwd,
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
        request = self._request(tenure, command, env, secrets, cwd=cwd, user=user, timeout=timeout, merge=merge)
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

    def _request(
        self,
        tenure: Tenure,
        command: str | Sequence[str],
        env: Mapping[str, str] | None,
        secrets: Mapping[str, str] | None,
        **options: Any,
    ) -> Command:
        words = as_words(command)
        known = {**self._given, **self._secrets(tenure, secrets)}
        return Command(command=words, env=env or {}, secrets=known, **options)

    def __repr__(self) -> str:
        state = "released" if self.released else "resetting" if self._resetting else "lost" if self.lost else "leased"
        return f"<Lease {self.id!r} of {self.image!r} [{state}, {len(self._log.entries)} commands]>"
