# SPDX-License-Identifier: Apache-2.0
"""Images to plan for, from the registries that have them: their manifests, over the OCI distribution API."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import attrs
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from agentsandbox.errors import ApiUnavailable, ConfigurationError, SandboxError, Throttled
from agentsandbox.hydration.inputs import Wanted
from agentsandbox.hydration.logins import Logins
from agentsandbox.hydration.manifest import MEDIA_TYPES, PLATFORM, Platform, Resolution, verify
from agentsandbox.hydration.registry_auth import Authorizer, denied
from agentsandbox.hydration.registry_http import Http, refusal
from agentsandbox.models.reference import parse_reference

if TYPE_CHECKING:
    from agentsandbox.hydration.records import ImageUse
    from agentsandbox.models.image import Layer
    from agentsandbox.models.reference import Reference

__all__ = ["RegistryImages", "from_registry"]

_MANIFEST_LIMIT = 4 * 1024 * 1024
"""Bytes of a manifest, as registries themselves limit them."""

_ATTEMPTS = 5
"""How often a question is asked that finds no answer, or too many others."""

_LONGEST_PAUSE = 20.0
"""Seconds between two of them, if the registry does not say; they begin at half a second at most."""


_PATIENCE = 8
"""Images in a row without an answer after which a registry counts as gone."""


@attrs.frozen(kw_only=True)
class RegistryImages:
    """What the registries said."""

    uses: tuple[ImageUse, ...]
    """The images whose layers are known, in the order in which they were named."""
    failed: Mapping[str, SandboxError] = attrs.field(factory=dict)
    """Name → why its layers are not known: :exc:`~agentsandbox.errors.NotFound`, …"""


async def from_registry(
    images: Iterable[str | Wanted],
    *,
    platform: str = PLATFORM,
    plain_http: Iterable[str] = (),
    ca_file: Path | None = None,
    docker_config: Path | None = None,
    concurrency: int = 8,
    deadline: float = 600.0,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
) -> RegistryImages:
    """
    Ask registries what images are made of. Only manifests are fetched, no layers; runs on asyncio.

    Credentials are those of ``docker login``. They are sent to the registry that they are for, and to the token server
    that it names, over TLS or on this machine, and shown to nobody else.

    Args:
        images: What to ask for, as container tools name it, or with how it is used.
        platform: Of images that are there for several: ``OS/ARCHITECTURE`` or ``OS/ARCHITECTURE/VARIANT``.
        plain_http: Registries that are asked without TLS: ``HOST`` or ``HOST:PORT``. Those on loopback addresses are
            anyway.
        ca_file: Certificates that are trusted besides the system's, or those in ``$SSL_CERT_FILE``.
        docker_config: Docker's configuration file. Default: ``config.json`` in ``$DOCKER_CONFIG`` or ``~/.docker``.
        concurrency: Images asked for at a time.
        deadline: Seconds for everything; what has no answer by then has failed.
        sleep: Waits for so many seconds.

    Returns:
        The images, and those that failed; one that fails keeps no other from being read.

    Raises:
        ConfigurationError: If a name is none, naming it, or an option cannot be used; nothing was asked then.

    """
    wanted = [one if isinstance(one, Wanted) else Wanted(reference=parse_reference(one)) for one in images]
    if concurrency < 1 or not deadline > 0:
        raise ConfigurationError("concurrency is 1 or more, and deadline more than 0 seconds")
    runs = Platform(name=platform)
    async with Http.open(plain_http=plain_http, ca_file=ca_file, connections=concurrency) as http:
        reader = _Reader(
            http=http,
            auth=Authorizer(http=http, logins=Logins(path=docker_config)),
            platform=runs,
            deadline=anyio.current_time() + deadline,
            sleep=sleep,
        )
        # Two spellings of one name are one question.
        found = await reader.read({str(one.reference): one.reference for one in wanted}, concurrency)
    late = ApiUnavailable(f"not read within {deadline:g} s")
    answers = {one: found.get(str(one.reference), late) for one in wanted}
    return RegistryImages(
        uses=tuple(one.made_of(layers) for one, layers in answers.items() if isinstance(layers, tuple)),
        failed={one.reference.name: why for one, why in answers.items() if isinstance(why, SandboxError)},
    )


@attrs.define(eq=False, repr=False, kw_only=True)
class _Reader:
    """One round of questions."""

    http: Http
    auth: Authorizer
    platform: Platform
    deadline: float
    sleep: Callable[[float], Awaitable[None]]
    _found: dict[str, tuple[Layer, ...] | SandboxError] = attrs.field(factory=dict, init=False)
    _layers: dict[Layer, Layer] = attrs.field(factory=dict, init=False)
    _silent: dict[str, int] = attrs.field(factory=lambda: defaultdict(int), init=False)
    _resume_at: dict[str, float] = attrs.field(factory=lambda: defaultdict(lambda: -math.inf), init=False)

    async def read(
        self, references: Mapping[str, Reference], concurrency: int
    ) -> Mapping[str, tuple[Layer, ...] | SandboxError]:
        """Ask for all of them; what is not in the answer was not answered in time."""
        queue = deque(references.items())
        with anyio.CancelScope(deadline=self.deadline):
            async with anyio.create_task_group() as group:
                for _ in range(min(concurrency, len(queue))):
                    group.start_soon(self._work, queue)
        return self._found

    async def _work(self, queue: deque[tuple[str, Reference]]) -> None:
        while queue:
            key, reference = queue.popleft()
            registry = reference.registry
            try:
                if self._silent[registry] >= _PATIENCE:
                    raise ApiUnavailable(f"{registry} does not answer, and is not asked any more")
                layers = await self._image(reference)
            except SandboxError as error:
                self._found[key] = error
                self._silent[registry] = self._silent[registry] + 1 if isinstance(error, ApiUnavailable) else 0
            else:
                self._silent[registry] = 0
                # Thousands of images share most of their layers.
                self._found[key] = tuple(self._layers.setdefault(layer, layer) for layer in layers)

    async def _image(self, reference: Reference) -> tuple[Layer, ...]:
        way = Resolution(target=reference.target, platform=self.platform, where=reference.name)
        while way.layers is None:
            way.take(await self._retrying(reference.registry)(self._manifest, reference, way.target))
        return way.layers

    async def _manifest(self, reference: Reference, target: str) -> bytes:
        """Ask once; twice if the registry wants to be shown something."""
        registry = reference.registry
        if (pause := self._resume_at[registry] - anyio.current_time()) > 0:
            if self._resume_at[registry] >= self.deadline:
                raise Throttled(f"{registry} asks to be left alone for {pause:.0f} s more")
            # Registries count refused questions, too: everybody waits.
            await self.sleep(pause)
        url = f"{self.http.base(registry)}/v2/{reference.repository}/manifests/{target}"
        headers = {"Accept": ", ".join(MEDIA_TYPES)}
        header = await self.auth.header(reference)
        answer = await self.http.ask(url, headers=headers, authorization=header, limit=_MANIFEST_LIMIT)
        if answer.status == 401 and not answer.foreign:
            header = await self.auth.renew(reference, answer, header)
            answer = await self.http.ask(url, headers=headers, authorization=header, limit=_MANIFEST_LIMIT)
        if answer.status in (401, 403):
            raise denied(reference, login=await self.auth.logins.of(registry) is not None)
        if answer.status != 200:
            raise refusal(answer, f"no manifest of {reference}")
        if said := answer.headers.get("Docker-Content-Digest"):
            verify(said, answer.body, reference.name)
        return answer.body

    def _retrying(self, registry: str) -> AsyncRetrying:
        """Return the attempts for one question."""
        usual = wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE)

        def pause(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome is not None else None
            asked = getattr(error, "retry_after", None)
            seconds: float = usual(state) if asked is None else asked
            if not isinstance(error, Throttled):
                return seconds
            self._resume_at[registry] = max(self._resume_at[registry], anyio.current_time() + seconds)
            return 0.0

        def enough(state: RetryCallState) -> bool:
            again = max(self._resume_at[registry], anyio.current_time() + state.upcoming_sleep)
            return state.attempt_number >= _ATTEMPTS or again >= self.deadline

        return AsyncRetrying(
            retry=retry_if_exception_type((ApiUnavailable, Throttled)),
            wait=pause,
            stop=enough,
            sleep=self.sleep,
            reraise=True,
        )

    def __repr__(self) -> str:
        failed = sum(isinstance(one, SandboxError) for one in self._found.values())
        return f"<_Reader [{len(self._found)} images read, {failed} failed]>"
