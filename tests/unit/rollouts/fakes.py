# SPDX-License-Identifier: Apache-2.0
"""A lease source in memory, the one seam that rollouts have to the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import attrs

from agentsandbox.errors import OutputLimitExceeded, SandboxLost, UsageError
from agentsandbox.models.sandbox import Identity
from agentsandbox.models.timing import StartKind, TTFCSample


@attrs.define(eq=False)
class FakeLease:
    """One lease of one sandbox."""

    source: FakeSource
    sandbox: str
    image: str
    episode: str | None
    attempt: int | None
    requested_at: float
    granted_at: float
    node: str | None = "node-1"
    lost: SandboxLost | None = None
    released: bool = False
    discarded: bool = False
    started_at: float | None = None
    commands: tuple[Mapping[str, Any], ...] = ()
    files: dict[str, bytes] = attrs.field(factory=dict)
    release_error: Exception | None = None
    release_seconds: float = 0.0

    @property
    def identity(self) -> Identity:
        return Identity(uid=self.sandbox, instance="1")

    @property
    def ttfc(self) -> TTFCSample:
        end = self.granted_at if self.started_at is None else self.started_at
        return TTFCSample(
            seconds=end - self.requested_at,
            start=StartKind.WARM,
            censored=self.started_at is None,
            stages={"queue": self.granted_at - self.requested_at, "start": end - self.granted_at},
            episode=self.episode,
            image=self.image,
            sandbox=self.sandbox,
        )

    def _check(self) -> None:
        if self.released:
            raise UsageError("the lease was released")
        if self.lost:
            raise self.lost

    async def exec(self, command: str, *, seconds: float = 0.0) -> int:
        """Run a command that takes *seconds*."""
        self._check()
        await anyio.lowlevel.checkpoint()
        if self.started_at is None:
            self.started_at = anyio.current_time()
        self.commands += ({"command": command},)
        await anyio.sleep(seconds)
        self._check()
        return 0

    def lose(self, reason: str = "evicted") -> None:
        """Let the sandbox be gone."""
        self.lost = SandboxLost(reason)

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        self._check()
        await anyio.lowlevel.checkpoint()
        if path not in self.files:
            raise FileNotFoundError(f"no such file: {path}")
        if limit is not None and len(self.files[path]) > limit:
            raise OutputLimitExceeded(limit)
        return self.files[path]

    async def alive(self) -> bool:
        await anyio.lowlevel.checkpoint()
        return self.lost is None and not self.released

    async def release(self, *, discard: bool = False) -> None:
        if self.released:
            return
        self.released = True
        self.discarded = discard
        self.source.give_back(self)
        await anyio.sleep(self.release_seconds)
        if self.release_error is not None:
            raise self.release_error


@attrs.define(eq=False)
class FakeSource:
    """Grants leases at once, up to *size* at a time; every grant is a new sandbox."""

    size: int = 1_000_000
    seconds: float = 0.0
    leases: list[FakeLease] = attrs.field(factory=list)
    held: set[str] = attrs.field(factory=set)
    most: int = 0
    failures: dict[str, list[Exception]] = attrs.field(factory=dict)
    calls: Counter[str] = attrs.field(factory=Counter)
    _slots: anyio.Semaphore = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._slots = anyio.Semaphore(self.size)

    async def acquire(self, image: str, *, episode: str | None = None, attempt: int | None = None) -> FakeLease:
        requested_at = anyio.current_time()
        self.calls[episode or ""] += 1
        await self._slots.acquire()
        try:
            await anyio.sleep(self.seconds)
            waiting = self.failures.get(episode or "", [])
            if waiting:
                raise waiting.pop(0)
        except BaseException:
            self._slots.release()
            raise
        lease = FakeLease(
            source=self,
            sandbox=f"box-{len(self.leases)}",
            image=image,
            episode=episode,
            attempt=attempt,
            requested_at=requested_at,
            granted_at=anyio.current_time(),
        )
        self.leases.append(lease)
        self.held.add(lease.sandbox)
        self.most = max(self.most, len(self.held))
        return lease

    def give_back(self, lease: FakeLease) -> None:
        self.held.remove(lease.sandbox)
        self._slots.release()
