# SPDX-License-Identifier: Apache-2.0
"""Having sandboxes made, ready for their first command, within a time limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import InfrastructureError, ProvisionError, SandboxError, SandboxLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.backends.base import Backend, BackendSandbox
    from agentsandbox.models.sandbox import SandboxSpec
    from agentsandbox.reset.rungs import Resets

__all__ = ["Maker"]


class Maker:
    """
    Makes sandboxes. What is given up half-made is removed.

    Args:
        backend: Where they come from.
        resets: How they are prepared for a reset.
        timeout: How long one may take, in seconds.
        grace: How long it may take to remove what is half-made, in seconds.

    """

    def __init__(self, backend: Backend, resets: Resets, *, timeout: float, grace: float) -> None:
        self.timeout = timeout
        """How long it may take, in seconds."""
        self._backend = backend
        self._resets = resets
        self._grace = grace
        self._making: dict[str, str] = {}

    async def make(self, spec: SandboxSpec, name: str, *, opened: Callable[[], None] = lambda: None) -> BackendSandbox:
        """
        Make a sandbox.

        Args:
            spec: From what.
            name: Under which name.
            opened: Called when the backend has made it, and it only has to be prepared.

        Raises:
            SandboxError: If it could not be made; a :exc:`ProvisionError` if it was anything else, or took too long.

        """
        stage = self._making[name] = "the backend had not made it"
        try:
            with anyio.move_on_after(self.timeout):
                try:
                    sandbox = await self._backend.create(spec, name)
                    opened()
                    stage = self._making[name] = "its baseline was not taken"
                    if not sandbox.dormant:
                        await self._prepare(sandbox)
                except SandboxError:
                    raise
                except Exception as error:
                    # A bug in a backend, or a full file table, must end no other episodes than those of its image.
                    raise ProvisionError(f"{type(error).__name__}: {error}") from error
                return sandbox
        finally:
            del self._making[name]
        raise ProvisionError(f"no sandbox of image {spec.image!r} within {self.timeout:g} s: {stage}")

    async def open(self, sandbox: BackendSandbox) -> None:
        """
        Open a sandbox that was left closed until somebody takes it.

        Raises:
            SandboxLost: If it cannot be reached.

        """
        if not sandbox.dormant:
            return
        try:
            await sandbox.open()
            await self._resets.prepare(sandbox)
        except SandboxLost:
            raise
        except InfrastructureError as error:
            raise SandboxLost("unreachable", str(error)) from error

    async def _prepare(self, sandbox: BackendSandbox) -> None:
        try:
            await self._resets.prepare(sandbox)
        except BaseException:
            with anyio.move_on_after(self._grace, shield=True):
                await self._backend.destroy(sandbox)
            raise

    def __repr__(self) -> str:
        preparing = sum(stage.startswith("its") for stage in self._making.values())
        return f"<Maker [{len(self._making) - preparing} being made, {preparing} being prepared]>"
