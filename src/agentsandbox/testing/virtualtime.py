# SPDX-License-Identifier: Apache-2.0
"""
Time that passes only when everybody waits: an hour of timeouts tested in a millisecond.

For asyncio give pytest's ``anyio_backend`` as ``("asyncio", {"loop_factory": VirtualTimeLoop})``; for trio use
``trio.testing.MockClock(autojump_threshold=0)``. Not for real sockets, threads or processes: the clock would jump while
they work. Together with the backend ``simulated`` whole training steps take a moment.
"""

from __future__ import annotations

from agentsandbox.backends.simulated.virtualtime import VirtualTimeLoop

__all__ = ["VirtualTimeLoop"]
