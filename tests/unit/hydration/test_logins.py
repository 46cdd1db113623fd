# SPDX-License-Identifier: Apache-2.0
"""Credentials as ``docker login`` leaves them."""

from __future__ import annotations

import base64
import json
import os
import sys

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import logins as module
from agentsandbox.hydration.logins import Login, Logins

pytestmark = pytest.mark.anyio


def auth(text):
    return {"auth": base64.b64encode(text.encode()).decode()}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write a configuration file where it is looked for."""

    def write(document):
        text = document if isinstance(document, str) else json.dumps(document)
        (tmp_path / "config.json").write_text(text)
        return Logins()

    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return write


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """Have a credential helper on the path; it writes down how it was called."""

    def write(name, prints, code=0):
        path = tmp_path / f"docker-credential-{name}"
        log = tmp_path / f"{name}.log"
        path.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"open({str(log)!r}, 'a').write(f'{{sys.argv[1:]}} {{sys.stdin.read()!r}}\\n')\n"
            f"print({prints!r})\nsys.exit({code})\n"
        )
        path.chmod(0o755)
        return log

    monkeypatch.setenv("PATH", str(tmp_path))
    return write


async def test_a_file_has_names_and_passwords(config):
    """Under a host, a URL of one, or Docker Hub's own key; the very name comes first."""
    logins = config(
        {
            "auths": {
                "https://index.docker.io/v1/": auth("hub:a:b"),
                "https://r.example/v2/": auth("url:p"),
                "r.example": auth("host:p"),
                "http://old.example/v1/": {"username": "u", "password": "p"},
                "token.example": {**auth("u:p"), "identitytoken": "idt"},
                "elsewhere.example": {},
            }
        }
    )

    assert Login(user="hub", password="a:b") == await logins.of("docker.io")
    assert Login(user="host", password="p") == await logins.of("r.example")
    assert Login(user="u", password="p") == await logins.of("old.example")
    assert "idt" == (await logins.of("token.example")).identity_token
    assert None is await logins.of("elsewhere.example")
    assert None is await logins.of("r.example:5000")
    assert "<Logins [6 registries asked for]>" == repr(logins)


async def test_without_a_file_there_are_none(config, tmp_path):
    """Neither where the variable says, nor where the caller says."""
    assert None is await Logins().of("r.example")
    assert None is await Logins(path=tmp_path / "other").of("r.example")


async def test_the_file_is_looked_for_at_home(monkeypatch, tmp_path):
    """If the variable says nothing."""
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text(json.dumps({"auths": {"r.example": auth("u:p")}}))

    assert Login(user="u", password="p") == await Logins().of("r.example")


async def test_a_helper_is_asked_once_and_without_a_shell(config, helper):
    """The one for the registry comes before the one for all; it is told which registry on standard input."""
    own = helper("own", json.dumps({"Username": "u", "Secret": "$(id)"}))
    every = helper("every", json.dumps({"ServerURL": "x", "Username": "<token>", "Secret": "idt"}))
    logins = config({"credHelpers": {"r.example": "own"}, "credsStore": "every", "auths": {"r.example": auth("f:f")}})

    assert Login(user="u", password="$(id)") == await logins.of("r.example")
    assert Login(user="u", password="$(id)") == await logins.of("r.example")
    assert Login(identity_token="idt") == await logins.of("docker.io")
    assert "['get'] 'r.example'\n" == own.read_text()
    assert "['get'] 'https://index.docker.io/v1/'\n" == every.read_text()


async def test_a_helper_that_has_none_leaves_the_file(config, helper):
    """It says so in words, with an exit code."""
    helper("empty", "credentials not found in native keychain", 1)
    logins = config({"credsStore": "empty", "auths": {"r.example": auth("f:f")}})

    assert Login(user="f", password="f") == await logins.of("r.example")
    assert None is await logins.of("other.example")


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("{", "it is no JSON"),
        ("[]", "holds no object"),
        ({"auths": []}, None),
        ({"auths": [1]}, "auths is no object"),
        ({"auths": {"r.example": "s3cret"}}, "the entry for r.example is no object"),
        ({"auths": {"r.example": {"auth": "s3cret"}}}, "the entry for r.example is damaged"),
        ({"auths": {"r.example": auth("s3cret")}}, "the entry for r.example is damaged"),
        ({"auths": {"r.example": {"auth": ["s3cret"]}}}, "the entry for r.example is damaged"),
        ({"credsStore": "../s"}, "'../s' is no name of a credential helper"),
        ({"credsStore": "not-there"}, "cannot run docker-credential-not-there"),
        ({"credsStore": "fails"}, "docker-credential-fails failed for r.example: exit code 3"),
        ({"credsStore": "babbles"}, "not what helpers print"),
        ({"credsStore": "numbers"}, "not what helpers print"),
    ],
)
async def test_what_is_damaged_is_said_without_what_it_holds(config, helper, document, why):
    """Each time that it is asked for, by one look; no secret is in the message or in what it comes from."""
    log = helper("fails", "s3cret", 3)
    helper("babbles", "s3cret")
    helper("numbers", json.dumps({"Username": "u", "Secret": 3}))
    logins = config(document)
    if why is None:
        assert None is await logins.of("r.example")
        return

    for _ in range(2):
        with pytest.raises(ConfigurationError, match=why) as caught:
            await logins.of("r.example")
        assert "s3cret" not in f"{caught.value} {caught.value.__cause__!r}"
    assert not log.exists() or "['get'] 'r.example'\n" == log.read_text()


async def test_a_helper_that_hangs_is_stopped(config, tmp_path, monkeypatch):
    """It is not waited for any longer than it is good for."""
    program = tmp_path / "docker-credential-hangs"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(module, "_HELPER_TIMEOUT", 0.05)

    with pytest.raises(
        ConfigurationError, match=r"docker-credential-hangs gave no credentials for r.example in 0.05 s"
    ):
        await config({"credsStore": "hangs"}).of("r.example")


async def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    """A directory, for one."""
    with pytest.raises(ConfigurationError, match=r"cannot read .*: Is a directory"):
        await Logins(path=tmp_path).of("r.example")


async def test_a_login_never_shows_itself():
    """Nor what it is made of."""
    assert "<Login>" == repr(Login(user="me", password="s3cret", identity_token="idt"))
    assert "" == Login(user="me").basic
