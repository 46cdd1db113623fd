# SPDX-License-Identifier: Apache-2.0
"""
How a batch can be brought to sandboxes. All of them are settings of the same engine on the same model.

``cold``
    A Pod a rollout, asked for when the rollout is admitted.
``naive``
    A warm pool for every image from the beginning, each as large as its rollouts; sandboxes are used once.
``sliding``
    Images in windows as large as the cluster; a window's pools are filled, used up, and the next one begins.
``pipelined``
    The same with windows of half the size, so that the next one is filled while one is used.
``ours``
    Sandboxes stay and change their image in place, on the node that a plan has put the image on, in the plan's order;
    episodes are admitted as their sandboxes become ready, and no rollout waits for a sandbox that straggles while
    another one could become its.

The middle three follow the descriptions of the upstream RL example (kubernetes-sigs/agent-sandbox,
examples/agent-sandbox-rl, ``docs/strategies.md``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.simulated import SimulatedBackend
from agentsandbox.client import SandboxClient
from agentsandbox.hydration.prepull import Hydration
from agentsandbox.models.events import discard
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.rollouts.admission import Admission
from agentsandbox.rollouts.gather import gather_rollouts
from agentsandbox.warmpool.stragglers import StragglerPolicy

if TYPE_CHECKING:
    from agentsandbox.cli.workload import Workload
    from agentsandbox.client import Lease
    from agentsandbox.hydration import Plan
    from agentsandbox.models.episode import Episode, RolloutResult
    from agentsandbox.models.events import Event, EventSink
    from agentsandbox.warmpool.engine import Engine

__all__ = ["STRATEGIES", "Run", "in_order", "run"]

_PATIENCE = 3600.0
"""Seconds that an admission waits for a sandbox: pulls may take long, and the batch is announced as a whole."""


@attrs.define(eq=False)
class Run:
    """A batch that is over."""

    strategy: str
    backend: SimulatedBackend
    results: list[tuple[float, RolloutResult]] = attrs.field(factory=list)
    """When each part of the batch was submitted, in seconds since the whole was, and what came of it."""
    warm_seconds: float = 0.0
    """What was spent before the batch was submitted."""
    seconds: float = 0.0
    """From the submission of the batch to its last record."""


class _Ready:
    """Counts sandboxes that become ready; a sink."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = anyio.Event()

    def __call__(self, event: Event) -> None:
        if event.name == "sandbox.ready":
            self.count += 1
            self._changed.set()

    async def reaches(self, count: int) -> None:
        while self.count < count:
            self._changed = anyio.Event()
            await self._changed.wait()


class _Unwarmed(SandboxClient):
    """Makes a sandbox when somebody asks for one, and not before."""

    def _build(self) -> Engine:
        engine = super()._build()
        engine._book.replenisher.targets.clear()  # noqa: SLF001 - a pool that keeps nothing warm is of no other use
        return engine


async def _rollout(sandbox: Lease, episode: Episode) -> float:
    await sandbox.exec(["true"])
    await sandbox.exec(["sleep", repr(episode.inputs["seconds"])], timeout=None)
    return 1.0


@attrs.define(eq=False)
class _Setting:
    """What all strategies have in common."""

    workload: Workload
    backend: SimulatedBackend
    sink: EventSink
    hydrated: bool
    run: Run
    plan: Plan
    lanes: int
    stragglers: StragglerPolicy
    ready: _Ready = attrs.field(factory=_Ready)
    admission: Admission = attrs.field(factory=lambda: Admission(_PATIENCE))

    @asynccontextmanager
    async def client(
        self, images: Mapping[str, int], *, kind: type[SandboxClient] = SandboxClient, limit: int | None = None
    ) -> AsyncIterator[Any]:
        client = kind(
            self.backend,
            images=images,
            spares=0,
            max_sandboxes=limit or self.workload.limit,
            acquire_timeout=None,
            create_timeout=_PATIENCE,
            reset=ResetPolicy(budget_seconds=_PATIENCE),
            stragglers=self.stragglers,
            sink=(self.sink, self.ready, self.admission),
        )
        client.run_id = "simulated"  # names must not differ from run to run
        async with client:
            yield client
            self.backend.finish()

    def has(self, node: str, image: str) -> bool:
        """Whether an image is on a node."""
        return self.backend.nodes[node].has(image, anyio.current_time())

    async def gather(
        self,
        client: SandboxClient,
        batch: Sequence[Episode],
        began: float,
        *,
        also: EventSink = discard,
        admission: Admission | None = None,
    ) -> None:
        """Run a part of the batch."""
        at = anyio.current_time() - began
        result = await gather_rollouts(
            client,
            batch,
            _rollout,
            parallelism=self.workload.limit,
            sink=(self.sink, also),
            max_attempts=3,
            admission=admission,
        )
        self.run.results.append((at, result))
        self.run.seconds = anyio.current_time() - began

    def begin(self) -> float:
        now = self.run.warm_seconds = anyio.current_time()
        return now


def _counts(episodes: Sequence[Episode]) -> dict[str, int]:
    return dict(Counter(episode.image for episode in episodes))


async def _cold(setting: _Setting) -> None:
    workload = setting.workload
    async with setting.client(_counts(workload.episodes), kind=_Unwarmed) as client:
        await setting.gather(client, workload.episodes, setting.begin())


async def _naive(setting: _Setting) -> None:
    workload = setting.workload
    async with setting.client(_counts(workload.episodes)) as client:
        if setting.hydrated:
            await setting.ready.reaches(min(workload.limit, len(workload.episodes)))
        await setting.gather(client, workload.episodes, setting.begin())


async def _windows(setting: _Setting, share: int) -> None:
    workload = setting.workload
    size, filled = workload.limit // share, 0
    windows: list[list[Episode]] = []
    for _, episodes in itertools.groupby(workload.episodes, key=lambda episode: episode.image):
        group = list(episodes)
        if not windows or filled + len(group) > size:
            windows.append([])
            filled = 0
        windows[-1] += group
        filled += len(group)
    async with setting.client({}) as client:
        began: float | None = None if setting.hydrated else setting.begin()
        announced, ready = 0, 0
        for number, window in enumerate(windows):
            ready += len(window)
            # The window that runs, and with halves the one after it, once the first one is full.
            for next_window in windows[announced : number + (1 if number == 0 or share == 1 else share)]:
                client.announce(_counts(next_window))
                announced += 1
            await setting.ready.reaches(ready)
            if began is None:
                began = setting.begin()
            for next_window in windows[announced : number + share]:
                client.announce(_counts(next_window))
                announced += 1
            await setting.gather(client, window, began)


async def _sliding(setting: _Setting) -> None:
    await _windows(setting, 1)


async def _pipelined(setting: _Setting) -> None:
    await _windows(setting, 2)


async def _ours(setting: _Setting) -> None:
    workload, planned = setting.workload, setting.plan
    batch = in_order(planned, workload.episodes, {node.name: node.room for node in workload.nodes()})
    lanes = setting.lanes
    hydration = Hydration(planned, setting.backend, lanes=lanes, have=setting.has)
    left = Counter(episode.image for episode in batch)

    def note(event: Event) -> None:
        if event.name == "episode.ended" and event.episode is not None:
            image = event.episode.rpartition("/")[0]
            left[image] -= 1
            if not left[image]:
                hydration.used(image)

    limit = workload.limit - lanes * workload.model.nodes
    async with anyio.create_task_group() as group, setting.client({}, limit=limit) as client:
        if lanes:
            group.start_soon(hydration.run)
        client.announce(batch)
        if setting.hydrated:
            await setting.ready.reaches(min(limit, len(batch)))
        await setting.gather(client, batch, setting.begin(), admission=setting.admission, also=note)
        group.cancel_scope.cancel()


def in_order(planned: Plan, episodes: Sequence[Episode], room: Mapping[str, int]) -> list[Episode]:
    """
    Put a batch into the order of a plan: each node's images in turn, the nodes evenly.

    What the plan does not place comes last.
    """
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.image, []).append(episode)
    keyed = []
    for at, node in enumerate(planned.nodes):
        done = 0.0
        for image in node.images:
            keyed.append((done / room[node.node], at, image))
            done += len(groups.get(image, ()))
    placed = [episode for _, _, image in sorted(keyed) for episode in groups.get(image, ())]
    return placed + [episode for episode in episodes if episode.image not in planned.placement]


STRATEGIES: Mapping[str, Callable[[_Setting], Awaitable[None]]] = {
    "cold": _cold,
    "naive": _naive,
    "sliding": _sliding,
    "pipelined": _pipelined,
    "ours": _ours,
}
"""Name → how it is done."""


async def run(workload: Workload, strategy: str, planned: Plan, *, hydrated: bool, sink: EventSink) -> Run:
    """
    Run a batch in virtual time.

    Args:
        workload: The batch and the cluster.
        strategy: One of :data:`STRATEGIES`.
        planned: Which image belongs on which node.
        hydrated: Whether the images are there at the beginning, each on its node, and sandboxes may be made before the
            batch is submitted; otherwise nothing is there.
        sink: Hears of every event.

    """
    where: dict[str, list[str]] = {}
    if hydrated:
        for node in planned.nodes:
            where[node.node] = [image for wave in node.waves[:1] for image in wave.images]
    ours = strategy == "ours"
    # Nothing is left to fetch if everything is there, or will be once the waves that fit have been used.
    fetches = ours and (not hydrated or any(len(node.waves) > 1 for node in planned.nodes))
    lanes = workload.model.pulls_at_once if fetches else 0
    backend = SimulatedBackend(
        model=workload.model,
        images=[use.image for use in workload.uses],
        placement=planned.placement if ours else None,
        hydrated=where,
        reuse=ours,
        reserved=lanes,
        seed=workload.seed,
    )
    over = Run(strategy, backend)
    stragglers = StragglerPolicy() if ours else StragglerPolicy(share=0)  # the others count on every sandbox
    setting = _Setting(workload, backend, sink, hydrated, over, planned, lanes, stragglers)
    await STRATEGIES[strategy](setting)
    return over
