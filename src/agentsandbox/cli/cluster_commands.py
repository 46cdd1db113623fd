# SPDX-License-Identifier: Apache-2.0
"""The commands that are about clusters, and their options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentsandbox.cli.cluster_options import (
    DEFAULT_IMAGE,
    DEFAULT_USER,
    Backend,
    ClusterOptions,
    Context,
    ImageUser,
    Namespace,
    RunAsRoot,
    RuntimeClass,
)
from agentsandbox.cli.running import running

__all__ = ["job", "reap", "ttfc"]

job = typer.Typer(
    no_args_is_help=True, help="A batch as one Job, for clusters where exec is not allowed: results come from logs."
)


def reap(
    run_id: Annotated[str, typer.Option(help="The run: 12 hexadecimal digits.", show_default=False)],
    *,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """
    Remove everything of one run from a namespace of a cluster, and the namespace if the run made it.

    For when there is no receipt; otherwise use cleanup. Without a run id nothing is removed.
    """
    from agentsandbox.cli.reap import reap as reap_run

    for line in running(reap_run, run_id, ClusterOptions(context=context, namespace=namespace)):
        typer.echo(line)


@job.command("run")
def job_run(
    output: Annotated[Path, typer.Option(help="Directory of the run.", show_default=False)],
    *,
    count: Annotated[int, typer.Option(help="Episodes.")] = 10,
    parallelism: Annotated[int | None, typer.Option(help="Episodes at once. Default: all.")] = None,
    image: Annotated[str, typer.Option(help="An image with python3, 3.9 or later.")] = DEFAULT_IMAGE,
    script: Annotated[
        Path | None, typer.Option(help="Python file with an episode of your own. Default: the built-in one.")
    ] = None,
    timeout: Annotated[int, typer.Option(help="Seconds after which the cluster ends the Job.")] = 240,
    user: Annotated[int, typer.Option(help="User and group id that episodes run as.")] = DEFAULT_USER,
    context: Context = None,
    namespace: Namespace = None,
    runtime_class: RuntimeClass = None,
) -> None:
    """
    Run a batch as one Job, one Pod an episode, and verify it from the logs.

    The exit code is 0, and there is DIR/results.json, only if every episode is verified. What is on the cluster stays
    there until job cleanup.
    """
    from agentsandbox.backends.kubernetes.jobs import JobOptions
    from agentsandbox.cli.job import run_job

    cluster = ClusterOptions(context=context, namespace=namespace)
    console = Console(soft_wrap=True)

    async def act() -> bool:
        options = JobOptions(
            count=count,
            parallelism=parallelism,
            image=image,
            runtime_class=runtime_class,
            deadline=timeout,
            user=user,
        )
        return await run_job(output, options, cluster, console, script=script)

    if not running(act):
        raise typer.Exit(1)


@job.command("cleanup")
def job_cleanup(output: Annotated[Path, typer.Option(help="Directory of the run.", show_default=False)]) -> None:
    """Remove the Job, its Pods and its namespace, after checking UIDs and labels. The directory stays."""
    from agentsandbox.cli.cleanup import cleanup

    for line in running(cleanup, output):
        typer.echo(line)


def ttfc(
    *,
    scenario: Annotated[str, typer.Option(help="warm, cold or many-images.")] = "warm",
    count: Annotated[int, typer.Option(min=1, help="Sandboxes of a round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 3,
    backend: Backend = "local",
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="What they are made from. Default: 'host', on a cluster python:3.12-alpine. Repeated for many-images."
        ),
    ] = None,
    parallelism: Annotated[int | None, typer.Option(min=1, help="Sandboxes at once. Default: all of a round.")] = None,
    output: Annotated[Path | None, typer.Option(help="File for the whole report, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    context: Context = None,
    namespace: Namespace = None,
    runtime_class: RuntimeClass = None,
    user: ImageUser = None,
    run_as_root: RunAsRoot = False,
) -> None:
    """
    Measure the time to first command: every sandbox of a round is asked for in the same instant.

    warm: they are ready. cold: there is none. many-images: there is none, and they are of several images.
    """
    from agentsandbox.cli.ttfc import TTFCOptions
    from agentsandbox.cli.ttfc import ttfc as measure

    cluster = ClusterOptions(
        context=context, namespace=namespace, runtime_class=runtime_class, user=user, run_as_root=run_as_root
    )
    console = Console(soft_wrap=True)

    async def act() -> dict[str, object]:
        options = TTFCOptions(
            scenario=scenario,
            count=count,
            rounds=rounds,
            backend=backend,
            images=tuple(image or ()),
            parallelism=parallelism,
            cluster=cluster,
        )
        return await measure(options, console if not as_json else Console(stderr=True, soft_wrap=True), output)

    report = running(act)
    if as_json:
        typer.echo(json.dumps(report))
    if report["failures"]:
        raise typer.Exit(1)
