# SPDX-License-Identifier: Apache-2.0
"""
Sandboxes for tests: the fixtures ``sandbox_pool`` and ``sandbox``.

They are asynchronous and run under anyio's own pytest plugin, on whatever ``anyio_backend`` says. A test that uses one
needs no marker. Nothing is imported, and no sandbox made, before a fixture is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agentsandbox.client import Lease
    from agentsandbox.pool import SandboxPool

Scope = Literal["function", "class", "module", "package", "session"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--sandbox-backend``, ``--sandbox-image``, ``--sandbox-size`` and ``--sandbox-scope``."""
    group = parser.getgroup("agentsandbox", "sandboxes for tests")
    group.addoption("--sandbox-backend", default="local", metavar="NAME", help="where sandboxes come from (local)")
    group.addoption("--sandbox-image", default="host", metavar="IMAGE", help="what sandboxes are made from (host)")
    group.addoption(
        "--sandbox-size", default=2, type=int, metavar="N", help="how many sandboxes one test may hold at once (2)"
    )
    group.addoption(
        "--sandbox-scope",
        default="function",
        choices=get_args(Scope),
        help="how long one sandbox_pool lives (function); a wider one needs an anyio_backend fixture at least as wide",
    )


def _scope(fixture_name: str, config: pytest.Config) -> Scope:
    scope: Scope = config.getoption("--sandbox-scope")
    return scope


@pytest.fixture(scope=_scope)
def sandbox_image(request: pytest.FixtureRequest) -> str:
    """Name what sandboxes are made from: the value of ``--sandbox-image``. Override it where another one is needed."""
    image: str = request.config.getoption("--sandbox-image")
    return image


@pytest.fixture(scope=_scope)
async def sandbox_pool(
    request: pytest.FixtureRequest, sandbox_image: str, anyio_backend: object
) -> AsyncIterator[SandboxPool]:
    """Give a :class:`~agentsandbox.SandboxPool` that grants sandboxes of ``sandbox_image``."""
    from agentsandbox.pool import SandboxPool

    option = request.config.getoption
    async with SandboxPool(option("--sandbox-backend"), images={sandbox_image: option("--sandbox-size")}) as pool:
        yield pool


@pytest.fixture
async def sandbox(sandbox_pool: SandboxPool, sandbox_image: str, anyio_backend: object) -> AsyncIterator[Lease]:
    """Give a fresh sandbox (a :class:`~agentsandbox.Lease`), released when the test has ended."""
    async with await sandbox_pool.acquire(sandbox_image) as lease:
        yield lease
