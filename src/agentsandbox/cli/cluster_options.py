# SPDX-License-Identifier: Apache-2.0
"""Options that every command has which may speak to a cluster."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import typer

from agentsandbox.errors import ConfigurationError

__all__ = [
    "CLUSTERS",
    "DEFAULT_IMAGE",
    "Backend",
    "ClusterOptions",
    "Context",
    "ImageUser",
    "Namespace",
    "RunAsRoot",
    "RuntimeClass",
]


def _sandboxes_are_real(backend: str) -> str:
    if backend == "simulated":
        raise typer.BadParameter("'simulated' is a model that runs no commands; agentsandbox simulate is for it")
    return backend


Backend = Annotated[
    str,
    typer.Option(help="Where sandboxes come from: local, kubernetes, agent-sandbox.", callback=_sandboxes_are_real),
]
Context = Annotated[str | None, typer.Option(help="Kubeconfig context. Default: the current one.")]
Namespace = Annotated[
    str | None,
    typer.Option(help="Namespace on the cluster. Default: the context's; run and job run make one of their own."),
]
RuntimeClass = Annotated[str | None, typer.Option(help="Runtime class of the Pods, such as gvisor.")]
ImageUser = Annotated[
    int | None,
    typer.Option("--user", help="User id that Pods run as. Default: the image's; 1000 if no image is given."),
]
RunAsRoot = Annotated[bool, typer.Option(help="Let Pods run as root, which images need that name no user.")]

CLUSTERS = ("kubernetes", "agent-sandbox")
"""Backends whose sandboxes are on a cluster."""

DEFAULT_IMAGE = "python:3.12-alpine"
"""On a cluster, when nothing is said. The local backend takes ``host``."""

DEFAULT_USER = 1000
"""Of Pods of the default image, which names no user of its own."""


@attrs.frozen(kw_only=True)
class ClusterOptions:
    """Where on which cluster, and how its Pods are made."""

    context: str | None = None
    namespace: str | None = None
    runtime_class: str | None = None
    user: int | None = None
    run_as_root: bool = False

    def require_cluster(self, backend: str) -> None:
        """
        Refuse options of clusters for another backend.

        Raises:
            ConfigurationError: Naming the first of them.

        """
        if backend in CLUSTERS:
            return
        for field in attrs.fields(ClusterOptions):
            if getattr(self, field.name) != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise ConfigurationError(f"{option} is for clusters: add --backend {' or '.join(CLUSTERS)}")

    def where(self) -> dict[str, Any]:
        """Return the arguments of :meth:`KubernetesApi.connect` that say where."""
        return {"context": self.context, "namespace": self.namespace}

    def for_backend(self, image: str | None = None) -> dict[str, Any]:
        """
        Return the arguments of :class:`KubernetesBackend`.

        Args:
            image: The image; ``None`` is the default one, which names no user.

        """
        user = self.user
        if image is None and user is None and not self.run_as_root:
            user = DEFAULT_USER
        options = {
            **self.where(),
            "runtime_class": self.runtime_class,
            "user": user,
            "run_as_root": self.run_as_root or None,
        }
        return {key: value for key, value in options.items() if value is not None}
