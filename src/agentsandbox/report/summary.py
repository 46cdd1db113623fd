# SPDX-License-Identifier: Apache-2.0
"""The figures of one batch: ``results.json`` as a dictionary, and the lines that are printed."""

from __future__ import annotations

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.metrics.quantiles import quantile
from agentsandbox.report.bias import bias_lines, bias_report

if TYPE_CHECKING:
    from agentsandbox.metrics.resets import ResetTally
    from agentsandbox.models.episode import Attempt, EpisodeRecord, RolloutResult
    from agentsandbox.models.timing import TTFCSummary

__all__ = ["describe_environment", "record_row", "results", "summary_lines"]

_FIGURES = ("n", "mean", "p50", "p95", "p99", "max", "censored")


def results(
    result: RolloutResult,
    *,
    parallelism: int,
    backend: str,
    image: str,
    run_id: str,
    environment: Mapping[str, Any] | None = None,
    resets: ResetTally | None = None,
) -> dict[str, Any]:
    """
    Put a batch into the dictionary that ``results.json`` holds.

    Every duration is in seconds, on the driver's monotonic clock. A figure that does not exist is ``None``: no batch is
    ready before its last episode was, and none has all rewards if one is missing.

    * ``successful_episodes``: episodes with a valid reward, whatever its size.
    * ``batch_to_all_ready_seconds``: from the submission to the grant of the last episode's sandbox.
    * ``batch_to_all_rewards_seconds``: from the submission to the last reward.
    * ``sandbox_to_ready_*_seconds``: from the call of ``acquire()`` to the grant, over every attempt that got one.
    * ``client_complete_seconds``: from the submission until every sandbox was given back.

    Args:
        result: What came of the batch.
        parallelism: How many episodes ran at the same time.
        backend: Where the sandboxes came from.
        image: What they were made from.
        run_id: The run.
        environment: Where the driver ran; ``None`` asks :func:`describe_environment`.
        resets: The sink that has counted the resets, if one has.

    Returns:
        Only dictionaries, lists, strings, numbers, truth values and ``None``.

    """
    records = result.records
    ready = [record.timings.ready_at for record in records]
    rewards = [_rewarded_at(record) for record in records]
    granted = [
        attempt.timings.acquire
        for record in records
        for attempt in record.history
        if attempt.timings.acquire is not None
    ]
    return {
        "episodes": result.counts.submitted,
        "successful_episodes": result.valid_count,
        "reward_sum": _reward_sum(result),
        "counts": {
            "submitted": result.counts.submitted,
            "rewarded": result.counts.rewarded,
            "failed": result.counts.failed,
            "retryable": result.counts.retryable,
            "cancelled": result.counts.cancelled,
        },
        "batch_to_all_ready_seconds": _latest(ready),
        "batch_to_all_rewards_seconds": _latest(rewards),
        "sandbox_to_ready_p50_seconds": quantile(granted, 0.50) if granted else None,
        "sandbox_to_ready_p95_seconds": quantile(granted, 0.95) if granted else None,
        "sandbox_to_ready_max_seconds": max(granted, default=None),
        "client_complete_seconds": result.wall_seconds,
        "ttfc": {
            **_figures(result.ttfc),
            "by_start": {name: _figures(part) for name, part in result.ttfc.by_start.items()},
            "by_stage": {name: _figures(part) for name, part in result.ttfc.by_stage.items()},
        },
        "late_results": result.late_results,
        "resumed": result.resumed,
        "extra_acquires": result.extra_acquires,
        "lost_twins": result.lost_twins,
        "resets": None if resets is None else resets.rows(),
        "bias": bias_lines(bias_report(result)),
        "groups": [
            {"group": _plain(group.group), "size": group.size, "valid": group.valid_count, "complete": group.complete}
            for group in result.groups.values()
        ],
        "parallelism": parallelism,
        "backend": backend,
        "image": image,
        "run_id": run_id,
        "environment": _plain(describe_environment() if environment is None else environment),
        "records": [record_row(record) for record in records],
    }


def record_row(record: EpisodeRecord) -> dict[str, Any]:
    """
    Put one record into a dictionary that serialises to JSON.

    Args:
        record: The record.

    Returns:
        Its row in ``results.json``: what came of the episode, and in ``history`` every attempt.

    """
    failure, last = record.failure, record.last
    return {
        "episode": record.episode.id,
        "group": _plain(record.episode.group),
        "image": record.episode.image,
        "status": record.status.value,
        "reward": record.reward,
        "reason": record.reason,
        "kind": failure.kind.value if failure else None,
        "phase": failure.phase.value if failure else None,
        "blame": failure.blame.value if failure else None,
        "retryable": record.retryable,
        "gradable": failure.gradable if failure else None,
        "attempts": record.attempts,
        "ttfc": _plain(attrs.asdict(record.ttfc)) if record.ttfc else None,
        "timings": _plain(attrs.asdict(record.timings)),
        "sandbox": last.sandbox if last else None,
        "node": last.node if last else None,
        "identity": attrs.asdict(last.identity) if last and last.identity else None,
        "info": _plain(record.info),
        "artifacts": {name: str(path) for name, path in record.artifacts.items()},
        "history": [_attempt_row(attempt) for attempt in record.history],
    }


def summary_lines(result: RolloutResult) -> list[str]:
    """
    Say what came of a batch in a few lines; the first is for programs as well.

    Returns:
        The counts, then the time to first command, then one line for each kind of failure.

    """
    counts = result.counts
    lines = [
        f"episodes={counts.submitted} successful_episodes={result.valid_count} reward_sum={_reward_sum(result):g}",
        (
            f"submitted={counts.submitted} rewarded={counts.rewarded} failed={counts.failed} "
            f"retryable={counts.retryable} cancelled={counts.cancelled} seconds={result.wall_seconds:.3f}"
        ),
    ]
    ttfc = result.ttfc
    if ttfc.n:
        shown = " ".join(f"{name}={getattr(ttfc, name):.4f}" for name in ("mean", "p50", "p95", "p99", "max"))
        lines.append(f"ttfc_seconds n={ttfc.n} {shown} censored={ttfc.censored}")
    elif ttfc.censored:
        lines.append(f"ttfc_seconds n=0 censored={ttfc.censored}")
    groups = result.groups.values()
    complete = sum(group.complete for group in groups)
    if complete < len(groups):
        without = sum(group.all_failed for group in groups)
        part = len(groups) - complete - without
        lines.append(f"groups={len(groups)} complete={complete} incomplete={part} all_failed={without}")
    kinds = Counter((record.status.value, record.failure.kind.value) for record in result.records if record.failure)
    for (status, kind), count in kinds.most_common():
        example = next(r for r in result.records if r.failure and (r.status, r.failure.kind) == (status, kind))
        lines.append(f"{status} {kind}: {count}, for instance {example.episode.id}: {example.reason}")
    return lines


def describe_environment() -> dict[str, Any]:
    """
    Say where the driver runs, as far as it matters for comparing figures.

    Returns:
        Versions, operating system, machine and how many processors may be used.

    """
    return {
        "agentsandbox": version("agentsandbox"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _attempt_row(attempt: Attempt) -> dict[str, Any]:
    failure = attempt.failure
    return {
        "number": attempt.number,
        "sandbox": attempt.sandbox,
        "node": attempt.node,
        "reward": attempt.reward,
        "kind": failure.kind.value if failure else None,
        "reason": failure.message if failure else None,
        "ttfc": attempt.ttfc.seconds if attempt.ttfc else None,
        "censored": attempt.ttfc.censored if attempt.ttfc else None,
        "total_seconds": attempt.timings.total,
    }


def _reward_sum(result: RolloutResult) -> float:
    return math.fsum(reward for reward in result.rewards if reward is not None)


def _rewarded_at(record: EpisodeRecord) -> float | None:
    timings = record.timings
    if record.reward is None or timings.ready_at is None or timings.run is None:
        return None
    return timings.ready_at + timings.run


def _latest(moments: Sequence[float | None]) -> float | None:
    known = [moment for moment in moments if moment is not None]
    return max(known) if known and len(known) == len(moments) else None


def _figures(summary: TTFCSummary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in _FIGURES}


def _plain(value: object) -> Any:
    """Reduce *value* to what JSON knows; what it does not know becomes its ``repr()``, and nothing is left out."""
    if value is None or isinstance(value, (bool, int, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(_plain(key)): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Iterable) and isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in value]
    return repr(value)
