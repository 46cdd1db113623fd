# SPDX-License-Identifier: Apache-2.0
"""The metrics that Prometheus is told."""

from __future__ import annotations

import re
import sys
from collections import Counter

import anyio
import pytest

from agentsandbox import Episode, ResetPolicy, SandboxPool
from agentsandbox.backends.simulated import ClusterModel, Faults, SimulatedBackend
from agentsandbox.errors import ConfigurationError
from agentsandbox.metrics.collectors import BUCKETS
from agentsandbox.metrics.prometheus import PrometheusSink
from agentsandbox.models.events import Event
from agentsandbox.testing.virtualtime import virtual_time

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    """Time passes only when everybody waits."""
    return virtual_time(request.param)


class Story:
    """A sink, events told to it at given times, and what a scrape would see."""

    def __init__(self, **options):
        self.registry = options.pop("registry", None) or prometheus_client.CollectorRegistry()
        self.backend = options.pop("backend", "local")
        self.sink = PrometheusSink(self.backend, registry=self.registry, **options)

    def tell(self, at, name, sandbox=None, episode=None, attempt=None, **data):
        """One event."""
        self.sink(Event(name=name, at=at, sandbox=sandbox, episode=episode, attempt=attempt, data=data))

    def value(self, name, **labels):
        """One value, or nothing if there is no such time series."""
        return self.registry.get_sample_value(f"agentsandbox_{name}", {"backend": self.backend, **labels})

    def by(self, name, label):
        """Every value that is not 0 of one metric, by one label."""
        found = Counter()
        for metric in self.registry.collect():
            for sample in metric.samples:
                if sample.name == f"agentsandbox_{name}" and sample.value:
                    found[sample.labels[label]] += sample.value
        return dict(found)

    def attempt(self, asked, granted, *, sandbox="s", episode="e", attempt=1, start="warm", image="a"):
        """An attempt up to its grant."""
        who = {"episode": episode, "attempt": attempt}
        self.tell(asked, "attempt.started", **who)
        self.tell(granted, "lease.granted", sandbox, **who, image=image, start=start, queue=granted - asked)
        self.tell(granted, "attempt.granted", sandbox, **who)

    def made(self, created, ready, sandbox="s", image="a"):
        """A sandbox."""
        self.tell(created, "sandbox.created", sandbox, image=image)
        self.tell(ready, "sandbox.ready", sandbox, image=image, node="n")


def test_names_follow_the_conventions():
    """A prefix, base units, totals that say so, and a text for each; buckets from a millisecond to ten minutes."""
    registry = Story().registry
    names = {metric.name: metric for metric in registry.collect()}

    assert {
        "agentsandbox_api_throttles",
        "agentsandbox_attempts",
        "agentsandbox_attempts_in_progress",
        "agentsandbox_episodes",
        "agentsandbox_episodes_restored",
        "agentsandbox_image_pull_seconds",
        "agentsandbox_reset_seconds",
        "agentsandbox_resets",
        "agentsandbox_retries",
        "agentsandbox_sandbox_creation_seconds",
        "agentsandbox_sandbox_creations",
        "agentsandbox_sandbox_failures",
        "agentsandbox_sandbox_losses",
        "agentsandbox_sandboxes",
        "agentsandbox_ttfc_censored",
        "agentsandbox_ttfc_seconds",
        "agentsandbox_waiting_seconds",
    } == set(names)
    counted = re.findall(r"^# TYPE (\S+) counter$", prometheus_client.generate_latest(registry).decode(), re.MULTILINE)
    assert len(counted) == 11
    assert all(name.endswith("_total") for name in counted)
    assert all(metric.documentation.endswith(".") for metric in names.values())
    assert (0.001, 600) == (BUCKETS[0], BUCKETS[-1])


def test_what_has_not_happened_is_zero_and_not_absent():
    """A rate is known from the first failure on only if there was a 0 before it."""
    story = Story()

    assert [0.0] * 4 == [
        story.value("episodes_total", status=status) for status in ("rewarded", "failed", "retryable", "cancelled")
    ]
    assert 0.0 == story.value("api_throttles_total")
    assert 0.0 == story.value("ttfc_seconds_count", start="reused")
    assert 0.0 == story.value("sandboxes", state="leased")


def test_time_to_first_command_is_split_by_start():
    """From the call to the first command only, in the bucket where it belongs."""
    story = Story()
    for number, (start, seconds) in enumerate([("cold", 42.0), ("warm", 0.004), ("warm", 0.004), ("reused", 0.3)]):
        name = f"e{number}"
        story.attempt(10.0, 10.0 + seconds / 2, sandbox=name, episode=name, start=start)
        for at in (10.0 + seconds, 99.0):
            story.tell(at, "command.started", name, name, 1, command="true")

    assert {"cold": 1, "warm": 2, "reused": 1} == story.by("ttfc_seconds_count", "start")
    assert 42.0 == story.value("ttfc_seconds_sum", start="cold")
    assert (0, 2) == tuple(story.value("ttfc_seconds_bucket", start="warm", le=le) for le in ("0.0025", "0.005"))
    assert (0, 1) == tuple(story.value("ttfc_seconds_bucket", start="cold", le=le) for le in ("30.0", "60.0"))
    assert {} == story.by("ttfc_censored_total", "start")


def test_p56_an_attempt_without_a_first_command_is_censored_and_in_no_bucket():
    """Whether it got a sandbox or not; a low p99 beside many of them is not good news."""
    story = Story()
    story.attempt(0.0, 1.0, start="reused")
    story.tell(9.0, "lease.released", "s", "e", 1, discard=True)
    story.tell(9.0, "attempt.ended", "s", "e", 1, kind="rollout_raised", reason="no")
    story.tell(0.0, "attempt.started", None, "f", 1)
    story.tell(300.0, "lease.refused", None, "f", 1, image="a", error="AcquireTimeout: no", waited=300.0)
    story.tell(300.0, "attempt.ended", None, "f", 1, kind="acquire_timeout", reason="no")

    assert {"reused": 1, "cold": 1} == story.by("ttfc_censored_total", "start")
    assert {} == story.by("ttfc_seconds_count", "start")


def test_a_lease_outside_of_a_rollout_counts_as_well():
    """A loop that owns its schedule has no attempts: its calls of acquire() are what is measured."""
    story = Story()
    for number, sandbox in enumerate(("s0", "s1")):
        story.tell(5.0, "lease.granted", sandbox, image="a", start="warm", queue=1.5)
        if number == 0:
            story.tell(6.0, "command.started", sandbox, command="true")
            story.tell(7.0, "command.started", sandbox, command="true")
        story.tell(8.0, "lease.released", sandbox, discard=False)
    story.tell(9.0, "lease.refused", image="a", error="AcquireTimeout: no", waited=3.0)

    assert (1, 2.5) == tuple(story.value(f"ttfc_seconds_{what}", start="warm") for what in ("count", "sum"))
    assert {"warm": 1, "cold": 1} == story.by("ttfc_censored_total", "start")


def test_a_hedged_wait_is_measured_from_the_first_call():
    """The sandbox that comes second is handed back unused, and is no censored sample."""
    story = Story()
    story.tell(0.0, "attempt.started", None, "e", 1)
    for at, sandbox, start, queue in ((10.0, "s0", "warm", 2.0), (10.0, "s1", "cold", 10.0)):
        story.tell(at, "lease.granted", sandbox, "e", 1, image="a", start=start, queue=queue)
    story.tell(10.0, "lease.released", "s1", "e", 1, discard=False)
    story.tell(10.0, "attempt.granted", "s0", "e", 1)
    story.tell(11.0, "command.started", "s0", "e", 1, command="true")
    story.tell(12.0, "attempt.ended", "s0", "e", 1, kind=None)

    assert {"warm": 11.0} == story.by("ttfc_seconds_sum", "start")
    assert {} == story.by("ttfc_censored_total", "start")


def test_retries_say_why():
    """A failure, a twin that was started beside, or a driver that came after another one."""
    story = Story()
    ended = [("sandbox_lost", 1), ("stream_broken", 2), (None, 3)]
    for kind, number in ended:
        story.tell(0.0, "attempt.started", None, "again", number)
        story.tell(0.0, "attempt.ended", None, "again", number, kind=kind)
    story.tell(0.0, "episode.ended", None, "again", 3, status="rewarded", kind=None)
    for number in (1, 2):
        story.tell(0.0, "attempt.started", None, "twins", number)
    story.tell(0.0, "attempt.started", None, "resumed", 4)

    assert {"sandbox_lost": 1, "stream_broken": 1, "hedge": 1, "resumed": 1} == story.by("retries_total", "reason")
    assert {"sandbox_lost": 1, "stream_broken": 1, "rewarded": 1} == story.by("attempts_total", "outcome")
    assert {"rewarded": 1} == story.by("episodes_total", "status")
    assert {} == story.sink._failed


def test_restored_records_are_counted_apart():
    """The driver that made them has counted them."""
    story = Story()
    story.tell(0.0, "episode.restored", None, "e", 1, status="failed", kind="command")

    assert {"failed": 1} == story.by("episodes_restored_total", "status")
    assert {} == story.by("episodes_total", "status")


def test_waiting_is_split_by_cause():
    """Until its sandbox is begun it is the queue, then the start, then the policy and commands in turn."""
    story = Story()
    story.tell(0.0, "attempt.started", None, "e", 1)
    assert {"waiting": 1} == story.by("attempts_in_progress", "state")
    story.made(3.0, 7.0)
    story.tell(7.0, "lease.granted", "s", "e", 1, image="a", start="cold", queue=7.0)
    story.tell(7.0, "attempt.granted", "s", "e", 1)
    assert {"agent": 1} == story.by("attempts_in_progress", "state")
    story.tell(9.0, "command.started", "s", "e", 1)
    story.tell(10.0, "command.started", "s", "e", 1)
    assert {"exec": 1} == story.by("attempts_in_progress", "state")
    story.tell(11.0, "command.ended", "s", "e", 1, started=2.0, wall=2.0, exit_code=0)
    story.tell(14.0, "command.ended", "s", "e", 1, started=3.0, wall=4.0, exit_code=0)
    story.tell(14.0, "command.ended", "s", "e", 1, started=None, wall=0.0, error="CommandNotFound: nix")
    story.tell(15.0, "attempt.ended", "s", "e", 1, kind=None)

    assert {"queue": 3.0, "start": 4.0, "agent": 3.0, "exec": 5.0} == story.by("waiting_seconds_total", "cause")
    assert {} == story.by("attempts_in_progress", "state")
    assert {} == story.sink._attempts


def test_the_fetching_of_an_image_is_a_cause_of_its_own():
    """As far as the attempt waited for it, whether it came to its end or was told of too late."""
    story = Story()
    story.tell(0.0, "sandbox.created", "s", image="a")
    story.tell(1.0, "image.pulling", "s", image="a", node="n", pod="p")
    story.tell(3.0, "image.pulled", "s", image="a", node="n", pod="p", seconds=2.0, error="try again")
    story.tell(4.0, "attempt.started", None, "e", 1)
    story.tell(3.5, "image.pulling", "s", image="a", node="n", pod="p")
    story.tell(9.5, "image.pulled", "s", image="a", node="n", pod="p", seconds=6.0)
    story.tell(9.75, "image.pulling", "s", image="b", node="n", pod="p")
    story.tell(10.0, "lease.granted", "s", "e", 1, image="a", start="cold", queue=6.0)
    story.tell(10.0, "attempt.granted", "s", "e", 1)
    story.tell(11.0, "image.pulled", "nothing known", image="b", node="n", pod="q", seconds=1.0)

    assert {"hydrate": 5.75, "start": 0.25} == story.by("waiting_seconds_total", "cause")
    assert (2, 7.0) == tuple(story.value(f"image_pull_seconds_{what}") for what in ("count", "sum"))


def test_a_sandbox_that_was_made_before_is_no_reason_to_wait():
    """Who waits until somebody else gives back a sandbox waits in the queue, and for its reset."""
    story = Story()
    story.made(0.0, 1.0)
    story.tell(2.0, "attempt.started", None, "e", 1)
    story.tell(8.0, "sandbox.ready", "s", image="a", node="n", recycled=1.0)
    story.tell(8.0, "lease.granted", "s", "e", 1, image="a", start="cold", queue=6.0)
    story.tell(8.0, "attempt.granted", "s", "e", 1)

    assert {"queue": 5.0, "start": 1.0} == story.by("waiting_seconds_total", "cause")
    assert 1 == story.value("sandbox_creation_seconds_count")


def test_sandboxes_by_state():
    """Each is in one state at a time, and in none when it is gone."""
    story = Story()
    seen = []
    for name, data in [
        ("sandbox.created", {"image": "a"}),
        ("sandbox.ready", {"image": "a"}),
        ("lease.granted", {"image": "a", "start": "warm", "queue": 0.0}),
        ("lease.released", {"discard": False}),
        ("sandbox.ready", {"image": "a", "recycled": 0.5}),
        ("lease.granted", {"image": "a", "start": "reused", "queue": 0.0}),
        ("sandbox.lost", {"reason": "evicted"}),
        ("sandbox.lost", {"reason": "deleted"}),
        ("lease.released", {"discard": False}),
        ("sandbox.stuck", {"error": "no", "rounds": 3}),
        ("sandbox.deleted", {}),
        ("sandbox.deleted", {}),
    ]:
        story.tell(1.0, name, "s", **data)
        seen.append(story.by("sandboxes", "state"))

    states = ["creating", "ready", "leased", "returned", "ready", "leased", "lost", "lost", "lost", "stuck"]
    assert [*({state: 1} for state in states), {}, {}] == seen
    assert {"evicted": 1} == story.by("sandbox_losses_total", "reason")
    assert "<PrometheusSink 'local' [0 sandboxes, 0 attempts]>" == repr(story.sink)


def test_creations_that_failed_say_why():
    """By the kind of the error; what the API server throttled is counted once more, on its own."""
    story = Story()
    errors = ["Throttled: slow down", "ImagePullFailed: no such image", "Strange: what", "ApiUnavailable: gone"]
    for number, error in enumerate(errors):
        story.tell(0.0, "sandbox.created", f"s{number}", image="a")
        story.tell(1.0, "sandbox.failed", f"s{number}", error=error)

    assert 4 == story.value("sandbox_creations_total")
    assert {"control_plane": 2, "image_pull": 1, "other": 1} == story.by("sandbox_failures_total", "kind")
    assert 1 == story.value("api_throttles_total")
    assert {} == story.by("sandboxes", "state")


def test_resets_by_rung_and_outcome():
    """Each is counted once, also if its lease tells of it as well."""
    story = Story()
    story.made(0.0, 1.0, "new")
    for verified in (True, False):
        story.tell(1.0, "sandbox.reset", "s", rung="files", seconds=0.25, verified=verified, reason="")
    story.tell(1.0, "lease.reset", "s", "e", 1, rung="files", seconds=0.25)
    story.tell(1.0, "lease.reset", "new", "e", 1, rung="replace", seconds=4.0)
    story.tell(1.0, "sandbox.not_recycled", "s", image="a", error="files: it is to be another image")

    assert [1, 1, 1, 1] == [
        story.value("resets_total", rung=rung, outcome=outcome)
        for rung, outcome in [
            ("files", "verified"),
            ("files", "unverified"),
            ("replace", "verified"),
            ("none", "failed"),
        ]
    ]
    assert {"files": 0.5, "replace": 4.0} == story.by("reset_seconds_sum", "rung")
    assert {"leased": 1} == story.by("sandboxes", "state")


def test_labels_take_few_values_whatever_a_backend_says():
    """Ids are never labels, words of a backend are limited in number and form, and kinds are those that there are."""
    story = Story()
    for number in range(200):
        name = f"ep-{number}"
        story.made(0.0, 1.0, name, image=f"image-{number}")
        story.attempt(0.0, 1.0, sandbox=name, episode=name, image=f"image-{number}")
        story.tell(1.0, "command.started", name, name, 1)
        story.tell(2.0, "sandbox.lost", name, reason=f"reason_{number}")
        story.tell(2.0, "attempt.ended", name, name, 1, kind=f"kind-{number}")
    story.tell(2.0, "sandbox.reset", "x", rung="Übung", seconds=1.0, verified=True)

    text = prometheus_client.generate_latest(story.registry).decode()
    assert "ep-" not in text
    assert "image-" not in text
    losses = story.by("sandbox_losses_total", "reason")
    assert (51, 150) == (len(losses), losses["other"])
    assert {"other": 200} == story.by("attempts_total", "outcome")
    assert {"other": 1} == story.by("resets_total", "rung")


def test_images_are_a_label_only_if_asked_for():
    """Then what is of sandboxes is by image, also when one becomes another."""
    story = Story(images=True)
    story.made(0.0, 1.0, "s", image="a")
    story.attempt(1.0, 1.0, sandbox="s", image="a")
    story.tell(3.0, "command.started", "s", "e", 1)
    story.tell(3.0, "lease.released", "s", "e", 1)
    story.tell(4.0, "sandbox.ready", "s", image="b", recycled=0.5)

    assert {"a": 1} == story.by("sandbox_creations_total", "image")
    assert {"a": 2.0} == story.by("ttfc_seconds_sum", "image")
    assert {"b": 1} == story.by("sandboxes", "image")
    with pytest.raises(ConfigurationError, match="the same labels, and this one was begun with images=True"):
        PrometheusSink("other", registry=story.registry)


def test_two_pools_share_a_registry():
    """Each is told apart by its backend, and two of one backend add up."""
    local = Story()
    cluster = Story(registry=local.registry, backend="kubernetes")
    second = Story(registry=local.registry)
    for story in (local, cluster, second):
        story.made(0.0, 1.0)
    second.tell(2.0, "sandbox.deleted", "s")

    assert {"local": 1, "kubernetes": 1} == local.by("sandboxes", "backend")
    assert {"local": 2, "kubernetes": 1} == local.by("sandbox_creations_total", "backend")


def test_the_global_registry_is_the_default():
    """What a user serves with start_http_server() has it."""
    PrometheusSink("of the test of the default")
    PrometheusSink("of the test of the default")

    found = prometheus_client.REGISTRY.get_sample_value(
        "agentsandbox_episodes_total", {"backend": "of the test of the default", "status": "rewarded"}
    )
    assert 0.0 == found


def test_events_of_things_that_began_before_break_nothing():
    """A sink that is given late, and events in an order that nobody expects, count what can be counted."""
    names = [
        "image.pulling",
        "image.pulled",
        "sandbox.ready",
        "sandbox.lost",
        "sandbox.stuck",
        "sandbox.deleted",
        "sandbox.failed",
        "lease.released",
        "lease.reset",
        "command.started",
        "command.ended",
        "attempt.granted",
        "attempt.ended",
        "episode.ended",
        "nothing.known",
    ]
    story = Story()
    for name in names:
        story.tell(1.0, name, "s", "e", 1, status="rewarded")
    story.attempt(2.0, 3.0)
    story.attempt(1.0, 2.0)  # the same id in another batch, and time that seems to go back

    assert {"agent": 1} == story.by("attempts_in_progress", "state")
    assert {} == story.by("sandboxes", "state")
    assert {"rewarded": 1} == story.by("episodes_total", "status")


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    """Whoever asks for metrics without it is told what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'agentsandbox\[metrics\]'"):
        PrometheusSink("local")


@pytest.mark.anyio
async def test_a_real_pool_is_counted_as_it_counts_itself():
    """Over a simulated cluster that loses sandboxes, every figure is that of the result, and nothing stays."""
    story = Story(backend="simulated")
    faults = Faults(losses_per_hour=60, failed_starts=0.1)
    backend = SimulatedBackend(model=ClusterModel(nodes=2, faults=faults), seed=3)

    async def solve(sandbox, episode):
        await anyio.sleep(20)
        await sandbox.exec("true")
        await anyio.sleep(20)
        return 1.0

    async with SandboxPool(
        backend, images={"a": 8}, rollout=solve, max_attempts=3, sink=story.sink, reset=ResetPolicy()
    ) as pool:
        result = await pool.rollout([Episode(id=f"e{number}", image="a") for number in range(64)])
        statistics = pool.statistics()
        states, failures = story.by("sandboxes", "state"), story.by("sandbox_failures_total", "kind")

    attempts = [attempt for record in result.records for attempt in record.history]
    outcomes = Counter("rewarded" if one.failure is None else str(one.failure.kind) for one in attempts)
    again = Counter(
        str(record.history[n].failure.kind) for record in result.records for n in range(record.attempts - 1)
    )
    assert {"rewarded", "sandbox_lost"} <= set(outcomes)
    assert Counter(str(record.status) for record in result.records) == story.by("episodes_total", "status")
    assert outcomes == story.by("attempts_total", "outcome")
    assert again == story.by("retries_total", "reason")
    for start, figures in result.ttfc.by_start.items():
        assert figures.n == story.value("ttfc_seconds_count", start=start)
        assert figures.n * (figures.mean or 0.0) == pytest.approx(story.value("ttfc_seconds_sum", start=start))
        assert figures.censored == story.value("ttfc_censored_total", start=start)
    assert {"provision": statistics.failed_total} == failures
    assert statistics.recycled_total == story.value("resets_total", rung="restart", outcome="verified")
    assert statistics.ready == states.get("ready", 0)
    failed = sum(story.by("sandbox_failures_total", "kind").values())
    assert failed == statistics.failed_total + statistics.creating  # what the end of the pool came upon
    assert story.value("sandbox_creations_total") == story.value("sandbox_creation_seconds_count") + failed
    assert {} == story.by("sandboxes", "state")
    assert {} == story.by("attempts_in_progress", "state")
    assert ({}, {}, {}) == (story.sink._sandboxes, story.sink._leases, story.sink._failed)
