# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox run``: one batch, and everything about it on disk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.backends.local.leftovers import started
from agentsandbox.backends.opening import open_backend
from agentsandbox.cli.output import OutputDirectory
from agentsandbox.cli.progress import BatchProgress
from agentsandbox.cli.shipping import episodes, repair
from agentsandbox.cli.tasks import load_rollout, load_tasks
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.sandbox import SandboxSpec
from agentsandbox.pool import SandboxPool
from agentsandbox.report.summary import results as results_of
from agentsandbox.rollouts.source import check_rollout

if TYPE_CHECKING:
    from rich.console import Console

    from agentsandbox.models.episode import Episode, EpisodeRecord

__all__ = ["RunOptions", "run"]


@attrs.frozen(kw_only=True)
class RunOptions:
    """What the user asked for."""

    output: Path
    count: int | None = None
    parallelism: int | None = None
    backend: str = "local"
    image: str = "host"
    tasks: Path | None = None
    rollout: str | None = None


def _batch(options: RunOptions) -> tuple[Sequence[Episode], Callable[..., Awaitable[Any]]]:
    if options.count is not None and options.count < 1:
        raise ConfigurationError(f"--count must be at least 1, not {options.count}")
    if options.tasks is not None:
        if options.rollout is None:
            raise ConfigurationError("--tasks needs --rollout module:function, the function that works on them")
        batch = load_tasks(options.tasks, image=options.image)
        if options.count is not None and options.count > len(batch):
            raise ConfigurationError(f"--count {options.count} is more than the {len(batch)} tasks in {options.tasks}")
        batch = batch[: options.count]
    else:
        batch = episodes(10 if options.count is None else options.count, options.image)
    rollout = repair if options.rollout is None else load_rollout(options.rollout)
    check_rollout(rollout)
    return batch, rollout


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
    batch, rollout = _batch(options)
    parallelism = _parallelism(options, len(batch))
    images = {episode.image: 0 for episode in batch}
    for episode in batch:
        images[episode.image] = min(parallelism, images[episode.image] + 1)
    run_id = uuid.uuid4().hex[:12]
    receipt = {
        "run_id": run_id,
        "backend": options.backend,
        "image": options.image,
        "driver": {"pid": os.getpid(), "started": started(os.getpid())},
    }
    backend = open_backend(options.backend, run_id=run_id)
    await backend.validate([SandboxSpec(image=image) for image in images])
    output = OutputDirectory(options.output, receipt)
    console.print(f"run {run_id}: {len(batch)} episodes, {parallelism} at once", highlight=False)
    with BatchProgress(len(batch), console) as progress:
        try:
            async with SandboxPool(
                backend, images=images, parallelism=parallelism, rollout=rollout, sink=(output, progress)
            ) as pool:
                result = await pool.rollout(batch, output=options.output / "artifacts")
        finally:
            output.end()
    report = results_of(
        result,
        backend=options.backend,
        image=options.image,
        parallelism=parallelism,
        run_id=run_id,
    )
    output.write_results(report)
    console.print(
        f"episodes={report['episodes']} successful_episodes={report['successful_episodes']} "
        f"reward_sum={report['reward_sum']:g}",
        highlight=False,
    )
    unsound = {record.episode.id: why for record in result.records if (why := _unsound(record))}
    for episode_id, why in unsound.items():
        console.print(f"{episode_id}: {why}", style="red", markup=False, highlight=False)
    return not unsound
