# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox report``: what has come of a run, from its journal."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from agentsandbox.cli.output import RESULTS, read_receipt
from agentsandbox.cli.resuming import JOURNAL
from agentsandbox.cli.running import refusing
from agentsandbox.errors import ConfigurationError
from agentsandbox.report import bias_lines, bias_report, html_report, journal_result, summary_lines
from agentsandbox.report.html import visible
from agentsandbox.rollouts.journal import Journal

__all__ = ["report"]

_BEGINNING = b"<!doctype html>"


def report(
    output: Annotated[Path | None, typer.Option(help="Directory of a run.", show_default=False)] = None,
    *,
    journal: Annotated[
        Path | None, typer.Option(help="A journal that a pool has written, instead.", show_default=False)
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Which batch of it, from 1 on. Default: all.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page of HTML there, too.", show_default=False)] = None,
) -> None:
    """
    Say what has come of a run or of any journal, also while it is going on or after it was killed.

    With --html it is a page for a browser as well, which needs the extra 'report'.
    """
    for line in refusing(lambda: _report(output, journal, batch, html)):
        typer.echo(visible(line))


def _report(output: Path | None, journal: Path | None, batch: int | None, html: Path | None) -> list[str]:
    if (output is None) == (journal is None):
        raise ConfigurationError("give either --output DIR, the directory of a run, or --journal FILE")
    facts: dict[str, Any] = {}
    resets = None
    if output is not None:
        receipt = read_receipt(output)
        facts = {name: receipt[name] for name in ("run_id", "backend", "image") if receipt.get(name) is not None}
        path = output / JOURNAL
        with suppress(OSError, ValueError):  # a run that has not ended has no results
            resets = json.loads((output / RESULTS).read_text(encoding="utf-8")).get("resets")
    else:
        assert journal is not None
        path = journal
    result = journal_result(Journal(path), batch=batch)
    if html is not None:
        where = (output if output is not None else path).resolve().name
        title = where if batch is None else f"{where}, batch {batch}"
        _write(html, html_report(result, title=title, facts=facts, resets=resets))
    pending = [f"not_ended={result.counts.pending}"] if result.counts.pending else []
    return [*summary_lines(result), *pending, *bias_lines(bias_report(result))]


def _write(path: Path, page: str) -> None:
    try:
        if path.exists() and not path.read_bytes().startswith(_BEGINNING):
            raise ConfigurationError(f"{path} exists and is no page of HTML: it is not overwritten")
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error}") from error
