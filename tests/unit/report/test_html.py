# SPDX-License-Identifier: Apache-2.0
"""A batch as a page of HTML."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.errors import (
    AcquireTimeout,
    ConfigurationError,
    FailureKind,
    JournalError,
    Phase,
    SandboxLost,
    StreamBroken,
    classify,
)
from agentsandbox.metrics.resets import ResetTally
from agentsandbox.models.episode import Attempt, Counts, EpisodeRecord, Status
from agentsandbox.models.events import Event
from agentsandbox.models.timing import StartKind, Timings, TTFCSample
from agentsandbox.report import html_report, journal_result, result_of
from agentsandbox.report.advice import ADVICE
from agentsandbox.report.figure import seconds_text, ttfc_figure
from agentsandbox.report.html import visible
from agentsandbox.rollouts.journal import Journal

from ..warmpool.fake_backend import FakeBackend  # noqa: TID252 - doubles are shared within the tests

pytest.importorskip("jinja2")

VOID = {"meta", "br", "line", "rect"}
LOST = classify(SandboxLost("evicted", "memory"), Phase.EXEC)
BROKEN = classify(StreamBroken("stream", "1006"), Phase.EXEC)
HOSTILE = "<script>alert('x')</script>\"&\u202e\x1b[31m\ud800"


def sample(seconds, start="warm", **options):
    """A sample."""
    return TTFCSample(seconds=seconds, start=StartKind(start), **options)


def record(name, failure=None, *, group=None, ttfc=None, total=1.0, before=(), node="n1", image="host"):
    """A record of one attempt, or of one more after those that failed before."""
    history = [Attempt(number=number, failure=failed, node=node) for number, failed in enumerate(before, 1)]
    last = Attempt(
        number=len(history) + 1,
        reward=None if failure else 1.0,
        failure=failure,
        node=node,
        ttfc=ttfc,
        timings=Timings(queued=0.25, acquire=0.5, run=0.125, total=total),
    )
    status = Status.REWARDED if failure is None else Status.RETRYABLE if failure.retryable else Status.FAILED
    return EpisodeRecord(
        episode=Episode(id=name, image=image, group=group),
        status=status,
        reward=last.reward,
        failure=failure,
        attempts=last.number,
        history=(*history, last),
    )


class Page(HTMLParser):
    """A page, read as a browser would; what is not closed, or closed twice, is an error."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.handlers, self.open, self.texts = [], [], [], [], {}
        self.section, self.rows = "", {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [name for name, _ in attributes if name in ("src", "href", "action", "xlink:href")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attributes)["id"]
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts[self.section] = self.texts.get(self.section, "") + data
        if {"td", "th"} & set(self.open):
            self.rows[self.section][-1][-1] += data


def table(page, section):
    """The body of the first table of a section."""
    return page.rows.get(section, [[]])[1:]


def words(page, section):
    """The text of a section, with single spaces."""
    return " ".join(page.texts[section].split())


def test_the_verdict_comes_first():
    """How it ended in words, then the law in figures; a page of a batch that went well says so."""
    good = Page(html_report([record("a"), record("b")], title="Step 49", facts={"backend": "local"}))
    bad = Page(html_report(result_of([record("a"), record("b", LOST)], submitted=5)))

    assert "Step 49 All 2 episodes have a valid reward 2submitted= 2rewarded+ 0failed+ 0retryable+ 0cancelled" in words(
        good, ""
    )
    assert words(good, "").endswith("seconds1.000 backendlocal")
    assert (
        "1 of 5 episodes have no reward; 1 of them can be submitted again; 3 have not ended "
        "5submitted= 1rewarded+ 0failed+ 1retryable+ 0cancelled + 3not ended"
    ) in words(bad, "")


def test_an_empty_batch_is_no_success():
    """Nothing was asked for, nothing is claimed."""
    page = Page(html_report([]))

    assert "There was nothing to do" in words(page, "")
    assert "All" not in words(page, "")
    assert "No attempt asked for a sandbox." in words(page, "ttfc")
    assert "No episode has ended." in words(page, "slowest")
    assert "groups" not in page.texts


def test_failures_say_what_to_do():
    """One row for each status and kind, the most frequent first, with an example and the names of some."""
    none = classify(AcquireTimeout("none within 3 s"), Phase.ACQUIRE)
    page = Page(
        html_report([record("x", none), *(record(f"e{number}", LOST) for number in range(5)), record("y", None)])
    )

    assert [
        ["retryable", "sandbox_lost", "exec", "5", "SandboxLost: evicted: memorye0, e1, e2 and 2 more"],
        ["retryable", "acquire_timeout", "acquire", "1", "AcquireTimeout: none within 3 sx"],
    ] == [[*row[:4], row[4].replace("\n", "")] for row in table(page, "failures")]
    assert [ADVICE[FailureKind.SANDBOX_LOST], ADVICE[FailureKind.ACQUIRE_TIMEOUT]] == [
        row[5] for row in table(page, "failures")
    ]


def test_failures_that_were_made_up_for_are_named():
    """The reward is there, and so is the cause; the slower one of two attempts is no failure."""
    cancelled = classify(ConfigurationError("x"), Phase.EXEC)
    twin = type(cancelled)(
        kind=FailureKind.CANCELLED, phase=Phase.EXEC, blame=cancelled.blame, retryable=True, message="a twin was faster"
    )
    page = Page(html_report([record("a", before=(BROKEN, LOST)), record("b", before=(BROKEN,)), record("c", None)]))
    calm = Page(html_report([record("a", before=(twin,))]))

    assert "made up for by another one: 2 stream_broken, 1 sandbox_lost." in words(page, "failures")
    assert "Failures No episode has failed." == words(calm, "failures")


@pytest.mark.parametrize("kind", FailureKind, ids=str)
def test_there_is_advice_for_every_kind(kind):
    """Whatever happens, the page says in one sentence or two what to do."""
    assert re.fullmatch(r"[A-Z].{10,100}\.", ADVICE[kind])


def test_nothing_that_came_from_an_episode_is_markup():
    """Ids, reasons, groups, nodes, images, titles and facts are text, and can neither run, load, hide nor turn it."""
    hostile = classify(ValueError(HOSTILE * 9), Phase.EXEC)
    records = [record(f"{HOSTILE}{number}", hostile, group=HOSTILE, node=HOSTILE, image=HOSTILE) for number in range(9)]
    records += [record(f"fine-{number}") for number in range(40)]
    tally = ResetTally()
    tally(Event(name="sandbox.reset", at=0.0, data={"rung": HOSTILE, "verified": True, "seconds": 1.0}))

    text = html_report(records, title=HOSTILE, facts={HOSTILE: HOSTILE}, resets=tally)
    page = Page(text)

    assert "script" not in page.tags
    assert ([], []) == (page.links, page.handlers)
    assert 1 == text.count("<style>")
    for section in ("", "failures", "bias", "resets", "groups", "slowest"):
        assert "<script>alert('x')</script>\"&\\u202e\\x1b[31m\\ud800" in page.texts[section]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert text == text.encode("utf-8").decode("utf-8")
    assert "\u2026" in page.texts["failures"]


def test_the_page_needs_nothing_else_and_forbids_it():
    """No script, no address, nothing to fetch; a browser would refuse it if there were."""
    text = html_report([record("a", LOST, ttfc=sample(0.5))])
    page = Page(text)

    assert text.startswith("<!doctype html>\n")
    assert {"script", "link", "img", "iframe", "object", "form", "a"}.isdisjoint(page.tags)
    assert [] == page.links
    assert "default-src 'none'" in text
    assert [] == re.findall(r"https?:|url\(|@import|javascript:", text)


def test_times_to_first_command_are_split_by_start():
    """The figures of all, then of each way to come by a sandbox, then of the stages; those without one are apart."""
    samples = [
        sample(2.0, "cold", stages={"queue": 1.5, "start": 0.5}),
        sample(0.004, "warm"),
        sample(0.006, "warm"),
        sample(300.0, "cold", censored=True),
    ]
    page = Page(html_report([record(f"e{number}", ttfc=one) for number, one in enumerate(samples)]))

    assert [
        ["all", "3", "670 ms", "6 ms", "1.8 s", "1.96 s", "2 s", "1"],
        ["cold", "1", "2 s", "2 s", "2 s", "2 s", "2 s", "1"],
        ["warm", "2", "5 ms", "5 ms", "5.9 ms", "5.98 ms", "6 ms", "0"],
        ["of it: queue", "1", "1.5 s", "1.5 s", "1.5 s", "1.5 s", "1.5 s", ""],
        ["of it: start", "1", "500 ms", "500 ms", "500 ms", "500 ms", "500 ms", ""],
    ] == table(page, "ttfc")
    assert "cold 1 attempts + 1 never" in words(page, "ttfc")
    assert "p50 5 ms p99 5.98 ms" in words(page, "ttfc")


def test_the_figure_is_to_scale():
    """Equal factors are equal distances, the highest bar is the fullest, and every sample is in one bar."""
    figure = ttfc_figure([sample(seconds) for seconds in (0.001, 0.0011, 0.01, 0.1, 0.999)])

    assert ["1 ms", "10 ms", "100 ms", "1 s"] == [tick.text for tick in figure.ticks]
    (row,) = figure.rows
    steps = [second.x - first.x for first, second in zip(figure.ticks, figure.ticks[1:], strict=False)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)
    assert (figure.left, figure.right) == (figure.ticks[0].x, figure.ticks[-1].x)
    assert [2, 1, 1, 1] == [int(re.search(r": (\d+) of 5", bar.text)[1]) for bar in row.bars]
    assert [bar.height for bar in row.bars] == [50.0, 25.0, 25.0, 25.0]
    assert [bar.x - 1 for bar in row.bars[:3]] == pytest.approx([tick.x for tick in figure.ticks[:3]], abs=0.02)
    assert all(bar.y + bar.height == row.y for bar in row.bars)
    assert "1 ms to 1.47 ms: 2 of 5" == row.bars[0].text
    assert figure.ticks[1].x == row.marks[0].x


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1.0, 10.0, 86_400.0])
def test_one_sample_of_any_size_fits(seconds):
    """Also none at all, and exactly a power of ten."""
    figure = ttfc_figure([sample(seconds)])

    (bar,) = figure.rows[0].bars
    assert figure.left <= bar.x
    assert bar.x + bar.width <= figure.right
    assert all(figure.left <= mark.x <= figure.right for mark in figure.rows[0].marks)


def test_a_row_without_a_first_command_is_empty():
    """It is there, with the number of those that never came to one, beside a row that has bars."""
    figure = ttfc_figure([sample(1.0, "warm"), sample(9.0, "cold", censored=True)])

    cold, warm = figure.rows
    assert ("cold", 0, 1, (), ()) == (cold.name, cold.count, cold.censored, cold.bars, cold.marks)
    assert ("warm", 1, 0, 1) == (warm.name, warm.count, warm.censored, len(warm.bars))


def test_without_a_first_command_there_is_no_figure():
    """Only the number of those that never came to one."""
    page = Page(html_report([record("a", LOST, ttfc=sample(9.0, "cold", censored=True))]))

    assert ttfc_figure([sample(9.0, censored=True)]) is None
    assert "svg" not in page.tags
    assert ["cold", "0", "-", "-", "-", "-", "-", "1"] == table(page, "ttfc")[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.00042, "0.42 ms"),
        (0.0123456, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (75.44, "75.4 s"),
        (999.4, "999 s"),
        (86400.0, "86 400 s"),
    ],
)
def test_durations_have_three_digits(seconds, text):
    """And a unit, so that columns can be read down."""
    assert text == seconds_text(seconds)


def test_resets_are_by_rung():
    """With their times; that they were not recorded is not the same as none."""
    tally = ResetTally()
    for seconds in (0.1, 0.3):
        tally(Event(name="sandbox.reset", at=0.0, data={"rung": "files", "verified": True, "seconds": seconds}))
    tally(Event(name="sandbox.not_recycled", at=0.0, data={"error": "x"}))
    tally(Event(name="sandbox.ready", at=0.0))

    assert "<ResetTally [files verified: 2, none failed: 1]>" == repr(tally)
    assert [
        ["files", "verified", "2", "200 ms", "298 ms", "300 ms"],
        ["none", "failed", "1", "-", "-", "-"],
    ] == table(Page(html_report([record("a")], resets=tally)), "resets")
    assert "No used sandbox was made like new." in words(
        Page(html_report([record("a")], resets=ResetTally())), "resets"
    )
    assert "Not recorded" in words(Page(html_report([record("a")])), "resets")


def test_groups_that_are_not_complete_are_named():
    """At most twenty of them; the count is of all."""
    records = [record(f"a{number}", LOST if number == 0 else None, group="part") for number in range(2)]
    records += [record(f"b{number}", group="whole") for number in range(2)]
    records += [record(f"c{number}", LOST, group=number) for number in range(25)]
    page = Page(html_report(records))

    assert "27 groups = 1 complete + 1 incomplete + 25 without any reward." in words(page, "groups")
    rows = table(page, "groups")
    assert [["part", "2", "1", "incomplete"], ["0", "1", "0", "no reward at all"]] == rows[:2]
    assert 20 == len(rows)
    assert words(page, "groups").endswith("And 6 more that are not complete.")


def test_the_slowest_are_listed():
    """Those that ended last, with where their time went."""
    page = Page(html_report([record(f"e{number}", total=float(number + 1)) for number in range(20)], slowest=2))

    assert [
        ["e19", "rewarded", "1", "250 ms", "500 ms", "-", "125 ms", "20 s", "n1"],
        ["e18", "rewarded", "1", "250 ms", "500 ms", "-", "125 ms", "19 s", "n1"],
    ] == table(page, "slowest")


def test_bias_is_a_warning():
    """What chance does not explain is told; where there is nothing of the kind, that is told, too."""
    ill = [record(f"i{number}", LOST, node="ill") for number in range(8)]
    fine = [record(f"f{number}", node="fine") for number in range(32)]

    assert "node ill: 8 of 8 without a reward, 6.2 deviations" in words(Page(html_report(ill + fine)), "bias")
    one = [record("x", LOST), *(record(f"f{number}") for number in range(9))]
    assert "Nothing in length, image or node sets the 1 episodes" in words(Page(html_report(one)), "bias")
    assert "No reward is missing." in words(Page(html_report(fine)), "bias")


def test_a_journal_is_read_as_it_is(tmp_path):
    """What has ended has its record, what has not is counted as such, and a batch that is not there is refused."""
    path = tmp_path / "run.journal"

    async def solve(sandbox, episode):
        if episode.id == "e2":
            raise ValueError(HOSTILE)
        await sandbox.exec(["true"])
        return 1.0

    async def main():
        async with SandboxPool(FakeBackend(), images={"a": 2}, rollout=solve, journal=path) as pool:
            return await pool.rollout([Episode(id=f"e{number}", image="a", group=0) for number in range(4)])

    result = anyio.run(main)
    read = journal_result(Journal(path), batch=1)

    assert Counts(submitted=4, rewarded=3, failed=1) == read.counts == result.counts
    assert read.ttfc == result.ttfc
    assert read.groups == result.groups
    assert read.wall_seconds == pytest.approx(result.wall_seconds, rel=0.5)
    assert "1 of 4 episodes have no reward" in words(Page(html_report(read)), "")
    with pytest.raises(ConfigurationError, match="has no batch 2"):
        journal_result(Journal(path), batch=2)
    with pytest.raises(JournalError, match="there is no journal"):
        journal_result(Journal(tmp_path / "none"))


def test_a_journal_of_a_driver_that_was_killed_shows_what_is_open(tmp_path):
    """Episodes without a record have not ended, and nothing is claimed of them."""
    journal = Journal(tmp_path / "run.journal")

    async def main():
        async with journal.writing():
            book = await journal.begin([Episode(id=f"e{number}", image="a") for number in range(3)])
            book.settled(1, record("e1", LOST))
            await book.flush()

    anyio.run(main)
    result = journal_result(journal)

    assert Counts(submitted=3, retryable=1) == result.counts
    assert 2 == result.counts.pending


def test_hidden_characters_are_shown():
    """What turns, erases or colours the text around it; letters of every script stay, and so do lines."""
    assert "a\\x1b[2J\\u202eb\\ud800 Ünïcode 漢字\n" == visible("a\x1b[2J\u202eb\ud800 Ünïcode 漢字\n")


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    """Whoever asks for a page without it is told what to install."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'agentsandbox\[report\]'"):
        html_report([])
