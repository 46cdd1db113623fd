# SPDX-License-Identifier: Apache-2.0
"""The rules about sandboxes as a whole: isolation, reuse, identity, leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsandbox.errors import ConfigurationError, UsageError
from agentsandbox.testing.subject import Source, processes, raises, sh

if TYPE_CHECKING:
    from agentsandbox.client import Lease

PLANT = """
echo planted > planted; echo planted > "$HOME/.planted"; mkdir -p /tmp/.git; echo planted > /tmp/planted
echo planted > /dev/shm/planted; echo planted > /var/tmp/planted; setsid sleep 333 > /dev/null 2>&1 &
"""

SEEK = "{ cat planted $HOME/.planted /tmp/planted /dev/shm/planted /var/tmp/planted; ls -d /tmp/.git; } 2>/dev/null"


async def _fresh(lease: Lease) -> None:
    assert (await sh(lease, SEEK)).stdout == b""
    assert await processes(lease, "sleep 333") == []


async def check_sandboxes_are_isolated(source: Source, image: str) -> None:
    """Files and processes of one sandbox are invisible in another that exists at the same time."""
    async with await source.acquire(image) as one, await source.acquire(image) as two:
        assert one.sandbox != two.sandbox
        assert one.identity != two.identity
        await sh(one, PLANT, check=True)

        assert len(await processes(one, "sleep 333")) == 1
        await _fresh(two)


async def check_p37_release_of_one_leaves_others_alone(source: Source, image: str) -> None:
    """What a sandbox changes in a file of the image stays with it, and its release does not touch its siblings."""
    async with await source.acquire(image) as two:
        async with await source.acquire(image) as one:
            before = (await two.exec(["cat", "/etc/passwd"], check=True)).stdout
            await sh(one, "echo hack >> /etc/passwd || true; cp /etc/passwd passwd; echo hack >> passwd", check=False)
            assert (await two.exec(["cat", "/etc/passwd"])).stdout == before
        assert (await sh(two, "pwd")).exit_code == 0
        assert (await two.exec(["cat", "/etc/passwd"])).stdout == before


async def check_release_and_acquire_gives_a_fresh_sandbox(source: Source, image: str) -> None:
    """Nothing that an episode left (files, processes) is there for the next, however often it is asked."""
    for _ in range(4):
        async with await source.acquire(image) as lease:
            await _fresh(lease)
            await sh(lease, PLANT, check=True)


async def check_reset_gives_a_fresh_sandbox(source: Source, image: str) -> None:
    """``reset`` makes the sandbox of a lease like new, and the lease goes on."""
    async with await source.acquire(image) as lease:
        await sh(lease, PLANT, check=True)
        await lease.reset()

        await _fresh(lease)
        assert await lease.alive()


async def check_identity_is_stable(source: Source, image: str) -> None:
    """A lease has one identity, which commands do not change, and ``alive`` says that it is there."""
    async with await source.acquire(image) as lease:
        identity = lease.identity
        await sh(lease, "true")
        await sh(lease, "exit 1")

        assert lease.identity == identity
        assert identity.uid
        assert identity.instance
        assert await lease.alive() is True


async def check_released_lease_is_dead(source: Source, image: str) -> None:
    """Use after release is a usage error; a second release is none; no sandbox is granted twice at a time."""
    async with await source.acquire(image) as lease:
        assert (await lease.exec(["true"])).ok
        await lease.release()
        await lease.release()
        with raises(UsageError):
            await lease.exec(["true"])
        with raises(UsageError):
            await lease.read_file("f")

        async with await source.acquire(image) as other:
            assert (other.id, other.generation) != (lease.id, lease.generation)


async def check_unknown_image_is_refused(source: Source, image: str) -> None:
    """An image that was not announced is a configuration error that names it."""
    with raises(ConfigurationError, "no-such-image-4711"):
        await source.acquire("no-such-image-4711")
    async with await source.acquire(image) as lease:
        assert (await lease.exec(["true"])).ok


async def check_p56_time_to_first_command(source: Source, image: str) -> None:
    """Time to first command is censored until a command starts, and is then fixed and not negative."""
    async with await source.acquire(image) as lease:
        assert lease.ttfc.censored
        await lease.exec(["true"])
        first = lease.ttfc
        await lease.exec(["true"])

        assert not first.censored
        assert first.seconds >= 0
        assert lease.ttfc == first
        assert first.start == lease.start
        assert abs(sum(first.stages[name] for name in ("queue", "start")) - first.seconds) < 1e-6
