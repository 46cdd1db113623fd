# SPDX-License-Identifier: Apache-2.0
"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# The machine is shared: how long one example takes says nothing, and no state is kept between runs.
settings.register_profile("agentsandbox", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentsandbox")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each asynchronous test on both event loops."""
    return str(request.param)
