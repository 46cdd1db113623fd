# SPDX-License-Identifier: Apache-2.0
"""The commands that look ahead: ``simulate`` and ``plan``, and their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import attrs
import typer
from rich.console import Console

from agentsandbox.cli.cluster_options import ClusterOptions, Context, Namespace
from agentsandbox.cli.output import write_json
from agentsandbox.cli.running import refusing, running

__all__ = ["plan", "simulate"]

Images = Annotated[int, typer.Option(min=1, help="Images, made up: of ten repositories that share most of them.")]
Rollouts = Annotated[int, typer.Option(min=1, help="Rollouts of each image.")]
Nodes = Annotated[int, typer.Option(min=1, help="Nodes.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="What a rollout takes, on average.")]
Csv = Annotated[
    Path | None, typer.Option(help="File with the images, with columns such as image,size,rollouts,seconds.")
]
Layout = Annotated[Path | None, typer.Option("--oci-layout", help="OCI layout with the images.")]
RegistryImages = Annotated[
    Path | None,
    typer.Option(
        "--registry-images", help="File with image references, one a line; their registries say what they weigh."
    ),
]
Platform = Annotated[str, typer.Option(help="Which of an image that is there for several platforms.")]
PlainHttp = Annotated[
    list[str] | None, typer.Option("--plain-http", help="Registry to ask without TLS: HOST or HOST:PORT.")
]
CaFile = Annotated[Path | None, typer.Option("--ca-file", help="Certificates to trust besides the system's.")]
RegistryTimeout = Annotated[float, typer.Option(min=1.0, help="Seconds that registries have for all images.")]
Disk = Annotated[float | None, typer.Option(min=0.1, help="Disk of each node, in GB. Default: the model's.")]
PodsPerNode = Annotated[int | None, typer.Option(min=1, help="Pods that a node takes. Default: the model's.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def simulate(
    *,
    images: Images = 100,
    rollouts_per_image: Rollouts = 4,
    nodes: Nodes = 10,
    seconds: Seconds = 30.0,
    strategy: Annotated[
        list[str] | None, typer.Option(help="cold, naive, sliding, pipelined, ours. Default: all.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="hydrated or cold-nodes. Default: both.")] = None,
    csv: Csv = None,
    oci_layout: Layout = None,
    registry_images: RegistryImages = None,
    platform: Platform = "linux/amd64",
    plain_http: PlainHttp = None,
    ca_file: CaFile = None,
    registry_timeout: RegistryTimeout = 600.0,
    disk: Disk = None,
    pods_per_node: PodsPerNode = None,
    seed: Annotated[int, typer.Option(help="Of everything that is left to chance.")] = 0,
    output: Annotated[Path | None, typer.Option(help="File for the whole report, as JSON.")] = None,
    figure: Annotated[Path | None, typer.Option(help="File for a figure: .png, .svg or .pdf.")] = None,
    journal: Annotated[Path | None, typer.Option(help="Directory for the record of events of each run.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time, a process each. Default: as many as processors.")
    ] = None,
    as_json: Json = False,
) -> None:
    """
    Bring a batch to a cluster that is a model, in virtual time, by several strategies.

    The pool, its replenisher, the planner and the accounting are the real ones; nodes, pulls, starts and the control
    plane are a model. All figures are simulated.
    """
    from agentsandbox.backends.simulated import ClusterModel
    from agentsandbox.cli.simulation import SHAPES
    from agentsandbox.cli.simulation import simulate as measure
    from agentsandbox.cli.simulation_table import draw, require_matplotlib, show
    from agentsandbox.cli.strategies import STRATEGIES
    from agentsandbox.cli.workload import Inputs, made_up, of_uses

    inputs = Inputs(
        csv=csv,
        oci_layout=oci_layout,
        registry_images=registry_images,
        platform=platform,
        plain_http=tuple(plain_http or ()),
        ca_file=ca_file,
        deadline=registry_timeout,
    )

    def act() -> dict[str, object]:
        if figure is not None:
            require_matplotlib()  # before anything is simulated, which takes a while
        model = ClusterModel(nodes=nodes)
        if disk is not None:
            model = attrs.evolve(model, disk=round(disk * 1e9))
        if pods_per_node is not None:
            model = attrs.evolve(model, pods_per_node=pods_per_node)
        unread: dict[str, str] = {}
        if csv is None and oci_layout is None and registry_images is None:
            workload = made_up(model, images=images, rollouts=rollouts_per_image, seconds=seconds, seed=seed)
        else:
            uses, unread = anyio.run(partial(inputs.read, rollouts=rollouts_per_image, seconds=seconds))
            workload = of_uses(model, uses, seed=seed)
        report = measure(
            workload,
            tuple(strategy or STRATEGIES),
            shapes=tuple(shape or SHAPES),
            journal=journal,
            jobs=jobs,
            progress=lambda text: Console(stderr=True).print(f"simulated {text}", markup=False, highlight=False),
        )
        report["unread"] = unread
        if output is not None:
            write_json(output, report)
        if figure is not None:
            draw(report, figure)
        return report

    report = refusing(act)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 120))
    _tell(report)
    if report["unread"]:
        raise typer.Exit(1)


def plan(
    *,
    csv: Csv = None,
    oci_layout: Layout = None,
    registry_images: RegistryImages = None,
    ahead: Annotated[
        list[Path] | None,
        typer.Option(help="Images of the batch that comes next, listed in the same way. Again for each after it."),
    ] = None,
    platform: Platform = "linux/amd64",
    plain_http: PlainHttp = None,
    ca_file: CaFile = None,
    registry_timeout: RegistryTimeout = 600.0,
    rollouts_per_image: Rollouts = 4,
    seconds: Seconds = 60.0,
    backend: Annotated[
        str, typer.Option(help="Whose nodes: 'kubernetes' asks a cluster, 'simulated' takes those of the model.")
    ] = "simulated",
    nodes: Nodes = 10,
    disk: Disk = None,
    pods_per_node: PodsPerNode = None,
    headroom: Annotated[float, typer.Option(help="Share of a disk above which the kubelet removes images.")] = 0.85,
    output: Annotated[Path | None, typer.Option(help="File for the whole plan, as JSON.")] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Carry it out: fetch the first wave on every node of the cluster.")
    ] = False,
    lanes: Annotated[int, typer.Option(min=1, help="Images that a node fetches at a time, with --fetch.")] = 3,
    as_json: Json = False,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """
    Say which image goes to which node and in which order, what does not fit, and the one change that would help most.

    Nothing is changed anywhere without --fetch. What is predicted is a prediction.
    """
    from agentsandbox.cli.planning import carry_out, lines, node_list, read_batches, report
    from agentsandbox.cli.workload import Inputs
    from agentsandbox.hydration import plan as make

    cluster = ClusterOptions(context=context, namespace=namespace)
    inputs = Inputs(
        csv=csv,
        oci_layout=oci_layout,
        registry_images=registry_images,
        platform=platform,
        plain_http=tuple(plain_http or ()),
        ca_file=ca_file,
        deadline=registry_timeout,
    )

    async def act() -> dict[str, Any]:
        batches, unread = await read_batches(inputs, ahead or (), rollouts=rollouts_per_image, seconds=seconds)
        where = await node_list(
            backend, cluster, count=nodes, disk=disk, pods_per_node=pods_per_node, headroom=headroom
        )
        planned = make(batches[0], where, ahead=batches[1:])
        made = {**report(planned), "unread": unread}
        if output is not None:
            write_json(output, made)
        if fetch:
            made["failed"] = await carry_out(planned, backend, cluster, lanes=lanes)
        return made

    made = running(act)
    if as_json:
        typer.echo(json.dumps(made))
    else:
        for line in lines(made):
            Console(soft_wrap=True).print(line, markup=False, highlight=False)
    _tell(made)
    if made["unread"] or made.get("failed") or any(each["unplaced"] for each in (made, *made["ahead"])):
        raise typer.Exit(1)


def _tell(made: Mapping[str, Any]) -> None:
    """Name all images that no registry would say anything of; the others are planned for all the same."""
    for image, why in made["unread"].items():
        Console(stderr=True, soft_wrap=True).print(f"left out: {image}: {why}", markup=False, highlight=False)
