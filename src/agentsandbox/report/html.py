# SPDX-License-Identifier: Apache-2.0
"""A batch as one page of HTML, for a person: no scripts, and nothing from anywhere else. Needs the extra ``report``."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from agentsandbox.errors import ConfigurationError, FailureKind
from agentsandbox.metrics.recorder import summarise_ttfc
from agentsandbox.metrics.resets import ResetTally
from agentsandbox.models.episode import Counts, RolloutResult, Status
from agentsandbox.report.advice import ADVICE
from agentsandbox.report.bias import bias_report
from agentsandbox.report.figure import seconds_text, ttfc_figure

if TYPE_CHECKING:
    from agentsandbox.models.episode import EpisodeRecord
    from agentsandbox.models.timing import TTFCSummary
    from agentsandbox.rollouts.journal import Journal

__all__ = ["html_report", "journal_result", "result_of", "visible"]

_SHOWN = 300
"""Characters of a text that somebody else has written."""
_NAMES, _NAME = 3, 60
"""Episodes that a row of failures names, and with how many characters."""
_GROUPS = 20
"""Groups that are not complete that are listed."""


def result_of(records: Iterable[EpisodeRecord], *, submitted: int | None = None) -> RolloutResult:
    """
    Put records, of one batch or of several, into a result.

    Args:
        records: The records.
        submitted: How many episodes there are, if some have not ended.

    Returns:
        Their counts and times; ``wall_seconds`` is when the last attempt ended, counted from its batch's submission.

    """
    records = tuple(records)
    found = Counter(record.status for record in records)
    samples = tuple(attempt.ttfc for record in records for attempt in record.history if attempt.ttfc is not None)
    totals = [attempt.timings.total for record in records for attempt in record.history]
    return RolloutResult(
        records=records,
        counts=Counts(
            submitted=len(records) if submitted is None else submitted,
            rewarded=found[Status.REWARDED],
            failed=found[Status.FAILED],
            retryable=found[Status.RETRYABLE],
            cancelled=found[Status.CANCELLED],
        ),
        ttfc=summarise_ttfc(samples),
        samples=samples,
        wall_seconds=max((total for total in totals if total is not None), default=0.0),
    )


def journal_result(journal: Journal, *, batch: int | None = None) -> RolloutResult:
    """
    Read what a journal has of a batch so far, also while it is written or after its driver was killed.

    Args:
        journal: The journal; it need not be open.
        batch: Of which batch, counted from 1; of all of them when nothing is said.

    Raises:
        ConfigurationError: If there is no such batch.
        JournalError: If there is no such file, or it is no journal.

    """
    records = journal.records(batch)
    # What ended in between is among those that have not: a page shows what it has records of.
    submitted = journal.counts(batch).submitted
    if not submitted:
        what = "no episodes" if batch is None else f"no batch {batch}"
        raise ConfigurationError(f"the journal {journal.path} has {what}")
    return result_of(records, submitted=submitted)


def html_report(
    result: RolloutResult | Iterable[EpisodeRecord],
    *,
    title: str = "Batch",
    facts: Mapping[str, Any] | None = None,
    resets: ResetTally | Iterable[Mapping[str, Any]] | None = None,
    slowest: int = 10,
) -> str:
    """
    Make one page of HTML of what came of a batch.

    It says first how it ended, then why rewards are missing and what to do about that, then where the time went. It
    can be mailed and printed, and needs neither colour nor a network. Whatever came from an episode is text in it.

    Args:
        result: What came of a batch, or the records of several.
        title: What it is of.
        facts: What it was measured with, such as ``{"backend": "local"}``.
        resets: The sink that has counted the resets, or the rows of one; records do not have them.
        slowest: How many of the slowest episodes are listed.

    Returns:
        The page. Write it as UTF-8.

    Raises:
        ConfigurationError: If ``jinja2`` is missing.

    """
    try:
        import jinja2
    except ImportError as error:
        raise ConfigurationError("a page of HTML needs jinja2: pip install 'agentsandbox[report]'") from error
    if not isinstance(result, RolloutResult):
        result = result_of(result)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_finally
    )
    environment.filters["seconds"] = seconds_text
    template = environment.from_string(files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8"))
    bias = bias_report(result)
    good, verdict = _verdict(result)
    known = {"seconds": f"{result.wall_seconds:.3f}", **(facts or {})} if result.wall_seconds else dict(facts or {})
    return template.render(
        version=version("agentsandbox"),
        title=title,
        verdict=verdict,
        good=good,
        counts=result.counts,
        facts=list(known.items()),
        failures=_failures(result),
        made_up=_made_up(result),
        missing=bias.missing,
        bias=bias.notable,
        figure=ttfc_figure(result.samples),
        ttfc=_ttfc(result.ttfc),
        resets=resets.rows() if isinstance(resets, ResetTally) else resets if resets is None else list(resets),
        groups=_groups(result),
        slowest=_slowest(result, slowest),
    )


def visible(text: str) -> str:
    """Make visible what a text of somebody else could hide: control characters, and those that turn what follows."""
    return "".join(character if _harmless(character) else ascii(character)[1:-1] for character in text)


def _harmless(character: str) -> bool:
    # Cc, Cf, Cs: control characters, formatting ones such as the turn from right to left, and lone surrogates.
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn")


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _finally(value: Any) -> Any:
    return visible(_clipped(value, _SHOWN)) if isinstance(value, str) else value


def _verdict(result: RolloutResult) -> tuple[bool, str]:
    counts = result.counts
    missing = counts.submitted - counts.rewarded - counts.pending
    parts = []
    if missing:
        parts.append(f"{missing} of {counts.submitted} episodes have no reward")
    if counts.retryable:
        parts.append(f"{counts.retryable} of them can be submitted again")
    if counts.pending:
        parts.append(f"{counts.pending} have not ended")
    if not counts.submitted:
        return False, "There was nothing to do"
    return not parts, "; ".join(parts) or f"All {counts.submitted} episodes have a valid reward"


def _failures(result: RolloutResult) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], list[EpisodeRecord]] = {}
    for record in result.records:
        if record.failure is not None:
            found.setdefault((record.status.value, record.failure.kind.value), []).append(record)
    rows = []
    for (status, kind), records in sorted(found.items(), key=lambda item: -len(item[1])):
        failure = records[0].failure
        assert failure is not None
        names = ", ".join(_clipped(record.episode.id, _NAME) for record in records[:_NAMES])
        rows.append(
            {
                "status": status,
                "kind": kind,
                "phase": ", ".join(sorted({r.failure.phase.value for r in records if r.failure})),
                "count": len(records),
                "reason": failure.message,
                "names": names + (f" and {len(records) - _NAMES} more" if len(records) > _NAMES else ""),
                "advice": ADVICE[failure.kind],
            }
        )
    return rows


def _made_up(result: RolloutResult) -> str:
    """Name the kinds of failures that another attempt has made up for: the reward is there, and so is the cause."""
    kinds = Counter(
        attempt.failure.kind.value
        for record in result.records
        if record.reward is not None
        for attempt in record.history
        if attempt.failure is not None and attempt.failure.kind is not FailureKind.CANCELLED  # the slower twin
    )
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _ttfc(summary: TTFCSummary) -> list[dict[str, Any]]:
    if not summary.n and not summary.censored:
        return []
    parts = [("all", summary), *summary.by_start.items()]
    rows = [{"name": name, "figures": figures, "never": figures.censored} for name, figures in parts]
    stages = summary.by_stage.items()
    return rows + [{"name": f"of it: {name}", "figures": figures, "never": ""} for name, figures in stages]


def _groups(result: RolloutResult) -> dict[str, Any]:
    groups = tuple(result.groups.values())
    broken = [group for group in groups if not group.complete]
    without = sum(group.all_failed for group in broken)
    rows: Sequence[dict[str, Any]] = [
        {
            "name": str(group.group),
            "size": group.size,
            "valid": group.valid_count,
            "state": "no reward at all" if group.all_failed else "incomplete",
        }
        for group in broken[:_GROUPS]
    ]
    return {
        "total": len(groups),
        "complete": len(groups) - len(broken),
        "incomplete": len(broken) - without,
        "all_failed": without,
        "rows": rows,
        "more": max(0, len(broken) - _GROUPS),
    }


def _slowest(result: RolloutResult, most: int) -> list[dict[str, Any]]:
    ordered = sorted(result.records, key=lambda record: -(record.timings.total or 0.0))
    return [
        {
            "name": record.episode.id,
            "status": record.status.value,
            "attempts": record.attempts,
            "timings": record.timings,
            "node": (record.last.node if record.last else None) or "-",
        }
        for record in ordered[:most]
        if record.timings.total is not None
    ]
