# SPDX-License-Identifier: Apache-2.0
"""Each shell that is on this machine and each event loop, once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests time. Of those that want each shell, keep one loop a shell: the two have nothing to do with it."""
    params = [getattr(getattr(item, "callspec", None), "params", {}) for item in items]
    for item in items:
        if item.path.parent == Path(__file__).parent:
            # Their own guards are to fire first: those leave the loop to the tests that follow.
            item.add_marker(pytest.mark.timeout(180))
    items[:] = [
        item
        for item, param in zip(items, params, strict=True)
        if "shell" not in param or (param["shell"] == "dash") == (param.get("anyio_backend") == "trio")
    ]


@pytest.fixture(scope="module", params=["dash", "bash", "busybox"])
def shell(request: pytest.FixtureRequest) -> str:
    """Run the test with each shell that is installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run in real time: the shells are real processes."""
    return str(request.param)


@pytest.fixture(scope="module")
async def backend(anyio_backend: str) -> AsyncIterator[None]:
    """Make all sandboxes of a module with one backend."""
    from shells import shared_backend

    async with shared_backend():
        yield
