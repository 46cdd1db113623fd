# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsandbox.hydration import ImageUse, NodeFacts
from agentsandbox.hydration.bounds import load_bound, pull_bound
from agentsandbox.hydration.placing import Load, lpt, place, weigh
from agentsandbox.models.image import ImageManifest, Layer

NODE = NodeFacts(name="node-0", room=10, disk=10**12, unpack_rate=1e6, network_rate=1e6, pull_overhead=0.0)


def busiest(loads):
    return max(load.value for load in loads)


def use(name, *layers, rollouts=1, seconds=1e-6):
    made = tuple(Layer(digest=digest, size=size, unpacked=size) for digest, size in layers)
    return ImageUse(image=ImageManifest(name=name, layers=made), rollouts=rollouts, seconds=seconds)


def nodes(count):
    return [NodeFacts(name=f"n{n}", room=10, disk=10**12, unpack_rate=1e6, network_rate=1e6) for n in range(count)]


def exhaustive(uses, where):
    """The best placement of all there are, computed in the plainest way."""
    best = float("inf")
    for choice in itertools.product(range(len(where)), repeat=len(uses)):
        worst = 0.0
        for at, node in enumerate(where):
            mine = [each for each, chosen in zip(uses, choice, strict=True) if chosen == at]
            layers = {layer.digest: layer for each in mine for layer in each.image.layers}
            rate = (node.network_rate, node.unpack_rate)
            pull = sum(max(layer.size / rate[0], layer.unpacked / rate[1]) for layer in layers.values())
            pull += len(mine) * node.pull_overhead / node.pulls_at_once
            run = sum(each.rollouts * each.seconds / node.room for each in mine)
            worst = max(worst, pull, run)
        best = min(best, worst)
    return best


def test_a_shared_layer_counts_once_a_node():
    """Two images on one base take the base's time once, and their own twice."""
    first, second = use("a", ("base", 5_000_000), ("a", 1_000_000)), use("b", ("base", 5_000_000), ("b", 2_000_000))
    load = Load(NODE, weigh([first, second], NODE))
    load.add(first)

    assert 6.0 == load.pull
    assert 2.0 == load.adds(second)

    load.add(second)
    assert 8.0 == load.pull
    assert 1.0 == load.frees(first)

    load.remove(first)
    assert 7.0 == load.pull


def test_relatives_are_kept_together():
    """Four images on two bases go to two nodes family by family: each base is fetched once."""
    uses = [use(f"{base}{n}", (base, 9_000_000), (f"{base}{n}", 1_000_000)) for base in "xy" for n in range(2)]

    loads = place(uses, nodes(2))

    assert [{"x0", "x1"}, {"y0", "y1"}] == sorted((set(load.images) for load in loads), key=min)


@pytest.mark.parametrize("seed", range(20))
def test_a_placement_is_near_the_bound_and_never_worse_than_longest_first(seed, make_instance):
    """On twenty random instances the busiest node has at most 5 % more to do than it must, and less than with LPT."""
    uses, where = make_instance(seed)

    found = busiest(place(uses, where, bound=load_bound(uses, where)))

    assert found <= busiest(lpt(uses, where)) + 1e-9
    assert found <= 1.05 * load_bound(uses, where)


LAYERS = st.lists(st.tuples(st.sampled_from(["base 1", "base 2"]), st.integers(1, 9)), min_size=0, max_size=1)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(LAYERS, st.integers(1, 9), st.integers(1, 4), st.floats(0.1, 9.0)), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_a_small_instance_is_placed_as_well_as_by_trying_everything(made, count):
    """What an exhaustive search finds is found."""
    sizes = {"base 1": 3_000_000, "base 2": 7_000_000}
    uses = [
        use(
            f"i{n}",
            *((base, sizes[base]) for base, _ in shared),
            (f"own {n}", own * 1_000_000),
            rollouts=rollouts,
            seconds=seconds,
        )
        for n, (shared, own, rollouts, seconds) in enumerate(made)
    ]
    where = nodes(count)

    found = busiest(place(uses, where, bound=load_bound(uses, where)))

    best = exhaustive(uses, where)
    assert found == pytest.approx(best)
    assert load_bound(uses, where) <= best + 1e-9


def test_what_is_on_a_node_costs_nothing_there():
    """An image that a node has already stays there."""
    here = NodeFacts(name="n0", disk=10**12, unpack_rate=1e6, network_rate=1e6, images=frozenset({"a"}))
    there = NodeFacts(name="n1", disk=10**12, unpack_rate=1e6, network_rate=1e6)
    big, other = use("a", ("a", 9_000_000)), use("b", ("b", 9_000_000))

    loads = place([big, other], [here, there])

    assert "a" in loads[0].images
    assert 0.0 == Load(here, weigh([big], here)).adds(big)
    assert 9.0 + 0.1 == pytest.approx(pull_bound([big, other], [here, there]))


def test_an_image_goes_where_the_disk_holds_it():
    """A node whose disk is too small for an image does not get it, however little it has to do."""
    small = NodeFacts(name="small", disk=1_000_000, headroom=0.5)
    large = NodeFacts(name="large", disk=100_000_000)
    uses = [use(f"i{n}", (f"i{n}", 5_000_000)) for n in range(20)]

    loads = place(uses, [small, large])

    assert [0, 20] == [len(load.images) for load in loads]
    assert [0, 20] == [len(load.images) for load in lpt(uses, [small, large])]


def test_a_load_shows_what_it_has():
    """The state is in the repr."""
    load = Load(NODE, {"a": 1.0})
    load.add(use("a", ("a", 1_000_000), rollouts=20, seconds=3))

    assert "<Load 'node-0' [1 images, 1.0 s pull, 6.0 s run]>" == repr(load)
