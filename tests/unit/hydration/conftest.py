# SPDX-License-Identifier: Apache-2.0
"""Images, nodes and registries that are made up."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
from contextlib import asynccontextmanager
from random import Random

import pytest
from aiohttp import web

from agentsandbox.hydration import ImageUse, NodeFacts
from agentsandbox.models.image import ImageManifest, Layer

GB = 1000**3
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"


def image(name: str, own: int = 100_000_000, base: str | None = None, base_size: int = 500_000_000) -> ImageManifest:
    """An image of one layer of its own, on a base that others may have too; on disk as large as fetched."""
    layers = () if base is None else (Layer(digest=base, size=base_size, unpacked=base_size),)
    return ImageManifest(name=name, layers=(*layers, Layer(digest=f"own {name}", size=own, unpacked=own)))


def random_instance(seed: int) -> tuple[list[ImageUse], list[NodeFacts]]:
    """Images of a few families, with rollouts of different lengths, and a few nodes."""
    random = Random(seed)
    bases = [(f"base {n}", int(random.uniform(50e6, 900e6))) for n in range(random.randint(1, 12))]
    uses = []
    for number in range(random.randint(150, 400)):
        base, size = random.choice(bases)
        own = int(random.lognormvariate(18.5, 0.7))
        manifest = image(f"image {number}", own, base, size)
        seconds = random.choice([5.0, 20.0, 60.0])
        uses.append(ImageUse(image=manifest, rollouts=random.randint(1, 8), seconds=seconds))
    nodes = [NodeFacts(name=f"node-{n}", disk=1000 * GB) for n in range(random.randint(2, 12))]
    return uses, nodes


@pytest.fixture
def make_image():
    return image


@pytest.fixture
def make_instance():
    return random_instance


class RegistryDouble:
    """An image registry on loopback, and its token server; ``requests`` has what it was asked, and with what header."""

    def __init__(self) -> None:
        self.auth: str | None = None
        self.login: tuple[str, str] | None = ("reader", "s3cret")
        self.identity_token = ""
        self.public = False
        self.tokens: dict[str, str] = {}
        self.expires_in: object = 300
        self.realm: str | None = None
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.answers: list[object] = []  # what comes before anything else: answers, or what makes one of a request
        self.active = self.most_active = 0
        self.host = ""

    @asynccontextmanager
    async def serving(self, *, tls=None):
        """Serve, with a certificate if one is given."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
            await site.start()
            self.host = "{}:{}".format(*site._server.sockets[0].getsockname()[:2])
            yield self
        finally:
            await runner.cleanup()

    def push(self, repository: str, tag: str, document: object, media_type: str = OCI_MANIFEST) -> str:
        """Have a document there, by tag and by digest; return its digest."""
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        for target in (tag, digest):
            self.manifests[repository, target] = (media_type, body)
        return digest

    def image(self, repository: str, tag: str = "latest", *, layers: dict[str, int] | None = None) -> str:
        """Have an image there; return its digest."""
        sizes = layers or {f"own {repository}:{tag}": 100}
        listed = [{"mediaType": GZIP, "digest": name, "size": size} for name, size in sizes.items()]
        return self.push(repository, tag, {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": listed})

    def asked(self, part: str = "/v2/") -> list[str]:
        """Return the paths that it was asked for."""
        return [path for path, _ in self.requests if part in path]

    async def _answer(self, request):
        self.requests.append((request.path_qs, request.headers.get("Authorization")))
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            if self.answers and request.path.startswith("/v2/"):
                answer = self.answers.pop(0)
                said = answer(request) if callable(answer) else answer
                return await said if inspect.isawaitable(said) else said
            if request.path == "/token":
                return await self._token(request)
            return self._manifest(request)
        finally:
            self.active -= 1

    def _basic(self) -> str:
        return f"Basic {base64.b64encode(':'.join(self.login).encode()).decode()}"

    async def _token(self, request):
        if request.method == "POST":
            form = await request.post()
            if form.get("grant_type") != "refresh_token" or form.get("refresh_token") != self.identity_token:
                return refused(401, "UNAUTHORIZED")
            scopes = form["scope"]
        else:
            given = request.headers.get("Authorization")
            if given != (None if self.public else self._basic()):
                return refused(401, "UNAUTHORIZED")
            scopes = " ".join(request.query.getall("scope"))
        token = f"t{len(self.tokens)}"
        self.tokens[f"Bearer {token}"] = scopes
        return web.json_response({"access_token": token, "expires_in": self.expires_in})

    def _manifest(self, request):
        repository, _, target = request.path.removeprefix("/v2/").partition("/manifests/")
        scope = f"repository:{repository}:pull"
        given = request.headers.get("Authorization")
        if self.auth == "basic" and given != self._basic():
            return refused(401, "UNAUTHORIZED", {"WWW-Authenticate": 'Basic realm="here"'})
        if self.auth == "bearer" and scope not in self.tokens.get(given, ""):
            realm = self.realm or f"http://{self.host}/token"
            says = f'Bearer realm="{realm}",service="double",scope="{scope}"'
            return refused(401, "UNAUTHORIZED", {"WWW-Authenticate": says})
        if (repository, target) not in self.manifests:
            return refused(404, "MANIFEST_UNKNOWN")
        media_type, body = self.manifests[repository, target]
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        return web.Response(body=body, headers={"Content-Type": media_type, "Docker-Content-Digest": digest})


def refused(status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    """What registries answer when they do not."""
    return web.json_response({"errors": [{"code": code, "message": "no"}]}, status=status, headers=headers)


@pytest.fixture
def registry() -> RegistryDouble:
    return RegistryDouble()


@pytest.fixture
def other_registry() -> RegistryDouble:
    return RegistryDouble()
