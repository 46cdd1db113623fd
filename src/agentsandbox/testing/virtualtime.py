# SPDX-License-Identifier: Apache-2.0
"""
Time that passes only when everybody waits: an hour of timeouts tested in a millisecond.

::

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(request):
        return virtual_time(request.param)

Outside pytest :func:`run` runs an async function so. Not for real sockets, threads or processes: the clock would jump
while they work. Together with the backend ``simulated`` whole training steps take a moment, and the same seed gives
the same events at the same times: on asyncio always, on trio under :func:`run` or within :func:`deterministic_trio`.
"""

from __future__ import annotations

from agentsandbox.backends.simulated.virtualtime import VirtualTimeLoop, deterministic_trio, run, virtual_time

__all__ = ["VirtualTimeLoop", "deterministic_trio", "run", "virtual_time"]
