# SPDX-License-Identifier: Apache-2.0
"""What a reset costs, beside ``git reset --hard && git clean -xdff`` on the same tree in the same sandbox."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.opening import open_backend
from agentsandbox.cli.bench import environment, spread, timed
from agentsandbox.client import SandboxClient
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.command import Command
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.reset import baseline

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agentsandbox.backends.base import BackendSandbox
    from agentsandbox.session import Session

__all__ = ["bench_reset"]

FILES = 10_000
CHANGED = 20

_TREE = f"""
set -e
export HOME=$PWD GIT_AUTHOR_DATE=2024-01-01T00:00:00Z GIT_COMMITTER_DATE=2024-01-01T00:00:00Z
mkdir tree; cd tree
python3 - <<'P'
import os
for directory in range(100):
    os.mkdir("d%d" % directory)
    for number in range({FILES // 100}):
        with open("d%d/f%d.py" % (directory, number), "w") as file:
            file.write("# %d.%d\\n" % (directory, number) + "value = 'x'\\n" * 80)
P
git init -q .
git config gc.auto 0
git config maintenance.auto false
git add .
git -c user.name=b -c user.email=b@example.org commit -qm base
git repack -adq
"""
_CHANGE = f"cd tree; for i in $(seq 0 {CHANGED - 1}); do echo changed >> d$i/f$i.py; done"
_GIT = "cd tree; git reset -q --hard && git clean -q -xdff"


async def bench_reset(backend: str, image: str, *, repeats: int = 15) -> dict[str, Any]:
    """
    Measure the rungs that a backend offers.

    Args:
        backend: Where sandboxes come from.
        image: What they are made from.
        repeats: How many resets of each kind.

    Returns:
        ``files``: the whole reset, its part for the scope, and git on the same changes; ``sweep``: looking at every
        file outside of the scope, and that for 50,000 of them; ``jail``: from the end of an episode to a fresh sandbox
        without a spare, and how long the next acquire waits with one.

    """
    return {
        "bench": "reset",
        "backend": backend,
        "image": image,
        "environment": environment(),
        "files": await _files(backend, image, repeats),
        "sweep": await _sweep(backend, image, repeats),
        "fresh": await _fresh(backend, image, repeats),
    }


@asynccontextmanager
async def _sandbox(backend: str, image: str) -> AsyncIterator[BackendSandbox]:
    source, spec = open_backend(backend), SandboxSpec(image=image)
    await source.validate([spec])
    async with source.running():
        sandbox = await source.create(spec, "bench")
        try:
            yield sandbox
        finally:
            with anyio.CancelScope(shield=True):
                await source.destroy(sandbox)


async def _run(session: Session, script: str, *, user: str | None = None) -> None:
    (await session.exec(Command(command=script, user=user))).check()


async def _files(backend: str, image: str, repeats: int) -> dict[str, Any]:
    async with _sandbox(backend, image) as sandbox:
        session = sandbox.session
        await _run(session, _TREE)
        known, why = await baseline.take(session, ResetPolicy())
        if known is None:
            raise ConfigurationError(f"the rung 'files' is not offered here: {why}")
        taken = known.seconds
        whole, scope, outside, git, hashed = [], [], [], [], 0.0
        for number in range(repeats + 1):
            await _run(session, _CHANGE)
            start = anyio.current_time()
            known, report = await baseline.restore(session, known, timeout=60.0)
            seconds = anyio.current_time() - start
            if not report.verified or report.figures["count"] != CHANGED:
                raise ConfigurationError(f"a reset was not verified: {report}")
            await _run(session, _CHANGE)
            beside = await timed(lambda: _run(session, _GIT))
            known, _ = await baseline.restore(session, known, timeout=60.0)
            if number:
                whole.append(seconds)
                scope.append(report.figures["scope_seconds"])
                outside.append(report.figures["outside_seconds"])
                git.append(beside)
                hashed = report.figures["hashed"]
        return {
            "files": known.files,
            "changed": CHANGED,
            "hashed": int(hashed),
            "baseline_ms": taken * 1e3,
            "whole": spread(whole),
            "scope": spread(scope),
            "outside": spread(outside),
            "git": spread(git),
        }


async def _sweep(backend: str, image: str, repeats: int) -> dict[str, Any]:
    async with _sandbox(backend, image) as sandbox:
        session = sandbox.session
        if sandbox.capabilities.users:
            await _run(session, "true", user="root")  # then nothing may be left out
        known, why = await baseline.take(session, ResetPolicy(), whole=True)
        if known is None:
            raise ConfigurationError(f"the rung 'files' is not offered here: {why}")
        seconds, files = [], 0.0
        for number in range(repeats + 1):
            if sandbox.capabilities.users:
                await _run(session, "true", user="root")
            known, report = await baseline.restore(session, known, timeout=60.0)
            files = report.figures["outside"]
            if number:
                seconds.append(report.figures["outside_seconds"])
        return {
            "files": int(files),
            "whole": spread(seconds),
            "per_50000": spread([value * 50_000 / files for value in seconds]),
        }


async def _fresh(backend: str, image: str, repeats: int) -> dict[str, Any]:
    source, spec = open_backend(backend), SandboxSpec(image=image)
    made: list[float] = []
    async with source.running():
        sandbox = await source.create(spec, "bench-0")
        for number in range(1, repeats + 2):
            await _run(sandbox.session, "true")
            start = anyio.current_time()
            await source.destroy(sandbox)
            sandbox = await source.create(spec, f"bench-{number}")
            if number > 1:
                made.append(anyio.current_time() - start)
        rungs = sandbox.capabilities.rungs
        await source.destroy(sandbox)
    waits: list[float] = []
    async with SandboxClient(backend, images={image: 1}, spares=1) as client:
        lease = await client.acquire(image)
        for number in range(repeats + 1):
            await lease.exec(["true"])
            while client.statistics().ready < 1:  # noqa: ASYNC110 - as long as an episode takes
                await anyio.sleep(0.002)
            start = anyio.current_time()
            await lease.release()
            lease = await client.acquire(image)
            if number:
                waits.append(anyio.current_time() - start)
        await lease.release()
    return {"rung": rungs[0], "replaced": spread(made), "acquire_after_release": spread(waits)}
