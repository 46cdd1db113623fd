# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import Step
from agentsandbox.hydration.working_set import WorkingSet, steps
from agentsandbox.models.image import ImageManifest, Layer

MANIFESTS = {name: ImageManifest(name=name, layers=(Layer(digest=name, size=1, unpacked=1),)) for name in "abcdef"}


def pulls(done):
    return [step.pull for batch in done for step in batch if step.pull]


def test_what_is_needed_last_goes():
    """Room for two, three images: the one whose next use is farthest away makes room."""
    done = steps(["ab", "ca", "ab"], MANIFESTS, budget=2)

    assert [
        (Step(pull="a"), Step(pull="b")),
        (Step(evict="b"), Step(pull="c")),
        (Step(evict="a"), Step(pull="b")),
    ] == done


def test_what_is_never_needed_again_goes_first():
    """An image that was there and that no batch needs is the first to go; one that fits stays."""
    assert [(Step(evict="e"), Step(pull="a"))] == steps(["a"], MANIFESTS, budget=2, present="ef")
    assert [()] == steps(["a"], MANIFESTS, budget=2, present="af")


def test_a_shared_layer_stays_as_long_as_it_is_used():
    """Removing one of two relatives frees its own layer only."""
    base = Layer(digest="base", size=10, unpacked=10)
    first, second = (ImageManifest(name=name, layers=(base, Layer(digest=name, size=1, unpacked=1))) for name in "xy")
    there = WorkingSet(100)
    there.add(first)

    assert 1 == there.needs(second)

    there.add(second)
    there.remove("x")
    assert 11 == there.size
    assert "<WorkingSet [1 images, 0.0 of 0.0 GB]>" == repr(there)


def test_an_image_beyond_the_budget_is_refused():
    """It would evict everything and still not fit."""
    with pytest.raises(ConfigurationError, match="image 'a' takes"):
        steps(["a"], MANIFESTS, budget=0)


def fewest(sequence, budget):
    """Count the pulls of the best sequence of evictions there is, by trying all of them."""
    states = {frozenset(): 0}
    for name in sequence:
        following: dict[frozenset, int] = {}
        for there, count in states.items():
            if name in there:
                options = [(there, count)]
            elif len(there) < budget:
                options = [(there | {name}, count + 1)]
            else:
                options = [((there - {gone}) | {name}, count + 1) for gone in there]
            for state, cost in options:
                following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14), st.integers(1, 4))
def test_nothing_fetches_less(sequence, budget):
    """With images of one size, no sequence of evictions comes to fewer pulls."""
    batches = (
        [tuple(group) for group in itertools.batched(sequence, 3)] if hasattr(itertools, "batched") else [sequence]
    )

    assert fewest(sequence, budget) == len(pulls(steps(batches, MANIFESTS, budget=budget)))
