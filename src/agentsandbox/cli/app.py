# SPDX-License-Identifier: Apache-2.0
"""The commands and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agentsandbox.cli.cluster_commands import job, reap, ttfc
from agentsandbox.cli.cluster_options import (
    CLUSTERS,
    Backend,
    ClusterOptions,
    Context,
    ImageUser,
    Namespace,
    RunAsRoot,
    RuntimeClass,
)
from agentsandbox.cli.planning_commands import plan, simulate
from agentsandbox.cli.reporting import report
from agentsandbox.cli.running import running as _run
from agentsandbox.errors import ConfigurationError

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Isolated sandboxes for reinforcement learning of coding agents.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure, each figure beside its bare counterpart in the same run.")
app.add_typer(bench, name="bench")

Output = Annotated[Path, typer.Option(help="Directory of the run.", show_default=False)]
Image = Annotated[str, typer.Option(help="What they are made from: 'host', a directory, or an image archive.")]
AnyImage = Annotated[
    str | None,
    typer.Option(help="What they are made from. Default: 'host', on a cluster python:3.12-alpine."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"agentsandbox {version('agentsandbox')}")
        raise typer.Exit


@app.callback()
def _everywhere(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def run(
    output: Annotated[
        Path | None, typer.Option(help="Directory for a new run. It must not exist.", show_default=False)
    ] = None,
    *,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a run that was killed: go on with it. Instead of --output.", show_default=False
        ),
    ] = None,
    count: Annotated[int | None, typer.Option(help="Episodes to run. Default: 10, or all tasks.")] = None,
    parallelism: Annotated[int | None, typer.Option(help="Episodes at once. Default: all.")] = None,
    backend: Backend = "local",
    image: AnyImage = None,
    tasks: Annotated[Path | None, typer.Option(help="File of tasks, one JSON object a line. Needs --rollout.")] = None,
    rollout: Annotated[
        str | None, typer.Option(help="What runs them, as module:function: async, of a sandbox and an episode.")
    ] = None,
    context: Context = None,
    namespace: Namespace = None,
    runtime_class: RuntimeClass = None,
    user: ImageUser = None,
    run_as_root: RunAsRoot = False,
) -> None:
    """
    Run a batch of episodes and write DIR/results.json, a log an episode, and a receipt.

    Without --tasks each episode repairs a boundary bug and shows that the test fails before and passes after. On a
    cluster there are pods.json and events.txt as well. The exit code is 0 only if every episode has a valid reward.
    """
    from agentsandbox.cli.run import run as run_batch
    from agentsandbox.cli.run_options import RunOptions

    directory = output if resume is None else resume
    if directory is None or (output is not None and resume is not None):
        raise typer.BadParameter("give either --output DIR for a new run, or --resume DIR to go on with one")
    options = RunOptions(
        output=directory,
        resume=resume is not None,
        count=count,
        parallelism=parallelism,
        backend=backend,
        image=image,
        tasks=tasks,
        rollout=rollout,
        cluster=ClusterOptions(
            context=context, namespace=namespace, runtime_class=runtime_class, user=user, run_as_root=run_as_root
        ),
    )
    if not _run(run_batch, options, Console(soft_wrap=True)):
        raise typer.Exit(1)


@app.command()
def cleanup(output: Output) -> None:
    """Remove what a run left behind, and only that, after checking that it is that run's."""
    from agentsandbox.cli.cleanup import cleanup as clean

    for line in _run(clean, output):
        typer.echo(line)


@app.command()
def doctor(
    backend: Backend = "local",
    *,
    image: Annotated[list[str] | None, typer.Option(help="Make a sandbox of this image, too. May be repeated.")] = None,
    as_json: Json = False,
    context: Context = None,
    namespace: Namespace = None,
    runtime_class: RuntimeClass = None,
    user: ImageUser = None,
    run_as_root: RunAsRoot = False,
    deny_network: Annotated[
        bool, typer.Option(help="With --image, forbid its Pods every connection and see whether the cluster does.")
    ] = False,
) -> None:
    """Say whether a backend can work here and, where it cannot, what to do about it."""
    from agentsandbox.cli.doctor import doctor as examine

    cluster = ClusterOptions(
        context=context, namespace=namespace, runtime_class=runtime_class, user=user, run_as_root=run_as_root
    )
    console, images = Console(soft_wrap=True), image or []

    async def act() -> bool:
        cluster.require_cluster(backend)
        if deny_network and backend != "kubernetes":
            raise ConfigurationError("--deny-network is for clusters: add --backend kubernetes")
        options: dict[str, Any] = {}
        if backend in CLUSTERS:
            options = {**cluster.for_backend(images[0] if images else None), "ready_timeout": 120.0}
            options |= {"network": False} if deny_network else {}
        return await examine(backend, console, as_json=as_json, images=images, options=options)

    if not _run(act):
        raise typer.Exit(1)


@bench.command("exec")
def bench_exec(
    backend: Backend = "local",
    image: AnyImage = None,
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Commands of each kind.")] = 200,
    as_json: Json = False,
    context: Context = None,
    namespace: Namespace = None,
    runtime_class: RuntimeClass = None,
    user: ImageUser = None,
    run_as_root: RunAsRoot = False,
) -> None:
    """
    Latency of a warm command, throughput both ways, memory of the driver.

    On a cluster: latency of a command over a sandbox's open stream, beside that of one exec connection a command.
    """
    cluster = ClusterOptions(
        context=context, namespace=namespace, runtime_class=runtime_class, user=user, run_as_root=run_as_root
    )

    async def act() -> dict[str, Any]:
        cluster.require_cluster(backend)
        if backend == "kubernetes":
            from agentsandbox.cli import bench_cluster

            return await bench_cluster.bench_exec(cluster, image, repeats=repeats)
        from agentsandbox.cli import bench as benches

        return await benches.bench_exec(backend, image or "host", repeats=repeats)

    _print(_run(act), as_json=as_json)


@bench.command("reset")
def bench_reset(
    backend: Backend = "local",
    image: Image = "host",
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Resets of each kind.")] = 15,
    as_json: Json = False,
) -> None:
    """Make used sandboxes like new, by each rung, beside git on the same tree."""
    from agentsandbox.cli import bench_reset as benches

    _print(_run(benches.bench_reset, backend, image, repeats=repeats), as_json=as_json)


@bench.command("rollout")
def bench_rollout(
    backend: Backend = "local",
    image: Image = "host",
    *,
    count: Annotated[int, typer.Option(min=1, help="Episodes, a multiple of 100.")] = 1000,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 8,
    as_json: Json = False,
) -> None:
    """Whole episodes of one command each, every sandbox used once, beside bare bwrap."""
    from agentsandbox.cli import bench as benches

    _print(_run(benches.bench_rollout, backend, image, count=count, concurrency=concurrency), as_json=as_json)


app.command()(report)
app.command()(ttfc)
app.command()(plan)
app.command()(simulate)
app.command()(reap)
app.add_typer(job, name="job")


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console(soft_wrap=True).print_json(json.dumps(report))
