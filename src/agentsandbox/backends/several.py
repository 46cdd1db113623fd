# SPDX-License-Identifier: Apache-2.0
"""Several backends as one: clusters with weights, images with a home."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import attrs

from agentsandbox.backends.base import Backend, BackendSandbox, Check
from agentsandbox.backends.opening import backend_class
from agentsandbox.errors import (
    ConfigurationError,
    ControlPlaneError,
    ProvisionError,
    SandboxError,
    UsageError,
)

if TYPE_CHECKING:
    from agentsandbox.models.events import Event
    from agentsandbox.models.sandbox import SandboxSpec

__all__ = ["Balance", "SeveralBackends"]

REST = 30.0
"""Seconds for which a member that could not make a sandbox is asked last; it doubles with every failure in a row."""

LONGEST_REST = 480.0

SLACK = 1.25
"""How far above its fair share a member may be loaded, and by one more, so that an image stays where it is."""


@attrs.define(eq=False)
class _Member:
    weight: float
    patterns: tuple[str, ...]
    live: int = 0
    failures: int = 0
    rests_until: float = 0.0
    images: Counter[str] = attrs.field(factory=Counter)


class Balance:
    """
    Decides which member makes the next sandbox. Pure: time is handed in.

    Args:
        weights: Member → its share of the sandboxes relative to the others.
        images: Member → patterns of the images that it takes, such as ``swe/*``; one that is not named takes all.

    """

    def __init__(self, weights: Mapping[str, float], images: Mapping[str, Iterable[str]]) -> None:
        self._members = {
            name: _Member(weight=weight, patterns=tuple(images.get(name, ("*",)))) for name, weight in weights.items()
        }

    def __repr__(self) -> str:
        return f"<Balance [{', '.join(f'{name} {member.live}' for name, member in self._members.items())}]>"

    def takers(self, image: str) -> list[str]:
        """Return the members that take an image."""
        return [
            name
            for name, member in self._members.items()
            if any(fnmatch.fnmatchcase(image, pattern) for pattern in member.patterns)
        ]

    def order(self, image: str, now: float) -> list[str]:
        """
        Return the members that take an image, the one to ask first in front.

        Members that failed lately come last. Of the others, one that has the image already comes first as long as it
        is not loaded far beyond its share; then the one that is loaded least for its weight.
        """
        names = self.takers(image)
        total = sum(self._members[name].live for name in names)
        weights = sum(self._members[name].weight for name in names)

        def rank(name: str) -> tuple[bool, bool, float]:
            member = self._members[name]
            at_home = member.images[image] > 0 and member.live <= SLACK * total * member.weight / weights + 1
            return now < member.rests_until, not at_home, (member.live + 1) / member.weight

        return sorted(names, key=rank)

    def taken(self, name: str, image: str) -> None:
        """Note that a member is about to make a sandbox."""
        self._members[name].live += 1
        self._members[name].images[image] += 1

    def made(self, name: str) -> None:
        """Note that it did."""
        self._members[name].failures = 0

    def failed(self, name: str, image: str, now: float) -> None:
        """Note that it could not."""
        member = self._members[name]
        member.failures += 1
        member.rests_until = now + min(LONGEST_REST, REST * 2.0 ** (member.failures - 1))
        self.freed(name, image)

    def freed(self, name: str, image: str) -> None:
        """Note that one is gone, or was never made."""
        self._members[name].live -= 1
        self._members[name].images[image] -= 1


class SeveralBackends(Backend):
    """
    Make sandboxes in several places as one backend, such as clusters of several regions.

    Every sandbox says in ``capabilities.facts["member"]`` where it is. When a member cannot make one, the next is
    asked, and the first is left alone for a while.

    Args:
        members: Name → backend.
        weights: Name → its share of the sandboxes relative to the others; 1 if not given.
        images: Name → patterns of the images that it takes, such as ``["swe/*"]``; all if not given.

    Raises:
        ConfigurationError: If there are no members, or a name or weight is none.

    """

    name: ClassVar[str] = "several"

    def __init__(
        self,
        members: Mapping[str, Backend],
        *,
        weights: Mapping[str, float] | None = None,
        images: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        weights, images = weights or {}, images or {}
        if not members:
            raise ConfigurationError("there must be at least one member")
        if len({id(member) for member in members.values()}) < len(members):
            raise ConfigurationError("one backend cannot be two members; make one for each")
        for name in (*weights, *images):
            if name not in members:
                raise ConfigurationError(f"there is no member {name!r}; there are {', '.join(members)}")
        for name, weight in weights.items():
            if not weight > 0:
                raise ConfigurationError(f"weight of {name!r}: {weight!r} is not above 0")
        for name, patterns in images.items():
            if isinstance(patterns, str):
                raise ConfigurationError(f"images of {name!r}: {patterns!r} should be a list of patterns")
        self.members = dict(members)
        """Name → backend."""
        self.balance = Balance({name: float(weights.get(name, 1.0)) for name in members}, images)
        """Who is asked next."""
        self._where: dict[str, str] = {}
        rates = [member.default_create_rate for member in members.values()]
        self.default_create_rate = None if None in rates else sum(rate for rate in rates if rate is not None)
        self.default_create_timeout = max(member.default_create_timeout for member in members.values())
        self.default_creates_in_flight = sum(member.default_creates_in_flight for member in members.values())

    def __repr__(self) -> str:
        return f"<SeveralBackends {self.balance!r}>"

    def expect(self, sandboxes: int) -> None:
        """Hear how many sandboxes there may be: any member may get all of them."""
        for member in self.members.values():
            member.expect(sandboxes)

    @property
    def guaranteed_life(self) -> float | None:
        """Seconds that a sandbox lives at least: what the member says that promises least."""
        lives = [life for member in self.members.values() if (life := member.guaranteed_life) is not None]
        return min(lives, default=None)

    def default_spares(self, size: int) -> int:
        """Say how many sandboxes to keep ready beyond those that may be leased: what the most careful member says."""
        return min(member.default_spares(size) for member in self.members.values())

    async def validate(self, specs: Iterable[SandboxSpec]) -> None:
        """
        Refuse what no member can make, before anything is created.

        Raises:
            ConfigurationError: If no member takes an image, or one that takes it cannot use it.

        """
        specs = tuple(specs)
        for spec in specs:
            if not self.balance.takers(spec.image):
                raise ConfigurationError(f"no member takes image {spec.image!r}; there are {', '.join(self.members)}")
        for name, member in self.members.items():
            try:
                await member.validate([spec for spec in specs if name in self.balance.takers(spec.image)])
            except ConfigurationError as error:
                raise ConfigurationError(f"member {name!r}: {error}") from error

    async def examine(self) -> list[Check]:
        """Have every member look at what it needs."""
        found: list[Check] = []
        for name, member in self.members.items():
            found += [attrs.evolve(check, name=f"{name}: {check.name}") for check in await member.examine()]
        return found

    def receipt(self) -> Mapping[str, Any]:
        """Return what each member needs to know of this run."""
        return {
            "members": {
                name: {"backend": member.name, "run_id": getattr(member, "run_id", ""), **member.receipt()}
                for name, member in self.members.items()
            }
        }

    @classmethod
    async def remove_leftovers(cls, receipt: Mapping[str, Any]) -> list[str]:
        """
        Have every member's kind remove what it left.

        Raises:
            UsageError: If the run is still going on, or something is not provably its own.

        """
        removed: list[str] = []
        for own in (receipt.get("members") or {}).values():
            removed += await backend_class(own["backend"]).remove_leftovers({**receipt, **own})
        return removed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run every member for as long as the context lasts."""
        async with AsyncExitStack() as stack:
            for member in self.members.values():
                member.sink = self._hear
                await stack.enter_async_context(member.running())
            yield

    def _hear(self, event: Event) -> None:
        self.sink(event)

    async def create(self, spec: SandboxSpec, name: str) -> BackendSandbox:
        """
        Have the best member make a sandbox, or the next if it cannot.

        Raises:
            ProvisionError: If none can, in the words of each.

        """
        failures: list[SandboxError] = []
        words: list[str] = []
        for member in self.balance.order(spec.image, anyio.current_time()):
            self.balance.taken(member, spec.image)
            try:
                sandbox = await self.members[member].create(spec, name)
            except (ControlPlaneError, ProvisionError) as error:
                self.balance.failed(member, spec.image, anyio.current_time())
                failures.append(error)
                words.append(f"{member}: {error}")
            except BaseException:
                self.balance.freed(member, spec.image)
                raise
            else:
                self.balance.made(member)
                self._where[name] = member
                _tell(sandbox, member)
                return sandbox
        if len(failures) == 1:
            raise failures[0]
        raise ProvisionError("; ".join(words)) from failures[-1]

    def can_recycle(self, sandbox: BackendSandbox) -> bool:
        """Whether the member that has it can."""
        member = self._where.get(sandbox.name)
        return member is not None and self.members[member].can_recycle(sandbox)

    async def recycle(self, sandbox: BackendSandbox, spec: SandboxSpec, name: str) -> BackendSandbox:
        """
        Have the member that has it make it a fresh one.

        Raises:
            ProvisionError: If it did not work, or that member does not take the image.

        """
        member = self._owner(sandbox)
        if member not in self.balance.takers(spec.image):
            raise ProvisionError(f"member {member!r} does not take image {spec.image!r}")
        fresh = await self.members[member].recycle(sandbox, spec, name)
        self.balance.freed(member, sandbox.spec.image)
        self.balance.taken(member, spec.image)
        self._where.pop(sandbox.name, None)
        self._where[name] = member
        _tell(fresh, member)
        return fresh

    async def suspend(self, sandbox: BackendSandbox) -> None:
        """Have the member that has it suspend it; see :meth:`Backend.suspend`."""
        await self.members[self._owner(sandbox)].suspend(sandbox)

    async def resume(self, sandbox: BackendSandbox) -> BackendSandbox:
        """Have the member that has it resume it; see :meth:`Backend.resume`."""
        return await self.members[self._owner(sandbox)].resume(sandbox)

    async def destroy(self, sandbox: BackendSandbox) -> None:
        """Have the member that has it remove it; one that is gone already is fine."""
        member = self._where.get(sandbox.name)
        if member is None:
            return
        await self.members[member].destroy(sandbox)
        if self._where.pop(sandbox.name, None) is not None:
            self.balance.freed(member, sandbox.spec.image)

    def _owner(self, sandbox: BackendSandbox) -> str:
        if (member := self._where.get(sandbox.name)) is None:
            raise UsageError(f"{sandbox!r} is not of this backend")
        return member


def _tell(sandbox: BackendSandbox, member: str) -> None:
    facts = {**sandbox.capabilities.facts, "member": member}
    sandbox.capabilities = attrs.evolve(sandbox.capabilities, facts=facts)
