# SPDX-License-Identifier: Apache-2.0
"""
Every parameter of the simulated cluster, with where its value comes from.

The values describe one setting: ten nodes of a public cloud with sandboxes under gVisor. They are the same for every
strategy that is simulated. Those that no public source states are marked as assumptions: above all the part of an image
that others share, and how many starts fail. All times are in seconds, all sizes in bytes.
"""

from __future__ import annotations

import attrs

from agentsandbox.errors import ConfigurationError

__all__ = ["ClusterModel", "Faults", "StartModel"]

GB = 1000**3
"""Bytes; disks and images are sold in these."""


@attrs.frozen(kw_only=True)
class StartModel:
    """
    How long something takes to start: log-normal around a median. Some tries fail, and are made again after a pause.

    Args:
        median: Seconds that a try takes.
        p95: Seconds that 95 of 100 tries stay within.
        floor: The least that is possible, in seconds: what lower bounds count with.
        fails: Share of starts whose first try fails.
        fails_again: Share of tries after a failed one that fail as well: its cause is often still there. With pauses
            that double, a quarter gives a heavy tail: twice as long is a quarter as likely.

    """

    median: float
    p95: float
    floor: float
    fails: float = 0.01
    fails_again: float = 0.25

    def __attrs_post_init__(self) -> None:
        """Refuse what is no distribution."""
        if not 0 < self.floor <= self.median <= self.p95:
            raise ConfigurationError(f"a start needs 0 < floor <= median <= p95, not {self!r}")
        if not (0 <= self.fails < 1 and 0 <= self.fails_again < 1):
            raise ConfigurationError(f"shares of tries that fail are from 0 to below 1, not {self!r}")


@attrs.frozen(kw_only=True)
class Faults:
    """What goes wrong for good, besides tries that fail. Nothing, unless something is said."""

    losses_per_hour: float = 0.0
    """How often a sandbox is lost while it is there: evicted, out of memory, its node gone."""
    failed_pulls: float = 0.0
    """Share of pulls that the registry fails; the next try may work."""
    failed_starts: float = 0.0
    """Share of sandboxes that do not start."""


@attrs.frozen(kw_only=True)
class ClusterModel:
    """A cluster, in figures."""

    nodes: int = 10
    """The published benchmark ran on a pool of 10 gVisor nodes (GKE Agent Sandbox for agentic RL, 2026)."""
    pods_per_node: int = 256
    """The most that GKE Standard allows on a node (GKE documentation, "Configure maximum Pods per node")."""
    cpu_per_node: float = 96.0
    """Processors of an n2-standard-96 (Compute Engine documentation, machine types)."""
    memory_per_node: int = 384 * 1024**3
    """Memory of the same machine."""
    cpu_request: float = 0.25
    """What the upstream RL example asks for a sandbox (kubernetes-sigs/agent-sandbox, examples/agent-sandbox-rl)."""
    memory_request: int = 512 * 1024**2
    """Likewise."""
    disk: int = 4 * 375 * GB
    """Four local SSDs of 375 GB each for images and writable layers (Compute Engine documentation, local SSD)."""
    disk_used: int = 20 * GB
    """What the node itself and its system Pods take of it; an assumption that hardly matters."""
    writable_layer: int = 100 * 1000**2
    """What an episode writes in its sandbox; an assumption."""
    gc_high: float = 0.85
    """Share of the disk above which the kubelet removes images (``imageGCHighThresholdPercent``, its default)."""
    gc_low: float = 0.80
    """Share that it frees down to (``imageGCLowThresholdPercent``, its default)."""
    status_images: int = 50
    """Images that a node tells the scheduler of, the largest ones (kubelet ``nodeStatusMaxImages``, its default)."""
    pulls_at_once: int = 5
    """Images that a node pulls at a time (GKE node system configuration: ``maxParallelImagePulls`` of fast disks)."""
    unpack_rate: float = 1.4 * GB
    """
    Bytes on disk a second and node, all its pulls together: what four NVMe local SSDs write (Compute Engine
    documentation, local SSD performance). The upstream RL example found unpacking, not the registry, to be the limit.
    """
    network_rate: float = 32e9 / 8
    """Bytes a second and node, all its pulls together: 32 Gbit/s, the egress of an n2-standard-96."""
    pull_overhead: float = 0.5
    """Resolving the name, and the manifest: a few round trips to a registry with its authentication."""
    api_writes: float = 600.0
    """
    Writes a second that the API server takes: the upstream controller saw 85 Sandboxes a second made under API Priority
    and Fairness and 240 without, of five to seven writes each (agent-sandbox, sandboxwarmpool_controller.go).
    """
    api_patience: float = 5.0
    """Seconds that a write may wait in a queue of the API server before it is refused with 429."""
    api_latency: float = 0.02
    """Seconds that a write takes when nothing else is going on."""
    retry_after: float = 1.0
    """What the API server asks for with a 429 (API Priority and Fairness sends ``Retry-After: 1``)."""
    scheduler_rate: float = 70.0
    """Pods bound a second: kube-scheduler at its default client limits (same upstream source)."""
    writes_start: int = 5
    """Writes of the whole cluster to bring a Pod up: create, bind, three status updates (watch of a 1.36 server)."""
    writes_stop: int = 3
    """Writes to remove it: delete, its status, its end (the same)."""
    writes_change: int = 3
    """Writes to change its image in place: one patch, two status updates (the same)."""
    writes_restart: int = 2
    """Writes when it restarts in place: two status updates (the same)."""
    start: StartModel = StartModel(median=2.8, p95=3.5, floor=1.5)
    """From the binding of a Pod, its image on the node, until ready: 2.5 to 3.5 s (same upstream source)."""
    starts_at_once: int = 16
    """Sandboxes that one node starts at a time; more wait. The worker count of a container runtime; an assumption."""
    change: StartModel = StartModel(median=1.0, p95=1.3, floor=0.8)
    """From the patch of an image that is on the node until ready: 1.0 s (measured by this project, Kubernetes 1.36)."""
    restart: StartModel = StartModel(median=1.0, p95=1.3, floor=0.8)
    """A restart in place by the rule ``RestartAllContainers``: 1.0 s (measured likewise)."""
    backoff: float = 10.0
    """
    Seconds that the kubelet waits after a container did not start, before it tries again; doubled each time (Kubernetes
    documentation, "Pod Lifecycle"; those of image pulls are the same). How many do not start is an assumption.
    """
    backoff_max: float = 300.0
    """Seconds to which that grows (same source)."""
    stop: StartModel = StartModel(median=1.5, p95=2.5, floor=0.5, fails=0.0)
    """
    From the delete until a Pod's room is free: a grace of 1 s and the status round trips (measured likewise). The
    kubelet kills what does not end.
    """
    round_trip: float = 0.0021
    """A command over an open stream: 2.1 ms (measured likewise)."""
    image_size: int = round(1.2 * GB)
    """Bytes fetched for an image: single images exceed 1.2 GB (same publication as the number of nodes)."""
    repositories: int = 10
    """Repositories that the images come from; images of one share their base (R2E-Gym-Subset: 4,578 tasks of 10)."""
    shared: float = 0.85
    """Part of an image that all images of its repository share: system, interpreter, most packages; an assumption."""
    faults: Faults = Faults()
    """What goes wrong."""

    @property
    def room(self) -> int:
        """Sandboxes that a node has room for."""
        by_cpu = int(self.cpu_per_node / self.cpu_request)
        return min(self.pods_per_node, by_cpu, self.memory_per_node // self.memory_request)

    def __attrs_post_init__(self) -> None:
        """Refuse what makes no sense."""
        for field in (
            "nodes",
            "pods_per_node",
            "cpu_request",
            "memory_request",
            "disk",
            "pulls_at_once",
            "unpack_rate",
        ):
            if not getattr(self, field) > 0:
                raise ConfigurationError(f"{field} must be above 0, not {getattr(self, field)!r}")
        if not 0 < self.gc_low < self.gc_high < 1:
            raise ConfigurationError(f"0 < gc_low < gc_high < 1, not {self.gc_low!r} and {self.gc_high!r}")
        if self.room < 1:
            raise ConfigurationError("a sandbox asks for more than a node has")
