# SPDX-License-Identifier: Apache-2.0
"""Where the time of the accelerators goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentsandbox import Episode, SandboxPool
from agentsandbox.errors import ConfigurationError, UsageError
from agentsandbox.metrics.idle import Cause, IdleMeter
from agentsandbox.models.events import Event


class Story:
    """A meter, and events told to it at given times."""

    def __init__(self, **options):
        self.meter = IdleMeter(**options)

    def tell(self, at, name, *, episode=None, sandbox=None, **data):
        """One event."""
        self.meter(Event(name=name, at=at, episode=episode, sandbox=sandbox, data=data))

    def idle(self, now):
        """What was idle until now, without zeros."""
        return {str(cause): seconds for cause, seconds in self.meter.report(now).idle.items() if seconds}


def begun(count=4, **options):
    """A story with a batch at time 0."""
    story = Story(**options)
    story.meter.begin_batch({f"e{number}": "a" for number in range(count)}, 0.0)
    return story


def test_every_cause_gets_its_own_time():
    """Queue, hydrate, start, agent and exec, each for as long as it lasted."""
    story = begun(1)
    story.tell(1.0, "attempt.started", episode="e0")
    story.tell(2.0, "sandbox.created", sandbox="s", image="a")
    story.tell(4.0, "image.pulling", image="a")
    story.tell(7.0, "image.pulled", image="a")
    story.tell(8.0, "sandbox.ready", sandbox="s")
    story.tell(8.0, "attempt.granted", episode="e0")
    story.tell(10.0, "command.started", episode="e0")
    story.tell(15.0, "command.ended", episode="e0")
    story.tell(16.0, "attempt.ended", episode="e0")
    story.tell(16.0, "episode.ended", episode="e0")
    expected = {"queue": 2.0, "start": 3.0, "hydrate": 3.0, "agent": 3.0, "exec": 5.0, "other": 4.0}
    assert expected == story.idle(20.0)


def test_an_instant_is_split_among_the_unfinished():
    """One of four runs a command, one thinks, two have not begun."""
    story = begun(4)
    for number in range(2):
        story.tell(0.0, "attempt.started", episode=f"e{number}")
        story.tell(0.0, "attempt.granted", episode=f"e{number}")
    story.tell(0.0, "command.started", episode="e0")
    assert {"exec": 2.0, "agent": 2.0, "queue": 4.0} == story.idle(8.0)


def test_the_last_of_a_batch_are_stragglers_whatever_they_do():
    """From the moment on when no more than their share is left; a batch of one has none."""
    story = begun(20, stragglers=0.1)
    for number in range(18):
        story.tell(1.0, "episode.ended", episode=f"e{number}")
    assert {"queue": 1.0, "straggler": 4.0} == story.idle(5.0)
    assert {"queue": 5.0} == begun(1).idle(5.0)


def test_training_is_not_idle_and_everything_adds_up():
    """Busy and idle are the wall time; a nested step counts once; devices multiply what is lost."""
    story = begun(2, devices=8)
    story.meter.begin_step(1.0)
    story.meter.begin_step(2.0)
    story.meter.end_step(3.0)
    story.meter.end_step(4.0)
    story.meter.end_batch(6.0)
    report = story.meter.report(10.0)
    assert (10.0, 3.0, 2) == (report.wall, report.busy, report.steps)
    assert {"queue": 3.0, "other": 4.0} == story.idle(10.0)
    assert (24.0, 0.7) == (report.device_seconds[Cause.QUEUE], report.share)
    assert "idle 70% of 10.0 s on 8 devices: other 4.0 s, queue 3.0 s" == str(report)


def test_a_second_attempt_waits_again():
    """What was granted is forgotten when the attempt ends; an attempt that starts anew takes the old one's place."""
    story = begun(1)
    story.tell(0.0, "attempt.started", episode="e0")
    story.tell(0.0, "attempt.granted", episode="e0")
    story.tell(0.0, "attempt.granted", episode="e0")
    story.tell(1.0, "attempt.ended", episode="e0")
    story.tell(2.0, "attempt.started", episode="e0")
    story.tell(2.0, "attempt.started", episode="e0")
    assert {"agent": 1.0, "queue": 2.0} == story.idle(3.0)


def test_what_is_told_of_strangers_changes_nothing():
    """Commands of leases outside of a batch, sandboxes nobody has seen, ends without beginnings."""
    story = begun(1)
    for name in ("command.started", "command.ended", "attempt.granted", "attempt.ended", "image.pulled"):
        story.tell(0.0, name, episode="x", image="b")
    story.tell(0.0, "sandbox.ready", sandbox="x")
    story.tell(0.0, "pool.something")
    assert {"queue": 1.0} == story.idle(1.0)


NAMES = st.sampled_from(
    [
        "sandbox.created",
        "sandbox.ready",
        "sandbox.failed",
        "image.pulling",
        "image.pulled",
        "attempt.started",
        "attempt.granted",
        "attempt.ended",
        "command.started",
        "command.ended",
        "episode.ended",
        "step",
        "batch",
        "over",
    ]
)


@given(st.lists(st.tuples(NAMES, st.integers(0, 3), st.floats(0, 10)), max_size=60))
def test_whatever_happens_busy_and_idle_are_the_wall_time(steps):
    """In any order of events, also of impossible ones, no cause is ever negative and nothing is lost."""
    story, now, open_steps, batches = Story(), 0.0, 0, 0
    story.meter.report(0.0)
    for name, number, passed in steps:
        now += passed
        if name == "step":
            open_steps = 1 - open_steps
            (story.meter.begin_step if open_steps else story.meter.end_step)(now)
        elif name == "batch":
            batches += 1
            story.meter.begin_batch({f"e{n}": "ab"[n % 2] for n in range(4)}, now)
        elif name == "over":
            if batches:
                batches -= 1
                story.meter.end_batch(now)
        else:
            story.tell(now, name, episode=f"e{number}", sandbox=f"s{number}", image="ab"[number % 2])
    report = story.meter.report(now)
    assert now == pytest.approx(report.wall)
    assert report.wall == pytest.approx(report.busy + sum(report.idle.values()))
    assert min(report.idle.values()) >= 0


def test_a_step_that_did_not_begin_cannot_end():
    """The error says so."""
    with pytest.raises(UsageError, match="no training step is under way"):
        IdleMeter().end_step(0.0)


@pytest.mark.parametrize(("options", "words"), [({"devices": 0}, "devices"), ({"stragglers": 2}, "stragglers")])
def test_bad_arguments_are_refused_by_name(options, words):
    """Before anything is measured."""
    with pytest.raises(ConfigurationError, match=words):
        IdleMeter(**options)


def test_it_shows_what_it_is_about():
    """Quiet, in a step, or how many are left."""
    story = Story()
    assert "<IdleMeter [0 steps, quiet]>" == repr(story.meter)
    assert ("idle 0% of 0.0 s on 1 devices", 0.0) == (str(story.meter.report(1.0)), story.meter.report(1.0).share)
    story = begun(3)
    assert "<IdleMeter [0 steps, 3 episodes left]>" == repr(story.meter)
    story.meter.begin_step(0.0)
    assert "<IdleMeter [1 steps, in a training step]>" == repr(story.meter)


@pytest.mark.anyio
async def test_a_pool_knows_what_its_trainer_waited_for():
    """Steps are marked by the trainer, the rest is known from the pool's own events."""

    async def rollout(sandbox, episode):
        return float((await sandbox.exec(["true"])).exit_code == 0)

    async with SandboxPool("local", images={"host": 2}, rollout=rollout, devices=4) as pool:
        await pool.rollout([Episode(id=f"e{number}", image="host") for number in range(4)])
        with pool.training_step():
            pass
        report = pool.idle()
    assert (1, 4) == (report.steps, report.devices)
    assert report.wall == pytest.approx(report.busy + sum(report.idle.values()))
    assert report.idle[Cause.EXEC] > 0
