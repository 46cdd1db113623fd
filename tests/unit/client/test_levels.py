# SPDX-License-Identifier: Apache-2.0
"""Where there is no runner, what needs one is refused by name; and what happens when a runner cannot do it."""

from __future__ import annotations

from contextlib import asynccontextmanager

import attrs
import pytest

from agentsandbox import SandboxClient
from agentsandbox.errors import CheckpointError, SandboxLost, UsageError
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import ExecLevel

from ..warmpool.fake_backend import FakeBackend  # noqa: TID252

pytestmark = pytest.mark.anyio


class Backend(FakeBackend):
    """Its sandboxes are of one exec level, and its runners answer what a test says."""

    def __init__(self, level=ExecLevel.RUNNER):
        super().__init__()
        self.level = level
        self.answers = {}
        self.asked = []

    async def create(self, spec, name):
        sandbox = await super().create(spec, name)
        sandbox.capabilities = attrs.evolve(sandbox.capabilities, exec_level=self.level)
        if self.level is ExecLevel.RUNNER:
            sandbox.session.builtin = self.builtin
            sandbox.session.facts = {"workdir": "/w", "home": "/h"}
        return sandbox

    async def builtin(self, name, arguments, *, timeout, stdin=None, on_output=None):
        self.asked.append((name, dict(arguments)))
        if name == "baseline":
            return {"verified": False, "reason": "files of others are in the way"}
        return self.answers[name]


@asynccontextmanager
async def leased(backend, **options):
    async with SandboxClient(backend, images={"host": 1}, spares=0, **options) as client:
        async with await client.acquire("host") as lease:
            yield lease


@pytest.mark.parametrize("level", [ExecLevel.SHELL, ExecLevel.DIRECT], ids=str)
async def test_a_lower_level_is_named(tmp_path, level):
    """Nothing is sent, and the lease is good."""
    async with leased(Backend(level), baseline=True) as lease:
        for what, call in (
            ("a diff", lease.diff()),
            ("a checkpoint", lease.checkpoint(tmp_path)),
            ("a secret", lease.exec("true", secrets={"TOKEN": "abcdef"})),
            ("a secret", lease.open_process("true", secrets={"TOKEN": "abcdef"})),
            ("a secret", lease.place_secret("abcdef")),
            ("restoring a checkpoint", lease.restore("0" * 64, tmp_path)),
        ):
            with pytest.raises(UsageError, match=f"^{what} needs a runner .* at level '{level}'$"):
                await call
        with pytest.raises(UsageError, match=f"at level '{level}'$"):
            lease.use_secrets({"TOKEN": "abcdef"})
        assert (await lease.exec("true")).ok


async def test_why_there_is_no_baseline_is_said():
    """In the words of the runner that could not take it."""
    async with leased(Backend(), baseline=True) as lease:
        with pytest.raises(UsageError, match=r"no baseline to compare with \(files of others are in the way\)$"):
            await lease.diff()


async def test_a_baseline_is_taken_when_it_is_asked_for():
    """Where a reset needs none; otherwise nothing is asked of the runner."""
    policy, asked = ResetPolicy(rungs=("replace",)), []
    for wanted in (False, True):
        backend = Backend()
        async with leased(backend, reset=policy, baseline=wanted):
            asked.append([name for name, _ in backend.asked])

    assert [[], ["baseline"]] == asked


async def test_the_scope_of_the_reset_policy_is_kept_too(tmp_path):
    """Beside the working directory, the home and the two places for temporary files."""
    backend = Backend()
    backend.answers["capture"] = {"verified": False, "reason": "no"}
    async with leased(backend, reset=ResetPolicy(scope=("/opt/env", "/h"))) as lease:
        with pytest.raises(CheckpointError, match=r"^what is in the sandbox cannot be told: no$"):
            await lease.checkpoint(tmp_path)

    assert ["/w", "/h", "/tmp", "/var/tmp", "/opt/env"] == backend.asked[-1][1]["scope"]


async def test_the_loss_of_the_sandbox_is_the_end_of_the_lease(tmp_path):
    """As with any other call."""
    backend = Backend()

    async def builtin(name, arguments, **_):
        raise SandboxLost("died")

    async with leased(backend) as lease:
        backend.sandboxes[lease.sandbox].session.builtin = builtin
        with pytest.raises(SandboxLost, match="died"):
            await lease.checkpoint(tmp_path)
        with pytest.raises(SandboxLost, match="died"):
            await lease.exec("true")


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_name_that_is_gone_a_moment_later_is_looked_at_again(tmp_path, times):
    """Three times in all; then it is named, and the lease is good."""
    backend = Backend()
    missing = [FileNotFoundError(2, "No such file or directory", "/w/busy") for _ in range(times)]

    async def builtin(name, arguments, **_):
        backend.asked.append((name, dict(arguments)))
        if missing:
            raise missing.pop()
        return {"verified": False, "reason": "reached"}

    async with leased(backend) as lease:
        backend.sandboxes[lease.sandbox].session.builtin = builtin
        backend.asked.clear()
        expected = "'/w/busy' is written to while it is kept" if times == 3 else "cannot be told: reached"
        with pytest.raises(CheckpointError, match=expected):
            await lease.checkpoint(tmp_path)
        assert min(times + 1, 3) == len(backend.asked)
        assert lease.lost is None


async def test_what_is_not_allowed_is_not_tried_again(tmp_path):
    """Python's own error, with the path."""
    backend = Backend()

    async def builtin(name, arguments, **_):
        backend.asked.append(name)
        raise PermissionError(13, "Permission denied", "/w/closed")

    async with leased(backend) as lease:
        backend.sandboxes[lease.sandbox].session.builtin = builtin
        backend.asked.clear()
        with pytest.raises(PermissionError, match="/w/closed"):
            await lease.checkpoint(tmp_path)
        assert ["capture"] == backend.asked
