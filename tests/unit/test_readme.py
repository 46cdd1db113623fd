# SPDX-License-Identifier: Apache-2.0
"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(name: str) -> str:
    """Return the code block that is marked with this name."""
    (found,) = re.findall(rf"<!-- {name} -->\n```\w+\n(.*?)```\n", README, re.DOTALL)
    return found


@pytest.mark.timeout(120)
def test_example_runs_as_printed(tmp_path):
    """The README's example prints the rewards that its last line promises."""
    promised = re.search(r"# (\(.*\))\n\Z", block("example"))
    assert promised is not None
    example = tmp_path / "example.py"
    example.write_text(block("example"))

    done = subprocess.run([sys.executable, "-W", "error", example.name], cwd=tmp_path, capture_output=True, text=True)

    assert (0, promised[1] + "\n", "") == (done.returncode, done.stdout, done.stderr)


def test_example_is_short():
    """The README's example has at most 15 lines of code."""
    assert len([line for line in block("example").splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("name", ["quickstart", "tests"])
def test_ci_runs_the_commands_of_the_readme(name):
    """What ``.ci/run`` takes out of the README is the block that a reader sees."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^readme\(\) \{.*?^\}$", script, re.DOTALL | re.MULTILINE)

    taken = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{function}\nreadme {name}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    assert block(name) == taken
    assert f'"$(readme {name})"' in script


def test_test_command_is_the_session_that_exists():
    """The README's test command installs nox and runs the session ``tests``."""
    assert block("tests") == "pip install nox && nox -s tests\n"
    assert re.search(r"^def tests\(", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)


def test_links_lead_somewhere():
    """Each relative link of the README is a file of the checkout."""
    targets = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]

    assert [] == [link for link in targets if not (ROOT / link).exists()]
