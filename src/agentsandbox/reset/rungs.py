# SPDX-License-Identifier: Apache-2.0
"""Apply the rungs of the reset ladder to the sandboxes of a pool, and believe only what was shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import CommandTimeout, ConfigurationError, InfrastructureError, ResetUnverified, StartError
from agentsandbox.models.reset import RUNGS, ResetPolicy, ResetReport
from agentsandbox.reset import baseline
from agentsandbox.reset.ladder import Ladder

if TYPE_CHECKING:
    from agentsandbox.backends.base import Backend, BackendSandbox
    from agentsandbox.models.sandbox import SandboxSpec
    from agentsandbox.reset.baseline import Baseline

__all__ = ["Resets"]

DESTROY_WITHIN = 30.0
"""Seconds for the removal of a sandbox that was lost as soon as it was fresh."""

_NO_CHANGE = "files changed, and the policy is to replace sandboxes then"


@attrs.define(eq=False)
class _Used:
    """What is known of one sandbox."""

    baseline: Baseline | None
    reuses: int = 0
    streams: int = 0
    """How many streams its session had taken when nothing of an episode had run since it was fresh."""
    secrets: set[str] = attrs.field(factory=set)
    """Files with credentials that are to be gone after the next reset."""


class Resets:
    """
    The ladder at work.

    Args:
        backend: Whose sandboxes they are.
        policy: Which rungs may be used.
        compare: Whether every sandbox gets a baseline, also where none is needed for a reset.

    """

    def __init__(self, backend: Backend, policy: ResetPolicy, *, compare: bool = False) -> None:
        self.policy = policy
        self._compare = compare
        self._backend = backend
        self._ladders: dict[str, Ladder] = {}
        self._used: dict[str, _Used] = {}

    async def prepare(self, sandbox: BackendSandbox) -> None:
        """
        Look at a fresh sandbox before anybody uses it, if that is needed for a reset, and add to its capabilities.

        Raises:
            SandboxLost: If it is lost meanwhile.

        """
        used = self._used[sandbox.name] = _Used(None, streams=_streams(sandbox))
        if (self._cheapest_is_fresh(sandbox) and not self._compare) or not hasattr(sandbox.session, "builtin"):
            return
        try:
            used.baseline, why = await baseline.take(sandbox.session, self.policy)
        except (CommandTimeout, ConfigurationError, StartError) as error:
            why = str(error)
        facts = {**sandbox.capabilities.facts, "files": why} if why else sandbox.capabilities.facts
        rungs = sandbox.capabilities.rungs + (("files",) if used.baseline else ())
        sandbox.capabilities = attrs.evolve(
            sandbox.capabilities, facts=facts, rungs=tuple(rung for rung in RUNGS if rung in rungs)
        )

    def _cheapest_is_fresh(self, sandbox: BackendSandbox) -> bool:
        rungs = self.policy.rungs
        return "files" not in rungs or ("jail" in rungs and "jail" in sandbox.capabilities.rungs)

    def next(self, sandbox: BackendSandbox) -> tuple[str | None, str]:
        """Choose a rung for a used sandbox; return it and why it is no cheaper one."""
        return self._next(sandbox, ())

    def keeps(self, sandbox: BackendSandbox) -> bool:
        """Whether a used sandbox can be made like new and stay what it is."""
        return self.next(sandbox)[0] in ("files", "restart")

    def may_restart(self, sandbox: BackendSandbox) -> bool:
        """Whether a used sandbox can become a fresh one of any image in the same place."""
        rung, _ = self._next(sandbox, ("jail", "files"))
        return rung == "restart"

    def baseline(self, sandbox: BackendSandbox) -> Baseline | None:
        """Return what a sandbox was like before its first command, if that is known."""
        used = self._used.get(sandbox.name)
        return None if used is None else used.baseline

    def placed(self, sandbox: BackendSandbox, path: str) -> None:
        """Note that a file with credentials is there, which the next reset has to take away."""
        if (used := self._used.get(sandbox.name)) is not None:  # else it is gone, and the file with it
            used.secrets.add(path)

    def forget(self, name: str) -> None:
        """Drop what is known of a sandbox that is gone."""
        self._used.pop(name, None)

    async def renew(self, sandbox: BackendSandbox, spec: SandboxSpec) -> tuple[BackendSandbox, ResetReport]:
        """
        Make a used sandbox a fresh one, by the cheapest rung that can be verified.

        Args:
            sandbox: What was used.
            spec: What it is to be.

        Returns:
            The fresh sandbox, which may be the same object, and what was done.

        Raises:
            ResetUnverified: If no rung but ``replace`` is left.
            InfrastructureError: If the backend could not do its part.

        """
        began = anyio.current_time()
        failed: dict[str, str] = {} if spec == sandbox.spec else {"files": "it is to be another image"}
        with anyio.move_on_after(self.policy.budget_seconds):
            while True:
                rung, _ = self._next(sandbox, tuple(failed))
                if rung == "files":
                    report = await self.files(sandbox)
                    if report.verified:
                        return sandbox, attrs.evolve(report, seconds=anyio.current_time() - began)
                    failed[rung] = report.reason
                elif rung == "restart":
                    return await self._restart(sandbox, spec, began, failed)
                else:
                    break
        reasons = "; ".join(f"{rung}: {reason}" for rung, reason in failed.items())
        raise ResetUnverified(reasons or "the time for resets is over")

    async def files(self, sandbox: BackendSandbox) -> ResetReport:
        """
        Apply the rung ``files``. When cancelled, or if the result is not verified, the sandbox must be removed.

        Returns:
            What was done; never an error of the sandbox.

        """
        began = anyio.current_time()
        ladder, used = self._ladder(sandbox), self._used[sandbox.name]
        assert used.baseline is not None
        before, used.baseline = used.baseline, None  # what is interrupted is never clean
        try:
            after, report = await baseline.restore(sandbox.session, before, timeout=self.policy.budget_seconds)
            if report.verified:
                await sandbox.check()
        except (InfrastructureError, CommandTimeout, ConfigurationError, StartError) as error:
            report = ResetReport(rung="files", seconds=0.0, verified=False, reason=f"{type(error).__name__}: {error}")
        if report.verified and report.changed and self.policy.on_change == "replace":
            report = attrs.evolve(report, verified=False, reason=_NO_CHANGE)
        if report.verified and _streams(sandbox) != used.streams:
            report = attrs.evolve(report, verified=False, reason="the stream was attached again meanwhile")
        now = anyio.current_time()
        if report.verified and (left := [path for path in sorted(used.secrets) if not _within(path, before.scope)]):
            report = attrs.evolve(report, verified=False, reason=f"a secret is outside of the scope: {', '.join(left)}")
        if report.verified:
            report = attrs.evolve(report, secrets=tuple(sorted(used.secrets)))
            used.secrets.clear()
            used.baseline = after
            used.reuses += 1
            used.streams = _streams(sandbox)
            ladder.succeeded("files", now - began)
        else:
            ladder.failed("files", now)
        return attrs.evolve(report, seconds=now - began)

    async def _restart(
        self, sandbox: BackendSandbox, spec: SandboxSpec, began: float, failed: dict[str, str]
    ) -> tuple[BackendSandbox, ResetReport]:
        ladder, reuses = self._ladder(sandbox), self._used[sandbox.name].reuses
        secrets = tuple(sorted(self._used[sandbox.name].secrets))
        try:
            fresh = await self._backend.recycle(sandbox, spec, sandbox.name)
        except InfrastructureError:
            ladder.failed("restart", anyio.current_time())
            raise
        seconds = anyio.current_time() - began
        ladder.succeeded("restart", seconds)
        try:
            await self.prepare(fresh)
        except BaseException:
            # Whoever asked knows the old one only, which is nothing any more.
            with anyio.move_on_after(DESTROY_WITHIN, shield=True):
                await self._backend.destroy(fresh)
            raise
        self._used[fresh.name].reuses = reuses + 1
        reason = "; ".join(f"{rung}: {why}" for rung, why in failed.items())
        return fresh, ResetReport(rung="restart", seconds=seconds, verified=True, reason=reason, secrets=secrets)

    def _next(self, sandbox: BackendSandbox, failed: tuple[str, ...]) -> tuple[str | None, str]:
        used = self._used.get(sandbox.name)
        offered = set(sandbox.capabilities.rungs) - {"files", "restart"}
        # A stream that was attached beside an episode of the same user may be in its hands: what comes over it can be
        # used, since the episode could as well change what it does, but it proves nothing.
        alone = used is not None and used.streams == _streams(sandbox)
        if used is not None and used.baseline is not None and sandbox.session.alive and alone:
            offered.add("files")
        if self._backend.can_recycle(sandbox):
            offered.add("restart")
        reuses = 0 if used is None else used.reuses
        return self._ladder(sandbox).next(anyio.current_time(), offered, failed, reuses=reuses)

    def _ladder(self, sandbox: BackendSandbox) -> Ladder:
        return self._ladders.setdefault(sandbox.spec.image, Ladder(self.policy))

    def __repr__(self) -> str:
        ready = sum(used.baseline is not None for used in self._used.values())
        return f"<Resets [{len(self._used)} sandboxes, {ready} with a baseline]>"


def _streams(sandbox: BackendSandbox) -> int:
    return getattr(sandbox.session, "streams", 0)


def _within(path: str, scope: tuple[str, ...]) -> bool:
    return any(path.startswith(place.rstrip("/") + "/") for place in scope)
