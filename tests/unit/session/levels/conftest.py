# SPDX-License-Identifier: Apache-2.0
"""Each shell that is on this machine, once."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep every shell on one loop, and each loop with dash: the two have nothing to do with each other."""
    params = [getattr(getattr(item, "callspec", None), "params", {}) for item in items]
    items[:] = [
        item
        for item, param in zip(items, params, strict=True)
        if param.get("shell", "dash") == "dash" or param.get("anyio_backend") != "trio"
    ]


@pytest.fixture(params=["dash", "bash", "busybox"])
def shell(request: pytest.FixtureRequest) -> str:
    """Run the test with each shell that is installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run in real time: the shells are real processes."""
    return str(request.param)
