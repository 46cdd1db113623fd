# SPDX-License-Identifier: Apache-2.0
"""The short examples print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> str:
    """Run an example with warnings as errors, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / name], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.timeout(120)
def test_quickstart_prints_the_rewards() -> None:
    """The rewards come in input order."""
    assert run("quickstart.py") == "(1.0, 0.0, 1.0, 0.0)\n"


@pytest.mark.timeout(120)
def test_grading_tells_reward_from_no_reward() -> None:
    """A good repair is 1, a bad one 0; an unsound task and a report without tests have no reward."""
    lines = dict(line.split(": ", 1) for line in run("grading.py").splitlines())

    assert lines["good repair"] == "1.0"
    assert lines["bad repair"] == "0.0"
    assert "must fail before the task is solved" in lines["nothing broken"]
    assert "does not mention" in lines["emptied tests"]


@pytest.mark.timeout(120)
def test_ppo_loop_learns() -> None:
    """The mean reward rises to near 1 within eight steps, and no rollout is lost."""
    lines = run("ppo_loop.py").splitlines()
    means = [float(re.search(r"mean reward ([\d.]+) over 12, 0 to try again", line)[1]) for line in lines]  # type: ignore[index]

    assert len(means) == 8
    assert means[-1] > means[0]
    assert sum(means[-2:]) / 2 >= 0.75
