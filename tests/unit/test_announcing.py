# SPDX-License-Identifier: Apache-2.0
"""What a trainer tells ahead, and what is ready when it begins."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from agentsandbox.blocking import BlockingPool
from agentsandbox.client import SandboxClient
from agentsandbox.errors import AcquireTimeout, ConfigurationError, UsageError
from agentsandbox.models.episode import Episode
from agentsandbox.models.timing import StartKind
from agentsandbox.pool import SandboxPool
from agentsandbox.rollouts.hedging import HedgePolicy
from agentsandbox.testing.virtualtime import virtual_time

from .warmpool.fake_backend import FakeBackend

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Virtual time: nothing here uses sockets, threads or processes."""
    return virtual_time(request.param)


def batch(*images, group=4):
    """A group of episodes of each image."""
    return [Episode(id=f"{image}-{number}", image=image) for image in images for number in range(group)]


async def one(sandbox, episode):
    """Run one command and give 1."""
    assert episode.image == sandbox.image
    return float((await sandbox.exec("true")).ok)


async def idle():
    """Let everybody act who can."""
    await anyio.wait_all_tasks_blocked()


async def test_a_batch_that_was_announced_finds_its_sandboxes_ready():
    """Images of which nobody had heard: eight sandboxes in the order of the batch, and each first command is warm."""
    backend = FakeBackend()
    async with SandboxClient(backend, max_sandboxes=8) as client:
        announced = client.announce(batch("a", "b"))
        await idle()
        assert "<SandboxClient [fake | 0 leased, 8 ready, 0 creating | 0 waiting, 8 announced]>" == repr(client)
        assert {"a": 4, "b": 4} == client.images
        made = [sandbox.spec.image for sandbox in backend.sandboxes.values()]
        assert ["a"] * 4 + ["b"] * 4 == made

        lease = await client.acquire("b")
        assert StartKind.WARM is lease.start
        assert {"a": 4, "b": 3} == dict(announced.left)
        assert "<Announced [7 of 8 rollouts to come]>" == repr(announced)
        await lease.release()
    assert set() == backend.alive


async def test_what_is_withdrawn_is_prepared_no_more():
    """What was not made yet is not made; the image stays known."""
    backend = FakeBackend()
    async with SandboxClient(backend, max_sandboxes=2) as client:
        announced = client.announce({"a": 4})
        await idle()
        announced.withdraw()
        announced.withdraw()
        assert {} == dict(announced.left)
        for _ in range(4):
            async with await client.acquire("a"):
                pass
        await idle()
        assert 0 == client.statistics().announced
        assert 0 == client.statistics().creating


async def test_an_announcement_ends_with_the_client():
    """Withdrawing it later does nothing; announcing to a client that is not open is refused."""
    backend = FakeBackend()
    client = SandboxClient(backend, max_sandboxes=2)
    with pytest.raises(UsageError, match="not open"):
        client.announce({"a": 1})
    async with client:
        announced = client.announce({"a": 1, "b": 0})
        assert {"a": 1} == client.images
    announced.withdraw()
    assert {} == dict(client.announce({"c": 1}).left)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"": 1}, "an image is a name such as 'host', not ''"),
        ({"a": -1}, "the number of rollouts of image 'a' must be a whole number of at least 0, not -1"),
        ({"a": True}, "not True"),
        ({"a": 1.0}, "not 1.0"),
        (["a", "b"], "a batch to announce has episodes, or maps images to numbers; not 'a'"),
        ("ab", "not 'a'"),
    ],
    ids=str,
)
async def test_what_cannot_be_a_batch_is_refused(batch, message):
    """Nothing is made then."""
    async with SandboxClient(FakeBackend(), images={"host": 1}, max_sandboxes=2) as client:
        with pytest.raises(ConfigurationError, match=message):
            client.announce(batch)
        assert 0 == client.statistics().announced


async def test_an_announced_image_that_does_not_exist_is_refused_to_who_asks():
    """Its failure is the image's own; other images are not held up."""
    backend = FakeBackend()
    async with SandboxClient(backend, max_sandboxes=4) as client:
        backend.create_errors.append(ConfigurationError("no image 'nope'"))
        client.announce({"nope": 1})
        await idle()
        client.announce({"a": 1})
        await idle()
        with pytest.raises(ConfigurationError, match="no image 'nope'"):
            await client.acquire("nope")
        async with await client.acquire("a") as lease:
            assert StartKind.WARM is lease.start


async def test_create_timeout_is_the_clients_or_the_backends():
    """A sandbox that takes too long is given up in time."""
    backend = FakeBackend()
    backend.create_block = anyio.Event()
    async with SandboxClient(backend, images=["host"], create_timeout=10.0) as client:
        with pytest.raises(AcquireTimeout, match="within 10 s: the backend had not made it"):
            await client.acquire("host", timeout=15.0)
    backend.default_create_timeout = 20.0
    async with SandboxClient(backend, images=["host"]) as client:
        with pytest.raises(AcquireTimeout, match="within 20 s: the backend had not made it"):
            await client.acquire("host", timeout=25.0)


async def test_the_next_batch_is_prepared_while_one_runs():
    """As sandboxes come back they become what comes next: the second batch starts warm, and six Pods serve both."""
    backend = FakeBackend()
    backend.recycling = True
    go = anyio.Event()
    starts = []

    async def solve(sandbox, episode):
        starts.append((episode.image, sandbox.start))
        await go.wait()
        return 1.0

    async with SandboxPool(backend, max_sandboxes=6, rollout=solve) as pool:
        pool.announce(batch("a"))
        await idle()
        async with anyio.create_task_group() as group:
            group.start_soon(pool.rollout, batch("a"))
            await idle()
            assert [("a", StartKind.WARM)] * 4 == starts
            pool.announce(batch("b"))
            await idle()
            assert (4, 2) == (pool.statistics().leased, pool.statistics().ready)
            go.set()
        await anyio.sleep(1)
        assert (0, 4) == (pool.statistics().leased, sum(s.spec.image == "b" for s in backend.sandboxes.values()))
        result = await pool.rollout(batch("b"))

        assert (1.0,) * 4 == result.rewards
        assert {StartKind.WARM, StartKind.REUSED} == {start for _, start in starts[4:]}
        assert 6 == pool.statistics().created_total
        assert 0 == pool.statistics().announced


async def test_a_batch_that_ends_early_leaves_no_announcement():
    """Some of its rollouts never asked for a sandbox: they are not expected any more, and the next batch still is."""
    backend = FakeBackend()
    async with SandboxPool(backend, max_sandboxes=2, rollout=one) as pool:
        pool.announce(batch("a"))
        pool.announce(batch("b"))

        async def hang(sandbox, episode):
            await anyio.sleep_forever()

        result = await pool.rollout(batch("a"), rollout=hang, deadline=5.0)
        assert (None,) * 4 == result.rewards
        assert 4 == pool.statistics().announced
        result = await pool.rollout(batch("b"))
        assert (1.0,) * 4 == result.rewards
        assert 0 == pool.statistics().announced


async def test_an_image_that_was_never_announced_is_refused():
    """Before anything is granted; the error says what would help."""
    async with SandboxPool(FakeBackend(), max_sandboxes=4, rollout=one) as pool:
        message = r"episode 'a-0' needs image 'a', and the pool has none; add it to images=, or announce\(\) the batch"
        with pytest.raises(ConfigurationError, match=message):
            await pool.rollout(batch("a"))


async def test_parallelism_follows_what_is_announced():
    """As many at once as may be leased, and never more than there may be sandboxes."""
    async with SandboxPool(FakeBackend(), max_sandboxes=6, rollout=one) as pool:
        assert 6 == pool.parallelism
        pool.announce({"a": 4})
        assert 4 == pool.parallelism
        pool.announce({"b": 4})
        assert 6 == pool.parallelism
    async with SandboxPool(FakeBackend(), images={"a": 1}, rollout=one) as pool:
        pool.announce({"b": 4})
        assert 5 == pool.parallelism


async def test_a_hedge_may_have_a_sandbox_beyond_what_is_announced():
    """The budget for second sandboxes holds for images that are only announced, too."""
    hedge = HedgePolicy(budget=0.5)
    async with SandboxPool(FakeBackend(), max_sandboxes=4, rollout=one, hedge=hedge) as pool:
        pool.announce({"a": 2})
        leases = [await pool.acquire("a", timeout=5) for _ in range(4)]
        assert 4 == pool.statistics().leased
        for lease in leases:
            await lease.release()


@pytest.fixture
def blocking():
    """A pool for code that is not async, of a backend that counts."""
    with BlockingPool(FakeBackend(), max_sandboxes=4, rollout=one) as pool:
        yield pool


def test_a_blocking_pool_is_told_ahead_too(blocking):
    """The same from another thread: announced, looked at, run, withdrawn."""
    announced = blocking.announce(iter(batch("a")))
    assert {"a": 4} == announced.left
    assert "<BlockingAnnounced [4 of 4 rollouts to come]>" == repr(announced)
    result = blocking.rollout(batch("a"))
    assert (1.0,) * 4 == result.rewards
    assert {} == announced.left

    announced = blocking.announce({"b": 2})
    announced.withdraw()
    assert {} == announced.left
    assert 0 == blocking.statistics().announced
