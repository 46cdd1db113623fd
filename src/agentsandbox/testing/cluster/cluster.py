# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in this process."""

from __future__ import annotations

import json
import re
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
import anyio.abc
import anyio.to_thread
from anyio import AsyncContextManagerMixin

from agentsandbox.errors import ConfigurationError
from agentsandbox.testing.cluster import certificates, statuses
from agentsandbox.testing.cluster.access import Access
from agentsandbox.testing.cluster.agent_sandbox import AgentSandbox
from agentsandbox.testing.cluster.clock import Clock, Names, Timing
from agentsandbox.testing.cluster.containers import Runtime
from agentsandbox.testing.cluster.faults import Faults, RequestRecord
from agentsandbox.testing.cluster.images import Image
from agentsandbox.testing.cluster.jobs import Jobs
from agentsandbox.testing.cluster.kubelet import Kubelet
from agentsandbox.testing.cluster.network import PLUGINS, Network
from agentsandbox.testing.cluster.peers import Answer, well
from agentsandbox.testing.cluster.recording import Recorder
from agentsandbox.testing.cluster.removal import Removal
from agentsandbox.testing.cluster.rest import Rest
from agentsandbox.testing.cluster.scheduler import NodeSpec
from agentsandbox.testing.cluster.server import ApiServer
from agentsandbox.testing.cluster.store import Store, Stored
from agentsandbox.testing.cluster.streams import ExecStreams
from agentsandbox.testing.cluster.worker import End

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from agentsandbox.testing.cluster.replies import Json

__all__ = ["FakeCluster"]


class FakeCluster(AsyncContextManagerMixin):
    """
    An API server on 127.0.0.1, with nodes, a scheduler and kubelets behind it, as an async context manager.

    Containers are real processes in namespaces of the local backend, and so are commands that clients run in them. What
    it answers is what a server of version 1.36.2 was seen to answer.

    Args:
        nodes: How many, their names, or :class:`NodeSpec`.
        images: What is behind the names of images: an :class:`Image`, or its ``root``.
        namespace: The namespace to have beside the usual ones; kubeconfigs name it.
        version: Of the server, as major and minor number.
        process: ``real``, or ``echo-runner`` for Pods without processes; see :mod:`.peers`.
        answer: What echo runners answer.
        isolation: See :class:`Runtime`.
        timing: How long things take.
        tls: Whether to speak TLS.
        token: What the kubeconfig's user shows.
        enforce_memory: Whether memory limits hold: the largest process of a container over it is killed.
        cgroup: The version of control groups that containers see.
        events: Whether to keep Events.
        agent_sandbox: Whether the agent-sandbox controller is there, with its custom resources.
        network: Which Pods without processes reach each other: ``none``, ``plain`` for all of them whatever network
            policies say, ``enforcing`` for those that policies let; see :mod:`.network`.
        seed: For names and addresses.

    """

    def __init__(
        self,
        *,
        nodes: int | Sequence[str | NodeSpec] = 1,
        images: Mapping[str, str | Image] | None = None,
        namespace: str = "rl",
        version: tuple[int, int] = (1, 36),
        process: Literal["real", "echo-runner"] = "real",
        answer: Answer = well,
        isolation: str = "auto",
        timing: Timing | None = None,
        tls: bool = False,
        token: str = "t0",  # noqa: S107 - opens nothing
        enforce_memory: bool = False,
        cgroup: int = 1,
        events: bool = True,
        agent_sandbox: bool = False,
        network: Literal["none", "plain", "enforcing"] = "none",
        seed: int = 0,
    ) -> None:
        if process not in ("real", "echo-runner"):
            raise ConfigurationError(f'process is "real" or "echo-runner", not {process!r}')
        if network not in PLUGINS:
            raise ConfigurationError(f"network is one of {', '.join(PLUGINS)}, not {network!r}")
        names = [f"node{number + 1}" for number in range(nodes)] if isinstance(nodes, int) else nodes
        self.nodes = [node if isinstance(node, NodeSpec) else NodeSpec(name=node) for node in names]
        given = images if images is not None else {"host": "host"}
        self.images = {name: one if isinstance(one, Image) else Image(root=one) for name, one in given.items()}
        """What is behind the names of images; may be changed at any time."""
        self.namespace = namespace
        self.version = version
        self.process = process
        self.answer = answer
        self.timing = timing or Timing()
        self.enforce_memory = enforce_memory
        self.token = token
        self.clock = Clock()
        self.names = Names(seed)
        self.requests: list[RequestRecord] = []
        """Every request, in order of arrival."""
        self.faults = Faults()
        self.watches: dict[Any, Any] = {}
        self.store = Store()
        self.access = Access(self.store, version=version)
        self.rest = Rest(self)
        self.streams = ExecStreams(self)
        self.runtime = Runtime(isolation=isolation, cgroup=cgroup)
        self.jobs = Jobs(self)
        self.network_plugin = network
        self.network = Network(self)
        self.kubelet = Kubelet(self)
        self.agent_sandbox = AgentSandbox(self) if agent_sandbox else None
        self._removal = Removal(self)
        self._server = ApiServer(self)
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._authority = ""
        self.recorder = Recorder(self.store, self.clock, keeps=events)

    def __repr__(self) -> str:
        pods = self.store.count(self.kubelet.pods)
        counts = f"{pods} Pods, {self.streams.open} streams, {len(self.requests)} requests"
        return f"<FakeCluster on port {self._server.port} [{counts}]>"

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self, None]:
        raised: BaseException | None = None
        with tempfile.TemporaryDirectory(prefix="agentsandbox-cluster-") as directory:
            if self._tls:
                self._context, self._authority = await anyio.to_thread.run_sync(certificates.make, Path(directory))
            async with anyio.create_task_group() as group:
                try:
                    if self.process == "real":
                        await self.runtime.start(group)
                    await group.start(self.kubelet.run)
                    await group.start(self.jobs.run)
                    if self.agent_sandbox is not None:
                        await group.start(self.agent_sandbox.run)
                    await group.start(self._removal.run)
                    self._furnish()
                    await self._server.start(self._context)
                    yield self
                except (anyio.get_cancelled_exc_class(), GeneratorExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - to be raised as it is, and not in a group
                    raised = error
                finally:
                    with anyio.move_on_after(60, shield=True):
                        self.faults.clear()
                        await self._server.stop()
                        await self.runtime.stop()
                    group.cancel_scope.cancel()
        if raised is not None:
            raise raised

    def _furnish(self) -> None:
        now = self.clock.stamp()
        for name in dict.fromkeys(("default", "kube-system", self.namespace)):
            labels = {"kubernetes.io/metadata.name": name}
            self.create("namespaces", {"metadata": {"name": name, "labels": labels}, "status": {"phase": "Active"}})
            self.create("serviceaccounts", {"metadata": {"name": "default", "namespace": name}})
        for node in self.nodes:
            self.store.create(self.kubelet.nodes, node.object(now, ()), now=now)

    # How to get in.

    @property
    def url(self) -> str:
        """The server's base URL."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.port}"

    def kubeconfig(
        self,
        path: str | Path,
        *,
        namespace: str | None = None,
        user: Mapping[str, Any] | None = None,
        context: str = "fake",
    ) -> str:
        """
        Write a kubeconfig and return its path.

        Args:
            path: Where; a directory gets a file ``kubeconfig``.
            namespace: The context's; by default the cluster's own.
            user: The user entry; by default one with the cluster's token.
            context: Its name.

        """
        file = Path(path) / "kubeconfig" if Path(path).is_dir() else Path(path)
        cluster = {"server": self.url, **({"certificate-authority": self._authority} if self._tls else {})}
        inner = {"cluster": context, "user": context, "namespace": namespace or self.namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "clusters": [{"name": context, "cluster": cluster}],
            "users": [{"name": context, "user": dict(user or {"token": self.token})}],
            "contexts": [{"name": context, "context": inner}],
        }
        file.write_text(json.dumps(config))
        return str(file)

    # What is there.

    def create(self, plural: str, object_: Json) -> Stored:
        """Put an object there, past all checks."""
        resource = self.store.resource(plural)
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **object_}
        return self.store.create(resource, body, now=self.clock.stamp())

    def pods(self, selector: str = "") -> list[Json]:
        """Return the Pods of the cluster's namespace whose name matches."""
        found = self.store.all(self.kubelet.pods, self.namespace)
        return [one.object for one in found if re.search(selector, one.name)]

    def pod(self, name: str, namespace: str | None = None) -> Json:
        """Return a Pod."""
        return self.store.get(self.kubelet.pods, namespace or self.namespace, name).object

    def asked(self, method: str = "", path: str = "") -> list[RequestRecord]:
        """Return the requests with that method whose path matches."""
        return [one for one in self.requests if method in ("", one.method) and re.search(path, one.path)]

    def event(self, about: Json, kind: str, reason: str, message: str, *, component: str = "kubelet") -> None:
        """Tell something of an object, as an Event."""
        self.recorder.tell(about, kind, reason, message, component=component)

    # What can happen.

    def delete(self, stored: Stored, grace: int | None = None) -> Stored:
        """Delete an object as the API server does; return what is left of it."""
        return self._removal.delete(stored, grace)

    def released(self, stored: Stored) -> None:
        """Nothing holds an object back any more that is marked for deletion."""
        self._removal.released(stored)

    def delete_behind(self, name: str) -> None:
        """Take a Pod away at once, and everything that ran in it."""
        self.store.remove(self.store.get(self.kubelet.pods, self.namespace, name))

    def hold_deletion(self, name: str) -> None:
        """Let a Pod's deletion never finish: it has a finalizer that nobody removes."""
        stored = self.store.get(self.kubelet.pods, self.namespace, name)
        meta = {**stored.object["metadata"], "finalizers": ["example.com/never"]}
        self.store.replace(stored, {**stored.object, "metadata": meta})

    def replace_pod(self, name: str) -> Json:
        """Put another Pod of the same name and spec in a Pod's place."""
        old = self.store.get(self.kubelet.pods, self.namespace, name).object
        self.delete_behind(name)
        meta = {
            key: old["metadata"][key]
            for key in ("name", "namespace", "labels", "annotations")
            if key in old["metadata"]
        }
        spec = {key: value for key, value in old["spec"].items() if key != "nodeName"}
        status = {"phase": "Pending", "qosClass": old["status"]["qosClass"]}
        return self.create("pods", {"metadata": meta, "spec": spec, "status": status}).object

    def restart_container(self, name: str, *, exit_code: int = 137, oom: bool = False) -> None:
        """Kill a Pod's container; what follows is by its restart policy and rules."""
        self.kubelet.worker(self.namespace, name).kill(exit_code, oom=oom)

    def evict(self, namespace: str, name: str, *, message: str = "", by_api: bool = False) -> None:
        """
        Evict a Pod.

        Args:
            namespace: Its namespace.
            name: Its name.
            message: The kubelet's words.
            by_api: Whether it is marked and deleted, as an eviction request does, and not ended by its kubelet.

        """
        if by_api:
            self._disrupt(namespace, name, "EvictionByEvictionAPI", "Eviction API: evicting")
            return
        words = message or "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52Ki. "
        self.kubelet.worker(namespace, name).end(End(reason="Evicted", message=words))

    def preempt(self, name: str) -> None:
        """Let the scheduler end a Pod in favour of another."""
        words = "default-scheduler: preempting to accommodate a higher priority pod"
        self._disrupt(self.namespace, name, "PreemptionByScheduler", words)

    def _disrupt(self, namespace: str, name: str, reason: str, words: str) -> None:
        stored = self.store.get(self.kubelet.pods, namespace, name)
        worker = self.kubelet.workers.get(stored.uid)
        condition = statuses.disruption(reason, words, self.clock.stamp(), stored.object["metadata"]["generation"])
        if worker is not None:
            worker.view.extra = [condition]
        status = stored.object["status"]
        status = {**status, "conditions": [condition, *(status.get("conditions") or ())]}
        self.delete(self.store.replace(stored, {**stored.object, "status": status}))

    def lose_node(self, name: str, *, evict: bool = False) -> None:
        """
        Let a node fall silent: its Pods are no longer ready, its streams stall, its deletions do not finish.

        Args:
            name: The node.
            evict: Whether its Pods are marked for deletion at once, as after five minutes.

        """
        now = self.clock.stamp()
        node = self.store.get(self.kubelet.nodes, "", name)
        ready = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "lastTransitionTime": now}
        ready["message"] = "Kubelet stopped posting node status."
        taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
        status = {**node.object["status"], "conditions": [ready]}
        self.store.replace(node, {**node.object, "spec": {**node.object["spec"], "taints": [taint]}, "status": status})
        self.kubelet.frozen.add(name)
        for stored in list(self.store.all(self.kubelet.pods)):
            if stored.object["spec"].get("nodeName") == name:
                self.streams.silence(stored.uid)
                conditions = [
                    {**one, "status": "False", "lastTransitionTime": now} if one["type"] == "Ready" else one
                    for one in stored.object["status"].get("conditions") or ()
                ]
                status = {**stored.object["status"], "conditions": conditions}
                self.store.replace(stored, {**stored.object, "status": status})
                if evict:
                    words = "Taint manager: deleting due to NoExecute taint"
                    self._disrupt(stored.namespace, stored.name, "DeletionByTaintManager", words)

    def shut_down_node(self, name: str) -> None:
        """Let a node end its Pods in good order, as before it is switched off."""
        for worker in list(self.kubelet.workers.values()):
            if worker.node == name:
                words = "Pod was terminated in response to imminent node shutdown."
                condition = statuses.disruption("TerminationByKubelet", words, self.clock.stamp(), 1)
                worker.end(End(reason="Terminated", message=words, condition=condition))

    def drop_watches(self, path: str = "") -> int:
        """Break the connections of watches that are open; return how many."""
        found = [http for http in self.watches.values() if re.search(path, http.path)]
        for http in found:
            if http.transport is not None:
                http.transport.close()
        return len(found)

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        """Have no API server for as long as the context lasts; what runs in Pods runs on."""
        port = self._server.port
        await self._server.stop()
        try:
            yield
        finally:
            await self._server.start(self._context, port=port)
