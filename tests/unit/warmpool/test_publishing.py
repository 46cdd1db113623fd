# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from agentsandbox.models.events import Event
from agentsandbox.warmpool.publishing import Publisher


def test_every_sink_hears_every_event_in_order():
    """One event, made once, handed to all."""
    one, two = [], []
    Publisher([one.append, two.append]).emit(
        "sandbox.ready", 1.5, sandbox="sb-1", episode="ep", attempt=1, image="host"
    )

    assert [Event(name="sandbox.ready", at=1.5, sandbox="sb-1", episode="ep", attempt=1, data={"image": "host"})] == one
    assert one[0] is two[0]


def test_a_failing_sink_is_reported_once_and_the_others_hear_on(caplog):
    """One line in the log, with the sink's own error; nothing is raised."""
    heard = []

    def full(event):
        raise OSError("disk full")

    publisher = Publisher([full, heard.append])
    for name in ("a", "b", "c"):
        publisher.emit(name, 0.0, sandbox=None)

    assert ["a", "b", "c"] == [event.name for event in heard]
    assert 1 == len(caplog.records)
    assert "disk full" in caplog.text
    assert "<Publisher [2 sinks, 1 failing]>" == repr(publisher)


def test_without_sinks_nothing_is_made():
    """No sink, no event: the hot path costs nothing."""
    publisher = Publisher()
    publisher.emit("a", 0.0, sandbox=None, anything=object())

    assert "<Publisher [0 sinks, 0 failing]>" == repr(publisher)
