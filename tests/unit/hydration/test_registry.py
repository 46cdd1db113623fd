# SPDX-License-Identifier: Apache-2.0
"""Images from registries: a real one on loopback, that answers as registries do and as they should not."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys

import anyio
import pytest
from aiohttp import web

from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    NotFound,
    PermissionDenied,
    ProtocolError,
    Throttled,
)
from agentsandbox.hydration import ImageUse
from agentsandbox.hydration.inputs import Wanted
from agentsandbox.hydration.registry import RegistryImages, _Reader, from_registry
from agentsandbox.hydration.registry_http import Answer, Http
from agentsandbox.models.image import ImageManifest, Layer
from agentsandbox.models.reference import parse_reference

pytestmark = pytest.mark.anyio

INDEX = "application/vnd.oci.image.index.v1+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
SCHEMA_2 = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture
def anyio_backend():
    """The HTTP client dictates asyncio."""
    return "asyncio"


@pytest.fixture(autouse=True)
def docker_config(tmp_path, monkeypatch):
    """No credentials but those of the test; return what writes some down."""
    home = tmp_path / "docker"
    home.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(home))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)

    def write(host, pair="reader:s3cret", **more):
        entry = {"auth": base64.b64encode(pair.encode()).decode(), **more}
        (home / "config.json").write_text(json.dumps({"auths": {host: entry}}))

    return write


class Pauses(list):
    """How long was waited, without waiting."""

    async def __call__(self, seconds):
        self.append(seconds)
        await anyio.sleep(0)


async def read(registry, *names, **options):
    return await from_registry([f"{registry.host}/{name}" for name in names], **{"sleep": Pauses(), **options})


async def why(registry, name="a", **options):
    """Why an image cannot be read."""
    found = await read(registry, name, **options)
    assert () == found.uses
    ((_, error),) = found.failed.items()
    return error


async def test_an_image_is_read_by_its_manifest(registry):
    """As it was named and used; a name twice is two images of one question."""
    registry.image("a", "1", layers={"base": 1000, "own": 10})
    async with registry.serving():
        short, full = f"{registry.host}/a:1", f"{registry.host}/a@{registry.image('a', '2', layers={'base': 1000})}"
        wanted = Wanted(reference=parse_reference(short), rollouts=3, seconds=2.5)
        found = await from_registry([wanted, full])

    layers = (Layer(digest="base", size=1000), Layer(digest="own", size=10))
    assert ImageUse(image=ImageManifest(name=short, layers=layers), rollouts=3, seconds=2.5) == found.uses[0]
    assert (full, {}) == (found.uses[1].name, dict(found.failed))
    assert found.uses[0].image.layers[0] is found.uses[1].image.layers[0]
    assert ["/v2/a/manifests/1", f"/v2/a/manifests/{full.partition('@')[2]}"] == registry.asked()
    assert {None} == {header for _, header in registry.requests}


async def test_two_spellings_are_one_question(registry):
    """Both are answered."""
    registry.image("a")
    async with registry.serving():
        found = await read(registry, "a", "a:latest")

    assert [f"{registry.host}/a", f"{registry.host}/a:latest"] == [use.name for use in found.uses]
    assert 1 == len(registry.requests)


@pytest.mark.parametrize("media_type", [INDEX, LIST])
@pytest.mark.parametrize(("platform", "layer"), [("linux/amd64", "amd64"), ("linux/arm64/v8", "arm64")])
async def test_an_index_is_followed_to_the_platform(registry, media_type, platform, layer):
    """OCI's and Docker's; the image's own manifest is asked for by its digest."""
    entries = [
        {
            "digest": registry.push("a", name, {"layers": [{"digest": name, "size": 1}]}, SCHEMA_2),
            "platform": {"os": "linux", "architecture": name},
        }
        for name in ("arm64", "amd64")
    ]
    registry.push("a", "latest", {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}, media_type)
    async with registry.serving():
        found = await read(registry, "a", platform=platform)
        other = await why(registry, platform="linux/riscv64")

    assert [(Layer(digest=layer, size=1),)] == [use.image.layers for use in found.uses]
    assert f"{registry.host}/a: no image for linux/riscv64, only for linux/amd64, linux/arm64" == str(other)
    assert isinstance(other, ConfigurationError)


async def test_schema_1_is_refused_with_what_to_do(registry):
    """It says no sizes."""
    registry.push(
        "a", "latest", {"schemaVersion": 1, "fsLayers": []}, "application/vnd.docker.distribution.manifest.v1+json"
    )
    async with registry.serving():
        assert "in Docker's schema 1, which says no sizes: push the image again" in str(await why(registry))


async def test_all_that_is_missing_is_named_and_nothing_else_is_lost(registry):
    """Whatever is wrong with one image, the others are read."""
    for name in "abc":
        registry.image(name)
    registry.push("broken", "latest", b"<html>")
    async with registry.serving():
        found = await read(registry, "a", "gone/1", "b", "broken", "gone/2", "c")

    host = registry.host
    assert [f"{host}/{name}" for name in "abc"] == [use.name for use in found.uses]
    assert [f"{host}/gone/1", f"{host}/broken", f"{host}/gone/2"] == list(found.failed)
    gone = found.failed[f"{host}/gone/1"]
    assert isinstance(gone, NotFound)
    assert f"no manifest of {host}/gone/1:latest: 127.0.0.1 answers with HTTP status 404 (MANIFEST_UNKNOWN)" == str(
        gone
    )
    assert not gone.retryable


async def test_a_bad_name_is_refused_before_anybody_is_asked(registry):
    """So is an option that cannot be used."""
    async with registry.serving():
        for names, options, reason in (
            (["a", "B"], {}, "'B' has capitals"),
            (["a"], {"platform": "linux"}, "'linux' is no platform"),
            (["a"], {"concurrency": 0}, "concurrency is 1 or more"),
            (["a"], {"deadline": 0.0}, "deadline more than 0"),
            (["a"], {"plain_http": ["http://r.example"]}, "leave out http://"),
            (["a"], {"plain_http": ["example"]}, "'example' is no registry to ask without TLS"),
        ):
            with pytest.raises(ConfigurationError, match=reason):
                await read(registry, *names, **options)

    assert [] == registry.requests


async def test_a_password_is_sent_when_it_is_asked_for(registry, docker_config):
    """Once it was, it goes along from the beginning."""
    registry.auth = "basic"
    registry.image("a")
    registry.image("b")
    async with registry.serving():
        docker_config(registry.host)
        found = await read(registry, "a", "b", concurrency=1)

    assert 2 == len(found.uses)
    sent = f"Basic {base64.b64encode(b'reader:s3cret').decode()}"
    assert [None, sent, sent] == [header for _, header in registry.requests]


async def test_a_token_is_fetched_with_the_password_and_kept(registry, docker_config):
    """One for each repository, however many images of it; the registry itself never sees the password."""
    registry.auth = "bearer"
    for name in ("a", "b"):
        for tag in ("1", "2", "3"):
            registry.image(name, tag)
    async with registry.serving():
        docker_config(registry.host)
        found = await read(registry, "a:1", "b:1", "a:2", "b:2", "a:3", "b:3")

    assert (6, {}) == (len(found.uses), dict(found.failed))
    assert ["repository:a:pull", "repository:b:pull"] == sorted(registry.tokens.values())
    assert {"/token?service=double&scope=repository:a:pull", "/token?service=double&scope=repository:b:pull"} == {
        path.replace("%3A", ":") for path in registry.asked("/token")
    }
    sent = f"Basic {base64.b64encode(b'reader:s3cret').decode()}"
    assert {sent} == {header for path, header in registry.requests if path.startswith("/token")}
    assert {None, *registry.tokens} == {header for path, header in registry.requests if path.startswith("/v2/")}


async def test_what_is_public_needs_no_credentials(registry):
    """A token server gives tokens to anybody."""
    registry.auth, registry.public = "bearer", True
    registry.image("a")
    async with registry.serving():
        found = await read(registry, "a")

    assert 1 == len(found.uses)
    assert ["/v2/a/manifests/latest", "/token", "/v2/a/manifests/latest"] == [
        path.partition("?")[0] for path, _ in registry.requests
    ]


async def test_an_identity_token_is_exchanged(registry, docker_config):
    """It is posted to the token server, and to nobody else."""
    registry.auth, registry.identity_token = "bearer", "idt"
    registry.image("a")
    async with registry.serving():
        docker_config(registry.host, identitytoken="idt")
        found = await read(registry, "a")

    assert 1 == len(found.uses)
    assert ["/token"] == registry.asked("/token")
    assert "idt" not in str(registry.requests)


async def test_a_token_that_is_over_is_fetched_again(registry, docker_config):
    """Before it is refused if its server says how long it is good for, or else after."""
    registry.auth, registry.expires_in = "bearer", 0.000001
    registry.image("a", "1")
    registry.image("a", "2")
    async with registry.serving():
        docker_config(registry.host)
        await read(registry, "a:1", "a:2", concurrency=1)
        assert (2, 3) == (len(registry.tokens), len(registry.asked()))

        registry.requests.clear()
        registry.expires_in = "soon"

        async def forget(request):
            registry.tokens.clear()
            return registry._manifest(request)

        registry.answers = [registry._manifest, registry._manifest, forget]
        found = await read(registry, "a:1", "a:2", concurrency=1)

    assert 2 == len(found.uses)
    assert (2, 4) == (len(registry.asked("/token")), len(registry.asked()))


@pytest.mark.parametrize(
    ("auth", "login", "reason"),
    [
        ("basic", None, "asks for a password: docker login"),
        ("basic", "reader:wrong", "no such image, or the credentials for .* may not read it"),
        ("bearer", None, "no such image, or it is private: docker login"),
        ("bearer", "reader:wrong", "no such image, or the credentials for .* may not read it"),
    ],
)
async def test_whoever_is_refused_is_told_what_to_do(registry, docker_config, auth, login, reason):
    """It is not tried again, and the password is in no message."""
    registry.auth = auth
    registry.image("a")
    async with registry.serving():
        if login:
            docker_config(registry.host, login)
        error = await why(registry)

    assert isinstance(error, PermissionDenied)
    with pytest.raises(PermissionDenied, match=reason):
        raise error
    assert "wrong" not in str(error)
    assert len(registry.asked()) <= 2


async def test_a_token_that_is_refused_is_not_fetched_for_ever(registry):
    """401 after 401 is an answer."""
    registry.auth, registry.public = "bearer", True

    def never(request):
        challenge = f'Bearer realm="http://{registry.host}/token",service="double"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    registry.answers = [never] * 5
    async with registry.serving():
        error = await why(registry)

    assert isinstance(error, PermissionDenied)
    assert (2, 1) == (len(registry.asked()), len(registry.asked("/token")))
    assert ["repository:a:pull"] == list(registry.tokens.values())


@pytest.mark.parametrize(
    ("challenge", "reason"),
    [
        ("Negotiate", "asks for neither a token nor a password"),
        (None, "asks for neither a token nor a password"),
        ('Bearer realm="ftp://r.example/token"', "something that is no URL of http or https"),
        ('Bearer realm="file:///etc/passwd"', "something that is no URL of http or https"),
        ('Bearer realm="/token"', "something that is no URL of http or https"),
        ("Bearer", "something that is no URL of http or https"),
        ('Bearer realm="https://u:p@r.example/token"', "something that is no URL of http or https"),
        ('Bearer realm="http://[::1/token"', "something that is no URL of http or https"),
        ('Bearer realm="http://r.example/token"', "refers to r.example, and not over TLS"),
    ],
)
async def test_nobody_is_sent_where_he_should_not_go(registry, docker_config, challenge, reason):
    """The credentials stay here."""
    registry.answers = [web.Response(status=401, headers={"WWW-Authenticate": challenge} if challenge else None)]
    async with registry.serving():
        docker_config(registry.host)
        error = await why(registry)

    assert reason in str(error)
    assert 1 == len(registry.requests)


async def test_credentials_go_nowhere_without_tls(registry, docker_config):
    """Neither to a registry that is asked without it, nor to a token server; without credentials both are asked."""
    async with Http.open(plain_http=["r.example:5000", "open.example"], ca_file=None, connections=1) as http:
        assert "http://r.example:5000" == http.base("r.example:5000")
        assert "https://r.example" == http.base("r.example")
        assert "http://open.example:1" == http.base("open.example:1")
        assert "https://registry-1.docker.io" == http.base("docker.io")
        assert ["http://[::1]:5000", "http://localhost"] == [http.base("[::1]:5000"), http.base("localhost")]
        assert [True, True, True, False] == [
            http.safe(url) for url in ("https://r.example", "http://[::1]:5/x", "http://localhost", "http://r.example")
        ]
        assert "http://open.example/x" == str(http.follow("http://open.example/x", "https://r.example"))
        # The registry of somebody else refers to nothing on this machine.
        with pytest.raises(ProtocolError, match=r"r.example refers to 127.0.0.1, and not over TLS"):
            http.follow("http://127.0.0.1/x", "https://r.example")
        with pytest.raises(ProtocolError, match=r"r.example refers to r.example, and not over TLS"):
            http.follow("http://r.example/x", "https://r.example/y")

    registry.answers = [
        web.Response(status=401, headers={"WWW-Authenticate": 'Bearer realm="http://open.example/token"'})
    ]
    async with registry.serving():
        docker_config(registry.host)
        error = await why(registry, plain_http=["open.example"])
    assert f"the credentials for {registry.host} are not sent without TLS" == str(error)


async def test_a_redirect_to_somebody_else_takes_no_credentials_along(registry, other_registry, docker_config):
    """Whoever is at its end is told neither password nor token, even if he asks for one."""
    registry.auth = "basic"
    other_registry.image("a")
    async with registry.serving(), other_registry.serving():
        docker_config(registry.host)
        other = f"http://{other_registry.host}/v2/a/manifests/latest"
        away = [
            web.Response(status=401, headers={"WWW-Authenticate": "Basic"}),
            web.Response(status=307, headers={"Location": "/v2/elsewhere"}),
            web.Response(status=302, headers={"Location": other}),
        ]
        registry.answers = list(away)
        found = await read(registry, "a")

        other_registry.auth = "basic"
        registry.answers = [web.Response(status=302, headers={"Location": other})]
        error = await why(registry)

    assert 1 == len(found.uses)
    assert isinstance(error, PermissionDenied)
    sent = f"Basic {base64.b64encode(b'reader:s3cret').decode()}"
    assert [None, sent, sent] == [header for _, header in registry.requests[:3]]
    assert [None, None] == [header for _, header in other_registry.requests]


async def test_redirects_come_to_an_end(registry):
    """Six are too many, and one to another kind of URL is not followed."""
    registry.answers = [lambda request: web.Response(status=302, headers={"Location": "/v2/again"})] * 10
    async with registry.serving():
        assert "127.0.0.1 redirects more than 5 times" == str(await why(registry))
        assert 6 == len(registry.requests)
        registry.answers = [web.Response(status=302, headers={"Location": "file:///etc/passwd"})]
        assert "something that is no URL of http or https" in str(await why(registry))


async def test_whoever_asks_too_often_waits_as_long_as_he_is_told(registry):
    """All images of that registry wait, and then are read."""
    registry.image("a")
    registry.image("b")
    registry.answers = [web.Response(status=429, headers={"Retry-After": "7"})]
    pauses = Pauses()
    async with registry.serving():
        found = await read(registry, "a", "b", sleep=pauses, concurrency=1)

    assert 2 == len(found.uses)
    assert [0.0] == [pause for pause in pauses if pause < 1]
    assert 2 == len([pause for pause in pauses if 6 < pause <= 7])
    assert 3 == len(registry.requests)


async def test_nobody_waits_for_what_comes_after_the_deadline(registry):
    """The refusal is told at once, to the images that were not asked for, too."""
    registry.answers = [web.Response(status=429, headers={"Retry-After": "3600"})]
    pauses = Pauses()
    async with registry.serving():
        found = await read(registry, "a", "b", sleep=pauses, concurrency=1)

    assert ([], 1) == (pauses, len(registry.requests))
    assert [Throttled, Throttled] == [type(error) for error in found.failed.values()]
    assert "asks to be left alone for 3600 s more" in str(found.failed[f"{registry.host}/b"])


async def test_server_errors_are_tried_again_and_not_for_ever(registry):
    """Five times in all, with pauses that grow, or as long as the server says."""
    registry.image("a")
    registry.answers = [web.Response(status=503, headers={"Retry-After": "0"}), web.Response(status=500)]
    pauses = Pauses()
    async with registry.serving():
        found = await read(registry, "a", sleep=pauses)
        assert (1, 2, 0.0) == (len(found.uses), len(pauses), pauses[0])
        assert pauses[1] <= 1.0

        registry.requests.clear()
        registry.answers = [lambda request: web.Response(status=502)] * 9
        error = await why(registry)

    assert isinstance(error, ApiUnavailable)
    assert "127.0.0.1 answers with HTTP status 502" in str(error)
    assert 5 == len(registry.requests)


async def test_a_registry_that_is_gone_is_given_up(registry):
    """Eight images without an answer are enough; another registry is asked all the same."""
    registry.image("a")
    async with registry.serving():
        names = [f"127.0.0.1:1/i{number}" for number in range(20)]
        found = await from_registry([*names, f"{registry.host}/a"], concurrency=1, sleep=Pauses())

    assert 1 == len(found.uses)
    said = [str(error) for error in found.failed.values()]
    assert 8 == len([text for text in said if text.startswith("cannot connect to 127.0.0.1:1")])
    assert 12 == said.count("127.0.0.1:1 does not answer, and is not asked any more")


async def test_a_registry_that_answers_now_and_then_is_not_gone(registry):
    """Eight in a row are: an image that is read begins the count anew, and so does one that is not there."""
    registry.image("a")
    bad = [lambda request: web.Response(status=502)] * 5 * 7  # seven images, each asked for five times
    registry.answers = [*bad, registry._manifest, *bad, registry._manifest, *bad]
    first, second, third = ([f"{letter}{number}" for number in range(7)] for letter in "xyz")
    async with registry.serving():
        found = await read(registry, *first, "a", *second, "gone", *third, concurrency=1)

    assert 1 == len(found.uses)
    said = [str(error) for error in found.failed.values()]
    assert (21, 1) == (len([text for text in said if "502" in text]), len([text for text in said if "404" in text]))


async def test_an_answer_that_breaks_off_is_asked_for_again(registry):
    """What was announced and did not come is not taken for all."""
    registry.image("a")

    async def break_off(request):
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b'{"layers": []}')
        request.transport.close()
        return response

    registry.answers = [break_off]
    async with registry.serving():
        found = await read(registry, "a")

    assert (1, 2) == (len(found.uses), len(registry.requests))


@pytest.mark.parametrize("by", ["digest", "header"])
async def test_what_is_not_what_its_digest_says_is_refused(registry, by):
    """Whether the caller named the digest or the registry."""
    digest = registry.image("a")
    other = json.dumps({"layers": [{"digest": "evil", "size": 1}]}).encode()
    name = "a" if by == "header" else f"a@{digest}"
    registry.answers = [web.Response(body=other, headers={"Docker-Content-Digest": digest} if by == "header" else None)]
    async with registry.serving():
        error = await why(registry, name)

    assert isinstance(error, ConfigurationError)
    assert f"what {digest} should be has the digest sha256:" in str(error)


async def test_an_answer_may_not_be_too_large(registry):
    """Announced or not, it is not kept; neither is one that is compressed unasked."""

    async def endless(request):
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            while True:
                await response.write(b" " * 65536)
        except ConnectionError:
            pass
        return response

    registry.answers = [endless, web.Response(body=b"x", headers={"Content-Encoding": "gzip"})]
    async with registry.serving():
        assert "127.0.0.1 answers with more than 4194304 bytes" == str(await why(registry))
        assert "127.0.0.1 compresses its answer, which nobody asked for" == str(await why(registry))


@pytest.mark.parametrize(
    "said",
    [b"{", b"[]", b"{}", b'{"token": 5}', b'{"token": "a\\nb"}', b'{"token": ""}', b'{"access_token": "\xc3\xa9"}'],
)
async def test_a_token_that_cannot_be_sent_is_refused(registry, said):
    """What it was is in no message."""

    async def token(request):
        return web.Response(body=said)

    registry.auth, registry._token = "bearer", token
    async with registry.serving():
        error = await why(registry)

    assert "127.0.0.1 gives no token that can be sent" == str(error)
    assert isinstance(error, ProtocolError)


async def _not_found():
    return web.Response(status=404)


async def test_a_token_server_that_fails_is_asked_again(registry):
    """Under the same rule as a registry."""
    registry.auth, registry.public = "bearer", True
    registry.image("a")
    good, calls = registry._token, []

    async def token(request):
        calls.append(request)
        return web.Response(status=503) if len(calls) == 1 else await good(request)

    registry._token = token
    async with registry.serving():
        assert 1 == len((await read(registry, "a")).uses)
        registry._token = lambda request: _not_found()
        error = await why(registry)

    assert f"a token for {registry.host}: 127.0.0.1 answers with HTTP status 404" == str(error)


async def test_no_secret_is_in_a_message_or_a_repr(registry, docker_config):
    """Whatever the registry sends back, and wherever it puts what it was sent."""

    async def echo(request):
        sent = request.headers["Authorization"]
        body = {"errors": [{"code": sent, "message": sent, "detail": sent}], "mediaType": sent, "manifests": [sent]}
        status = int(request.query_string or 418)
        return web.json_response(body, status=status, headers={"Docker-Content-Digest": sent}, reason=sent)

    async def echo_200(request):
        sent = request.headers["Authorization"]
        entry = {"digest": sent, "platform": {"os": sent, "architecture": sent}, "size": sent}
        return web.json_response({"manifests": [entry], "layers": sent, "schemaVersion": sent})

    async def echo_location(request):
        return web.Response(status=302, headers={"Location": f"ftp://{request.headers['Authorization']}/"})

    told = []
    async with registry.serving():
        docker_config(registry.host)
        for answer in (echo, echo_200, echo_location):
            registry.answers = [web.Response(status=401, headers={"WWW-Authenticate": "Basic"}), answer]
            told.append(await why(registry))

    secret = base64.b64encode(b"reader:s3cret").decode()
    for error in told:
        chain = [error, error.__cause__, error.__context__]
        assert not [one for one in chain for text in (secret, "s3cret") if text in f"{one} {one!r}"]


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3)])
async def test_so_many_are_asked_for_at_a_time_and_no_more(registry, concurrency, most):
    """Until that many are there, none is answered."""
    full = anyio.Event()

    async def wait(request):
        if registry.active == most:
            full.set()
        await full.wait()
        return registry._manifest(request)

    for number in range(12):
        registry.image(f"i{number}")
    registry.answers = [wait] * 12
    async with registry.serving():
        found = await read(registry, *(f"i{number}" for number in range(12)), concurrency=concurrency)

    assert (12, most) == (len(found.uses), registry.most_active)


async def test_what_has_no_answer_by_the_deadline_has_failed(registry):
    """What was read before is kept."""
    registry.image("a")

    async def never(request):
        await anyio.sleep_forever()

    registry.answers = [registry._manifest, never]
    async with registry.serving():
        found = await read(registry, "a", "b", "c", concurrency=1, deadline=1.0)

    assert [f"{registry.host}/a"] == [use.name for use in found.uses]
    assert {"not read within 1 s"} == {str(error) for error in found.failed.values()}
    assert 2 == len(found.failed)


async def test_a_helper_has_the_credentials(registry, docker_config, tmp_path, monkeypatch):
    """Asked once, however many images there are."""
    log = tmp_path / "log"
    program = tmp_path / "docker-credential-mine"
    program.write_text(f'#!/bin/sh\necho "$1 $(cat)" >> {log}\necho \'{{"Username": "reader", "Secret": "s3cret"}}\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    registry.auth = "bearer"
    for name in "abcd":
        registry.image(name)
    async with registry.serving():
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"credHelpers": {registry.host: "mine"}}))
        found = await read(registry, *"abcd", docker_config=config)

    assert 4 == len(found.uses)
    assert f"get {registry.host}\n" == log.read_text()


@pytest.fixture
def certificate(tmp_path):
    """A certificate of registry.test, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    files = ("-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem")
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=registry.test -addext subjectAltName=DNS:registry.test"
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return served, tmp_path / "cert.pem", tmp_path / "key.pem"


async def test_a_certificate_is_trusted_if_the_caller_says_so(certificate, registry, monkeypatch):
    """By a file, or by the variable that OpenSSL reads; a file that has none is refused."""
    served, file, key = certificate
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **kind: look_up(host.replace("registry.test", "127.0.0.1"), *more, **kind),
    )
    registry.image("a")
    async with registry.serving(tls=served):
        name = f"registry.test:{registry.host.rpartition(':')[2]}/a"
        trusted = await from_registry([name], ca_file=file)
        unknown = await from_registry([name])
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        named = await from_registry([name])
        for path in (file.with_name("no.pem"), key):
            with pytest.raises(ConfigurationError, match="cannot read certificates from"):
                await from_registry([name], ca_file=path)

    assert (1, 0, 1) == (len(trusted.uses), len(unknown.uses), len(named.uses))
    assert "is not trusted" in str(unknown.failed[name])


async def test_a_proxy_is_gone_through(registry, monkeypatch):
    """As the environment says; never to this machine itself."""
    registry.image("a")
    asked = []

    async def proxy(request):
        asked.append(str(request.url))
        return web.Response(status=404)

    async with registry.serving():
        registry.answers = [proxy]
        monkeypatch.setenv("HTTP_PROXY", f"http://{registry.host}")
        (error,) = (await from_registry(["r.example/a"], plain_http=["r.example"])).failed.values()
        found = await read(registry, "a")

    assert ["http://r.example/v2/a/manifests/latest"] == asked
    assert isinstance(error, NotFound)
    assert 1 == len(found.uses)


async def test_a_password_that_was_good_is_not_tried_again_where_it_is_not(registry, docker_config):
    """One image may be private to somebody else: two questions, and no more."""
    registry.auth = "basic"
    registry.image("a")
    private = web.Response(status=401, headers={"WWW-Authenticate": "Basic"})
    async with registry.serving():
        docker_config(registry.host)
        registry.answers = [registry._manifest, registry._manifest, private]
        found = await read(registry, "a", "b", concurrency=1)

    assert (1, 3) == (len(found.uses), len(registry.requests))
    assert [PermissionDenied] == [type(error) for error in found.failed.values()]


async def test_states_show_in_a_repr():
    """Without headers, tokens or passwords."""
    reader = _Reader(http=None, auth=None, platform=None, deadline=0.0, sleep=anyio.sleep)
    assert "<_Reader [0 images read, 0 failed]>" == repr(reader)
    assert "RegistryImages(uses=(), failed={})" == repr(RegistryImages(uses=()))
    assert "Answer(status=200, host='r.example', foreign=False)" == repr(
        Answer(status=200, headers={"A": "s3cret"}, body=b"s3cret", host="r.example")
    )


async def test_without_its_client_it_says_what_to_install(monkeypatch):
    """It comes with what speaks to clusters."""
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigurationError, match="pip install kubernetes-asyncio"):
        await from_registry(["a"])


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_trio_is_refused_by_name():
    """The HTTP client is asyncio's."""
    with pytest.raises(ConfigurationError, match="registries are asked on asyncio, not on trio"):
        await from_registry(["a"])
