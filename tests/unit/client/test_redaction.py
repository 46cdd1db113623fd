# SPDX-License-Identifier: Apache-2.0
"""Credentials do not get into anything that is kept."""

from __future__ import annotations

import base64
import json
import shlex
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsandbox.client.command_log import CommandLog
from agentsandbox.client.redaction import LEAST, Redactor, check_secrets
from agentsandbox.errors import CommandFailed, CommandTimeout, ConfigurationError, SandboxLost
from agentsandbox.models.command import Command, ExecResult

SECRET = "pa$$ w'rd\"é\n/+"


def knowing(*values):
    redactor = Redactor()
    redactor.learn(values)
    return redactor


@pytest.mark.parametrize(
    "spell",
    [
        str,
        json.dumps,
        lambda text: json.dumps(text, ensure_ascii=False),
        repr,
        shlex.quote,
        quote,
        lambda text: quote(text, safe=""),
        lambda text: base64.b64encode(text.encode()).decode(),
        lambda text: base64.urlsafe_b64encode(text.encode()).decode(),
    ],
    ids=["plain", "JSON", "JSON in UTF-8", "repr", "shell", "URL path", "URL", "base64", "base64 for URLs"],
)
def test_a_secret_is_found_however_it_is_spelt(spell):
    """In text and in bytes."""
    redactor, text = knowing(SECRET), f"before {spell(SECRET)} after"

    assert "w'rd" not in redactor.text(text)
    assert redactor.text(text).startswith("before ")
    assert redactor.text(text).endswith(" after")
    assert "[redacted]" in redactor.text(text)
    assert redactor.text(text).encode() == redactor.data(text.encode())


def test_every_long_line_of_a_key_is_a_secret():
    """A program may print one of them only."""
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nshort\n-----END KEY-----\n"
    redactor = knowing(key)

    assert "bad key near [redacted]" == redactor.text("bad key near MIIEvQIBADANBgkqhkiG9w0B")
    assert "a short story" == redactor.text("a short story")


def test_a_secret_that_holds_another_one_is_redacted_whole():
    """The longest comes first."""
    assert "[redacted]!" == knowing("abcd", "abcdefgh").text("abcdefgh!")


def test_containers_are_looked_into_and_the_rest_is_as_it_was():
    """What is returned has the types that it had."""
    redactor, other = knowing("hunter22"), object()
    value = {"hunter22": ["hunter22", ("a", b"x hunter22"), {"hunter22"}], "n": 3, "o": other, "none": None}

    found = redactor.value(value)

    assert {
        "[redacted]": ["[redacted]", ("a", b"x [redacted]"), {"[redacted]"}],
        "n": 3,
        "o": other,
        "none": None,
    } == found
    assert value is Redactor().value(value)


def test_an_error_is_cleaned_with_everything_that_led_to_it():
    """Messages, attributes, output, file names, causes and groups."""
    redactor = knowing("hunter22")
    lost = SandboxLost("died", "while hunter22 ran", stderr=b"hunter22")
    lost.__cause__ = OSError(2, "no hunter22", "/tmp/hunter22")
    failed = CommandFailed(ExecResult(exit_code=1, stdout=b"hunter22", stderr=b"hunter22"))
    failed.__context__ = ValueError("hunter22", 7)
    group = ExceptionGroup("two", [lost, failed, CommandTimeout("total", 1.0, 1.0, b"hunter22", b"")])
    lost.__context__ = group  # a circle ends, too

    redactor.error(group)

    assert ("died: while [redacted] ran", "while [redacted] ran", b"[redacted]") == (
        str(lost),
        lost.detail,
        lost.stderr,
    )
    assert "[Errno 2] no [redacted]: '/tmp/[redacted]'" == str(lost.__cause__)
    assert "exit code 1: [redacted]" == str(failed)
    assert (b"[redacted]", b"[redacted]") == (failed.result.stdout, failed.result.stderr)
    assert ("[redacted]", 7) == failed.__context__.args
    assert b"[redacted]" == group.exceptions[2].stdout


@given(st.text(min_size=LEAST, alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.text())
def test_nothing_of_a_secret_is_left_wherever_it_stands(secret, around):
    """Between anything."""
    left = knowing(secret).text(f"{around}{secret}{around}")

    assert secret not in left.replace("[redacted]", "\0")


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        (["TOKEN"], "^secrets is a mapping of names of variables to values, not a list$"),
        ({"TOKEN": 12345}, "^secret 'TOKEN' is a int, not a string$"),
        ({"TOKEN": "abc"}, "^secret 'TOKEN' is shorter than 4 characters, and could not be redacted$"),
        ({"TOKEN": "abc\0def"}, "^secret 'TOKEN' contains a NUL character$"),
        ({"A=B": "abcdef"}, "^'A=B' is no name of a variable$"),
        ({"": "abcdef"}, "^'' is no name of a variable$"),
    ],
    ids=repr,
)
def test_what_cannot_be_kept_secret_is_refused_without_being_shown(secrets, message):
    """The error names the variable, never its value."""
    with pytest.raises(ConfigurationError, match=message):
        check_secrets(secrets)


def test_a_command_shows_how_many_secrets_it_has_and_none_of_them():
    """Also in a traceback."""
    command = Command(command="true", secrets={"TOKEN": "hunter22"})

    assert "hunter22" not in repr(command)
    assert "<1 secrets>" in repr(command)


def test_the_state_of_a_redactor_is_in_its_repr():
    """Counts, and nothing else."""
    redactor = knowing("hunter22", "hunter22", "other-one")

    assert "<Redactor [2 secrets]>" == repr(redactor)
    assert redactor
    assert not Redactor()


@pytest.mark.anyio
async def test_a_long_command_is_cut_after_its_secrets_were_taken_out():
    """Half of one would not be recognised."""
    told = []
    log = CommandLog(0.0, knowing("0123456789abcdef").text)
    log.begin(
        Command(command="x" * 495 + "0123456789abcdef"), lambda _name, **data: told.append(data["command"])
    ).started()

    assert ["x" * 495 + "[red…"] == told
