# SPDX-License-Identifier: Apache-2.0
"""What a rollout needs of whatever gives it sandboxes, and what it asks of a rollout function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from agentsandbox.errors import SandboxLost
    from agentsandbox.models.episode import Episode, Graded
    from agentsandbox.models.sandbox import Identity
    from agentsandbox.models.timing import TTFCSample

__all__ = ["LeaseSource", "RolloutFunction", "RolloutLease", "check_rollout"]


class RolloutLease(Protocol):
    """What a rollout needs of a lease. The rollout function sees all of the real one."""

    @property
    def sandbox(self) -> str:
        """The name of the sandbox."""

    @property
    def node(self) -> str | None:
        """Where it is."""

    @property
    def identity(self) -> Identity:
        """What must not change while it is leased."""

    @property
    def ttfc(self) -> TTFCSample:
        """The time to first command; censored while none has started."""

    @property
    def lost(self) -> SandboxLost | None:
        """Why the sandbox is not to be trusted any more, if so."""

    @property
    def released(self) -> bool:
        """Whether it was given back."""

    @property
    def commands(self) -> Sequence[Mapping[str, Any]]:
        """The command log."""

    async def alive(self) -> bool:
        """Say whether the sandbox is still the one that was granted."""

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        """Return the content of a file in the sandbox."""

    async def release(self, *, discard: bool = False) -> None:
        """Give the sandbox back; with *discard* it is destroyed instead of reused."""


class LeaseSource(Protocol):
    """Anything that grants leases: a client, a pool, a double in a test."""

    async def acquire(self, image: str, *, episode: str | None = None, attempt: int | None = None) -> Any:
        """Wait for a sandbox of *image* and return its lease, a :class:`RolloutLease`."""


RolloutFunction = Callable[[Any, "Episode"], "Awaitable[float | Graded]"]
"""One attempt: takes the sandbox (a :class:`~agentsandbox.Lease`) and the episode, and returns the reward."""


def check_rollout(rollout: Any) -> None:
    """
    Refuse a rollout function that cannot work, before anything is created for it.

    Functions, methods and :func:`functools.partial` of them count, and so do objects with an async ``__call__``.

    Raises:
        ConfigurationError: If it is not async, or does not take a sandbox and an episode.

    """
    inner = rollout
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not callable(inner):
        raise ConfigurationError(f"the rollout must be an async function (sandbox, episode) -> reward, not {rollout!r}")
    if not (inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)):
        raise ConfigurationError(
            f"the rollout function {_name(inner)} is not async; declare it with 'async def' and await the sandbox in it"
        )
    try:
        inspect.signature(rollout).bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"the rollout function {_name(inner)} must take a sandbox and an episode: {error}"
        ) from None
    except ValueError:
        return  # A builtin without a signature: the call will tell.


def _name(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
