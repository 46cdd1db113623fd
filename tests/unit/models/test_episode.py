# SPDX-License-Identifier: Apache-2.0
"""Units of work and what came of them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from agentsandbox.errors import ConfigurationError, Phase, SandboxLost, classify
from agentsandbox.models.episode import (
    Attempt,
    Counts,
    Episode,
    EpisodeRecord,
    Graded,
    RolloutResult,
    Status,
    check_batch,
)
from agentsandbox.models.timing import Timings, TTFCSample

LOST = classify(SandboxLost("evicted"), Phase.EXEC)


def record(name: str, reward: float | None, *, group: object = None) -> EpisodeRecord:
    """Return the record of an episode."""
    status = Status.RETRYABLE if reward is None else Status.REWARDED
    failure = LOST if reward is None else None
    return EpisodeRecord(
        episode=Episode(id=name, image="host", group=group), status=status, reward=reward, failure=failure
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"id": ""}, "string that is not empty, not ''", id="no id"),
        pytest.param({"id": 3}, "string that is not empty, not 3", id="id 3"),
        pytest.param({"timeout": 0}, "timeout of episode 'a' must be above 0 seconds, not 0", id="timeout 0"),
    ],
)
def test_bad_episodes_are_refused(options: dict[str, Any], words: str) -> None:
    """An episode that cannot work is not made."""
    with pytest.raises(ConfigurationError, match=words):
        Episode(**{"id": "a", "image": "host", **options})


def test_an_episode_is_frozen_and_hashable() -> None:
    """Inputs may hold anything and do not take part in the hash; artifacts become a tuple."""
    episode = Episode(id="a", image="host", inputs={"x": []}, artifacts=["f"], timeout=2.0)

    assert len({episode, Episode(id="a", image="host", inputs={"x": []}, artifacts=["f"], timeout=2.0)}) == 1
    assert episode.artifacts == ("f",)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        episode.id = "b"


def test_a_record_without_attempts() -> None:
    """What never started has a reason and no times."""
    never = record("a", None)

    assert never.reason == "SandboxLost: evicted"
    assert never.retryable
    assert (never.last, never.ttfc, never.timings) == (None, None, Timings())


def test_a_record_speaks_for_its_last_attempt() -> None:
    """Times are those of the attempt that decided."""
    sample, timings = TTFCSample(seconds=1.0), Timings(run=2.0)
    history = (Attempt(number=1, failure=LOST), Attempt(number=2, reward=1.0, ttfc=sample, timings=timings))
    good = attrs.evolve(record("a", 1.0), attempts=2, history=history)

    assert good.reason is None
    assert not good.retryable
    assert (good.last.number, good.ttfc, good.timings) == (2, sample, timings)
    assert repr(good).startswith("EpisodeRecord(episode='a', status=<Status.REWARDED")


def test_graded() -> None:
    """A reward with nothing beside it is enough."""
    assert (Graded(reward=1.0).patch, Graded(reward=1.0).info) == (None, {})


def test_the_law() -> None:
    """What is neither of the four ends is pending."""
    assert Counts(submitted=10, rewarded=4, failed=3, retryable=2, cancelled=1).pending == 0
    assert Counts(submitted=10, rewarded=4).pending == 6


def test_a_result_keeps_order_groups_and_absence() -> None:
    """Rewards in input order, groups in order of appearance, absent rewards as ``None``."""
    result = RolloutResult(
        records=(
            record("a", 1.0, group="y"),
            record("b", None, group="x"),
            record("c", 0.0, group="y"),
            record("d", 0.5),
            record("e", 0.25, group="x"),
        )
    )

    assert result.rewards == (1.0, None, 0.0, 0.5, 0.25)
    assert result.valid_count == 4
    assert [episode.id for episode in result.retryable] == ["b"]
    assert list(result.groups) == ["y", "x"]
    assert (result.groups["y"].rewards, result.groups["y"].complete) == ((1.0, 0.0), True)
    assert (result.groups["x"].valid_count, result.groups["x"].size, result.groups["x"].complete) == (1, 2, False)
    assert "records=<5 records>" in repr(result)


def test_an_empty_result() -> None:
    """No records: no rewards, no groups."""
    empty = RolloutResult(records=())

    assert (empty.rewards, empty.valid_count, empty.retryable, dict(empty.groups)) == ((), 0, (), {})


def test_batches_are_checked() -> None:
    """Every id once, and nothing but episodes."""
    check_batch([])
    check_batch([Episode(id="a", image="host"), Episode(id="b", image="host")])
    with pytest.raises(ConfigurationError, match="'a' appears twice"):
        check_batch([Episode(id="a", image="host"), Episode(id="a", image="other")])
    with pytest.raises(ConfigurationError, match="sequence of Episode, not 'a'"):
        check_batch(["a"])
