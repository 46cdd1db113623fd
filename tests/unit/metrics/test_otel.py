# SPDX-License-Identifier: Apache-2.0
"""The traces that OpenTelemetry is told."""

from __future__ import annotations

import subprocess
import sys
import time

import anyio
import pytest

from agentsandbox import Episode, SandboxPool
from agentsandbox.backends.simulated import ClusterModel, SimulatedBackend
from agentsandbox.errors import ConfigurationError
from agentsandbox.metrics.otel import OpenTelemetrySink
from agentsandbox.models.events import Event
from agentsandbox.testing.virtualtime import virtual_time

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Time passes only when everybody waits."""
    return virtual_time(request.param)


class Story:
    """A sink, events told to it at given times, and the spans that have ended."""

    def __init__(self):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")
        self.sink = OpenTelemetrySink(self.tracer)
        self.began = time.time_ns()

    def tell(self, at, name, sandbox=None, episode=None, attempt=None, **data):
        """One event."""
        self.sink(Event(name=name, at=at, sandbox=sandbox, episode=episode, attempt=attempt, data=data))

    @property
    def spans(self):
        """Those that have ended, in that order."""
        return self.exporter.get_finished_spans()

    def named(self, name):
        """Those of a name."""
        return [span for span in self.spans if span.name == f"agentsandbox.{name}"]

    def attempt(self, number, *, asked, granted, sandbox="s", start="warm"):
        """An attempt of one episode up to its grant."""
        who = {"episode": "e", "attempt": number}
        self.tell(asked, "attempt.started", **who)
        self.tell(granted, "lease.granted", sandbox, **who, image="a", start=start, queue=granted - asked)
        self.tell(granted, "attempt.granted", sandbox, **who)


def seconds(span):
    """How long a span took."""
    return (span.end_time - span.start_time) / 1e9


def attributes(span):
    """What a span says, without our prefix."""
    return {name.removeprefix("agentsandbox."): value for name, value in span.attributes.items()}


def test_an_episode_that_is_tried_twice():
    """One trace: the episode, both attempts beneath it, and what each waited for beneath those."""
    story = Story()
    story.attempt(1, asked=100.0, granted=103.0, start="cold")
    story.tell(105.0, "command.started", "s", "e", 1, command="true")
    story.tell(106.0, "command.started", "s", "e", 1, command="true")
    story.tell(107.0, "sandbox.lost", "s", reason="evicted", detail="")
    story.tell(108.0, "attempt.ended", "s", "e", 1, reward=None, kind="sandbox_lost", reason="SandboxLost: evicted")
    story.attempt(2, asked=108.0, granted=109.0, sandbox="t")
    story.tell(110.0, "command.started", "t", "e", 2, command="true")
    story.tell(112.0, "attempt.ended", "t", "e", 2, reward=1.0, kind=None, reason=None)
    story.tell(111.5, "episode.ended", "t", "e", 2, status="rewarded", reward=1.0, kind=None, reason=None)

    (episode,), (first, second), acquires = story.named("episode"), story.named("attempt"), story.named("acquire")
    assert 5 == len(story.spans)
    assert 1 == len({span.context.trace_id for span in story.spans})
    assert (None, episode.context.span_id) == (episode.parent, first.parent.span_id)
    assert episode.context.span_id == second.parent.span_id
    assert [first.context.span_id, second.context.span_id] == [span.parent.span_id for span in acquires]
    assert [8.0, 4.0, 12.0, 3.0, 1.0] == [seconds(span) for span in (first, second, episode, *acquires)]
    assert {
        "episode": "e",
        "attempt": 1,
        "sandbox": "s",
        "start": "cold",
        "image": "a",
        "ttfc_seconds": 5.0,
        "kind": "sandbox_lost",
        "error.type": "sandbox_lost",
    } == attributes(first)
    assert {"episode": "e", "attempts": 2, "status": "rewarded", "reward": 1.0} == attributes(episode)
    assert ("ERROR", "sandbox_lost: SandboxLost: evicted") == (first.status.status_code.name, first.status.description)
    assert ["UNSET"] * 2 == [span.status.status_code.name for span in (second, episode)]
    told = [(event.name, (event.timestamp - first.start_time) / 1e9) for event in first.events]
    assert [("agentsandbox.first_command", 5.0), ("agentsandbox.sandbox_lost", 7.0)] == told
    assert "<OpenTelemetrySink [0 episodes, 0 attempts]>" == repr(story.sink)


def test_times_are_those_of_the_events_mapped_once_to_the_wall_clock(monkeypatch):
    """A wall clock that jumps in between moves nothing."""
    story = Story()
    story.attempt(1, asked=1000.0, granted=1000.25)
    after = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    story.tell(1000.5, "attempt.ended", "s", "e", 1, reward=1.0, kind=None, reason=None)

    (attempt,) = story.named("attempt")
    assert story.began <= attempt.start_time <= after
    assert 500_000_000 == attempt.end_time - attempt.start_time


def test_a_sandbox_that_was_not_had_in_time_fails_the_wait():
    """The wait is an error of its own, as is the attempt, and an episode without an attempt has a span all the same."""
    story = Story()
    story.tell(0.0, "attempt.started", None, "e", 1)
    story.tell(300.0, "attempt.ended", None, "e", 1, reward=None, kind="acquire_timeout", reason="no sandbox")
    story.tell(
        300.0, "episode.ended", None, "f", None, status="retryable", reward=None, kind="timed_out", reason="over"
    )

    (acquire,), (attempt,), (episode,) = (story.named(name) for name in ("acquire", "attempt", "episode"))
    assert (300.0, 300.0, 0.0) == (seconds(acquire), seconds(attempt), seconds(episode))
    assert ["acquire_timeout: no sandbox"] * 2 == [span.status.description for span in (acquire, attempt)]
    assert ("timed_out: over", "retryable") == (episode.status.description, attributes(episode)["status"])


def test_what_was_stopped_has_not_failed():
    """A batch that is cancelled, or the slower one of two attempts, is no error that anybody should be woken for."""
    story = Story()
    story.attempt(1, asked=0.0, granted=1.0)
    story.tell(2.0, "attempt.ended", "s", "e", 1, reward=None, kind="cancelled", reason="stopped")
    story.tell(2.0, "episode.ended", "s", "e", 1, status="cancelled", reward=None, kind="cancelled", reason="stopped")

    assert ["UNSET"] * 3 == [span.status.status_code.name for span in story.spans]
    assert "cancelled" == attributes(story.named("episode")[0])["kind"]


def test_resets_are_beneath_the_attempt_that_made_them_necessary():
    """Within it, and after it as well; those that failed say why; each is told once."""
    story = Story()
    story.attempt(1, asked=0.0, granted=1.0)
    story.tell(3.0, "sandbox.reset", "s", rung="files", seconds=0.5, verified=True, reason="")
    story.tell(3.0, "lease.reset", "s", "e", 1, rung="files", seconds=0.5)
    story.tell(5.0, "lease.reset", "t", "e", 1, rung="replace", seconds=2.0)
    story.tell(6.0, "attempt.ended", "t", "e", 1, reward=1.0, kind=None, reason=None)
    story.tell(7.0, "sandbox.reset", "t", rung="files", seconds=0.25, verified=False, reason="a file is left")
    story.tell(8.0, "sandbox.not_recycled", "t", image="a", error="files: a file is left")
    story.tell(9.0, "sandbox.deleted", "t")
    story.tell(9.5, "sandbox.reset", "t", rung="files", seconds=0.25, verified=True, reason="")

    (attempt,), resets = story.named("attempt"), story.named("reset")
    assert {attempt.context.span_id} == {span.parent.span_id for span in resets}
    assert [("files", 0.5), ("replace", 2.0), ("files", 0.25), ("none", 0.0)] == [
        (span.attributes["agentsandbox.rung"], seconds(span)) for span in resets
    ]
    assert [None, None, "unverified: a file is left", "failed: files: a file is left"] == [
        span.status.description for span in resets
    ]


def test_events_of_things_that_began_before_break_nothing():
    """A sink that is given late makes the spans that it can make, and ends each one once."""
    story = Story()
    for name in ("attempt.granted", "command.started", "sandbox.lost", "sandbox.deleted", "attempt.ended", "lease.new"):
        story.tell(1.0, name, "s", "e", 1)
    story.tell(2.0, "attempt.started", None, "e", 1)
    story.tell(3.0, "attempt.started", None, "e", 1)
    story.tell(4.0, "attempt.ended", None, "e", 1, kind=None)
    story.tell(4.0, "episode.ended", None, "e", 1, status="rewarded")

    assert [1.0, 1.0] == [seconds(span) for span in story.named("attempt")]
    assert [2.0] == [seconds(span) for span in story.named("episode")]


def test_the_global_provider_is_the_default():
    """Without a provider nothing is recorded, and nothing fails."""
    sink = OpenTelemetrySink()
    sink(Event(name="attempt.started", at=0.0, episode="e", attempt=1))
    sink(Event(name="attempt.ended", at=1.0, episode="e", attempt=1, data={"kind": "command", "reason": "no"}))

    assert "<OpenTelemetrySink [1 episodes, 0 attempts]>" == repr(sink)


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    """Whoever asks for traces without it is told what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'agentsandbox\[otel\]'"):
        OpenTelemetrySink()


def test_only_the_api_is_imported():
    """Which SDK exports the spans is the user's choice."""
    code = (
        "import sys; from agentsandbox.metrics.otel import OpenTelemetrySink; OpenTelemetrySink(); "
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "[]\n" == done.stdout


@pytest.mark.anyio
async def test_a_batch_within_a_span_of_the_trainer_is_beneath_it():
    """A real pool: its episodes are children of the step, and take as long as their records say."""
    story = Story()

    async def solve(sandbox, episode):
        await sandbox.exec("sleep 30")
        return 1.0

    async with SandboxPool(
        SimulatedBackend(model=ClusterModel(nodes=1)), images={"a": 2}, rollout=solve, sink=story.sink
    ) as pool:
        await anyio.sleep(100)
        with story.tracer.start_as_current_span("step") as step:
            result = await pool.rollout([Episode(id=f"e{number}", image="a") for number in range(4)])

    episodes, attempts = story.named("episode"), {attributes(span)["episode"]: span for span in story.named("attempt")}
    assert {step.get_span_context().span_id} == {span.parent.span_id for span in episodes}
    assert ["e0", "e1", "e2", "e3"] == sorted(attempts)
    for record in result.records:
        span, timings = attempts[record.episode.id], record.timings
        assert timings.total - timings.queued == pytest.approx(seconds(span), abs=1e-6)
        assert record.ttfc.seconds == pytest.approx(span.attributes["agentsandbox.ttfc_seconds"])
        assert record.ttfc.start == span.attributes["agentsandbox.start"]
    waits = {span.parent.span_id: seconds(span) for span in story.named("acquire")}
    assert [record.timings.acquire for record in result.records] == pytest.approx(
        [waits[attempts[record.episode.id].context.span_id] for record in result.records], abs=1e-6
    )
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert {} == story.sink._users
