# SPDX-License-Identifier: Apache-2.0
"""A live command of a lease."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from agentsandbox.models.command import ExecResult
    from agentsandbox.session import Process

__all__ = ["LeasedProcess"]


class LeasedProcess:
    """
    A command that runs while one talks to it. Use it as an async context manager: leaving it kills what still runs.

    Its end goes through the same fence as every result: it counts only if the sandbox is the one it was.
    """

    def __init__(
        self,
        process: Process,
        settle: Callable[[Callable[[], Awaitable[ExecResult]]], Awaitable[ExecResult]],
        given_up: Callable[[], None],
    ) -> None:
        self._process = process
        self._settle = settle
        self._given_up = given_up
        self._result: ExecResult | None = None

    @property
    def stdin(self) -> Any:
        """Standard input: ``await stdin.send(data)``, ``await stdin.aclose()``."""
        return self._process.stdin

    @property
    def stdout(self) -> AsyncIterable[bytes]:
        """Standard output as it arrives."""
        return self._process.stdout

    @property
    def stderr(self) -> AsyncIterable[bytes]:
        """Standard error as it arrives."""
        return self._process.stderr

    async def wait(self) -> ExecResult:
        """
        Wait for its end.

        Returns:
            Its result, without output: that went to whoever read the streams.

        Raises:
            CommandTimeout: If it ran for too long.
            SandboxLost: If the sandbox is not the one it was.

        """
        if self._result is None:
            self._result = await self._settle(self._process.wait)
        return self._result

    async def kill(self) -> None:
        """Kill it and everything it started."""
        await self._process.kill()

    async def __aenter__(self) -> Self:
        await self._process.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._process.__aexit__(kind, error, traceback)
        finally:
            self._given_up()

    def __repr__(self) -> str:
        state = "running" if self._result is None else f"exit code {self._result.exit_code}"
        return f"<LeasedProcess [{state}]>"
