# SPDX-License-Identifier: Apache-2.0
"""``agentsandbox report``: what has come of a run, from its journal."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.errors import Phase, SandboxLost, classify
from agentsandbox.models.episode import Attempt, Episode, EpisodeRecord, Status
from agentsandbox.rollouts.journal import Journal

LOST = classify(SandboxLost("evicted", "\x1b[2Jmemory"), Phase.EXEC)


@pytest.fixture
def journal(tmp_path):
    """A journal of two batches: one episode of each has ended, and one has not."""
    path = tmp_path / "run.journal"

    async def main():
        made = Journal(path)
        async with made.writing():
            for number, failure in enumerate((None, LOST)):
                batch = [Episode(id=f"{number}-{name}", image="host") for name in "ab"]
                book = await made.begin(batch)
                status, reward = (Status.RETRYABLE, None) if failure else (Status.REWARDED, 0.5)
                attempt = Attempt(number=1, reward=reward, failure=failure)
                record = EpisodeRecord(
                    episode=batch[0], status=status, reward=reward, failure=failure, attempts=1, history=(attempt,)
                )
                book.ended(0, attempt)
                book.settled(0, record)
                await book.flush()

    anyio.run(main)
    return path


def test_a_journal_is_told_in_lines(invoke, journal):
    """Counts first, then failures, what has not ended, and whether the missing ones are an accident."""
    code, text = invoke("report", "--journal", journal)

    assert (0, "episodes=4 successful_episodes=1 reward_sum=0.5") == (code, text.splitlines()[0])
    assert [
        "submitted=4 rewarded=1 failed=0 retryable=1 cancelled=0 seconds=0.000",
        "retryable sandbox_lost: 1, for instance 1-a: SandboxLost: evicted: \\x1b[2Jmemory",
        "not_ended=2",
        "1 of 2 rewards are missing (50.0%)",
        "nothing in length, image or node sets them apart from the others",
    ] == text.splitlines()[1:]


def test_one_batch_of_a_journal(invoke, journal):
    """Counted from 1; one that is not there is refused."""
    assert invoke("report", "--journal", journal, "--batch", "1")[1].startswith("episodes=2 successful_episodes=1")
    code, _ = invoke("report", "--journal", journal, "--batch", "3")
    assert 2 == code


def test_a_run_becomes_a_page(invoke, tmp_path):
    """The page of a run says where it ran; it may be made again, and takes the place of nothing else."""
    pytest.importorskip("jinja2")
    output, page = tmp_path / "out", tmp_path / "page.html"
    assert 0 == invoke("run", "--count", "2", "--output", output)[0]

    assert [0, 0] == [invoke("report", "--output", output, "--html", page)[0] for _ in range(2)]
    code, _ = invoke("report", "--output", output, "--html", output / "results.json")

    html = page.read_text(encoding="utf-8")
    assert "<title>out: All 2 episodes have a valid reward</title>" in html
    assert "<dt>backend</dt><dd>local</dd>" in html
    assert "No used sandbox was made like new." in html
    assert 2 == code
    assert (output / "results.json").read_text().startswith("{")
    assert 2 == invoke("report", "--output", output, "--html", tmp_path / "none" / "page.html")[0]


@pytest.mark.parametrize("words", [(), ("--output", "a", "--journal", "b"), ("--output", "a")], ids=str)
def test_what_cannot_be_read_is_refused(invoke, words, tmp_path, monkeypatch):
    """Neither of the two, both, or what is no run."""
    monkeypatch.chdir(tmp_path)

    assert 2 == invoke("report", *words)[0]
    assert [] == list(tmp_path.iterdir())
