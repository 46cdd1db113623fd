# SPDX-License-Identifier: Apache-2.0
"""Virtual time: these tests use neither sockets nor threads, so every wait is over at once."""

from __future__ import annotations

from typing import Any

import pytest

from agentsandbox.testing.virtualtime import virtual_time


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run on both backends, in virtual time."""
    return virtual_time(request.param)
