# SPDX-License-Identifier: Apache-2.0
"""The commands and their options."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
import typer
from rich.console import Console

from agentsandbox.errors import BatchFailed, SandboxError

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Isolated sandboxes for reinforcement learning of coding agents.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure, each figure beside its bare counterpart in the same run.")
app.add_typer(bench, name="bench")

T = TypeVar("T")

Output = Annotated[Path, typer.Option(help="Directory of the run.", show_default=False)]
Backend = Annotated[str, typer.Option(help="Where sandboxes come from.")]
Image = Annotated[str, typer.Option(help="What they are made from: 'host', a directory, or an image archive.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _run(action: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """Run *action* on asyncio; what we raise on purpose becomes one line on standard error and exit code 2."""
    try:
        return anyio.run(lambda: action(*args, **options))
    except BatchFailed as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except SandboxError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


@app.command()
def run(
    output: Output,
    *,
    count: Annotated[int | None, typer.Option(help="Episodes to run. Default: 10, or all tasks.")] = None,
    parallelism: Annotated[int | None, typer.Option(help="Episodes at once. Default: all.")] = None,
    backend: Backend = "local",
    image: Image = "host",
    tasks: Annotated[Path | None, typer.Option(help="File with one task, a JSON object, a line.")] = None,
    rollout: Annotated[str | None, typer.Option(help="Async function module:function(sandbox, episode).")] = None,
) -> None:
    """
    Run a batch of episodes and write DIR/results.json, a log an episode, and a receipt.

    Without --tasks each episode repairs a boundary bug and shows that the test fails before and passes after. The exit
    code is 0 only if every episode has a valid reward.
    """
    from agentsandbox.cli.run import RunOptions
    from agentsandbox.cli.run import run as run_batch

    options = RunOptions(
        output=output, count=count, parallelism=parallelism, backend=backend, image=image, tasks=tasks, rollout=rollout
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
def doctor(backend: Backend = "local", *, as_json: Json = False) -> None:
    """Say whether a backend can work here and, where it cannot, what to do about it."""
    from agentsandbox.cli.doctor import doctor as examine

    if not _run(examine, backend, Console(soft_wrap=True), as_json=as_json):
        raise typer.Exit(1)


@bench.command("exec")
def bench_exec(
    backend: Backend = "local",
    image: Image = "host",
    *,
    repeats: Annotated[int, typer.Option(min=1, help="Commands of each kind.")] = 200,
    as_json: Json = False,
) -> None:
    """Latency of a warm command, throughput both ways, memory of the driver."""
    from agentsandbox.cli import bench as benches

    _print(_run(benches.bench_exec, backend, image, repeats=repeats), as_json=as_json)


@bench.command("rollout")
def bench_rollout(
    backend: Backend = "local",
    image: Image = "host",
    *,
    count: Annotated[int, typer.Option(min=1, help="Episodes.")] = 1000,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 8,
    as_json: Json = False,
) -> None:
    """Whole episodes of one command each, every sandbox used once, beside bare bwrap."""
    from agentsandbox.cli import bench as benches

    _print(_run(benches.bench_rollout, backend, image, count=count, concurrency=concurrency), as_json=as_json)


def _print(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console(soft_wrap=True).print_json(json.dumps(report))
