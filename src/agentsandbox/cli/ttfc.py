# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox ttfc``: how long a trainer waits for its first commands, and what it depends on."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.backends.opening import open_backend
from agentsandbox.cli.cluster_options import DEFAULT_IMAGE, ClusterOptions
from agentsandbox.cli.output import write_json
from agentsandbox.cli.stages import STAGES, Split, StageRecorder, split
from agentsandbox.errors import ConfigurationError, InfrastructureError
from agentsandbox.metrics.quantiles import quantile
from agentsandbox.metrics.recorder import summarise_ttfc
from agentsandbox.models.episode import Episode
from agentsandbox.pool import SandboxPool
from agentsandbox.report.summary import describe_environment

if TYPE_CHECKING:
    from rich.console import Console

    from agentsandbox.backends.base import Backend
    from agentsandbox.client import Lease
    from agentsandbox.models.episode import RolloutResult
    from agentsandbox.models.events import Event
    from agentsandbox.models.timing import TTFCSample, TTFCSummary

__all__ = ["TTFCOptions", "ttfc"]

SCENARIOS = ("warm", "cold", "many-images")
SLOWEST = 5
FULL_WITHIN = 600.0
"""Seconds in which a pool must be full before a warm round."""

HOLD = 120.0
"""Seconds that a sandbox waits for the others of its round, if the cluster has no room for all of them."""

_SHOWN = 0.0005
"""Seconds; what is less is a zero with four digits."""

_FIGURES = ("n", "mean", "p50", "p95", "p99", "max", "censored")


@attrs.frozen(kw_only=True)
class TTFCOptions:
    """What is to be measured."""

    scenario: str = "warm"
    count: int = 10
    rounds: int = 3
    backend: str = "local"
    images: tuple[str, ...] = ()
    parallelism: int | None = None
    cluster: ClusterOptions = attrs.Factory(ClusterOptions)

    def __attrs_post_init__(self) -> None:
        """Refuse what makes no sense."""
        if self.scenario not in SCENARIOS:
            raise ConfigurationError(f"--scenario is one of {', '.join(SCENARIOS)}, not {self.scenario!r}")
        if self.scenario == "many-images" and len(set(self.images)) < 2:
            raise ConfigurationError("--scenario many-images needs --image at least twice")
        if self.scenario != "many-images" and len(self.images) > 1:
            raise ConfigurationError(f"--scenario {self.scenario} is about one --image, not {len(self.images)}")
        if self.parallelism is not None and not 1 <= self.parallelism <= self.count:
            raise ConfigurationError(f"--parallelism must be from 1 to --count, {self.count}, not {self.parallelism}")
        if self.scenario == "warm" and self.parallelism not in (None, self.count):
            raise ConfigurationError("--scenario warm asks for all sandboxes at once: --parallelism makes no sense")
        self.cluster.require_cluster(self.backend)

    @property
    def at_once(self) -> int:
        """Episodes at once."""
        return self.count if self.parallelism is None else self.parallelism

    @property
    def named(self) -> tuple[str, ...]:
        """The images, each once."""
        default = DEFAULT_IMAGE if self.backend == "kubernetes" else "host"
        return tuple(dict.fromkeys(self.images)) or (default,)


class _Measurement:
    """Rounds, and what came of them."""

    def __init__(self, options: TTFCOptions) -> None:
        self.options = options
        self.run_id = secrets.token_hex(6)
        self.recorder = StageRecorder()
        self.pods: Any = None
        self.rows: list[dict[str, Any]] = []
        self.samples: list[TTFCSample] = []
        self.splits: list[Split] = []
        self.rounds: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._now = _Round(0)
        self.made = 0
        self.recycled = 0

    def backend(self) -> Backend:
        """Make a backend; one serves one pool."""
        options = self.options
        if options.backend != "kubernetes":
            return open_backend(options.backend, run_id=self.run_id)
        from agentsandbox.backends.kubernetes.backend import KubernetesBackend
        from agentsandbox.cli.pods import PodRecorder

        if self.pods is None:
            self.pods = PodRecorder()
            self.recorder = StageRecorder(lambda sandbox: self.pods.moments.get(sandbox, {}))
        image = options.images[0] if options.images else None
        backend = KubernetesBackend(run_id=self.run_id, **options.cluster.for_backend(image))
        backend.observers.append(self.pods)
        return backend

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[SandboxPool]:
        """Have a pool, with nothing in reserve."""
        options = self.options
        share = -(-options.at_once // len(options.named))
        backend = self.backend()
        async with SandboxPool(
            backend,
            images=dict.fromkeys(options.named, share),
            spares=0,
            max_sandboxes=options.at_once if options.scenario == "many-images" else None,
            parallelism=options.at_once,
            max_attempts=1,
            sink=(self.recorder, self._hear),
        ) as pool:
            yield pool
            statistics = pool.statistics()
            self.made += statistics.created_total
            self.recycled += statistics.recycled_total

    async def round(self, pool: SandboxPool, number: int) -> None:
        """Ask for every sandbox in the same instant."""
        images = self.options.named
        batch = [Episode(id=f"{number}-{n}", image=images[n % len(images)]) for n in range(self.options.count)]
        # All of them at once, as a training step has them; with less parallelism each gives way to the next.
        self._now = _Round(len(batch) if self.options.at_once == len(batch) else 0)
        result = await pool.rollout(batch, rollout=self._now.rollout)
        self._take(result, number)

    def _take(self, result: RolloutResult, number: int) -> None:
        where = {record.episode.id: record.last for record in result.records}
        self.rounds.append(
            {"round": number, **_figures(summarise_ttfc(result.samples)), "wall_seconds": result.wall_seconds}
        )
        self.failures += [f"{r.episode.id}: {r.reason}" for r in result.records if r.reward is None]
        for sample in result.samples:
            self.samples.append(sample)
            moments = self.recorder.moments.get((sample.episode, sample.sandbox))
            if sample.censored or moments is None:
                continue
            parts = split(sample, moments)
            self.splits.append(parts)
            last = where.get(sample.episode or "")
            self.rows.append(
                {
                    "episode": sample.episode,
                    "round": number,
                    "image": sample.image,
                    "sandbox": sample.sandbox,
                    "node": last.node if last else None,
                    **self._pod(last),
                    "start": str(sample.start),
                    "seconds": sample.seconds,
                    "stages": dict(parts.stages),
                    "making": parts.making,
                }
            )

    def _hear(self, event: Event) -> None:
        self._now(event)

    def _pod(self, last: Any) -> dict[str, Any]:
        if self.pods is None or last is None:
            return {}
        facts = self.pods.where(last.identity)
        return {"pod": facts["pod"], "image_id": facts["image_id"]}


async def ttfc(options: TTFCOptions, console: Console, output: Path | None = None) -> dict[str, Any]:
    """
    Measure, print the figures, and return them all.

    Args:
        options: What is to be measured.
        console: Where to print.
        output: File for the whole report; it must not exist.

    Raises:
        ConfigurationError: If something cannot work; nothing has been created then.
        InfrastructureError: If sandboxes could not be made, so that there is nothing to measure.

    """
    _refuse_unwritable(output)
    measured = _Measurement(options)
    environment = await _environment(options)
    console.print(f"run {measured.run_id}", markup=False, highlight=False)
    if options.scenario == "warm":
        async with measured.pool() as pool:
            for number in range(options.rounds):
                await _full(pool, options.count)
                await measured.round(pool, number)
    else:
        for number in range(options.rounds):
            async with measured.pool() as pool:
                await measured.round(pool, number)
    report = _report(measured, environment)
    if output is not None:
        write_json(output, report)
    for line in _lines(report):
        console.print(line, markup=False, highlight=False)
    return report


def _refuse_unwritable(output: Path | None) -> None:
    if output is None:
        return
    if output.exists():
        raise ConfigurationError(f"{output} exists; results are never overwritten, choose another --output")
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(f"cannot write {output}: {output.parent} is no directory that takes files")


class _Round:
    """
    Holds every sandbox of a round until all have had their first command, or those that are early would serve others.

    Args:
        count: How many there are; 0 holds nobody.

    """

    def __init__(self, count: int) -> None:
        self._left = count
        self._all = anyio.Event()

    def __repr__(self) -> str:
        return f"<_Round [{self._left} left]>"

    def __call__(self, event: Event) -> None:
        """Take an event: who has failed is not waited for."""
        if event.name == "episode.ended" and event.data.get("status") != "rewarded":
            self._arrive()

    async def rollout(self, sandbox: Lease, episode: Episode) -> float:  # noqa: ARG002 - every rollout function has it
        """Run a first command, and wait for the others."""
        done = await sandbox.exec(["true"], timeout=60)
        if done.ok and self._left > 0:
            self._arrive()
            with anyio.move_on_after(HOLD):
                await self._all.wait()
        return float(done.ok)

    def _arrive(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._all.set()


async def _full(pool: SandboxPool, count: int) -> None:
    """Wait until every sandbox is ready and nothing else is going on."""
    with anyio.move_on_after(FULL_WITHIN):
        while (now := pool.statistics()).ready < count or now.creating or now.resetting or now.deleting:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        return
    raise InfrastructureError(f"the pool is not full after {FULL_WITHIN:g} s: {pool.statistics()}")


async def _environment(options: TTFCOptions) -> dict[str, Any]:
    facts: dict[str, Any] = {"driver": describe_environment()}
    if options.backend != "kubernetes":
        return facts
    from agentsandbox.backends.kubernetes.api import KubernetesApi
    from agentsandbox.backends.kubernetes.evidence import cluster_facts
    from agentsandbox.backends.kubernetes.options import PodOptions

    api = await KubernetesApi.connect(**options.cluster.where(), max_connections=8)
    try:
        facts["cluster"] = await cluster_facts(api, options.named)
    finally:
        await api.aclose()
    facts["pods"] = {
        "pull_policy": PodOptions().pull_policy,
        "requests": dict(PodOptions().requests),
        "limits": dict(PodOptions().limits),
        "runtime_class": options.cluster.runtime_class,
    }
    return facts


def _figures(summary: TTFCSummary) -> dict[str, Any]:
    return {name: getattr(summary, name) for name in _FIGURES}


def _spread(values: Iterable[float]) -> dict[str, Any]:
    found = list(values)
    if not found:
        return {"n": 0}
    return {
        "n": len(found),
        "mean": sum(found) / len(found),
        **{f"p{q}": quantile(found, q / 100) for q in (50, 95, 99)},
        "max": max(found),
    }


def _report(measured: _Measurement, environment: dict[str, Any]) -> dict[str, Any]:
    options, summary = measured.options, summarise_ttfc(measured.samples)
    return {
        "scenario": options.scenario,
        "backend": options.backend,
        "images": list(options.named),
        "count": options.count,
        "rounds": options.rounds,
        "parallelism": options.at_once,
        "run_id": measured.run_id,
        "cache_state": "uncontrolled",
        "environment": environment,
        "ttfc": {
            **_figures(summary),
            "by_start": {name: _figures(part) for name, part in summary.by_start.items()},
        },
        "by_stage": {
            stage: _spread(parts.stages[stage] for parts in measured.splits if stage in parts.stages)
            for stage in STAGES.values()
            if any(stage in parts.stages for parts in measured.splits)
        },
        "making": _spread(parts.making for parts in measured.splits if parts.making is not None),
        "sandboxes_made": measured.made,
        "sandboxes_recycled": measured.recycled,
        "by_round": measured.rounds,
        "slowest": sorted(measured.rows, key=lambda row: float(row["seconds"]), reverse=True)[:SLOWEST],
        "failures": measured.failures,
    }


def _lines(report: dict[str, Any]) -> list[str]:
    """Say what came of it, the figures first."""
    figures = report["ttfc"]
    head = {key: report[key] for key in ("scenario", "backend", "count", "rounds")}
    head |= {"images": len(report["images"]), "made": report["sandboxes_made"], "reused": report["sandboxes_recycled"]}
    lines = [" ".join(f"{key}={value}" for key, value in head.items())]
    if figures["n"]:
        shown = " ".join(f"{name}={figures[name]:.4f}" for name in ("mean", "p50", "p95", "p99", "max"))
        lines.append(f"ttfc_seconds n={figures['n']} {shown} censored={figures['censored']}")
    for stage, spread in report["by_stage"].items():
        if spread["max"] < _SHOWN:
            continue
        lines.append(f"  {stage:<18} p50={spread['p50']:.4f} p95={spread['p95']:.4f} max={spread['max']:.4f}")
    if report["making"]["n"]:
        spread = report["making"]
        lines.append(f"making a sandbox     p50={spread['p50']:.4f} p95={spread['p95']:.4f} max={spread['max']:.4f}")
    if report["slowest"]:
        lines.append("slowest:")
    for row in report["slowest"]:
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["stages"].items() if seconds >= _SHOWN)
        lines.append(f"  {row.get('pod') or row['sandbox']} {row['seconds']:.4f} s ({row['start']}): {parts}")
    lines += [f"failed {failure}" for failure in report["failures"]]
    return lines
