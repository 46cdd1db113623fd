# SPDX-License-Identifier: Apache-2.0
"""What a command is asked to do, and what came of it."""

from __future__ import annotations

from typing import Any

import pytest

from agentsandbox.errors import CommandFailed, ConfigurationError
from agentsandbox.models.command import DEFAULT_OUTPUT_LIMIT, DEFAULT_TIMEOUT, Command, ExecResult


def test_defaults() -> None:
    """A command has a limit of time and of output even when nothing is said."""
    command = Command(command="true")

    assert command.timeout == DEFAULT_TIMEOUT == 300.0
    assert command.output_limit == DEFAULT_OUTPUT_LIMIT == 10 * 1024 * 1024
    assert (command.cwd, command.user, command.no_output_timeout, command.merge) == (None, None, None, False)


def test_a_script_stays_a_string_and_arguments_become_a_tuple() -> None:
    """The two forms of a command are told apart by their type."""
    assert Command(command="echo a b").command == "echo a b"
    assert Command(command=["echo", "a b"]).command == ("echo", "a b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"command": ""}, "the command is empty", id="empty script"),
        pytest.param({"command": []}, "the command is empty", id="no arguments"),
        pytest.param({"command": ["sleep", 1]}, "not 1 inside", id="an argument that is no string"),
        pytest.param({"command": "a\0b"}, "NUL", id="NUL in a script"),
        pytest.param({"command": ["a", "b\0"]}, "NUL", id="NUL in an argument"),
        pytest.param({"timeout": 0}, "timeout must be above 0, not 0", id="timeout 0"),
        pytest.param({"no_output_timeout": -1.0}, "no_output_timeout must be above 0", id="silence below 0"),
        pytest.param({"output_limit": 0}, "output_limit must be above 0", id="limit 0"),
        pytest.param({"env": {"A": 1}}, "are strings, not 'A': 1", id="a value that is no string"),
        pytest.param({"env": {1: "A"}}, "are strings, not 1: 'A'", id="a name that is no string"),
        pytest.param({"env": {"": "x"}}, "'' is no valid", id="an empty name"),
        pytest.param({"env": {"A=B": "x"}}, "'A=B' is no valid", id="a name with ="),
        pytest.param({"env": {"A": "x\0"}}, "'A' is no valid", id="NUL in a value"),
        pytest.param({"env": {"A\0": "x"}}, "no valid", id="NUL in a name"),
    ],
)
def test_bad_commands_are_refused(options: dict[str, Any], words: str) -> None:
    """What no sandbox could run is refused with its value."""
    with pytest.raises(ConfigurationError, match=words):
        Command(**{"command": "true", **options})


def test_any_value_of_a_variable_is_fine() -> None:
    """Values are bytes to us: new lines, quotes, substitutions."""
    env = {"A": 'x\ny "q" $(id)', "B": ""}

    assert Command(command="true", env=env, timeout=None).env == env


def test_results() -> None:
    """Text is decoded with replacement, and 0 is the only good exit code."""
    good = ExecResult(exit_code=0, stdout=b"caf\xc3\xa9 \xff", stderr=b"\xfe")
    bad = ExecResult(exit_code=3, stderr=b"no\n")

    assert (good.text, good.error_text) == ("café �", "�")
    assert good.ok
    assert good.check() is good
    assert not bad.ok
    with pytest.raises(CommandFailed, match="exit code 3: no") as caught:
        bad.check()
    assert caught.value.result is bad


def test_a_result_does_not_print_its_output() -> None:
    """The repr of a result tells how much there is, not all of it."""
    assert "stdout=<100000 bytes>" in repr(ExecResult(exit_code=0, stdout=b"x" * 100_000))
