# SPDX-License-Identifier: Apache-2.0
"""What a run keeps in its directory so that it can go on after its driver was killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.backends.opening import backend_class
from agentsandbox.cli.cluster_options import ClusterOptions
from agentsandbox.cli.output import read_receipt
from agentsandbox.cli.tasks import load_tasks
from agentsandbox.errors import ConfigurationError

if TYPE_CHECKING:
    from agentsandbox.cli.output import OutputDirectory
    from agentsandbox.cli.run_options import RunOptions
    from agentsandbox.models.episode import Episode

__all__ = ["BATCH_ID", "JOURNAL", "keep", "refuse_others", "settings", "take_up"]

JOURNAL = "journal.db"
"""File in the directory of a run in which every step is written."""

BATCH_ID = "run"
"""What the one batch of a run is called in its journal."""

_EPISODES = "episodes.jsonl"


def settings(options: RunOptions, parallelism: int) -> dict[str, Any]:
    """Return what the receipt keeps of the options."""
    return {
        "parallelism": parallelism,
        "image": options.image,
        "rollout": options.rollout,
        "cluster": attrs.asdict(options.cluster),
    }


def keep(output: OutputDirectory, batch: Sequence[Episode]) -> None:
    """Write the episodes of a run: a file of tasks may be another one tomorrow."""
    lines = [
        json.dumps({key: value for key, value in attrs.asdict(episode, recurse=False).items() if value is not None})
        for episode in batch
    ]
    output.write_text(_EPISODES, "".join(f"{line}\n" for line in lines))


async def take_up(options: RunOptions) -> tuple[RunOptions, list[Episode], dict[str, Any]]:
    """
    Prepare to go on with a run that was killed; what its driver left behind is removed.

    Args:
        options: What the user asked for: the directory, and perhaps another parallelism.

    Returns:
        The options of that run, its episodes, and its receipt.

    Raises:
        ConfigurationError: If that is no run that can go on.
        UsageError: If it is still going on.

    """
    path = options.output
    receipt = read_receipt(path)
    kept = receipt.get("settings")
    if not isinstance(kept, dict) or not (path / _EPISODES).is_file():
        raise ConfigurationError(f"the run in {path} had not begun, or is of an older version; run it anew")
    if not receipt.get("ended"):
        await backend_class(receipt["backend"]).remove_leftovers(receipt)
    batch = load_tasks(path / _EPISODES, image="host")
    before = attrs.evolve(
        options,
        parallelism=min(options.parallelism or kept["parallelism"], len(batch)),
        backend=receipt["backend"],
        image=kept["image"],
        rollout=kept["rollout"],
        cluster=ClusterOptions(**kept["cluster"]),
    )
    return before, batch, receipt


def refuse_others(options: RunOptions) -> None:
    """
    Refuse options that a run has already.

    Raises:
        ConfigurationError: Naming the first of them.

    """
    for name in ("count", "image", "tasks", "rollout"):
        if getattr(options, name) is not None:
            raise ConfigurationError(f"--{name} cannot be changed when a run is resumed")
