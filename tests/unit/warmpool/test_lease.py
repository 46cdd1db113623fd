# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentsandbox.errors import UsageError
from agentsandbox.warmpool.lease import TABLE, Action, Input, SandboxLife, State, step


def walk(*events: Input) -> SandboxLife:
    life = SandboxLife("sb-1", "host")
    for event in events:
        life.apply(event)
    return life


def test_a_whole_life():
    """The way of the design: creating → hydrating → ready → leased → resetting → ready."""
    life = SandboxLife("sb-1", "host")
    seen = []
    for event in (Input.HYDRATE, Input.CREATED, Input.GRANT, Input.RESET, Input.VERIFIED):
        life.apply(event)
        seen.append(life.state)

    assert [State.HYDRATING, State.READY, State.LEASED, State.RESETTING, State.READY] == seen


def test_unverified_is_quarantined_and_removed_never_offered():
    """A reset whose effect could not be shown leads to quarantine and from there only to removal."""
    life = walk(Input.CREATED, Input.GRANT, Input.RESET)

    assert (Action.REMOVE,) == life.apply(Input.UNVERIFIED)
    assert State.QUARANTINED is life.state
    assert (Action.DESTROY,) == life.apply(Input.REMOVE)
    assert State.DELETING is life.state
    assert (Action.FORGET,) == life.apply(Input.DELETED)
    assert State.GONE is life.state


@pytest.mark.parametrize("state", [s for s in State if s is not State.GONE])
def test_anything_that_is_not_gone_can_be_lost(state):
    """Any state but ``gone`` takes a loss; only a removal under way stays what it is."""
    after, _ = step(state, Input.LOSE)

    assert after is (State.DELETING if state is State.DELETING else State.LOST)


def test_a_lost_sandbox_that_is_held_is_removed_when_its_holder_lets_go():
    """The holder of a lost sandbox keeps it, lost, until the release."""
    life = walk(Input.CREATED, Input.GRANT)

    assert () == life.apply(Input.LOSE)
    assert life.held_by(1)
    assert (Action.DESTROY,) == life.apply(Input.RELEASE)


def test_a_lost_sandbox_that_nobody_holds_is_withdrawn_and_removed():
    """A ready sandbox that is lost leaves the queue before it is removed."""
    assert (Action.WITHDRAW, Action.REMOVE) == walk(Input.CREATED).apply(Input.LOSE)


def test_generation_counts_grants():
    """Who held it before a hand-back holds nothing after the next grant."""
    life = walk(Input.CREATED, Input.GRANT)
    assert life.held_by(1)

    life.apply(Input.HAND_BACK)
    assert not life.held_by(1)

    life.apply(Input.GRANT)
    assert not life.held_by(1)
    assert life.held_by(2)


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in itertools.product(State, Input) if pair not in TABLE], ids=str
)
def test_everything_else_is_a_usage_error(state, event):
    """What the table does not name raises, and says what was tried where."""
    with pytest.raises(UsageError, match=rf"^a sandbox that is {state} cannot take {event}$"):
        step(state, event)


def test_a_refused_input_changes_nothing():
    """After a usage error the sandbox is where it was."""
    life = walk(Input.CREATED)
    with pytest.raises(UsageError):
        life.apply(Input.RELEASE)

    assert "<SandboxLife 'sb-1' [ready, generation 0]>" == repr(life)


def test_only_a_fresh_an_untouched_or_a_verified_sandbox_is_offered():
    """The ways into the queue: made, handed back untouched, reset and verified, made anew in place."""
    offering = {(state, event) for (state, event), (_, actions) in TABLE.items() if Action.OFFER in actions}

    assert {
        (State.CREATING, Input.CREATED),
        (State.HYDRATING, Input.CREATED),
        (State.LEASED, Input.HAND_BACK),
        (State.RESETTING, Input.VERIFIED),
        (State.RECYCLING, Input.VERIFIED),
    } == offering


class LifeMachine(RuleBasedStateMachine):
    """Any sequence of inputs: an independent model of who may have the sandbox agrees with the table."""

    def __init__(self):
        super().__init__()
        self.life = SandboxLife("sb-1", "host")
        self.offered = False
        self.destroyed = 0
        self.grants = 0
        self.tainted = False

    @rule(event=st.sampled_from(Input))
    def apply(self, event):
        before = self.life.state
        try:
            actions = self.life.apply(event)
        except UsageError:
            assert self.life.state is before
            return
        if event is Input.GRANT:
            assert self.offered
            assert not self.tainted
            self.offered = False
            self.grants += 1
        if event in (Input.LOSE, Input.UNVERIFIED):
            self.tainted = True
        for action in actions:
            if action is Action.OFFER:
                assert not self.offered
                assert not self.tainted
                self.offered = True
            elif action is Action.WITHDRAW:
                assert self.offered
                self.offered = False
            elif action is Action.DESTROY:
                assert not self.offered
                self.destroyed += 1
            elif action is Action.FORGET:
                assert self.life.state is State.GONE

    @invariant()
    def consistent(self):
        assert self.offered == (self.life.state is State.READY)
        assert self.life.generation == self.grants
        assert self.destroyed <= 1


TestLifeMachine = LifeMachine.TestCase
TestLifeMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
