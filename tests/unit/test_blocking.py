# SPDX-License-Identifier: Apache-2.0
"""The pool for code that is not async."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from agentsandbox import blocking
from agentsandbox.blocking import BlockingPool
from agentsandbox.errors import AcquireTimeout, CommandFailed, ConfigurationError, UsageError
from agentsandbox.models.episode import Episode

from .warmpool.fake_backend import FakeBackend

if TYPE_CHECKING:
    from pathlib import Path

    from agentsandbox.client import Lease


async def one(sandbox: Lease, episode: Episode) -> float:
    """Run one command and give 1."""
    return float((await sandbox.exec("true")).ok)


def host_threads() -> int:
    """Count the threads that run a host loop."""
    return sum("portal" in thread.name for thread in threading.enumerate())


def driver(script: str) -> subprocess.CompletedProcess[str]:
    """Run a program that has pools, to its end."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    env = {**os.environ, "PYTHONPATH": "."}
    return subprocess.run(command, capture_output=True, text=True, timeout=50, env=env, check=False)


def test_a_batch_runs_without_async() -> None:
    """A blocking rollout returns the same result as an async one, and closing removes every sandbox."""
    backend = FakeBackend()
    with BlockingPool(backend, images={"host": 2}, rollout=one) as pool:
        result = pool.rollout([Episode(id=f"ep-{index}", image="host") for index in range(5)], max_attempts=1)

    assert result.rewards == (1.0,) * 5
    assert backend.alive == set()


def test_a_lease_works_step_by_step(tmp_path: Path) -> None:
    """Everything a lease can do, as calls that wait."""
    backend = FakeBackend()
    with BlockingPool(backend, images=["host"]) as pool, pool.acquire("host", episode="ep-0") as lease:
        assert lease.exec(["true"], timeout=5).exit_code == 0
        lease.write_file("a.txt", "hello")
        assert lease.read_file("a.txt") == b"hello"
        lease.upload_dir(tmp_path, "/data")
        lease.download_dir("/data", tmp_path / "back")
        assert lease.alive()
        before = lease.sandbox
        lease.reset()
        assert lease.sandbox != before
        assert lease.image == "host"
        assert lease.id == lease.lease.id
        assert pool.statistics().leased == 1
        assert repr(lease) == f"<BlockingLease of {lease.lease!r}>"
        lease.release()
        assert pool.statistics().leased == 0

    assert lease.lease.released


def test_errors_come_through_unchanged() -> None:
    """The exception of the async side is raised in the calling thread, with its type and data."""
    backend = FakeBackend()
    with BlockingPool(backend, images=["host"], spares=0) as pool, pool.acquire("host") as lease:
        backend.sandboxes[lease.sandbox].exit_code = 3
        with pytest.raises(CommandFailed) as caught:
            lease.exec("false", check=True)
        assert caught.value.result.exit_code == 3
        with pytest.raises(FileNotFoundError):
            lease.read_file("missing")
        with pytest.raises(AcquireTimeout):
            pool.acquire("host", timeout=0.05)
        with pytest.raises(ConfigurationError, match="other"):
            pool.acquire("other")


def test_one_loop_serves_every_pool_and_thread() -> None:
    """Pools share one loop thread; calls from many threads at once all come back."""
    before = host_threads()
    with (
        BlockingPool(FakeBackend(), images={"host": 8}) as first,
        BlockingPool(FakeBackend(), images={"host": 8}) as second,
    ):

        def work(number: int) -> int:
            with (first if number % 2 else second).acquire("host") as lease:
                return lease.exec("true").exit_code

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(40))) == [0] * 40
        assert host_threads() == before + 1

    assert host_threads() == before


def test_training_steps_are_marked_without_async() -> None:
    """What is done within is busy, and everything adds up."""
    with BlockingPool(FakeBackend(), images=["host"], devices=2) as pool:
        with pool.training_step():
            assert pool.idle().steps == 1
        report = pool.idle()
    assert report.devices == 2
    assert report.wall == pytest.approx(report.busy + sum(report.idle.values()))


def test_it_opens_with_its_first_call_and_closes_once() -> None:
    """A pool need not be a context manager; closing twice is fine, and a closed pool stays closed."""
    backend = FakeBackend()
    pool = BlockingPool(backend, images=["host"])
    assert repr(pool).startswith("<BlockingPool [not open] of <SandboxPool [closed")
    assert not backend.running_now
    lease = pool.acquire("host")
    assert repr(pool).startswith("<BlockingPool [open] of <SandboxPool [open")
    lease.release()
    pool.close()
    pool.close()
    assert repr(pool).startswith("<BlockingPool [closed] of <SandboxPool [closed")
    assert backend.alive == set()
    with pytest.raises(UsageError, match="closed"):
        pool.acquire("host")
    with pytest.raises(UsageError, match="closed"):
        lease.exec("true")


def test_bad_settings_are_refused_at_once() -> None:
    """What cannot work is refused before a thread is started."""
    before = host_threads()
    with pytest.raises(ConfigurationError, match="parallelism"):
        BlockingPool(FakeBackend(), images=["host"], parallelism=0)
    assert host_threads() == before


def test_a_pool_that_cannot_open_leaves_no_thread() -> None:
    """When the backend refuses, the error comes through and the loop ends."""
    before = host_threads()
    backend = FakeBackend()
    backend.unknown.add("host")
    with pytest.raises(ConfigurationError, match="no image 'host'"):
        BlockingPool(backend, images=["host"]).open()
    assert host_threads() == before


def test_a_forgotten_pool_is_closed_when_it_is_collected() -> None:
    """The safety net removes the sandboxes of a pool that nobody closed."""
    backend = FakeBackend()
    pool = BlockingPool(backend, images=["host"]).open()
    assert backend.running_now
    del pool
    gc.collect()

    assert not backend.running_now
    assert backend.alive == set()


def test_a_pool_that_the_loop_itself_finds_forgotten_is_closed_elsewhere() -> None:
    """The loop cannot wait for its own end: a thread of its own closes the pool."""
    backend = FakeBackend()
    pool = BlockingPool(backend, images=["host"]).open()
    opened = pool._opened
    opened.portal.call(opened.close)
    for thread in threading.enumerate():
        if thread.name == "agentsandbox-close":
            thread.join(30)

    assert not backend.running_now
    pool._finalizer.detach()


def test_a_forgotten_lease_is_given_back() -> None:
    """A lease that is dropped without release goes back to the pool, with a warning."""
    with BlockingPool(FakeBackend(), images=["host"], spares=0) as pool:
        lease = pool.acquire("host")
        with pytest.warns(ResourceWarning, match="never released"):
            del lease
            gc.collect()
        pool.acquire("host", timeout=10).release()


def test_a_lease_ends_with_its_pool() -> None:
    """Releasing after the pool was closed does nothing."""
    pool = BlockingPool(FakeBackend(), images=["host"])
    with pool.acquire("host"):
        pool.close()


def test_a_call_from_inside_the_loop_is_refused() -> None:
    """A blocking call in a rollout function would wait for itself for ever; it is told so instead."""

    async def nested(sandbox: Lease, episode: Episode) -> float:
        pool.statistics()
        return 1.0

    with BlockingPool(FakeBackend(), images=["host"]) as pool:
        record = pool.rollout([Episode(id="a", image="host")], rollout=nested).records[0]

    assert record.reward is None
    assert "would wait for itself" in record.reason


def test_interrupting_a_call_stops_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the waiting thread cancels the batch, and every sandbox is given back before it is raised."""
    started = threading.Event()
    backend = FakeBackend()

    async def endless(sandbox: Lease, episode: Episode) -> float:
        import anyio

        started.set()
        await anyio.sleep_forever()
        return 1.0

    class Interrupted:
        """The future of a call, whose waiting thread is interrupted."""

        def __init__(self, future: Any) -> None:
            self.future = future

        def result(self) -> Any:
            started.wait(10)
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(self.future, name)

    with BlockingPool(backend, images=["host"], rollout=endless) as pool:
        portal = pool._open().portal
        start = portal.start_task_soon
        with monkeypatch.context() as patch:
            patch.setattr(type(portal), "start_task_soon", lambda self, *args: Interrupted(start(*args)))
            with pytest.raises(KeyboardInterrupt):
                pool.rollout([Episode(id="a", image="host")])
        assert pool.statistics().leased == 0


def test_a_forked_child_has_nothing_of_its_parents_pools() -> None:
    """In a forked child the parent's pool is refused, its end touches nothing, and a new pool works."""
    done = driver("""
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from agentsandbox.blocking import BlockingPool
        from agentsandbox.errors import UsageError
        from tests.unit.warmpool.fake_backend import FakeBackend

        backend = FakeBackend()
        pool = BlockingPool(backend, images=["host"]).open()
        child = os.fork()
        if child == 0:
            try:
                pool.statistics()
            except UsageError as error:
                print("refused:", error)
            pool.close()
            with BlockingPool(FakeBackend(), images=["host"]) as own, own.acquire("host") as lease:
                print("own:", lease.exec("true").exit_code)
            sys.stdout.flush()
            os._exit(7)
        print("child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        with pool.acquire("host") as lease:
            print("parent:", lease.exec("true").exit_code)
        pool.close()
        print("left:", len(backend.alive))
    """)

    assert done.stdout.splitlines() == [
        "refused: this pool was opened before a fork; a child process must make its own",
        "own: 0",
        "child: 7",
        "parent: 0",
        "left: 0",
    ], done.stderr


def test_a_pool_that_is_never_closed_ends_with_the_interpreter() -> None:
    """A program that forgets to close ends all the same, and its sandboxes with it."""
    done = driver("""
        from agentsandbox.blocking import BlockingPool
        from tests.unit.warmpool.fake_backend import FakeBackend

        class Telling(FakeBackend):
            async def destroy(self, sandbox):
                await super().destroy(sandbox)
                print("destroyed", flush=True)

        pool = BlockingPool(Telling(), images=["host"])
        lease = pool.acquire("host")
        print(lease.exec("true").exit_code, flush=True)
    """)

    assert done.returncode == 0
    assert done.stdout.splitlines() == ["0", "destroyed"], done.stderr


def test_the_host_is_made_anew_after_a_fork() -> None:
    """The child's host is not the parent's."""
    before = blocking._host
    blocking._after_fork()

    assert blocking._host is not before
