# SPDX-License-Identifier: Apache-2.0
"""
Sandboxes for Inspect AI: ``sandbox="agentsandbox"``, or ``sandbox=("agentsandbox", "config.yaml")``.

Inspect finds this module by its entry point. One pool serves all samples of a run that share a configuration: it is
opened by ``task_init`` and closed by ``task_cleanup``; each sample holds one sandbox of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import anyio
from anyio.lowlevel import RunVar

from agentsandbox.client import SandboxClient
from agentsandbox.errors import (
    CommandNotExecutable,
    ConfigurationError,
    InfrastructureError,
    OutputLimitExceeded,
    StartError,
    UsageError,
    UserNotFound,
)

try:
    import yaml
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
except ImportError as error:
    raise ImportError("the Inspect AI adapter needs an extra: pip install 'agentsandbox[inspect]'") from error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from agentsandbox.client import Lease

__all__ = ["AgentSandboxConfig", "AgentSandboxEnvironment"]

RELEASE_GRACE = 30.0
"""Seconds that giving back a sandbox may take once a sample has ended, even when the run is being cancelled."""


class AgentSandboxConfig(BaseModel, frozen=True):
    """What sandboxes are made from, and how many of them there are."""

    model_config = ConfigDict(extra="forbid")

    backend: str = "local"
    """Where sandboxes come from."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the backend, by name, such as ``{"namespace": "evals", "run_as_root": True}`` for ``kubernetes``."""
    image: str = "host"
    """What they are made from, in the words of the backend."""
    size: int = Field(default=8, ge=1)
    """How many samples may hold one at once; further samples wait."""
    user: str | int | None = None
    """User that commands run as when Inspect names none; ``None`` is the image's."""
    workdir: str | None = None
    """Directory that relative paths start from; ``None`` is the image's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables on top of the image's environment."""
    acquire_timeout: float | None = Field(default=None, gt=0)
    """Seconds a sample waits for a sandbox; ``None`` waits as long as the samples before it take."""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


@sandboxenv(name="agentsandbox")
class AgentSandboxEnvironment(SandboxEnvironment):
    """
    One leased sandbox as Inspect sees it.

    Args:
        lease: The lease; this object gives it back in ``sample_cleanup``.

    """

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self.lease = lease

    def __repr__(self) -> str:
        return f"<AgentSandboxEnvironment [{self.lease.sandbox}]>"

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """
        Run a command. It is executed at most once: *timeout_retry* is not needed, since no transport here times out.

        Raises:
            TimeoutError: If it ran longer than *timeout* seconds; its process tree is dead.
            PermissionError: If ``cmd[0]`` may not be executed.
            SandboxUserUnsupportedError: If the sandbox cannot run a second user.
            OutputLimitExceededError: If a stream exceeds Inspect's limit.
            SandboxUnavailableError: If the sandbox is lost.

        """
        try:
            result = await self.lease.exec(
                cmd,
                stdin=input.encode() if isinstance(input, str) else input,
                cwd=cwd,
                env=env,
                user=int(user) if user is not None and user.isdecimal() else user,
                timeout=timeout,
                output_limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
                require_complete=True,
            )
        except CommandNotExecutable:
            raise
        except UserNotFound as error:
            if not self.lease.capabilities.users:
                raise SandboxUserUnsupportedError(f"{self.lease.sandbox} runs commands as one user: {error}") from error
            return ExecResult(success=False, returncode=1, stdout="", stderr=f"{error}\n")
        except StartError as error:
            return ExecResult(success=False, returncode=127, stdout="", stderr=f"{error}\n")
        except OutputLimitExceeded as error:
            kept = error.result.text if error.result else None
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, kept) from error
        except InfrastructureError as error:
            raise SandboxUnavailableError(f"{self.lease.sandbox}: {error}") from error
        return ExecResult(success=result.ok, returncode=result.exit_code, stdout=result.text, stderr=result.error_text)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file; its directory is created, and an existing file is replaced at once."""
        try:
            await self.lease.write_file(file, contents)
        except InfrastructureError as error:
            raise SandboxUnavailableError(f"{self.lease.sandbox}: {error}") from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """
        Read a file.

        Raises:
            OutputLimitExceededError: If it is larger than Inspect's limit.
            UnicodeDecodeError: If *text* is asked for and it is not UTF-8.

        """
        try:
            data = await self.lease.read_file(file, limit=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        except OutputLimitExceeded as error:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        except InfrastructureError as error:
            raise SandboxUnavailableError(f"{self.lease.sandbox}: {error}") from error
        return data.decode("utf-8") if text else data

    def default_polling_interval(self) -> float:
        """Poll often: a command costs little here."""
        return 0.2

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Open the pool for *config*, or join the one that is open."""
        parsed = _parse(config)
        pools = _pools()
        if (shared := pools.get(parsed)) is None:
            shared = pools[parsed] = _SharedPool(parsed)
            _spawn(shared.run)
        shared.users += 1
        try:
            await shared.ready.wait()
            if shared.error is not None:
                raise shared.error
        except BaseException:
            await _leave(parsed, shared)
            raise

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Close the pool when nobody else uses it. Its sandboxes end with it, whatever *cleanup* says."""
        parsed = _parse(config)
        if (shared := _pools().get(parsed)) is not None:
            await _leave(parsed, shared)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Lease a sandbox for one sample."""
        parsed = _parse(config)
        shared = _pools().get(parsed)
        if shared is None or shared.client is None:
            raise UsageError("sample_init was called before task_init, or after task_cleanup")
        lease = await shared.client.acquire(parsed.image, timeout=parsed.acquire_timeout)
        return {"default": cls(lease)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Give back the sandbox of one sample, also when the run is being cancelled."""
        with anyio.move_on_after(RELEASE_GRACE, shield=True):
            for environment in environments.values():
                await environment.as_type(cls).lease.release()

    @classmethod
    def config_files(cls) -> list[str]:
        """Name the file that is used when a task names none."""
        return ["agentsandbox.yaml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Read a configuration from a log."""
        return AgentSandboxConfig(**config)


class _SharedPool:
    """
    A pool and the task that owns it.

    Inspect may call ``task_init`` and ``task_cleanup`` from different tasks, and neither has a scope that a task group
    could live in; so the pool is entered and left by a task of its own.
    """

    def __init__(self, config: AgentSandboxConfig) -> None:
        self._config = config
        self.users = 0
        self.client: SandboxClient | None = None
        self.error: Exception | None = None
        self.ready = anyio.Event()
        self.stop = anyio.Event()
        self.ended = anyio.Event()

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "open" if self.client else "opening"
        return f"<_SharedPool {self._config.backend}:{self._config.image} [{state}, {self.users} users]>"

    async def run(self) -> None:
        config = self._config
        try:
            async with SandboxClient(
                config.backend,
                images={config.image: config.size},
                user=config.user,
                workdir=config.workdir,
                env=config.env,
                acquire_timeout=config.acquire_timeout,
                backend_options=config.backend_options,
            ) as self.client:
                self.ready.set()
                await self.stop.wait()
        except Exception as error:  # noqa: BLE001 - carried to the call that waits, which raises it
            self.error = error
        finally:
            self.client = None
            self.ready.set()
            self.ended.set()


_POOLS: RunVar[dict[AgentSandboxConfig, _SharedPool]] = RunVar("agentsandbox_inspect_pools")
_TASKS: set[object] = set()  # asyncio itself keeps only weak references to tasks


def _pools() -> dict[AgentSandboxConfig, _SharedPool]:
    """Return the open pools of this event loop."""
    if (pools := _POOLS.get(None)) is None:
        pools = {}
        _POOLS.set(pools)
    return pools


async def _leave(config: AgentSandboxConfig, shared: _SharedPool) -> None:
    shared.users -= 1
    if shared.users:
        return
    _pools().pop(config, None)
    shared.stop.set()
    with anyio.CancelScope(shield=True):
        await shared.ended.wait()
    if shared.error is not None:
        raise shared.error


def _spawn(function: Callable[[], Awaitable[None]]) -> None:
    """Start a task that belongs to the event loop itself: it is cancelled, and waited for, when the loop ends."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        trio.lowlevel.spawn_system_task(function)
        return
    import asyncio

    task: asyncio.Task[None] = asyncio.get_running_loop().create_task(function())  # type: ignore[arg-type]
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


def _parse(config: SandboxEnvironmentConfigType | None) -> AgentSandboxConfig:
    """
    Make a configuration of what a task says.

    Raises:
        ConfigurationError: Naming the file or the field that is wrong.

    """
    if config is None:
        return AgentSandboxConfig()
    if isinstance(config, AgentSandboxConfig):
        return config
    if not isinstance(config, str):
        raise ConfigurationError(f"agentsandbox takes an AgentSandboxConfig or the name of a YAML file, not {config!r}")
    try:
        fields = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        return AgentSandboxConfig.model_validate({} if fields is None else fields)
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise ConfigurationError(f"sandbox configuration {config}: {error}") from error
