# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time

import anyio
import pytest
from trio._core import _run as scheduler

from agentsandbox.errors import ConfigurationError
from agentsandbox.testing.virtualtime import VirtualTimeLoop, deterministic_trio, run, virtual_time

OPTIONS = {"loop_factory": VirtualTimeLoop}


def test_a_day_passes_in_no_time():
    """Sleeping moves the clock by exactly what was asked, and costs nothing."""

    async def main():
        assert 0.0 == anyio.current_time()
        async with anyio.create_task_group() as group:
            for hours in range(24):
                group.start_soon(anyio.sleep, hours * 3600)
        return anyio.current_time()

    began = time.perf_counter()
    assert 23 * 3600 == anyio.run(main, backend_options=OPTIONS)
    assert time.perf_counter() - began < 60


def test_timeouts_fire_in_their_order():
    """The shorter one first, at its time."""

    async def main():
        with anyio.move_on_after(100), anyio.move_on_after(10):
            await anyio.sleep(1000)
        return anyio.current_time()

    assert 10.0 == anyio.run(main, backend_options=OPTIONS)


def test_work_comes_before_waiting():
    """The clock does not move while something can run."""

    async def main():
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        return anyio.current_time()

    assert 0.0 == anyio.run(main, backend_options=OPTIONS)


def test_waiting_for_nothing_is_an_error_instead_of_a_hang():
    """Every task waits and no timer is set: that is said at once."""

    async def main():
        await anyio.Event().wait()

    loop = VirtualTimeLoop()
    try:
        task = loop.create_task(main())
        with pytest.raises(RuntimeError, match=r"^deadlock"):
            loop.run_until_complete(task)
        task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
    finally:
        loop.close()


def test_both_loops_run_in_virtual_time():
    """From 0 s on; the fixture's value for each, and nothing for another one."""

    async def main(hours):
        await anyio.sleep(hours * 3600)
        return anyio.current_time()

    assert 7200.0 == run(main, 2) == run(main, 2, backend="trio")
    assert ("asyncio", OPTIONS) == virtual_time()
    assert "trio" == virtual_time("trio")[0]
    with pytest.raises(ConfigurationError, match="curio"):
        virtual_time("curio")


def order(seed):
    """Return the order in which ten tasks of trio begin that are ready at the same instant."""

    async def main():
        begun = []

        async def begin(number):
            begun.append(number)

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(begin, number)
        return begun

    return run(main, backend="trio", seed=seed)


def test_the_seed_decides_what_trio_does_first():
    """The same seed the same order, another one another, and all of them run."""
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1
    assert list(range(10)) == sorted(order(1))


def test_trio_is_left_as_it_was():
    """The switch and the source of chance, also after an error."""
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r

    with pytest.raises(ZeroDivisionError), deterministic_trio(3) as steady:
        assert steady is True
        assert scheduler._ALLOW_DETERMINISTIC_SCHEDULING is True
        assert scheduler._r is not before[1]
        raise ZeroDivisionError

    assert before == (scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r)


def test_a_trio_without_the_switch_is_said_to_have_none(monkeypatch):
    """It runs all the same, and nothing of it is changed."""
    monkeypatch.delattr(scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING")
    before = scheduler._r

    with pytest.warns(RuntimeWarning, match="no switch for deterministic scheduling"), deterministic_trio() as steady:
        assert steady is False
        assert scheduler._r is before


RUN = """
import sys
from agentsandbox.backends.simulated import ClusterModel, Faults
from agentsandbox.cli.simulation import EventRecord
from agentsandbox.cli.strategies import run
from agentsandbox.cli.workload import made_up
from agentsandbox.hydration import plan
from agentsandbox.testing import virtualtime

faults = Faults(losses_per_hour=20.0, failed_starts=0.02, failed_pulls=0.02)
workload = made_up(ClusterModel(nodes=2, pods_per_node=40, faults=faults), images=15, rollouts=3, seconds=20.0, seed=5)
planned = plan(workload.uses, workload.nodes(), advise=False)
for strategy in ("ours", "naive"):
    record = EventRecord()
    virtualtime.run(lambda: run(workload, strategy, planned, hydrated=False, sink=record), backend=sys.argv[1], seed=5)
    print(strategy, record.events, record.fingerprint)
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_two_processes_come_to_the_same_events(backend):
    """Byte for byte, however Python hashes and wherever objects are: with losses, failing starts and failing pulls."""
    found = {
        subprocess.run(
            [sys.executable, "-c", RUN, backend],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert 1 == len(found)
    assert 2 == found.pop().count("\n")
