# SPDX-License-Identifier: Apache-2.0
"""How commands reach a Pod: the session that it gets, and how that one finds its way back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio

from agentsandbox.backends.kubernetes.attach import NoPython, NoRunner
from agentsandbox.backends.kubernetes.conditions import lost
from agentsandbox.backends.kubernetes.manifests import FirstProcess, exec_params, exec_path, pods_path
from agentsandbox.backends.kubernetes.watch import backoff
from agentsandbox.errors import (
    ApiUnavailable,
    ConfigurationError,
    InfrastructureError,
    NotFound,
    ProvisionError,
    SandboxLost,
    StreamBroken,
    Throttled,
)
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.session import Session
from agentsandbox.session.pulse import Pulse
from agentsandbox.transport.websocket import MAX_MESSAGE, PROTOCOLS, ExecSocket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.attach import Attacher
    from agentsandbox.backends.kubernetes.sandbox import KubernetesSandbox
    from agentsandbox.backends.kubernetes.watch import Reflector
    from agentsandbox.session.levels import DirectSession
    from agentsandbox.transport import ByteStream

__all__ = ["MODES", "Sessions"]

Stream = TypeVar("Stream")

MODES = ("auto", "runner", "shell", "direct")
"""How commands may reach a sandbox; the first takes the best that an image offers."""

REOPEN_WITHIN = 25.0
"""Seconds that one attempt to attach again waits for an API server that does not answer."""

OPENINGS = 4
"""How often to ask for a stream that is refused for a reason that may pass, such as a kubelet out of reach."""

CONFIRM_WITHIN = 15.0
"""Seconds in which a sandbox must show that it is still there after a command of it was killed."""


class Sessions:
    """
    Makes sessions for Pods, as good as their images allow.

    Args:
        api: The API server.
        reflector: The watch of the run's Pods.
        attacher: What opens streams to runners.
        mode: One of :data:`MODES`.
        heartbeat: Seconds of silence after which a sandbox is asked for an answer, and idle timers are reset.
        heartbeat_timeout: Seconds it has to give one.

    """

    def __init__(
        self,
        api: KubernetesApi,
        reflector: Reflector,
        attacher: Attacher,
        *,
        mode: str,
        heartbeat: float = 15.0,
        heartbeat_timeout: float = 30.0,
    ) -> None:
        self._api = api
        self._reflector = reflector
        self._attacher = attacher
        self._mode = mode
        self._heartbeat = heartbeat
        self._heartbeat_timeout = heartbeat_timeout
        self.pulse = Pulse(min(1.0, heartbeat / 4, heartbeat_timeout / 4))
        """What watches the clock for all sessions with a runner; its ``run`` belongs into a task of their owner."""
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
                stream = await self._opened(sandbox, lambda: self._attach(sandbox), harmless=True)
            except NoPython:
                if self._mode != "auto":
                    raise
                level = self._levels[image] = ExecLevel.SHELL
            except InfrastructureError as error:
                raise await self._evidence(sandbox, error) from error
            else:
                return Session(
                    stream,
                    nonce=sandbox.nonce,
                    reopen=lambda: self._reopen(sandbox),
                    heartbeat=self._heartbeat,
                    heartbeat_timeout=self._heartbeat_timeout,
                    pulse=self.pulse,
                )
        return self._lower(sandbox, level)

    def _lower(self, sandbox: KubernetesSandbox, level: ExecLevel) -> Session:
        from agentsandbox.session.levels import DirectSession, ShellSession

        spec = sandbox.spec
        wanted: dict[str, Any] = {"user": spec.user}
        if level is ExecLevel.DIRECT:
            wanted |= {"workdir": spec.workdir, "env": dict(spec.env) or None}
        for name, value in wanted.items():
            if value is not None:
                raise ConfigurationError(f"{name}={value!r}: not possible at exec level '{level}' of {spec.image!r}")

        async def connect(command: Sequence[str], *, stdin: bool = False) -> ExecSocket:
            return await self._connect(sandbox, command, stdin=stdin)

        if level is ExecLevel.SHELL:
            shell = ShellSession(
                connect,
                env=dict(spec.env),
                workdir=spec.workdir,
                heartbeat=self._heartbeat,
                heartbeat_timeout=self._heartbeat_timeout,
            )
            return cast("Session", shell)  # they have the same interface

        async def confirm() -> None:
            await self._confirm(sandbox, direct)

        direct = DirectSession(connect, keep_alive=self._heartbeat, confirm=confirm)
        return cast("Session", direct)

    async def _connect(self, sandbox: KubernetesSandbox, command: Sequence[str], *, stdin: bool) -> ExecSocket:
        async def connect() -> ExecSocket:
            socket = await self._api.websocket(
                exec_path(self._api.namespace, sandbox.pod),
                params=exec_params(command, container=sandbox.container, stdin=stdin),
                protocols=PROTOCOLS,
                heartbeat=None,
                max_size=MAX_MESSAGE,
            )
            return ExecSocket(socket)

        return await self._opened(sandbox, connect, harmless=False)

    async def _attach(self, sandbox: KubernetesSandbox) -> ByteStream:
        return await self._attacher.open(
            sandbox.pod,
            sandbox.spec.image,
            nonce=sandbox.nonce,
            spec=sandbox.spec,
            container=sandbox.container,
            starts=not sandbox.ours,
        )

    async def _opened(
        self, sandbox: KubernetesSandbox, connect: Callable[[], Awaitable[Stream]], *, harmless: bool
    ) -> Stream:
        """
        Open a stream; ask again where the server has refused it, and nothing was started, for a reason that may pass.

        Args:
            sandbox: To which sandbox. That it is gone is found out before it is asked for again.
            connect: Opens it.
            harmless: Whether what is started may be started twice.

        """
        failures = 0
        while True:
            try:
                return await connect()
            except (ApiUnavailable, Throttled, NotFound) as error:
                if (loss := await self._loss(sandbox)) is not None:
                    raise loss from error
                unknown = isinstance(error, ApiUnavailable) and error.ambiguous and not harmless
                failures += 1
                if isinstance(error, NotFound) or unknown or failures >= OPENINGS:
                    raise
                wait = backoff(failures, random.random(), at_least=error.retry_after)  # noqa: S311 - jitter
                await anyio.sleep(wait)

    async def _confirm(self, sandbox: KubernetesSandbox, session: DirectSession) -> None:
        """Make sure that a command that was killed did not end because its container did."""

        def over(pod: dict[str, Any] | None) -> bool:
            return lost(pod, sandbox.identity) is not None

        try:
            with anyio.fail_after(CONFIRM_WITHIN):
                try:
                    await session.ping(CONFIRM_WITHIN)
                    await self._look(sandbox)
                except SandboxLost as error:
                    if not isinstance(error, StreamBroken):
                        raise
                    # Nothing can be started there any more, and why is about to be told.
                    await self._reflector.wait_for(sandbox.uid, over)
        except TimeoutError:
            raise SandboxLost("died", "nothing can be started there since a command was killed") from None
        if sandbox.loss is not None:
            raise sandbox.loss

    async def _reopen(self, sandbox: KubernetesSandbox) -> ByteStream:
        """Open another stream to the same runner, after a look whether it still can be the same."""
        failures = 0
        with anyio.move_on_after(REOPEN_WITHIN):
            while True:
                try:
                    await self._look(sandbox)
                    return await self._attach(sandbox)
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
