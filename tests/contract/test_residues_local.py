# SPDX-License-Identifier: Apache-2.0
"""Everything that an episode can leave behind, over the rungs of the local backend: see ``tests/residues``."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox import SandboxClient
from agentsandbox.backends.local import LocalBackend
from agentsandbox.backends.local.backend import Unconfined
from agentsandbox.models.reset import RUNGS as RUNG_NAMES
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.testing.determinism import check_reuse

from ..residues.harness import PLANTS, RUNGS, Hydrated, chosen, leave, opened  # noqa: TID252 - one copy

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


class Sandboxes(Hydrated, LocalBackend):
    """Local sandboxes in which the fixture's tree was made before anybody may use them."""


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module", params=["jail", "files", "replace"])
async def place(request, anyio_backend):
    async with opened(request.param, "host", Sandboxes(), Sandboxes()) as place:
        yield place


def test_the_corpus_is_large_and_named_once():
    """At least sixty plants, each with a name of its own, of every kind."""
    assert len(PLANTS) >= 60
    assert len({plant.id for plant in PLANTS}) == len(PLANTS)
    assert {plant.outcome for plant in PLANTS} == {"restored", "replaced", "prevented"}
    assert len({plant.kind for plant in PLANTS}) == 9


@chosen("")
async def test_the_next_episode_finds_nothing(place, plant):
    """Whatever was left, the next episode sees what a sandbox is like that nobody ever used."""
    await leave(place, plant)


@chosen("P26")
async def test_p26_content_is_compared_without_asking_the_repository(place, plant):
    """A repository that calls itself clean is compared with the manifest all the same."""
    await leave(place, plant)


@chosen("P27")
async def test_p27_the_pristine_state_cannot_be_redirected(place, plant):
    """The metadata of a repository is content like any other."""
    await leave(place, plant)


@chosen("P28")
async def test_p28_reset_runs_nothing_of_the_previous_episode(place, plant):
    """Hooks, helpers and start-up files are gone, and never ran."""
    await leave(place, plant)


@chosen("P29")
async def test_p29_no_process_survives(place, plant):
    """Servers and editors of the last episode are dead before the next one begins."""
    await leave(place, plant)


@chosen("P30")
async def test_p30_the_tree_has_exactly_the_paths_of_the_baseline(place, plant):
    """Ignored output and nested repositories go; ignored files of the baseline stay."""
    await leave(place, plant)


@chosen("P31")
async def test_p31_a_stale_lock_does_not_stop_a_reset(place, plant):
    """The file has its first content again, and the lock is gone."""
    await leave(place, plant)


@chosen("P32")
async def test_p32_configuration_of_git_is_as_it_was(place, plant):
    """Nobody's trust in directories survives, and the reset adds none of its own."""
    await leave(place, plant)


@chosen("P33")
async def test_p33_what_cannot_be_deleted_is_deleted(place, plant):
    """Read-only directories and files of other users are gone."""
    await leave(place, plant)


@chosen("P34")
async def test_p34_stray_files_outside_the_repository_are_gone(place, plant):
    """In temporary directories, shared memory and beside the repository."""
    await leave(place, plant)


@chosen("P35")
async def test_p35_installed_packages_do_not_drift(place, plant):
    """What was installed into the scope is removed; elsewhere the sandbox is replaced."""
    await leave(place, plant)


@chosen("P36")
async def test_p36_no_zombie_stays(place, plant):
    """Two hundred dead children are reaped before the next episode begins."""
    await leave(place, plant)


async def test_the_same_episode_has_the_same_fingerprint_in_a_used_sandbox(anyio_backend):
    """An episode that looks at everything finds the same after another one that changed a lot."""

    async def episode(sandbox):
        result = await sandbox.exec(
            "cd repo; git status --porcelain; git log --format=%H; "
            "find . -path ./.git -prune -o -printf '%p %y %m %s\\n' | sort; cat f.py; ls -A /tmp /dev/shm ~; "
            "python3 -c 'import random; print(random.Random(7).random())'"
        )
        return result.exit_code, result.stdout

    async def wrecker(sandbox):
        await sandbox.exec("rm -rf repo/.git repo/src; echo x > repo/f.py; echo y > /tmp/y; setsid sleep 60 & true")

    policy = ResetPolicy(rungs=RUNGS["files"])
    async with SandboxClient(Sandboxes(), images={"host": 1}, spares=0, reset=policy) as client:
        result = await check_reuse(client, "host", episode, between=wrecker, runs=4)

    assert (True, 4, 3, ()) == (result.ok, result.runs, result.reused, result.differences)


async def test_the_next_lease_does_not_wait_for_a_reset(anyio_backend):
    """With a spare it is granted at once, from another sandbox."""
    policy = ResetPolicy(rungs=RUNGS["files"])
    async with SandboxClient(Sandboxes(), images={"host": 1}, spares=1, reset=policy) as client:
        first = await client.acquire("host")
        while client.statistics().ready < 1:  # noqa: ASYNC110 - as long as an episode takes
            await anyio.sleep(0.01)
        await first.release()
        async with await client.acquire("host", timeout=5) as second:
            assert first.sandbox != second.sandbox
            assert 1 == client.statistics().resetting
            assert "warm" == second.start


@pytest.mark.parametrize(
    ("rungs", "expected"),
    [(RUNG_NAMES, "jail"), (("files", "replace"), "files"), (("restart", "replace"), "replace")],
    ids=["all", "files", "replace"],
)
async def test_a_reset_by_its_holder_takes_the_cheapest_rung(anyio_backend, rungs, expected):
    """Of those that are allowed and offered; whichever it is, nothing of before is left."""
    async with SandboxClient(LocalBackend(), images={"host": 1}, reset=ResetPolicy(rungs=rungs)) as client:
        async with await client.acquire("host") as lease:
            await lease.exec("echo x > left; echo y > /tmp/left; (setsid sleep 60 &)")
            before = lease.sandbox
            report = await lease.reset()

            assert (expected, True) == (report.rung, report.verified)
            assert (expected == "files") == (before == lease.sandbox)
            assert b"" == (await lease.exec("ls -A . /tmp | grep left; true")).stdout
            assert ["/tmp/left", "/workspace/left"] * (expected == "files") == sorted(report.changed)


async def test_without_isolation_nothing_is_used_again(anyio_backend):
    """What is no namespace of its own cannot be shown to be clean: its processes may be anybody's."""
    with pytest.warns(Unconfined):
        backend = LocalBackend(isolation="none")
    policy = ResetPolicy(rungs=("files", "replace"))
    async with SandboxClient(backend, images={"host": 1}, spares=0, reset=policy) as client:
        async with await client.acquire("host") as lease:
            assert ("replace",) == lease.capabilities.rungs
            assert "the runner is not the first process of a namespace" == lease.capabilities.facts["files"]
            first = lease.sandbox
        async with await client.acquire("host") as lease:
            assert first != lease.sandbox
