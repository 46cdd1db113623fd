# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox bench reset``: what it measures was verified, and its figures belong together."""

from __future__ import annotations

import json

import pytest

from agentsandbox.cli import bench_reset


@pytest.mark.timeout(300)
def test_every_rung_is_measured_beside_git(invoke) -> None:
    """A tree of 10,000 files, 20 of them changed each time, and both ways of making it as it was."""
    code, text = invoke("bench", "reset", "--repeats", "1", "--json")

    figures = json.loads(text)
    files, sweep, fresh = figures["files"], figures["sweep"], figures["fresh"]
    assert (code, figures["bench"], figures["backend"]) == (0, "reset", "local")
    assert files["changed"] == bench_reset.CHANGED == 20
    assert files["files"] >= bench_reset.FILES == 10_000
    assert {part: files[part]["n"] for part in ("whole", "scope", "outside", "git")} == {
        "whole": 1, "scope": 1, "outside": 1, "git": 1,
    }  # fmt: skip
    assert files["scope"]["max_ms"] <= files["whole"]["max_ms"]
    assert (sweep["whole"]["n"], sweep["files"] > 0) == (1, True)
    assert (fresh["rung"], fresh["replaced"]["n"], fresh["acquire_after_release"]["n"]) == ("jail", 1, 1)
    assert figures["environment"]["cpus"] > 0


def test_what_cannot_be_measured_is_said(invoke) -> None:
    """An image that does not exist is refused, with exit code 2 and no figures."""
    code, text = invoke("bench", "reset", "--image", "/nowhere", "--json")

    assert code == 2
    assert "/nowhere" in text
    assert "{" not in text
