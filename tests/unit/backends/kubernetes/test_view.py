# SPDX-License-Identifier: Apache-2.0
"""What each piece of news changes in what is known of a collection."""

from __future__ import annotations

import pytest

from agentsandbox.backends.kubernetes.view import Change, ChangeType, View, newer
from agentsandbox.errors import Conflict

EXPIRED = {
    "type": "ERROR",
    "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 5 (900)"},
}


def pod(uid, version, **status):
    """An object as far as a cache looks at it."""
    return {"metadata": {"uid": uid, "name": f"pod-{uid}", "resourceVersion": str(version)}, "status": status}


def told(changes):
    """Changes in short."""
    return [(change.type.value, change.object["metadata"]["uid"]) for change in changes]


def test_view_follows_a_life():
    """Added, modified and deleted, each with what was there before."""
    view = View()
    first, second, last = pod("a", 1), pod("a", 2, phase="Running"), pod("a", 3)

    assert view.event({"type": "ADDED", "object": first}) == [Change(ChangeType.ADDED, first, None)]
    assert view.event({"type": "MODIFIED", "object": second}) == [Change(ChangeType.MODIFIED, second, first)]
    assert repr(view) == "<View 1 objects at 2>"
    assert view.event({"type": "DELETED", "object": last}) == [Change(ChangeType.DELETED, last, second)]
    assert (view.objects, view.gone, view.version) == ({}, {"a": last}, "3")


def test_view_takes_old_news_for_old():
    """The answer to a call may be newer than the watch, or older; the newest wins, and twice is once."""
    view = View()
    view.put(pod("a", 12, phase="Running"))

    assert view.put(pod("a", 9)) == []
    assert view.put(pod("a", 12)) == []
    assert view.objects["a"]["status"] == {"phase": "Running"}


def test_view_does_not_bring_back_the_dead():
    """A late answer about a deleted object changes nothing, and a second deletion neither."""
    view = View()
    view.put(pod("a", 1))
    view.drop(pod("a", 2))

    assert view.put(pod("a", 3)) == []
    assert view.drop(pod("a", 3)) == []
    assert view.objects == {}


def test_view_reconciles_with_a_list():
    """Missing in the list: deleted; new in it: added; changed: modified; the same: nothing."""
    view = View()
    for uid in ("gone", "same", "changed"):
        view.put(pod(uid, 5))

    changes = view.reconcile([pod("same", 5), pod("changed", 8), pod("new", 7)], "900")

    assert sorted(told(changes)) == [("added", "new"), ("deleted", "gone"), ("modified", "changed")]
    assert (sorted(view.objects), view.version) == (["changed", "new", "same"], "900")


def test_view_keeps_what_is_younger_than_the_list():
    """An object that was created after the list was made is not in it, and not gone."""
    view = View()
    view.put(pod("young", 901))

    assert view.reconcile([], "900") == []
    assert told(view.reconcile([], "901")) == [("deleted", "young")]


def test_view_bookmark_moves_the_version_alone():
    """A bookmark says only where to go on."""
    view = View()

    assert view.event({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}}) == []
    assert view.version == "77"


def test_view_error_event_is_raised():
    """A 410 in a stream with status 200 is as good as one in its head."""
    with pytest.raises(Conflict, match="too old resource version") as caught:
        View().event(EXPIRED)

    assert caught.value.status == 410


def test_view_forgets_what_nobody_reads():
    """Field managers and our own program are most of a Pod's JSON."""
    view = View()
    bulky = pod("a", 1)
    bulky["metadata"]["managedFields"] = [{}]
    bulky["spec"] = {"containers": [{"name": "sandbox", "command": ["x" * 30_000], "image": "i"}]}
    view.put(bulky)

    assert "managedFields" not in view.objects["a"]["metadata"]
    assert view.objects["a"]["spec"]["containers"] == [{"name": "sandbox", "image": "i"}]


def test_view_remembers_a_limited_number_of_the_dead():
    """A long run does not fill the memory."""
    view = View()
    for i in range(3000):
        view.drop(pod(str(i), i))

    assert len(view.gone) == 1000
    assert "2999" in view.gone


@pytest.mark.parametrize(
    ("version", "than", "expected"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("b", "a", True), ("a", "a", False), ("", "5", True)],
)
def test_versions_are_compared_as_numbers(version, than, expected):
    """``10`` comes after ``9``; of versions that are no numbers the later told wins."""
    assert newer(pod("a", version), pod("a", than)) is expected
