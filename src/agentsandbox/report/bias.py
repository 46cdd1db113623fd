# SPDX-License-Identifier: Apache-2.0
"""
What the missing rewards of a batch have in common: a failure that is no accident biases what a trainer learns.

Long episodes lose their sandbox more often, one image may not start, one node may be ill. Each of these takes rewards
away from a part of the batch, and no mean over the rest shows it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import attrs

from agentsandbox.metrics.quantiles import quantile
from agentsandbox.models.episode import RolloutResult

if TYPE_CHECKING:
    from agentsandbox.models.episode import EpisodeRecord

K = TypeVar("K", int, str)

__all__ = ["BiasReport", "Share", "bias_lines", "bias_report"]

_PARTS = 4
"""How many equal parts the lengths are divided into: quarters say where, and 64 episodes still fill them."""

NOTABLE = 2.0
"""How many standard deviations from chance are worth a line; about one batch in twenty has that by chance."""


@attrs.frozen(kw_only=True)
class Share:
    """How much of one part of a batch has no reward."""

    part: str
    """Which part: a range of lengths, an image, a node."""
    episodes: int
    """How many it has; for a node, attempts."""
    missing: int
    """How many of them have no reward."""
    score: float
    """How far its share is from that of the rest, in standard deviations of chance; above 0 is worse."""

    @property
    def rate(self) -> float:
        """The share without a reward."""
        return self.missing / self.episodes

    @property
    def notable(self) -> bool:
        """Whether it is worse than chance explains."""
        return self.score >= NOTABLE


@attrs.frozen(kw_only=True)
class BiasReport:
    """Missing rewards against episode length, image and node."""

    episodes: int
    """How many episodes there are."""
    missing: int
    """How many of them have no reward, whatever the cause."""
    by_length: tuple[Share, ...] = ()
    """By how long the last attempt ran, in quarters of the batch; those that never ran are in none of them."""
    never_ran: int = 0
    """Episodes whose last attempt had no sandbox, so that they have no length."""
    longer: float | None = None
    """
    The chance that an episode without a reward ran longer than one with a reward: 0.5 is no bias, 1 means that only the
    longest are missing. What was cut off would have been longer still, so the truth is no smaller.
    """
    longer_score: float = 0.0
    """How far that is from 0.5, in standard deviations of chance."""
    by_image: tuple[Share, ...] = ()
    """By image."""
    by_node: tuple[Share, ...] = ()
    """By node, over every attempt that had one: a failed attempt counts where it failed, also if it was made up for."""

    @property
    def notable(self) -> tuple[str, ...]:
        """One line for each thing that chance does not explain."""
        lines = []
        if self.longer is not None and abs(self.longer_score) >= NOTABLE:
            than = "longer" if self.longer > 0.5 else "shorter"
            share = max(self.longer, 1 - self.longer)
            lines.append(
                f"episodes without a reward ran {than}: {share:.0%} of pairs, {abs(self.longer_score):.1f} deviations"
            )
        for what, shares in (("image", self.by_image), ("node", self.by_node)):
            lines += [
                f"{what} {share.part}: {share.missing} of {share.episodes} without a reward, "
                f"{share.score:.1f} deviations"
                for share in shares
                if share.notable
            ]
        return tuple(lines)


def bias_report(result: RolloutResult | Iterable[EpisodeRecord]) -> BiasReport:
    """
    Compare the episodes that have no reward with those that have one.

    Args:
        result: What came of a batch, or the records of several.

    Returns:
        Shares by length, image and node, each with how far it is from chance.

    """
    records = result.records if isinstance(result, RolloutResult) else tuple(result)
    lengths = [(record.timings.run, record.reward is None) for record in records]
    known = [(seconds, gone) for seconds, gone in lengths if seconds is not None]
    longer, score = _longer(known)
    attempts = [attempt for record in records for attempt in record.history if attempt.node is not None]
    return BiasReport(
        episodes=len(records),
        missing=sum(record.reward is None for record in records),
        by_length=_by_length(known),
        never_ran=len(lengths) - len(known),
        longer=longer,
        longer_score=score,
        by_image=_shares((record.episode.image, record.reward is None) for record in records),
        by_node=_shares((str(attempt.node), attempt.reward is None) for attempt in attempts),
    )


def bias_lines(report: BiasReport) -> list[str]:
    """
    Say in a few lines whether the missing rewards are an accident.

    Returns:
        The rate, then what chance does not explain, or that there is nothing of the kind.

    """
    if not report.missing:
        return ["no reward is missing"]
    head = f"{report.missing} of {report.episodes} rewards are missing ({report.missing / report.episodes:.1%})"
    found = report.notable
    return [head, *(found or ("nothing in length, image or node sets them apart from the others",))]


def _by_length(known: Sequence[tuple[float, bool]]) -> tuple[Share, ...]:
    if not known:
        return ()
    edges = [quantile([seconds for seconds, _ in known], part / _PARTS) for part in range(1, _PARTS)]
    names = [f"up to {edges[0]:.3g} s"]
    names += [f"{low:.3g} to {high:.3g} s" for low, high in itertools.pairwise(edges)]
    names.append(f"above {edges[-1]:.3g} s")

    def part(seconds: float) -> int:
        return sum(seconds > edge for edge in edges)

    return _shares(((part(seconds), gone) for seconds, gone in known), lambda number: names[number])


def _shares(members: Iterable[tuple[K, bool]], name: Callable[[K], str] = str) -> tuple[Share, ...]:
    counts: dict[K, list[int]] = {}
    for key, gone in members:
        count = counts.setdefault(key, [0, 0])
        count[0] += 1
        count[1] += gone
    total, missing = (sum(count[side] for count in counts.values()) for side in (0, 1))
    return tuple(
        Share(
            part=name(key), episodes=counts[key][0], missing=counts[key][1], score=_score(counts[key], total, missing)
        )
        for key in sorted(counts)
    )


def _score(count: Sequence[int], total: int, missing: int) -> float:
    """Compare a part with the rest: the hypergeometric mean and deviation, as if failures fell by lot."""
    size, gone = count
    expected = size * missing / total
    spread = expected * (1 - missing / total) * (total - size) / (total - 1) if total > 1 else 0.0
    return (gone - expected) / math.sqrt(spread) if spread > 0 else 0.0


def _longer(known: Sequence[tuple[float, bool]]) -> tuple[float | None, float]:
    """Rank the lengths (Mann and Whitney); equal ones share their rank."""
    gone = sum(missing for _, missing in known)
    there = len(known) - gone
    if not gone or not there:
        return None, 0.0
    ordered = sorted(known)
    ranks = ties = 0.0
    start = 0
    while start < len(ordered):
        end = start
        while end < len(ordered) and ordered[end][0] == ordered[start][0]:
            end += 1
        ranks += sum(missing for _, missing in ordered[start:end]) * (start + end + 1) / 2
        ties += (end - start) ** 3 - (end - start)
        start = end
    pairs, n = gone * there, len(known)
    wins = ranks - gone * (gone + 1) / 2
    variance = pairs / 12 * ((n + 1) - ties / (n * (n - 1)))
    return wins / pairs, (wins - pairs / 2) / math.sqrt(variance) if variance > 0 else 0.0
