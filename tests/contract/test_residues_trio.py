# SPDX-License-Identifier: Apache-2.0
"""The residues that the known pains describe, and one of each kind, with the other event loop."""

from __future__ import annotations

import pytest

from ..residues.harness import FIRST_OF_KIND, each, leave, opened  # noqa: TID252 - one copy
from .test_residues_local import (
    Sandboxes,
    test_p26_content_is_compared_without_asking_the_repository,
    test_p27_the_pristine_state_cannot_be_redirected,
    test_p28_reset_runs_nothing_of_the_previous_episode,
    test_p29_no_process_survives,
    test_p30_the_tree_has_exactly_the_paths_of_the_baseline,
    test_p31_a_stale_lock_does_not_stop_a_reset,
    test_p32_configuration_of_git_is_as_it_was,
    test_p33_what_cannot_be_deleted_is_deleted,
    test_p34_stray_files_outside_the_repository_are_gone,
    test_p35_installed_packages_do_not_drift,
    test_p36_no_zombie_stays,
)

__all__ = [
    "test_p26_content_is_compared_without_asking_the_repository",
    "test_p27_the_pristine_state_cannot_be_redirected",
    "test_p28_reset_runs_nothing_of_the_previous_episode",
    "test_p29_no_process_survives",
    "test_p30_the_tree_has_exactly_the_paths_of_the_baseline",
    "test_p31_a_stale_lock_does_not_stop_a_reset",
    "test_p32_configuration_of_git_is_as_it_was",
    "test_p33_what_cannot_be_deleted_is_deleted",
    "test_p34_stray_files_outside_the_repository_are_gone",
    "test_p35_installed_packages_do_not_drift",
    "test_p36_no_zombie_stays",
]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def anyio_backend():
    return "trio"


@pytest.fixture(scope="module", params=["jail", "files"])
async def place(request, anyio_backend):
    async with opened(request.param, "host", Sandboxes(), Sandboxes()) as place:
        yield place


@each(FIRST_OF_KIND)
async def test_the_next_episode_finds_nothing(place, plant):
    """One of each kind: the next episode sees what a sandbox is like that nobody ever used."""
    await leave(place, plant)
