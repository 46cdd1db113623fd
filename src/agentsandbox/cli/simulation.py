# SPDX-License-Identifier: Apache-2.0
"""Run strategies on the model of a cluster, and put what came of them beside what nothing could beat."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from agentsandbox.backends.simulated import virtualtime
from agentsandbox.cli.strategies import STRATEGIES, run
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import plan
from agentsandbox.hydration.bounds import pull_bound
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.metrics.recorder import summarise_ttfc

if TYPE_CHECKING:
    from agentsandbox.cli.strategies import Run
    from agentsandbox.cli.workload import Workload
    from agentsandbox.hydration import Plan
    from agentsandbox.models.events import Event

__all__ = ["SHAPES", "EventRecord", "bounds", "row", "simulate"]

SHAPES = {"hydrated": True, "cold-nodes": False}
"""Shape → whether the images are on their nodes, and sandboxes may be made, before the batch is submitted."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class EventRecord:
    """
    Everything that happened, a line an event: the same seed gives the same bytes. An event sink.

    Args:
        write: Takes each line; ``None`` keeps the fingerprint only.

    """

    def __init__(self, write: Callable[[bytes], Any] | None = None) -> None:
        self.events = 0
        """How many there were."""
        self._hash: _Hash = hashlib.sha256()
        self._write = write

    def __call__(self, event: Event) -> None:
        """Write an event down."""
        self.events += 1
        data = json.dumps(dict(event.data), sort_keys=True, default=str) if event.data else "{}"
        who = f"{event.sandbox or '-'} {event.episode or '-'} {event.attempt or '-'}"
        line = f"{event.at:.6f} {event.name} {who} {data}\n".encode()
        self._hash.update(line)
        if self._write is not None:
            self._write(line)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all lines."""
        return self._hash.hexdigest()

    def __repr__(self) -> str:
        return f"<EventRecord [{self.events} events, {self.fingerprint[:12]}]>"


def simulate(
    workload: Workload,
    strategies: tuple[str, ...],
    *,
    shapes: tuple[str, ...] = tuple(SHAPES),
    journal: Path | None = None,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """
    Run a batch by each of several strategies, in each of several shapes.

    Args:
        workload: The batch and the cluster.
        strategies: Of :data:`~agentsandbox.cli.strategies.STRATEGIES`.
        shapes: Of :data:`SHAPES`.
        journal: Directory for the record of events of each run.
        jobs: How many runs at a time, each in a process of its own; 1 for all of them here, ``None`` for as many as
            there are processors. Runs know nothing of each other, so the results are the same.
        progress: Told what is done.

    Returns:
        The report: only dictionaries, lists, strings, numbers, truth values and ``None``.

    Raises:
        ConfigurationError: If there is no such strategy or shape, or the images cannot be on the nodes.

    """
    for what, names, known in (("strategy", strategies, STRATEGIES), ("shape", shapes, SHAPES)):
        if unknown := [name for name in names if name not in known]:
            raise ConfigurationError(f"unknown {what} {unknown[0]!r}; there are {', '.join(known)}")
    began = time.perf_counter()
    planned = plan(workload.uses, workload.nodes(), advise=False)
    planning = time.perf_counter() - began
    if planned.unplaced:
        first = planned.unplaced[0]
        raise ConfigurationError(
            f"{len(planned.unplaced)} images fit on no node; {first.image}: {first.reason}; see 'agentsandbox plan'"
        )
    if journal is not None:
        journal.mkdir(parents=True, exist_ok=True)
    least = {shape: bounds(workload, hydrated=SHAPES[shape]) for shape in shapes}
    runs = [
        partial(_row, workload, strategy, planned, shape, least[shape], journal)
        for shape in shapes
        for strategy in strategies
    ]
    rows = _all(runs, jobs or len(os.sched_getaffinity(0)), progress)
    return {
        "simulated": True,
        "images": len(workload.uses),
        "rollouts": len(workload.episodes),
        "limit": workload.limit,
        "seed": workload.seed,
        "model": attrs.asdict(workload.model),
        "plan": {"seconds": planning, **_planned(planned)},
        "bounds": least,
        "rows": rows,
    }


def _all(
    runs: Sequence[Callable[[], dict[str, Any]]], jobs: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    def told(row: dict[str, Any]) -> dict[str, Any]:
        progress(f"{row['shape']}: {row['strategy']}, in {row['took_seconds']:.0f} s")
        return row

    if min(jobs, len(runs)) == 1:
        return [told(run()) for run in runs]
    # Not by fork: what else this process does must not be in the others.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(runs)), mp_context=context) as executor:
        futures = [executor.submit(run) for run in runs]
        for future in as_completed(futures):
            told(future.result())
    return [future.result() for future in futures]


def _row(
    workload: Workload,
    strategy: str,
    planned: Plan,
    shape: str,
    least: dict[str, float],
    journal: Path | None,
) -> dict[str, Any]:
    began = time.perf_counter()
    hydrated = SHAPES[shape]
    if journal is None:
        record = EventRecord()
        act = partial(run, workload, strategy, planned, hydrated=hydrated, sink=record)
        done = virtualtime.run(act)
    else:
        with (journal / f"{shape}-{strategy}.log").open("wb") as file:
            record = EventRecord(file.write)
            act = partial(run, workload, strategy, planned, hydrated=hydrated, sink=record)
            done = virtualtime.run(act)
    return {
        "shape": shape,
        **row(done, workload, least),
        "events": record.events,
        "journal_sha256": record.fingerprint,
        "took_seconds": time.perf_counter() - began,
    }


def row(done: Run, workload: Workload, least: dict[str, float]) -> dict[str, Any]:
    """
    Put one run into figures, all times in seconds.

    Args:
        done: The run.
        workload: What was run.
        least: What nothing could beat: see :func:`bounds`.

    """
    records = [(at, record) for at, result in done.results for record in result.records]
    ttfc = summarise_ttfc(sample for _, result in done.results for sample in result.samples)
    waited = [at + (record.timings.queued or 0.0) for at, record in records]
    nodes = done.backend.nodes.values()
    room = workload.limit * done.seconds
    return {
        "strategy": done.strategy,
        "rewarded": sum(record.reward is not None for _, record in records),
        "submitted": len(records),
        "ttfc": {
            "n": ttfc.n,
            "mean": ttfc.mean,
            "p50": ttfc.p50,
            "p95": ttfc.p95,
            "p99": ttfc.p99,
            "max": ttfc.max,
            "censored": ttfc.censored,
        },
        "waited_before_admission": {
            "mean": sum(waited) / len(waited),
            "p99": quantile(waited, 0.99),
            "max": max(waited),
        },
        "batch_seconds": done.seconds,
        "batch_over_bound": done.seconds / least["batch_seconds"],
        "warm_up_seconds": done.warm_seconds,
        "pods_created": done.backend.pods_created,
        "pods_peak": done.backend.pods_peak,
        "api_writes": done.backend.api.writes,
        "api_writes_peak": done.backend.api.peak,
        "api_refused": done.backend.api.refused,
        "pulled_bytes": sum(node.bytes_pulled for node in nodes),
        "pulls": sum(node.pulls for node in nodes),
        "images_collected": sum(node.removed for node in nodes),
        "disk_peak_share": max(node.disk_peak for node in nodes) / workload.model.disk,
        "accelerator_idle_share": 1 - workload.work / room,
    }


def bounds(workload: Workload, *, hydrated: bool) -> dict[str, float]:
    """
    Say what no strategy can beat on this model, whatever it does.

    * ``batch_seconds``: the larger of what fetching takes, with every layer once and all nodes at work, and of what
      running takes, with every place taken; the least time that a place needs between two rollouts counts, and from
      empty nodes what it takes to fill the places: Pods are bound one after another, and need their images.
    * ``ttfc_seconds``: a sandbox can be ready beforehand, so that only the first command's way to it is left.
    * ``pods``: one for each place, if images are changed in place; ``pods_without_change`` if they are not.
    * ``api_writes``: to start the Pods and, for each further rollout, the writes of a restart.
    """
    model = workload.model
    rollouts, places = len(workload.episodes), min(workload.limit, len(workload.episodes))
    between = min(model.change.floor, model.restart.floor)
    running = (workload.work + (rollouts - places) * between) / workload.limit
    fetching = first = 0.0
    if not hydrated:
        fetching = pull_bound(workload.uses, workload.nodes())
        first = model.start.floor + _filling(workload, places) / workload.limit
    complete = max(fetching, first + running, workload.longest)
    return {
        "batch_seconds": complete,
        "pull_seconds": fetching,
        "run_seconds": max(running, workload.longest),
        "fill_seconds": first,
        "ttfc_seconds": model.round_trip,
        "pods": float(places),
        "pods_without_change": float(len(workload.uses)),
        "api_writes": float(places * model.writes_start + (rollouts - places) * model.writes_restart),
        "pulled_bytes": 0.0 if hydrated else float(_layers(workload)),
        "accelerator_idle_share": 1 - workload.work / (workload.limit * complete),
    }


def _filling(workload: Workload, places: int) -> float:
    """
    Return the seconds that places lose, all together, before their first rollouts can begin on empty nodes.

    The scheduler binds one Pod after another; and as many places as an image has rollouts need that image, of which all
    nodes together fetch so many bytes a second, the smallest first at best. None is there before its largest layer,
    which is fetched by one pull, at a pull's share of the rate.
    """
    model = workload.model
    largest = min(max(layer.unpacked for layer in use.image.layers) for use in workload.uses)
    first = model.pull_overhead + model.pulls_at_once * largest / model.unpack_rate
    sharing = Counter(layer.digest for use in workload.uses for layer in use.image.layers)
    parts = []
    for use in workload.uses:
        own = sum(layer.unpacked for layer in use.image.layers if sharing[layer.digest] == 1)
        seconds = own / model.unpack_rate + model.pull_overhead / model.pulls_at_once
        parts += [seconds / use.rollouts / model.nodes] * use.rollouts
    lost = fetched = 0.0
    for bound, seconds in enumerate(sorted(parts)[:places], 1):
        fetched += seconds
        lost += max(bound / model.scheduler_rate, fetched, first)
    return lost


def _layers(workload: Workload) -> int:
    return sum({layer.digest: layer.size for use in workload.uses for layer in use.image.layers}.values())


def _planned(planned: Plan) -> dict[str, Any]:
    return {
        "complete_seconds": planned.complete_seconds,
        "bound_seconds": planned.bound_seconds,
        "load_seconds": planned.load_seconds,
        "load_bound_seconds": planned.load_bound_seconds,
        "waves": max(len(node.waves) for node in planned.nodes),
    }
