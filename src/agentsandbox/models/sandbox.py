# SPDX-License-Identifier: Apache-2.0
"""What a sandbox is made from, what it can do and how it is told apart from any other."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["Capabilities", "ExecLevel", "Identity", "SandboxSpec"]


class ExecLevel(StrEnum):
    """How commands reach a sandbox."""

    RUNNER = "runner"
    """Through our Python runner: everything works."""
    SHELL = "shell"
    """Through a POSIX shell."""
    DIRECT = "direct"
    """Through one connection a command."""


@attrs.frozen(kw_only=True)
class SandboxSpec:
    """From what a sandbox is to be made. Sandboxes of equal specs are interchangeable."""

    image: str = attrs.field()
    """The image, in the words of the backend."""
    user: str | int | None = None
    """User that commands run as; ``None`` is the image's."""
    workdir: str | None = None
    """Directory that commands start in; ``None`` is the image's."""
    env: Mapping[str, str] = attrs.field(factory=dict, hash=False)
    """Variables on top of the image's environment. No secrets: give those to a command."""

    @image.validator
    def _image(self, _: object, value: str) -> None:
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"an image is a name such as 'host', not {value!r}")


@attrs.frozen(kw_only=True)
class Identity:
    """
    What must not change while a sandbox is leased.

    The same name with another identity is another sandbox: nothing that ran there is this attempt's result.
    """

    uid: str
    """The unique id of the host: a Pod's UID; locally a random id and the process id of the parent."""
    instance: str
    """The instance in it: a container id; locally the identity of the namespaces."""
    restarts: int = 0
    """How often it was restarted in place."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a sandbox turned out to be able to do."""

    exec_level: ExecLevel = ExecLevel.RUNNER
    """How commands reach it."""
    isolation: str = "none"
    """What stands between it and its host, in one line."""
    users: bool = False
    """Whether commands can run as more than one user."""
    network: bool = False
    """Whether it can reach anything but itself."""
    rungs: tuple[str, ...] = ("replace",)
    """The reset rungs it offers, cheapest first."""
    python: str | None = None
    """Version of the interpreter that the runner runs on."""
    facts: Mapping[str, str] = attrs.field(factory=dict)
    """Whatever else is worth showing."""
