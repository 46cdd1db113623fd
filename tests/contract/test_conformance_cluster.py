# SPDX-License-Identifier: Apache-2.0
"""The backend contract on the cluster double, with each way of reaching a sandbox."""

from __future__ import annotations

import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.errors import ConfigurationError, StartError
from agentsandbox.testing import conformance
from agentsandbox.testing.cluster import FakeCluster, Image

pytestmark = pytest.mark.anyio

MODES = ("runner", "shell", "direct")


@pytest.fixture(scope="module")
def anyio_backend():
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="module", params=MODES)
async def source(request, tmp_path_factory, anyio_backend):
    """A client of a cluster of its own, for all checks."""
    image = Image(command=("sleep", "infinity"))  # what a Pod keeps whose first process is not ours to choose
    async with FakeCluster(images={"host": image}) as cluster:
        options = {"kubeconfig": cluster.kubeconfig(tmp_path_factory.mktemp("cluster")), "exec_mode": request.param}
        async with SandboxClient("kubernetes", images={"host": 2}, backend_options=options) as client:
            yield client


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check, source: SandboxClient) -> None:
    """The rule in the check's docstring holds, or what it needs is refused as not possible at that level."""
    try:
        await check(source, "host")
    except conformance.NotApplicable as reason:
        pytest.skip(str(reason))
    except (StartError, ConfigurationError) as refusal:
        if "exec level 'direct'" not in str(refusal):
            raise
        pytest.skip(str(refusal))
