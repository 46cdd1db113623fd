# SPDX-License-Identifier: Apache-2.0
"""
One episode as a program of its own, for Python 3.9 or later: it runs where nothing of this package is installed.

It repairs a boundary bug (an order of 99 should ship free), shows that the test failed before and passes after, and
tells so as one JSON object a line. The fix stands where a policy would act; your own script prints the same two events.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

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


def emit(event: str, **data: object) -> None:
    """Tell something."""
    line = {"event": event, "at": time.time(), "episode_id": os.environ["EPISODE_ID"], **data}
    print(json.dumps(line), flush=True)  # noqa: T201 - what is printed is the result


def test() -> tuple[int, str]:
    """Run the test; return its exit code and what it said."""
    command = [sys.executable, "-B", "test_shipping.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stderr


def main() -> int:
    """Run the episode; return the exit code."""
    source = pathlib.Path("shipping.py")
    source.write_text(SOURCE)
    pathlib.Path("test_shipping.py").write_text(TEST)
    emit("ready")
    before, _ = test()
    source.write_text(source.read_text().replace("total > 99", "total >= 99"))
    after, output = test()
    reward = int(before != 0 and after == 0)
    emit("reward", reward=reward, baseline_exit=before, tests_exit=after, tests_output=output)
    return 1 - reward


if __name__ == "__main__":
    sys.exit(main())
