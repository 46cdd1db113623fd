# SPDX-License-Identifier: Apache-2.0
"""Virtual time on both event loops."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from agentsandbox.testing.virtualtime import VirtualTimeLoop


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Time passes only when everybody waits."""
    if request.param == "asyncio":
        return "asyncio", {"loop_factory": VirtualTimeLoop}
    return "trio", {"clock": MockClock(autojump_threshold=0)}
