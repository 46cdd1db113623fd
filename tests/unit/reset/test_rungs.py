# SPDX-License-Identifier: Apache-2.0
"""The ladder at work: what a pool does with a used sandbox whose runner says what it could show."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import pytest

from agentsandbox import SandboxClient
from agentsandbox.errors import CommandTimeout, SandboxLost, StreamBroken, UsageError
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.testing.determinism import check_reuse, fingerprint
from agentsandbox.testing.virtualtime import virtual_time

from ..warmpool.fake_backend import FakeBackend  # noqa: TID252

pytestmark = pytest.mark.anyio

FILES = ResetPolicy(rungs=("files", "restart", "replace"))

TAKEN = {
    "verified": True,
    "reason": "",
    "manifest": "m",
    "stamps": "s0",
    "scope": ["/tmp"],
    "files": 3,
    "outside": 9,
    "copied": 12,
    "seconds": 0.1,
}


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time."""
    return virtual_time(request.param)


class Backend(FakeBackend):
    """Its runners take baselines and reset as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.baseline = TAKEN
        self.answers = []
        """One a reset: a report, or what it raises; a clean reset when there is none."""
        self.asked = []
        self.taking = 0.0
        self.lost_at = 0
        """The number of the request, counted from 1, of which the sandbox is lost."""
        self.block = None

    async def create(self, spec, name):
        return self.equip(await super().create(spec, name))

    async def recycle(self, sandbox, spec, name):
        return self.equip(await super().recycle(sandbox, spec, name))

    def equip(self, sandbox):
        async def builtin(name, arguments, *, timeout):
            self.asked.append((sandbox.name, name, arguments.get("stamps")))
            await anyio.sleep(self.taking)
            if name == "baseline":
                if self.lost_at == len(self.asked):
                    raise StreamBroken("silent", "no answer")
                return self.baseline
            if self.block is not None:
                await self.block.wait()
            answer = self.answers.pop(0) if self.answers else {}
            if isinstance(answer, Exception):
                raise answer
            return {"verified": True, "reason": "", "stamps": f"s{len(self.asked)}", "seconds": 0.02, **answer}

        sandbox.session.builtin = builtin
        sandbox.session.alive = True
        return sandbox


@asynccontextmanager
async def opened(backend, policy=FILES, **options):
    events = []
    async with SandboxClient(backend, images={"host": 1}, reset=policy, sink=events.append, **options) as client:
        client.events = events
        yield client
    assert set() == backend.alive


async def used(client, times=1):
    """Names of the sandboxes of consecutive episodes."""
    names = []
    for _ in range(times):
        async with await client.acquire("host") as lease:
            names.append(lease.sandbox)
        await anyio.sleep(0.5)
    return names


def told(client, name):
    return [event.data for event in client.events if event.name == name]


async def test_a_sandbox_that_is_shown_to_be_clean_is_used_again():
    """Its baseline is taken before the first lease, and each reset is asked for with the stamps of the last."""
    backend = Backend()
    async with opened(backend) as client:
        first, second, third = await used(client, 3)

        assert first == second == third
        assert [("baseline", None), ("reset", "s0"), ("reset", "s2"), ("reset", "s3")] == [
            (name, stamps) for _, name, stamps in backend.asked
        ]
        assert {"rung": "files", "verified": True, "changed": 0} == {
            key: told(client, "sandbox.reset")[0][key] for key in ("rung", "verified", "changed")
        }
        assert (1, 3) == (client.statistics().created_total, client.statistics().recycled_total)


async def test_nobody_gets_a_sandbox_before_its_baseline():
    """The first lease waits for it."""
    backend = Backend()
    backend.taking = 2.0
    async with opened(backend) as client:
        began = anyio.current_time()
        async with await client.acquire("host"):
            assert anyio.current_time() - began >= 2.0


@pytest.mark.parametrize(
    "answer",
    [
        {"verified": False, "reason": "changed outside of the scope: /etc"},
        {"verified": "yes"},
        {"stamps": None},
        StreamBroken("silent", "no answer"),
        CommandTimeout("total", 30.0, 31.0),
    ],
    ids=["changed", "not-true", "no-stamps", "stream", "timeout"],
)
async def test_what_was_not_shown_is_never_used_again(answer):
    """It is quarantined and removed, and another one made."""
    backend = Backend()
    backend.answers = [answer]
    async with opened(backend) as client:
        first, second = await used(client, 2)

        assert first != second
        assert [first] == backend.destroy_calls
        assert 1 == len(told(client, "sandbox.not_recycled"))


async def test_a_stream_that_was_attached_beside_an_episode_proves_nothing():
    """Whoever has the same user may have come between: another rung makes the sandbox like new, and then it counts."""
    backend = Backend()
    backend.recycling = True
    async with opened(backend) as client:
        async with await client.acquire("host") as lease:
            again = client._engine._sandboxes[lease.sandbox].session
            again.streams = 1 + getattr(again, "streams", 0)
        await anyio.sleep(0.5)
        await used(client, 2)

        assert ["restart", "files", "files"] == [data["rung"] for data in told(client, "sandbox.reset")]
        assert ["baseline", "baseline", "reset", "reset"] == [name for _, name, _ in backend.asked]


async def test_a_stream_that_was_attached_again_during_a_reset_proves_nothing():
    """What it says is not believed, whatever it says."""
    backend = Backend()
    async with opened(backend) as client:
        first = await client.acquire("host")
        session = client._engine._sandboxes[first.sandbox].session
        real = session.builtin

        async def builtin(*args, **options):
            session.streams = 1 + getattr(session, "streams", 0)
            return await real(*args, **options)

        session.builtin = builtin
        await first.release()
        async with await client.acquire("host") as second:
            assert first.sandbox != second.sandbox
        assert "attached again" in told(client, "sandbox.not_recycled")[0]["error"]


async def test_a_failed_rung_is_followed_by_the_next():
    """A restart in place makes what could not be shown clean a fresh one, which gets a baseline of its own."""
    backend = Backend()
    backend.recycling = True
    backend.answers = [{"verified": False, "reason": "x"}]
    async with opened(backend) as client:
        first, second = await used(client, 2)

        assert first == second
        assert [(first, "host")] == backend.recycled
        assert ["baseline", "reset", "baseline", "reset"] == [name for _, name, _ in backend.asked]
        assert ("restart", "files: x") == tuple(told(client, "sandbox.reset")[0][key] for key in ("rung", "reason"))


async def test_what_is_lost_right_after_its_restart_is_removed():
    """Neither the old sandbox nor the fresh one stays behind."""
    backend = Backend()
    backend.recycling = True
    backend.answers = [{"verified": False, "reason": "x"}]
    async with opened(backend) as client:
        backend.lost_at = 3
        first, second = await used(client, 2)

        assert first != second
        assert first in backend.destroy_calls


async def test_without_a_baseline_nothing_is_clean():
    """The runner says why there is none, the sandbox tells, and it is replaced."""
    backend = Backend()
    backend.baseline = {"verified": False, "reason": "processes run already"}
    async with opened(backend) as client:
        async with await client.acquire("host") as lease:
            assert ("replace",) == lease.capabilities.rungs
            assert "processes run already" == lease.capabilities.facts["files"]
            first = lease.sandbox
        await anyio.sleep(0.5)
        assert [first] != await used(client)


async def test_reuse_ends_after_the_agreed_number():
    """The third episode gets another sandbox."""
    backend = Backend()
    async with opened(backend, ResetPolicy(rungs=("files", "replace"), max_reuses=1)) as client:
        first, second, third = await used(client, 3)

        assert first == second != third


async def test_changes_may_be_a_reason_to_replace():
    """With ``on_change="replace"`` only a sandbox whose files nobody touched is used again."""
    backend = Backend()
    backend.answers = [{}, {"changed": ["/tmp/x"]}]
    async with opened(backend, ResetPolicy(rungs=("files", "replace"), on_change="replace")) as client:
        first, second, third = await used(client, 3)

        assert first == second != third


async def test_a_reset_that_takes_too_long_is_not_waited_for():
    """When the budget is spent the sandbox is removed."""
    backend = Backend()
    backend.block = anyio.Event()
    async with opened(backend, ResetPolicy(rungs=("files", "replace"), budget_seconds=3.0)) as client:
        async with await client.acquire("host") as lease:
            first = lease.sandbox
        began = anyio.current_time()
        async with await client.acquire("host") as lease:
            assert first != lease.sandbox
            assert 3.0 <= anyio.current_time() - began < 4.0


async def test_a_reset_by_its_holder_keeps_the_sandbox():
    """The lease goes on with the same one, and the report says what was found."""
    backend = Backend()
    backend.answers = [{"changed": ["/tmp/x"], "killed": [[7, "sleep"]]}]
    async with opened(backend) as client, await client.acquire("host") as lease:
        before = lease.sandbox
        report = await lease.reset()

        assert ("files", True, ("/tmp/x",), 7) == (
            report.rung,
            report.verified,
            report.changed,
            report.killed[0].pid,
        )
        assert (before, 2) == (lease.sandbox, lease.generation)
        assert (await lease.exec("true")).ok


async def test_a_reset_by_its_holder_that_shows_nothing_gets_another_sandbox():
    """The report names the rung that worked, and why the cheaper one did not."""
    backend = Backend()
    backend.answers = [{"verified": False, "reason": "a socket is left"}]
    async with opened(backend) as client, await client.acquire("host") as lease:
        before = lease.sandbox
        report = await lease.reset()

        assert ("replace", True, "a socket is left") == (report.rung, report.verified, report.reason)
        assert before != lease.sandbox


async def test_a_reset_that_is_cancelled_loses_the_sandbox():
    """Half a reset is none: the lease is dead and the sandbox is removed."""
    backend = Backend()
    backend.block = anyio.Event()
    async with opened(backend) as client:
        lease = await client.acquire("host")
        before = lease.sandbox
        with anyio.move_on_after(1):
            await lease.reset()
        with pytest.raises(SandboxLost):
            await lease.exec("true")
        await lease.release()
        backend.block = None
        async with await client.acquire("host") as other:
            assert before != other.sandbox


async def test_a_sandbox_that_is_lost_during_its_reset_is_removed():
    """Its identity is compared before it is ready again."""
    backend = Backend()
    async with opened(backend) as client:
        async with await client.acquire("host") as lease:
            first = lease.sandbox
            backend.sandboxes[first].dead = SandboxLost("replaced", "another container")
            await lease.release()
        assert [first] != await used(client)


async def test_the_same_episode_has_the_same_fingerprint_in_a_used_sandbox():
    """A result that depends on what ran before is a difference, with the sandbox it came from."""
    results = iter([1.0, 1.0, 0.0])

    async def same(lease):
        return {"output": (await lease.exec("true")).stdout, "reward": 1.0}

    async def drifting(lease):
        return next(results)

    async with opened(Backend()) as client:
        good = await check_reuse(client, "host", same)
    async with opened(Backend()) as client:
        bad = await check_reuse(client, "host", drifting, between=same)

    assert (True, 3, 2, ()) == (good.ok, good.runs, good.reused, good.differences)
    assert (False, 2, fingerprint(0.0)) == (bad.ok, bad.differences[0].run, bad.differences[0].fingerprint)


async def test_a_pool_that_never_uses_a_sandbox_again_proves_nothing():
    """The check is not passed by replacing every sandbox."""

    async def constant(lease):
        return 1

    async with opened(FakeBackend(), ResetPolicy(rungs=("replace",))) as client:
        result = await check_reuse(client, "host", constant)

    assert (False, 0, ()) == (result.ok, result.reused, result.differences)


def test_fingerprints_are_of_values():
    """Equal values have equal ones, whatever the order of a mapping; different types differ; objects are refused."""
    assert fingerprint({"a": [1, b"x"], "b": None}) == fingerprint({"b": None, "a": (1, b"x")})
    assert 6 == len({fingerprint(value) for value in (1, 1.0, "1", b"1", True, [1])})
    assert fingerprint([["a"], ["b"]]) != fingerprint([["a", "b"], []])
    with pytest.raises(UsageError, match="not of object"):
        fingerprint([object()])
