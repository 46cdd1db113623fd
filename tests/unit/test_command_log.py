# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from agentsandbox.client.command_log import CommandLog, as_words
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.command import Command, ExecResult, OutputSizes

pytestmark = pytest.mark.anyio


async def test_an_entry_says_what_became_of_its_command():
    """A result with its sizes; an error with its name, and without a result; nothing for what did not start."""
    log, told = CommandLog(granted_at=0.0), []
    good = log.begin(Command(command=["a", "b c"]), lambda name, **data: told.append(name))
    good.started()
    good.started()
    good.result = ExecResult(exit_code=1, truncated=True, sizes=OutputSizes(stdout=7, stderr=1), wall_seconds=2.0)
    good.end(None)
    bad = log.begin(Command(command="x"), lambda name, **data: told.append(name))
    bad.result = good.result
    bad.end(ValueError())

    assert ["command.started", "command.ended", "command.ended"] == told
    assert "<CommandLog [2 commands]>" == repr(log)
    assert {
        "command": "a 'b c'",
        "exit_code": 1,
        "wall": 2.0,
        "truncated": True,
        "sizes": {"stdout": 7, "stderr": 1},
    } == {key: value for key, value in log.entries[0].items() if key != "started"}
    assert log.first_started == log.entries[0]["started"]
    assert ("ValueError", None) == (log.entries[1]["error"], log.entries[1]["started"])
    assert "exit_code" not in log.entries[1]


async def test_a_process_that_was_given_up_has_neither_result_nor_error():
    """It ended without anybody waiting for it: only the times are known."""
    log = CommandLog(granted_at=0.0)
    log.begin(Command(command="x"), lambda name, **data: None).end(None)

    assert {"command", "started", "wall"} == set(log.entries[0])


@pytest.mark.parametrize(("command", "words"), [("a b", "a b"), (["a", "b"], ("a", "b")), (("a",), ("a",))], ids=repr)
async def test_both_forms_of_a_command(command, words):
    """A script stays one string, a list becomes a tuple."""
    assert words == as_words(command)


@pytest.mark.parametrize("command", [5, None, {"a"}, iter("a")], ids=lambda c: type(c).__name__)
async def test_anything_else_is_no_command(command):
    """It is refused with the value in the message."""
    with pytest.raises(ConfigurationError, match="a command is a string or a list of strings, not "):
        as_words(command)
