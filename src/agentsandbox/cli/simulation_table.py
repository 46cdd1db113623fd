# SPDX-License-Identifier: Apache-2.0
"""The report of a simulation as a table, and as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentsandbox.errors import ConfigurationError

__all__ = ["draw", "require_matplotlib", "show"]

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


def require_matplotlib() -> None:
    """
    Check that figures can be drawn.

    Raises:
        ConfigurationError: If matplotlib is missing.

    """
    try:
        import matplotlib  # noqa: F401, ICN001
    except ModuleNotFoundError as error:
        raise ConfigurationError("a figure needs matplotlib: pip install 'agentsandbox[report]'") from error


def draw(report: Mapping[str, Any], path: Path) -> None:
    """
    Draw a report: time to first command, and the whole batch against its bound.

    Raises:
        ConfigurationError: If matplotlib is missing.

    """
    require_matplotlib()
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    shapes = list(report["bounds"])
    figure, axes = plt.subplots(
        len(shapes), 2, figsize=(11, 0.8 + 3.4 * len(shapes)), squeeze=False, layout="constrained"
    )
    figure.suptitle(
        f"Simulated: {report['rollouts']:,} rollouts of {report['images']:,} images, "
        f"{report['model']['nodes']} nodes, {report['limit']:,} sandboxes at once"
    )
    for (left, right), shape in zip(axes, shapes, strict=True):
        rows = [row for row in report["rows"] if row["shape"] == shape]
        least = report["bounds"][shape]
        _first_commands(left, rows, least)
        _batches(right, rows, least)
        left.set_title(f"{_SHORT[shape]}: time to first command", fontsize=10)
        right.set_title(f"{_SHORT[shape]}: batch complete", fontsize=10)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _first_commands(axes: Any, rows: list[Any], least: Mapping[str, float]) -> None:
    """Draw mean, P99 and maximum of each strategy on a logarithmic scale, and the bound of all of them."""
    width = 0.26
    for number, name in enumerate(("mean", "p99", "max")):
        places = [at + (number - 1) * width for at in range(len(rows))]
        # What never came to a command has no figure; a bar of nothing is not drawn.
        heights = [row["ttfc"][name] or 0.0 for row in rows]
        bars = axes.bar(places, heights, width, label=name, color=_COLOURS[number])
        axes.bar_label(bars, [_brief(height) for height in heights], fontsize=6, padding=1)
    axes.set_yscale("log")
    axes.margins(y=0.12)
    _dress(axes, rows, least["ttfc_seconds"])


def _batches(axes: Any, rows: list[Any], least: Mapping[str, float]) -> None:
    """Draw from the submission to the last record, and how many times the bound that is."""
    bars = axes.bar(range(len(rows)), [row["batch_seconds"] for row in rows], 0.6, color=_COLOURS[1])
    labels = [f"{_seconds(row['batch_seconds'])} s\n{row['batch_over_bound']:.2f} times" for row in rows]
    axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.margins(y=0.18)
    _dress(axes, rows, least["batch_seconds"])


def _dress(axes: Any, rows: list[Any], bound: float) -> None:
    axes.axhline(bound, color="black", linestyle="--", linewidth=1, label=f"bound: {_seconds(bound)} s")
    axes.set_xticks(range(len(rows)), [row["strategy"] for row in rows])
    axes.set_ylabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper right")


def _brief(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{_seconds(seconds)} s"


_SHORT = {"hydrated": "images beforehand", "cold-nodes": "empty nodes"}

_COLOURS = ("#9ecae1", "#4292c6", "#08306b")
