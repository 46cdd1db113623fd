# SPDX-License-Identifier: Apache-2.0
"""
Everything that an episode can leave behind, in Pods of a real cluster, over every rung that it has.

``AGENTSANDBOX_E2E_RESIDUES_IMAGE`` names an image with Python, git and chattr, without which some residues are skipped;
otherwise it is ``AGENTSANDBOX_E2E_IMAGE``. Its user is root, as that of most images is.
"""

from __future__ import annotations

import os

import pytest

from agentsandbox.backends.kubernetes import KubernetesBackend

from ..residues.harness import PLANTS, Hydrated, each, leave, opened  # noqa: TID252 - one copy
from .conftest import IMAGE, options

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

ROOTS = {"home-of-root": "restored", "owner": "prevented"}
"""What is different where everybody is root, and root has no capabilities."""

JAILS = {"home-of-root": "restored"}
"""In a jail it has some."""


class Pods(Hydrated, KubernetesBackend):
    """Pods in which the fixture's tree was made before anybody may use them."""


@pytest.fixture(scope="module")
def anyio_backend():
    """Run on the event loop that the client library needs."""
    return "asyncio"


@pytest.fixture(scope="module", params=["files", "restart", "replace", "jail"])
async def place(request, anyio_backend):
    """Open a place for one rung."""
    image = os.environ.get("AGENTSANDBOX_E2E_RESIDUES_IMAGE") or IMAGE
    more = {"limits": {"cpu": "2", "memory": "2Gi"}, "lifetime": 3600}
    jailed = request.param == "jail"
    if jailed:
        more |= {"jail": True, "slots": 2}
    pods = [Pods(**options(**more)) for _ in range(2)]
    async with opened(request.param, image, *pods, root=True, outcomes=JAILS if jailed else ROOTS) as place:
        capabilities = place.reference.capabilities
        if request.param not in ("files", *capabilities.rungs):
            pytest.skip(f"no rung {request.param!r} here: {capabilities.facts.get(request.param, 'not offered')}")
        yield place


@each(PLANTS)
async def test_the_next_episode_finds_nothing(place, plant):
    """Whatever was left, the next episode sees what a Pod is like that nobody ever used."""
    await leave(place, plant)
