# SPDX-License-Identifier: Apache-2.0
"""Sandboxes whose session is opened when somebody takes them."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.errors import AcquireTimeout, ApiUnavailable, SandboxLost

from .fake_backend import FakeBackend, FakeSandbox
from .test_engine import running

pytestmark = pytest.mark.anyio


class Dormant(FakeSandbox):
    """Asleep until it is opened, which may fail or take long."""

    def __init__(self, name, spec, trouble):
        super().__init__(name, spec)
        self.trouble = trouble
        self.asleep = True

    @property
    def dormant(self):
        return self.asleep

    async def open(self):
        trouble = self.trouble.pop(0) if self.trouble else None
        if isinstance(trouble, BaseException):
            raise trouble
        await anyio.sleep(trouble or 0)
        self.asleep = False


@pytest.fixture
def backend(monkeypatch):
    """Make a backend of such sandboxes; ``trouble`` has one entry an attempt to open one."""
    backend = FakeBackend()
    backend.trouble = []
    monkeypatch.setattr(
        f"{FakeBackend.__module__}.FakeSandbox", lambda name, spec: Dormant(name, spec, backend.trouble)
    )
    return backend


def watch_preparing(engine):
    """Note for which sandboxes a baseline is taken."""
    prepared, prepare = [], engine.resets.prepare

    async def noted(sandbox):
        prepared.append((sandbox.name, sandbox.dormant))
        await prepare(sandbox)

    engine.resets.prepare = noted
    return prepared


async def test_it_is_opened_and_prepared_when_it_is_granted(backend):
    """Not before, and not again for the next holder of the same sandbox."""
    async with running(backend, images={"host": 1}, settle=False) as engine:
        prepared = watch_preparing(engine)
        await anyio.wait_all_tasks_blocked()
        assert [] == prepared
        assert 1 == engine.statistics().ready

        tenure = await engine.acquire("host", timeout=1.0)
        assert [("sb-000001", False)] == prepared
        engine.release(tenure)


@pytest.mark.parametrize("error", [ApiUnavailable("503"), SandboxLost("evicted")], ids=["no way there", "lost"])
async def test_one_that_cannot_be_opened_is_replaced(backend, error):
    """Whoever asked gets the next one, and never hears of it."""
    backend.trouble.append(error)
    events = []
    async with running(backend, images={"host": 1}, sinks=[events.append]) as engine:
        tenure = await engine.acquire("host", timeout=1.0)
        assert "sb-000002" == tenure.sandbox.name
        assert ["sb-000001"] == backend.destroy_calls
        reason = "evicted" if isinstance(error, SandboxLost) else "unreachable"
        assert [reason] == [event.data["reason"] for event in events if event.name == "sandbox.lost"]
        engine.release(tenure)


async def test_whoever_gives_up_meanwhile_leaves_it_asleep_for_the_next(backend):
    """It is handed back untouched."""
    backend.trouble.append(10.0)
    async with running(backend, images={"host": 1}) as engine:
        with pytest.raises(AcquireTimeout):
            await engine.acquire("host", timeout=5.0)
        assert 1 == engine.statistics().ready
        tenure = await engine.acquire("host", timeout=5.0)
        assert "sb-000001" == tenure.sandbox.name
        engine.release(tenure)
