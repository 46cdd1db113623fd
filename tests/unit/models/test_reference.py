# SPDX-License-Identifier: Apache-2.0
"""Names of images, as container tools read them."""

from __future__ import annotations

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.reference import is_digest, parse_reference

D = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12", "docker.io/library/python:3.12"),
        ("swebench/sweb.eval.x86_64.django__1", "docker.io/swebench/sweb.eval.x86_64.django__1:latest"),
        ("docker.io/python", "docker.io/library/python:latest"),
        ("index.docker.io/python", "docker.io/library/python:latest"),
        ("localhost/a", "localhost/a:latest"),
        ("localhost:5000/a/b:1", "localhost:5000/a/b:1"),
        ("127.0.0.1:5000/a", "127.0.0.1:5000/a:latest"),
        ("[::1]:5000/a", "[::1]:5000/a:latest"),
        ("registry.example/a-b__c.d/e:V1.0_x", "registry.example/a-b__c.d/e:V1.0_x"),
        ("Registry/a", "Registry/a:latest"),
        (f"ghcr.io/a/b@{D}", f"ghcr.io/a/b@{D}"),
        (f"ghcr.io/a/b:1@{D}", f"ghcr.io/a/b@{D}"),
        ("host:80/a:1", "host:80/a:1"),
        ("a:1/b", "a:1/b:latest"),
        ("z" * 64, f"docker.io/library/{'z' * 64}:latest"),
    ],
)
def test_a_name_is_spelled_out(name, full):
    """Registry, project and tag are filled in; a digest stands for the tag."""
    reference = parse_reference(name)

    assert (full, name) == (str(reference), reference.name)
    assert reference.target == (D if "@" in name else full.rpartition(":")[2])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "'' is no repository"),
        ("Python", "'Python' has capitals"),
        ("docker.io/Python:1", "'Python' has capitals"),
        ("a b", "'a b' is no repository"),
        ("a//b", "is no repository"),
        ("a/", "is no repository"),
        ("-a", "is no repository"),
        ("a___b", "is no repository"),
        ("a:", "'' is no tag"),
        ("a:-1", "'-1' is no tag"),
        (f"a:{'1' * 129}", "is no tag"),
        ("a:b:c", "'b:c' is no tag"),
        ("a@sha256:00", "'sha256:00' is no digest"),
        (f"a@{D.upper()}", "is no digest"),
        ("a@", "'' is no digest"),
        ("https://ghcr.io/a", "leave out https://"),
        ("docker://a", "leave out docker://"),
        ("host:99999/a", "'host:99999' is no registry"),
        ("-.io/a", "'-.io' is no registry"),
        ("a.b_c/d", "'a.b_c' is no registry"),
        ("0a" * 32, "it is an image's id"),
        (f"r.io/{'a' * 255}", "over 255 characters"),
        ("é", "is no repository"),
        ("a\n", "is no repository"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_reason(name, why):
    """The error names it."""
    with pytest.raises(ConfigurationError) as caught:
        parse_reference(name)

    assert why in str(caught.value)
    assert repr(name)[1:40] in str(caught.value)


def test_a_digest_is_one_that_can_be_verified():
    """Of a known algorithm, of its length, in lower case."""
    assert [True, True, False, False, False] == [
        is_digest(text) for text in (D, f"sha512:{'0' * 128}", f"md5:{'0' * 32}", f"sha256:{'0' * 63}", None)
    ]
