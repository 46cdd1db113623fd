# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox run``: one batch, and everything about it on disk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.backends.local.leftovers import started
from agentsandbox.backends.opening import open_backend
from agentsandbox.cli.cluster_options import CLUSTERS
from agentsandbox.cli.output import OutputDirectory
from agentsandbox.cli.progress import BatchProgress
from agentsandbox.cli.resuming import BATCH_ID, JOURNAL, keep, refuse_others, settings, take_up
from agentsandbox.cli.shipping import episodes, repair
from agentsandbox.cli.tasks import load_rollout, load_tasks
from agentsandbox.errors import ConfigurationError
from agentsandbox.metrics.resets import ResetTally
from agentsandbox.models.reset import ResetPolicy
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.pool import SandboxPool
from agentsandbox.report.summary import results as results_of
from agentsandbox.rollouts.journal import Journal
from agentsandbox.rollouts.source import check_rollout

if TYPE_CHECKING:
    from rich.console import Console

    from agentsandbox.backends.base import Backend
    from agentsandbox.cli.run_options import RunOptions
    from agentsandbox.models.episode import Episode, EpisodeRecord

__all__ = ["run"]


def _rollout(options: RunOptions) -> Callable[..., Awaitable[Any]]:
    rollout = repair if options.rollout is None else load_rollout(options.rollout)
    check_rollout(rollout)
    return rollout


def _batch(options: RunOptions) -> Sequence[Episode]:
    if options.count is not None and options.count < 1:
        raise ConfigurationError(f"--count must be at least 1, not {options.count}")
    if options.tasks is not None:
        if options.rollout is None:
            raise ConfigurationError("--tasks needs --rollout module:function, the function that works on them")
        batch = load_tasks(options.tasks, image=options.default_image)
        if options.count is not None and options.count > len(batch):
            raise ConfigurationError(f"--count {options.count} is more than the {len(batch)} tasks in {options.tasks}")
        batch = batch[: options.count]
    else:
        batch = episodes(10 if options.count is None else options.count, options.default_image)
    return batch


def _parallelism(options: RunOptions, count: int) -> int:
    parallelism = count if options.parallelism is None else options.parallelism
    if not 1 <= parallelism <= count:
        raise ConfigurationError(f"--parallelism must be from 1 to the number of episodes, {count}, not {parallelism}")
    return parallelism


def _unsound(record: EpisodeRecord) -> str | None:
    """Why a record is no proof that its episode went well, if so."""
    if record.reward is None:
        return record.reason or str(record.status)
    if record.last is None or record.last.identity is None:
        return "no sandbox identity was recorded"
    return None


@attrs.frozen
class _Plan:
    """What is to be done, checked."""

    options: RunOptions
    run_id: str
    batch: Sequence[Episode]
    rollout: Callable[..., Awaitable[Any]]
    parallelism: int
    images: dict[str, int]

    @property
    def workdir(self) -> str | None:
        """Where the built-in job works on a cluster: what an image starts in need not be writable by its user."""
        built_in = self.options.backend in CLUSTERS and self.options.rollout is None
        return "/tmp" if built_in else None  # noqa: S108 - of the sandbox

    @property
    def reset(self) -> ResetPolicy | None:
        """How used sandboxes are made like new: nothing need be known of them if each serves one episode."""
        once = self.parallelism >= len(self.batch)
        return ResetPolicy(rungs=("restart", "replace")) if once else None

    @property
    def max_sandboxes(self) -> int | None:
        """How many Pods there are at most: of many images they serve one after the other."""
        return self.parallelism if self.options.backend in CLUSTERS and len(self.images) > 1 else None

    @property
    def specs(self) -> list[SandboxSpec]:
        """From what sandboxes are made."""
        return [SandboxSpec(image=image, workdir=self.workdir) for image in self.images]

    def receipt(self) -> dict[str, Any]:
        """Return what the receipt says before anything is created."""
        return {
            "run_id": self.run_id,
            "backend": self.options.backend,
            "image": self.options.default_image,
            "driver": {"pid": os.getpid(), "started": started(os.getpid())},
            "settings": settings(self.options, self.parallelism),
        }

    def begin(self, **receipt: Any) -> OutputDirectory:
        """Make the directory, or take up the one that there is, before anything is created."""
        resume = self.options.resume
        output = OutputDirectory(self.options.output, {**self.receipt(), **receipt}, resume=resume)
        if not resume:
            keep(output, self.batch)
        return output


async def run(options: RunOptions, console: Console) -> bool:
    """
    Run a batch and write its output directory.

    Args:
        options: What the user asked for.
        console: Where to show progress.

    Returns:
        Whether every episode has a valid reward.

    Raises:
        ConfigurationError: If something cannot work; nothing has been created then.

    """
    options.cluster.require_cluster(options.backend)
    earlier: list[str] = []
    if options.resume:
        refuse_others(options)
        options, batch, before = await take_up(options)
        earlier = [*before.get("earlier", ()), before["run_id"]]
    else:
        batch = [*_batch(options)]
    rollout = _rollout(options)
    parallelism = _parallelism(options, len(batch))
    images = {episode.image: 0 for episode in batch}
    for episode in batch:
        images[episode.image] = min(parallelism, images[episode.image] + 1)
    plan = _Plan(options, uuid.uuid4().hex[:12], batch, rollout, parallelism, images)
    if options.backend not in CLUSTERS:
        backend = open_backend(options.backend, run_id=plan.run_id)
        await backend.validate(plan.specs)
        return await _run(plan, backend, plan.begin(earlier=earlier), console)
    from agentsandbox.cli.cluster_run import ClusterRun

    async with ClusterRun.connected(plan.run_id, options.cluster, options.image, options.backend) as cluster:
        await cluster.backend.validate(plan.specs)
        await cluster.check(plan.specs[0])
        output = plan.begin(earlier=earlier, **cluster.receipt())
        try:
            async with cluster.open(output, plan.specs[0], console):
                return await _run(plan, cluster.backend, output, console, amend=cluster.amend)
        finally:
            output.end()


async def _run(
    plan: _Plan,
    backend: Backend,
    output: OutputDirectory,
    console: Console,
    *,
    amend: Callable[[dict[str, Any], tuple[EpisodeRecord, ...]], None] = lambda *_: None,
) -> bool:
    options, batch, resets = plan.options, plan.batch, ResetTally()
    console.print(f"run {plan.run_id}: {len(batch)} episodes, {plan.parallelism} at once", highlight=False)
    with BatchProgress(len(batch), console) as progress:
        try:
            async with SandboxPool(
                backend,
                images=plan.images,
                parallelism=plan.parallelism,
                rollout=plan.rollout,
                workdir=plan.workdir,
                reset=plan.reset,
                max_sandboxes=plan.max_sandboxes,
                journal=Journal(options.output / JOURNAL, resume=True, retry=options.resume),
                sink=(output, progress, resets),
            ) as pool:
                result = await pool.rollout(batch, batch_id=BATCH_ID, output=options.output / "artifacts")
        finally:
            if options.backend not in CLUSTERS:
                output.end()
    report = results_of(
        result,
        backend=options.backend,
        image=options.default_image,
        parallelism=plan.parallelism,
        run_id=plan.run_id,
        resets=resets,
    )
    amend(report, result.records)
    console.print(
        f"episodes={report['episodes']} successful_episodes={report['successful_episodes']} "
        f"reward_sum={report['reward_sum']:g}",
        highlight=False,
    )
    unsound = {record.episode.id: why for record in result.records if (why := _unsound(record))}
    for episode_id, why in unsound.items():
        console.print(f"{episode_id}: {why}", style="red", markup=False, highlight=False)
    output.write_results(report)
    return not unsound
