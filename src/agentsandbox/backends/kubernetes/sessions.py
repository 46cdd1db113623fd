# SPDX-License-Identifier: Apache-2.0
"""How commands reach a Pod: the session that it gets, and how that one finds its way back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import anyio

from agentsandbox.backends.kubernetes.attach import NoPython, NoRunner
from agentsandbox.backends.kubernetes.manifests import FirstProcess, exec_params, exec_path, pods_path
from agentsandbox.backends.kubernetes.watch import backoff
from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    InfrastructureError,
    NotFound,
    ProvisionError,
    SandboxLost,
    Throttled,
)
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.session import Session
from agentsandbox.transport.websocket import MAX_MESSAGE, PROTOCOLS, ExecSocket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.attach import Attacher
    from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
    from agentsandbox.backends.kubernetes.watch import Reflector
    from agentsandbox.transport import ByteStream

__all__ = ["MODES", "Sessions"]

MODES = ("auto", "runner", "shell", "direct")
"""How commands may reach a sandbox; the first takes the best that an image offers."""

REOPEN_WITHIN = 25.0
"""Seconds that one attempt to attach again waits for an API server that does not answer."""


class Sessions:
    """
    Makes sessions for Pods, as good as their images allow.

    Args:
        api: The API server.
        reflector: The watch of the run's Pods.
        attacher: What opens streams to runners.
        mode: One of :data:`MODES`.

    """

    def __init__(self, api: KubernetesApi, reflector: Reflector, attacher: Attacher, *, mode: str) -> None:
        self._api = api
        self._reflector = reflector
        self._attacher = attacher
        self._mode = mode
        self._levels: dict[str, ExecLevel] = {}

    def __repr__(self) -> str:
        return f"<Sessions [{self._mode}, {len(self._levels)} images known]>"

    def level(self, image: str) -> ExecLevel:
        """Return what is known, or hoped, of an image."""
        if self._mode != "auto":
            return ExecLevel(self._mode)
        return self._levels.get(image, ExecLevel.RUNNER)

    def first_process(self, image: str) -> FirstProcess:
        """Return what a container of an image starts with."""
        return FirstProcess.IMAGE if self.level(image) is ExecLevel.DIRECT else FirstProcess.RUNNER

    def step_down(self, image: str, error: ProvisionError) -> bool:
        """Note that an image has no shell, if that is what an error says; whether another try makes sense then."""
        if self._mode != "auto" or self.level(image) is ExecLevel.DIRECT or 'exec: "sh"' not in str(error):
            return False
        self._levels[image] = ExecLevel.DIRECT
        return True

    async def make(self, sandbox: KubernetesSandbox) -> Session:
        """
        Make the session of a sandbox, which then has to be run.

        Raises:
            ProvisionError: If the image does not offer what it takes.
            ControlPlaneError: If the API server refuses.

        """
        image = sandbox.spec.image
        level = self.level(image)
        if level is ExecLevel.RUNNER:
            try:
                stream = await self._attacher.open(sandbox.pod, image, nonce=sandbox.nonce, spec=sandbox.spec)
            except NoPython:
                if self._mode != "auto":
                    raise
                level = self._levels[image] = ExecLevel.SHELL
            except InfrastructureError as error:
                raise await self._evidence(sandbox, error) from error
            else:
                return Session(stream, nonce=sandbox.nonce, reopen=lambda: self._reopen(sandbox))
        return self._lower(sandbox, level)

    def _lower(self, sandbox: KubernetesSandbox, level: ExecLevel) -> Session:
        from agentsandbox.session.levels import DirectSession, ShellSession

        spec = sandbox.spec
        wanted = {"user": spec.user, "workdir": spec.workdir}
        if level is ExecLevel.DIRECT:
            wanted["env"] = dict(spec.env) or None  # type: ignore[assignment]
        for name, value in wanted.items():
            if value is not None:
                raise ConfigurationError(f"{name}={value!r} needs Python in the image {spec.image!r}, which has none")

        async def connect(command: Sequence[str], *, stdin: bool = False) -> ExecSocket:
            return await self._connect(sandbox, command, stdin=stdin)

        lower = DirectSession(connect) if level is ExecLevel.DIRECT else ShellSession(connect, env=dict(spec.env))
        return cast("Session", lower)  # it has the same interface

    async def _connect(self, sandbox: KubernetesSandbox, command: Sequence[str], *, stdin: bool) -> ExecSocket:
        try:
            socket = await self._api.websocket(
                exec_path(self._api.namespace, sandbox.pod),
                params=exec_params(command, stdin=stdin),
                protocols=PROTOCOLS,
                heartbeat=None,
                max_size=MAX_MESSAGE,
            )
        except (ApiUnavailable, NotFound) as error:
            if (lost := await self._loss(sandbox)) is not None:
                raise lost from error
            raise
        return ExecSocket(socket)

    async def _reopen(self, sandbox: KubernetesSandbox) -> ByteStream:
        """Open another stream to the same runner, after a look whether it still can be the same."""
        failures = 0
        with anyio.move_on_after(REOPEN_WITHIN):
            while True:
                try:
                    await self._look(sandbox)
                    return await self._attacher.open(
                        sandbox.pod, sandbox.spec.image, nonce=sandbox.nonce, spec=sandbox.spec
                    )
                except (ApiUnavailable, Throttled) as error:
                    failures += 1
                    wait = backoff(min(failures, 3), random.random(), at_least=error.retry_after)  # noqa: S311 - jitter
                    await anyio.sleep(wait)
                except (NotFound, NoPython, NoRunner) as error:
                    await self._look(sandbox)
                    raise NoRunner(str(error)) from error
        raise ApiUnavailable("the API server did not answer in time")

    async def _look(self, sandbox: KubernetesSandbox) -> None:
        try:
            found: dict[str, Any] | None = await self._api.request(
                "GET", pods_path(self._api.namespace, sandbox.pod), timeout=10.0
            )
        except NotFound:
            found = None
        error = sandbox.compare(found, self._reflector.get(sandbox.uid) or self._reflector.gone(sandbox.uid))
        if error is not None:
            raise error

    async def _loss(self, sandbox: KubernetesSandbox) -> SandboxLost | None:
        try:
            await self._look(sandbox)
        except SandboxLost as lost:
            return lost
        except InfrastructureError:
            pass
        return None

    async def _evidence(self, sandbox: KubernetesSandbox, error: InfrastructureError) -> InfrastructureError:
        lost = await self._loss(sandbox)
        return error if lost is None else ProvisionError(f"Pod {sandbox.pod} {lost}")
