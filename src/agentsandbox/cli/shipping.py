# SPDX-License-Identifier: Apache-2.0
"""
The job that ``agentsandbox run`` does when it is given no tasks.

An order of 99 should ship free, and ``total > 99`` charges for it. Each episode shows that the boundary test fails,
makes the fix, and shows that the test passes. The fix stands where a policy would act.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentsandbox.errors import CommandFailed
from agentsandbox.models.episode import Episode, Graded
from agentsandbox.rollouts.grading import require_failing

if TYPE_CHECKING:
    from agentsandbox.client import Lease

__all__ = ["episodes", "repair"]

SOURCE = """\
def shipping(total):
    return 0 if total > 99 else 10
"""

TEST = """\
import unittest

from shipping import shipping


class ShippingTest(unittest.TestCase):
    def test_below(self):
        self.assertEqual(shipping(98), 10)

    def test_boundary(self):
        self.assertEqual(shipping(99), 0)

    def test_above(self):
        self.assertEqual(shipping(100), 0)


if __name__ == "__main__":
    unittest.main()
"""

RUN_TESTS = ("python3", "-B", "test_shipping.py")
TEST_TIMEOUT = 20.0


def episodes(count: int, image: str) -> list[Episode]:
    """Return *count* episodes of the job."""
    width = max(2, len(str(count - 1)))
    return [Episode(id=f"episode-{number:0{width}}", image=image) for number in range(count)]


async def repair(sandbox: Lease, episode: Episode) -> Graded:  # noqa: ARG001 - every rollout function has it
    """
    Fix the boundary and return reward 1.

    Args:
        sandbox: The sandbox of this attempt.
        episode: The episode.

    Raises:
        InvalidTask: If the test passes before the fix.
        CommandFailed: If it fails after it.

    """
    await sandbox.write_file("shipping.py", SOURCE)
    await sandbox.write_file("test_shipping.py", TEST)
    before = await sandbox.exec(RUN_TESTS, timeout=TEST_TIMEOUT)
    require_failing(before)
    source = (await sandbox.read_file("shipping.py")).decode()
    await sandbox.write_file("shipping.py", source.replace("total > 99", "total >= 99"))
    after = await sandbox.exec(RUN_TESTS, timeout=TEST_TIMEOUT)
    if not after.ok:
        raise CommandFailed(after)
    return Graded(reward=1.0, info={"baseline_exit": before.exit_code, "tests_exit": after.exit_code})
