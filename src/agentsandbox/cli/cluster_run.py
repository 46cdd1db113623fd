# SPDX-License-Identifier: Apache-2.0
"""What ``run`` has on a cluster beside its sandboxes: a namespace of its own, and evidence to save."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from agentsandbox.backends.kubernetes import owned, reaping
from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.backends.kubernetes.backend import KubernetesBackend
from agentsandbox.backends.kubernetes.evidence import events_text, shown
from agentsandbox.backends.kubernetes.preflight import check_runtime_class
from agentsandbox.backends.opening import backend_class
from agentsandbox.cli.pods import PodRecorder
from agentsandbox.errors import InfrastructureError

if TYPE_CHECKING:
    from rich.console import Console

    from agentsandbox.cli.cluster_options import ClusterOptions
    from agentsandbox.cli.output import OutputDirectory
    from agentsandbox.models.episode import EpisodeRecord
    from agentsandbox.models.sandbox import SandboxSpec

__all__ = ["ClusterRun"]

ENDING = 180.0
"""Seconds that evidence and the end of the namespace may take."""


class ClusterRun:
    """
    The surroundings of one run.

    Args:
        api: The API server.
        run_id: The run.
        cluster: What the user asked for.
        image: What the user asked for; ``None`` is the default.
        backend: Which kind of sandboxes.

    """

    def __init__(
        self, api: KubernetesApi, run_id: str, cluster: ClusterOptions, image: str | None, backend: str
    ) -> None:
        self._api = api
        self._run_id = run_id
        self._own = cluster.namespace is None
        self._nonce = secrets.token_hex(8)
        self._cluster = cluster
        self.namespace = owned.own_namespace(run_id) if self._own else api.namespace
        """Where the sandboxes are."""
        self.recorder = PodRecorder(self._note)
        """What is seen of the Pods."""
        self._output: OutputDirectory | None = None
        kind = backend_class(backend)
        assert issubclass(kind, KubernetesBackend)
        self.backend = kind(
            run_id=run_id, **{**cluster.for_backend(image), "context": self.context, "namespace": self.namespace}
        )
        """Where the sandboxes come from."""
        self.backend.observers.append(self.recorder)

    def __repr__(self) -> str:
        return f"<ClusterRun {self._run_id} in {self.namespace} [{'own' if self._own else 'given'}, {self.recorder!r}]>"

    @property
    def context(self) -> str | None:
        """The context to connect with: that of now, even if somebody makes another one current meanwhile."""
        return None if self._api.context == reaping.IN_CLUSTER else self._api.context

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, run_id: str, cluster: ClusterOptions, image: str | None, backend: str
    ) -> AsyncIterator[ClusterRun]:
        """Connect for as long as the context lasts."""
        api = await KubernetesApi.connect(**cluster.where(), max_connections=8)
        try:
            yield cls(api, run_id, cluster, image, backend)
        finally:
            await api.aclose()

    def receipt(self) -> dict[str, Any]:
        """Return what the receipt has to say before anything is created."""
        return {
            "context": self._api.context,
            "namespace": self.namespace,
            "own_namespace": self._own,
            "nonce": self._nonce,
        }

    async def check(self, spec: SandboxSpec) -> None:
        """
        Refuse what the cluster would refuse, as far as it can be asked before anything is created.

        Raises:
            ConfigurationError: If there is no such runtime class, or we may not make a namespace.
            ControlPlaneError: If a Pod is refused.

        """
        await check_runtime_class(self._api, self._cluster.runtime_class)
        if self._own:
            await owned.check_namespace(self._api, self._run_id)
        else:
            await self._dry_run(spec)

    @asynccontextmanager
    async def open(self, output: OutputDirectory, spec: SandboxSpec, console: Console) -> AsyncIterator[None]:
        """Have the namespace for as long as the context lasts; on exit the evidence is saved."""
        self._output = output
        try:
            if self._own:
                manifest = owned.namespace_manifest(self._run_id, self._nonce)
                made = await owned.create(self._api, owned.namespace_path(), manifest)
                output.note(namespace_uid=made["metadata"]["uid"])
                await self._dry_run(spec)
            yield
        finally:
            with anyio.move_on_after(ENDING, shield=True):
                await self._end(output, console)

    async def _dry_run(self, spec: SandboxSpec) -> None:
        await owned.usable(self._api, self.namespace, self.backend.manifest(spec))

    async def _end(self, output: OutputDirectory, console: Console) -> None:
        pods = sorted(self.recorder.pods.values(), key=lambda pod: str(pod["metadata"]["name"]))
        output.write("pods.json", [shown(pod) for pod in pods])
        names = None if self._own else {pod["metadata"]["name"] for pod in pods}
        output.write_text("events.txt", await events_text(self._api, self.namespace, names))
        if not self._own:
            return
        try:
            claim = reaping.Claim(run_id=self._run_id, nonce=self._nonce)
            await reaping.remove(self._api, self.namespace, claim)
        except InfrastructureError as error:
            words = f"namespace {self.namespace} is left: {error}; agentsandbox cleanup --output {output.path}"
            console.print(words, style="yellow", markup=False, highlight=False)

    def _note(self, pod: dict[str, Any]) -> None:
        if self._output is not None:
            self._output.created("Pod", pod)

    def amend(self, report: dict[str, Any], records: tuple[EpisodeRecord, ...]) -> None:
        """Add to a report where on the cluster everything was."""
        report.update(context=self._api.context, namespace=self.namespace, runtime_class=self._cluster.runtime_class)
        for row, record in zip(report["records"], records, strict=True):
            facts = self.recorder.where(record.last.identity if record.last else None)
            row.update(pod=facts["pod"], image_id=facts["image_id"], node=row["node"] or facts["node"])
