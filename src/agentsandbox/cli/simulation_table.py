# SPDX-License-Identifier: Apache-2.0
"""The report of a simulation as a table, and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentsandbox.errors import ConfigurationError

__all__ = ["draw", "show"]

_TITLES = {
    "hydrated": "simulated: images on their nodes beforehand, sandboxes warm",
    "cold-nodes": "simulated: nothing on the nodes, images arrive while the batch runs",
}


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a report: one table a shape, one column a strategy, the bound last."""
    console.print(
        f"SIMULATED: {report['rollouts']} rollouts of {report['images']} images, {report['model']['nodes']} nodes, "
        f"{report['limit']} sandboxes at once, seed {report['seed']}; planned in {report['plan']['seconds']:.1f} s",
        markup=False,
        highlight=False,
    )
    for shape, least in report["bounds"].items():
        rows = [row for row in report["rows"] if row["shape"] == shape]
        table = Table(title=_TITLES[shape], title_justify="left")
        table.add_column("", no_wrap=True)
        for row in rows:
            table.add_column(row["strategy"], justify="right")
        table.add_column("bound", justify="right")
        for name, cells, bound in _lines(rows, least):
            table.add_row(name, *cells, bound)
        console.print(table)


def _lines(rows: list[Any], least: Mapping[str, float]) -> list[tuple[str, list[str], str]]:
    def line(name: str, cell: Any, bound: str = "") -> tuple[str, list[str], str]:
        return name, [cell(row) for row in rows], bound

    floor = _seconds(least["ttfc_seconds"])
    lines = [
        line(f"TTFC {figure}, s", lambda row, f=figure: _seconds(row["ttfc"][f]), floor)
        for figure in ("mean", "p50", "p95", "p99", "max")
    ]
    lines += [
        line("never came to a command", lambda row: str(row["ttfc"]["censored"]), "0"),
        *(
            line(f"waited before admission {f}, s", lambda row, f=f: _seconds(row["waited_before_admission"][f]))
            for f in ("mean", "max")
        ),
        line("batch complete, s", lambda row: _seconds(row["batch_seconds"]), _seconds(least["batch_seconds"])),
        line("  over its bound", lambda row: f"{row['batch_over_bound']:.2f}", "1.00"),
        line("Pods created", lambda row: str(row["pods_created"]), f"{least['pods']:.0f}"),
        line("API writes", lambda row: str(row["api_writes"]), f"{least['api_writes']:.0f}"),
        line("  in the busiest second", lambda row: str(row["api_writes_peak"])),
        line("  refused with 429", lambda row: str(row["api_refused"]), "0"),
        line("fetched, GB", lambda row: f"{row['pulled_bytes'] / 1e9:.0f}", f"{least['pulled_bytes'] / 1e9:.0f}"),
        line("disk at its fullest", lambda row: f"{row['disk_peak_share']:.0%}"),
        line(
            "accelerator idle",
            lambda row: f"{row['accelerator_idle_share']:.0%}",
            f"{least['accelerator_idle_share']:.0%}",
        ),
        line("rewards", lambda row: f"{row['rewarded']} of {row['submitted']}"),
        line("simulated in, s", lambda row: f"{row['took_seconds']:.1f}"),
        line("journal sha256", lambda row: row["journal_sha256"][:12]),
    ]
    return lines


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def draw(report: Mapping[str, Any], path: Path) -> None:
    """
    Draw a report: time to first command, and the whole batch against its bound.

    Raises:
        ConfigurationError: If matplotlib is missing.

    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise ConfigurationError("a figure needs matplotlib: pip install 'agentsandbox[report]'") from error
    mpl.use("agg")
    from matplotlib import pyplot as plt

    shapes = list(report["bounds"])
    figure, axes = plt.subplots(len(shapes), 2, figsize=(10, 3.2 * len(shapes)), squeeze=False)
    for (left, right), shape in zip(axes, shapes, strict=True):
        rows = [row for row in report["rows"] if row["shape"] == shape]
        names = [row["strategy"] for row in rows]
        for name in ("mean", "p99", "max"):
            left.plot(names, [row["ttfc"][name] for row in rows], marker="o", label=name)
        left.set_yscale("log")
        left.set_ylabel("seconds")
        left.set_title(f"{shape}: time to first command (simulated)")
        left.legend()
        right.bar(names, [row["batch_seconds"] for row in rows])
        right.axhline(report["bounds"][shape]["batch_seconds"], color="black", linestyle="--", label="bound")
        right.set_ylabel("seconds")
        right.set_title(f"{shape}: batch complete (simulated)")
        right.legend()
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
