# SPDX-License-Identifier: Apache-2.0
"""What holds for every command."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from agentsandbox.cli.app import app


def commands(group=None, path=()):
    """Yield every command with the words that lead to it."""
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield pytest.param(command, id=" ".join((*path, name)))


def test_version_is_that_of_the_package(invoke):
    """``--version`` needs no command."""
    assert invoke("--version") == (0, f"agentsandbox {version('agentsandbox')}\n")


@pytest.mark.parametrize("command", list(commands()))
def test_every_option_says_what_it_means(command):
    """A command and each of its options have a help text that is a sentence."""
    assert command.help
    assert [found.name for found in command.params if not (found.help or "").endswith(".")] == []


@pytest.mark.parametrize(
    "words",
    [["run", "--output", "x"], ["doctor"], ["ttfc"], ["bench", "exec"], ["bench", "reset"], ["bench", "rollout"]],
)
def test_a_model_runs_no_commands(words, tmp_path, monkeypatch):
    """Where sandboxes are needed a model is refused before anything is made, and the way to it is told."""
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(app, [*words, "--backend", "simulated"], terminal_width=200)

    assert result.exit_code == 2
    assert "agentsandbox simulate is for it" in " ".join(result.output.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []
