# SPDX-License-Identifier: Apache-2.0
"""What ``test_residues_cluster.py`` leaves out: every residue over every rung, and those that only root can leave."""

from __future__ import annotations

import pytest

from ..residues.harness import FIRST_OF_KIND, ORDINARY, PLANTS, each, leave, opened  # noqa: TID252 - one copy
from .test_residues_cluster import SHARED, Pods, anyio_backend, options

__all__ = ["anyio_backend", "options"]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

ROOTS = {"home-of-root": "restored", "owner": "prevented"}
"""Root's home is restored where root is the sandbox's own user, and without its capability root changes no owners."""

READ_ONLY = ["system-site", "system-program", "system-program-in-place", "preloaded-library", "package-database"]
READ_ONLY += ["accounts", "names-of-hosts", "name-servers"]
JAILS = {"home-of-root": "restored", **dict.fromkeys(READ_ONLY, "prevented")}
"""Root of a jail may change owners; what the double's containers have of this machine is read-only in their jails."""


@pytest.fixture(scope="module")
async def place(request, options):
    """Open a place for the rung that the test names."""
    async with opened(request.param, "host", Pods(**options), Pods(**options)) as place:
        yield place


@pytest.fixture(scope="module", params=["files", "restart", "replace"])
async def roots_place(request, options):
    """Open a place in which everybody is root, for each rung."""
    more = {**options, "run_as_root": True}
    async with opened(request.param, "root", Pods(**more), Pods(**more), root=True, outcomes=ROOTS) as place:
        yield place


@pytest.mark.parametrize("place", ["restart"], indirect=True)
@each([plant for plant in ORDINARY if plant not in SHARED])
async def test_a_container_that_is_made_anew_inherits_nothing(place, plant):
    """Whatever was left, the next episode sees what a Pod is like that nobody ever used."""
    await leave(place, plant)


@pytest.mark.parametrize("place", ["replace"], indirect=True)
@each([plant for plant in ORDINARY if plant not in FIRST_OF_KIND])
async def test_another_pod_inherits_nothing(place, plant):
    """A Pod that was replaced is another one."""
    await leave(place, plant)


@each([plant for plant in PLANTS if plant.user == "root"])
async def test_root_leaves_nothing(roots_place, plant):
    """What only root can leave costs the Pod where it cannot be put right."""
    await leave(roots_place, plant)


@pytest.fixture(scope="module")
async def jail(options):
    """Open a place whose sandboxes are jails, two in a Pod, so that the next one is in the same Pod."""
    more = {**options, "run_as_root": True, "jail": True, "slots": 2}
    async with opened("jail", "root", Pods(**more), Pods(**more), root=True, outcomes=JAILS) as place:
        yield place


@each(PLANTS)
async def test_another_jail_inherits_nothing(jail, plant):
    """What was left in a jail ended with it."""
    await leave(jail, plant)
