# SPDX-License-Identifier: Apache-2.0
"""What registries ask for, in the words of their headers."""

from __future__ import annotations

import pytest

from agentsandbox.hydration.registry_auth import Authorizer, Challenge, challenge_of

HUB = 'Bearer realm="https://auth.docker.io/token",service="registry.docker.io",scope="repository:a/b:pull,push"'
WANTED = Challenge(
    bearer=True,
    realm="https://auth.docker.io/token",
    service="registry.docker.io",
    scope="repository:a/b:pull,push",
)


@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        ([HUB], WANTED),
        ([HUB.replace("Bearer", "bearer").replace(",s", " , S")], WANTED),
        (["Basic realm=here", HUB], WANTED),
        ([f'Basic realm="a, b=c", {HUB}'], WANTED),
        ([f'{HUB}, Basic realm="x"'], WANTED),
        (["Negotiate, Basic"], Challenge(bearer=False)),
        (['BASIC realm="x \\"y\\"", charset="UTF-8"'], Challenge(bearer=False, realm='x "y"')),
        (['Bearer realm="a",realm="b",error="insufficient_scope"'], Challenge(bearer=True, realm="a")),
        (["Bearer"], Challenge(bearer=True)),
        (["Negotiate abc=="], None),
        (["realm=x"], None),
        ([""], None),
        ([], None),
    ],
)
def test_a_challenge_is_read_as_servers_write_it(headers, challenge):
    """Several in a header or several headers; a token is preferred to a password."""
    assert challenge == challenge_of(headers)


def test_a_hostile_challenge_takes_no_time():
    """However often it begins anew."""
    assert None is challenge_of(["a" * 8000, "a=" * 4000, '"\\' * 4000, " " * 8000, 'a="' + "\\x" * 4000])


def test_an_authorizer_shows_no_secrets():
    """But how many it has."""
    assert "<Authorizer [0 registries ask, 0 tokens]>" == repr(Authorizer(http=None, logins=None))
