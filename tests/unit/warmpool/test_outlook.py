# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from agentsandbox.warmpool.outlook import Announcement, Outlook


def announced(outlook, **counts):
    announcement = Announcement(counts)
    outlook.add(announcement)
    return announcement


def test_what_is_announced_adds_up():
    """Image by image and over all; zero is nothing."""
    outlook = Outlook()
    announced(outlook, a=2, b=1)
    announced(outlook, a=3, c=0)

    assert (5, 1, 0) == tuple(outlook.ahead(image) for image in "abc")
    assert 6 == outlook.total
    assert "<Outlook [6 rollouts of 2 images]>" == repr(outlook)


def test_the_oldest_announcement_is_fulfilled_first():
    """Each lease takes one off the announcement that came first; without any there is nothing to take off."""
    outlook = Outlook()
    first, second = announced(outlook, a=2), announced(outlook, a=1)

    assert outlook.fulfil("a")
    assert "<Announcement [1 of 2 rollouts to come]>" == repr(first)
    assert outlook.fulfil("a")
    assert ({}, {"a": 1}) == (first.left, second.left)
    assert outlook.fulfil("a")
    assert not outlook.fulfil("a")
    assert not outlook.fulfil("never heard of")
    assert "<Outlook [0 rollouts of 0 images]>" == repr(outlook)


def test_a_withdrawn_announcement_counts_no_more():
    """Its rest is taken off at once, and later leases fulfil the next one; withdrawing again is no news."""
    outlook = Outlook()
    first, second = announced(outlook, a=2, b=2), announced(outlook, a=1)
    outlook.fulfil("b")

    assert ["a", "b"] == outlook.withdraw(first)
    assert (1, 0, 1) == (outlook.ahead("a"), outlook.ahead("b"), outlook.total)
    assert [] == outlook.withdraw(first)
    assert outlook.fulfil("a")
    assert {} == second.left
    assert 0 == outlook.total


def test_what_begins_replaces_what_was_announced_of_it():
    """Two were announced and three begin: three are to come. They are fulfilled before what comes after them."""
    outlook = Outlook()
    before, after = announced(outlook, a=2), announced(outlook, a=4)
    for _ in range(2):
        outlook.fulfil("a")
    batch = Announcement({"a": 3, "b": 1})
    outlook.begin(batch)
    assert ({}, {"a": 1}) == (before.left, after.left)
    assert (4, 1) == (outlook.ahead("a"), outlook.ahead("b"))

    outlook.fulfil("a")
    assert ({"a": 2, "b": 1}, {"a": 1}) == (batch.left, after.left)
    outlook.withdraw(batch)
    assert 1 == outlook.ahead("a") == outlook.total
    assert outlook.fulfil("a")
    assert {} == after.left
