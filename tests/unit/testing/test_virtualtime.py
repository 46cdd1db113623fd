# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import anyio
import pytest

from agentsandbox.testing.virtualtime import VirtualTimeLoop

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
