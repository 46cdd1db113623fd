# SPDX-License-Identifier: Apache-2.0
"""Virtual time: these tests use neither sockets nor threads, so every wait is over at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio.testing

from agentsandbox.testing.virtualtime import VirtualTimeLoop


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run on both backends, in virtual time."""
    if request.param == "asyncio":
        yield "asyncio", {"loop_factory": VirtualTimeLoop}
    else:
        yield "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}
