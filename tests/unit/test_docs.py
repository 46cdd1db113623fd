# SPDX-License-Identifier: Apache-2.0
"""What the documentation lists is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentsandbox.errors import FailureKind
from agentsandbox.models.episode import Status

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "agentsandbox"
EMITTERS = ["client", "rollouts", "warmpool"]
EMITTED = re.compile(r"(?:emit|_tell)\(\s*\"([a-z]+\.[a-z]+)\"")


def _page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_every_event_is_documented():
    """The page on events has one row for each event that the engine emits, and no other."""
    files = [path for part in EMITTERS for path in (SOURCE / part).glob("*.py")]
    emitted = {name for path in files for name in EMITTED.findall(path.read_text(encoding="utf-8"))}
    documented = set(re.findall(r"^\| `([a-z]+\.[a-z]+)` \|", _page("reference/events"), re.MULTILINE))

    assert emitted == documented
    assert "episode.ended" in emitted


@pytest.mark.parametrize("kind", FailureKind, ids=str)
def test_every_failure_kind_is_explained(kind):
    """The page on failures says of each kind whose doing it is and whether it is tried again."""
    assert f"`{kind}`" in _page("topics/failures")


@pytest.mark.parametrize("status", Status, ids=str)
def test_every_status_is_explained(status):
    """The page on failures has one row for each status that an episode can end with."""
    assert f"| `{status}` |" in _page("topics/failures")


def test_every_layer_is_described():
    """The page on architecture describes each top-level module and package."""
    layers = {
        path.stem for path in SOURCE.iterdir() if not path.name.startswith(("_", ".")) and path.suffix != ".typed"
    }
    described = set(re.findall(r"\*\*(\w+)\*\*", _page("topics/architecture")))

    assert layers - described == set()
