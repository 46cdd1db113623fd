# SPDX-License-Identifier: Apache-2.0
"""
Rewards that mean something: the tests must fail first, and every required test must be seen to pass.

The four episodes show what each outcome becomes: a good repair is 1, a bad one is 0, a task that was never broken is an
invalid task, and a repair that empties the test file is missing evidence. The last two have no reward at all.
"""

from __future__ import annotations

import asyncio

from agentsandbox import Episode, Lease, SandboxPool
from agentsandbox.rollouts.grading import grade_tests, require_failing

BROKEN = "def double(x):\n    return x + x + 1\n"
FIXED = "def double(x):\n    return 2 * x\n"
TESTS = """\
import unittest
from double import double

class DoubleTest(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(double(0), 0)

    def test_three(self):
        self.assertEqual(double(3), 6)
"""
REQUIRED = ("test_double.DoubleTest.test_zero", "test_double.DoubleTest.test_three")
RUN = ("python3", "-B", "-m", "unittest", "-v", "test_double")


async def rollout(sandbox: Lease, episode: Episode) -> float:
    """Show that the tests fail, let the policy write its files, and grade."""
    await sandbox.write_file("double.py", episode.inputs.get("given", BROKEN))
    await sandbox.write_file("test_double.py", TESTS)
    require_failing(await sandbox.exec(RUN, timeout=20))
    for path, content in episode.inputs["writes"].items():  # the policy acts here
        await sandbox.write_file(path, content)
    return grade_tests(await sandbox.exec(RUN, timeout=20), tests=REQUIRED)


EPISODES = (
    Episode(id="good repair", image="host", inputs={"writes": {"double.py": FIXED}}),
    Episode(id="bad repair", image="host", inputs={"writes": {"double.py": "def double(x):\n    return x\n"}}),
    Episode(id="nothing broken", image="host", inputs={"given": FIXED, "writes": {}}),
    Episode(id="emptied tests", image="host", inputs={"writes": {"test_double.py": ""}}),
)


async def main() -> None:
    """Run the four and print what became of each."""
    async with SandboxPool("local", images={"host": 4}, rollout=rollout) as pool:
        result = await pool.rollout(EPISODES)
    for record in result.records:
        print(f"{record.episode.id}: {record.reward if record.reward is not None else record.reason}")


if __name__ == "__main__":
    asyncio.run(main())
