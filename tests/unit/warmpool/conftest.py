# SPDX-License-Identifier: Apache-2.0
"""Virtual time on both event loops: nothing here uses sockets, threads or processes."""

from __future__ import annotations

import pytest
import trio.testing

from agentsandbox.testing.virtualtime import VirtualTimeLoop


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualTimeLoop}
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
