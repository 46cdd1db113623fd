# SPDX-License-Identifier: Apache-2.0
"""Several batches that are planned together: what stays where, what goes, and when each is over."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentsandbox.backends.simulated import ClusterModel
from agentsandbox.cli.workload import made_up
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import ImageUse, NodeFacts, Step, plan
from agentsandbox.models.image import ImageManifest, Layer


def use(name, *layers, rollouts=1, seconds=1.0):
    """An image of layers that are named with their bytes; its own layer of 100 bytes if none is."""
    made = tuple(Layer(digest=digest, size=size, unpacked=size) for digest, size in layers or [(name, 100)])
    return ImageUse(image=ImageManifest(name=name, layers=made), rollouts=rollouts, seconds=seconds)


def node(name="n", *, disk=2_000, room=1, **options):
    """A node that fetches 100 bytes a second, and has half of its disk for images."""
    figures = {"headroom": 0.5, "unpack_rate": 100.0, "network_rate": 1e9, "pull_overhead": 0.0, **options}
    return NodeFacts(name=name, disk=disk, room=room, **figures)


def pulled(made):
    return sum(batch.pulled for batch in made.batches)


def lengths(made):
    return [batch.complete_seconds for batch in made.batches]


def stepped(made, at=0):
    """What one node does for each batch: +a fetches a, -a removes it."""
    return [
        " ".join(f"+{step.pull}" if step.pull else f"-{step.evict}" for step in batch.nodes[at].steps)
        for batch in made.batches
    ]


def test_one_batch_is_planned_as_ever():
    """Nothing ahead, no steps, and the same bound for all."""
    made = plan([use("a"), use("b")], [node()], advise=False)

    assert ((), (made,), made.complete_seconds, made.bound_seconds) == (
        made.ahead,
        made.batches,
        made.total_seconds,
        made.total_bound_seconds,
    )
    assert [()] == [each.steps for each in made.nodes]


def test_the_next_batch_is_fetched_while_one_runs():
    """1 s for a, which runs for 10 s; b and c come meanwhile, so that their batches have nothing to wait for."""
    made = plan([use("a", seconds=10.0)], [node()], ahead=[[use("b", seconds=5.0)], [use("c", seconds=5.0)]])

    assert ["+a", "+b", "+c"] == stepped(made)
    assert [11.0, 5.0, 5.0] == lengths(made)
    assert (21.0, 20.0) == (made.total_seconds, made.total_bound_seconds)
    assert [1.0, 0.0, 0.0] == [batch.stall_seconds for batch in made.batches]


def test_what_returns_is_fetched_once_and_stays_where_it_is():
    """Four images in three batches, in turn, on two nodes: each is fetched by one node, and runs there again."""
    batches = [[use(name) for name in names] for names in ("abcd", "dcba", "cdab")]

    made = plan(batches[0], [node("n"), node("m")], ahead=batches[1:], advise=False)

    assert 400 == pulled(made)
    assert [400, 0, 0] == [batch.pulled for batch in made.batches]
    assert [made.placement] * 2 == [batch.placement for batch in made.ahead]


def test_images_that_return_together_are_apart_from_the_beginning():
    """
    Of four images two return: each node gets one of those.

    Whoever knows the first batch only may put both on one node, where they run one after another the next time.
    """
    first = [use(name, seconds=10.0) for name in "abcd"]
    for again in itertools.combinations("abcd", 2):
        made = plan(first, [node("n"), node("m")], ahead=[[use(name, seconds=10.0) for name in again]], advise=False)

        assert [21.0, 10.0] == lengths(made)
        assert 400 == pulled(made)
        assert {"n", "m"} == {made.placement[name] for name in again}


def test_what_is_needed_last_makes_room():
    """
    The disk holds three of four images: b goes for d, and a, which was used before b, stays for the second batch.

    a, b and c are there at 1, 2 and 3 s and run for a second each. b is over at 3 s, so that d is there at 4 s.
    """
    made = plan(
        [use("a"), use("b"), use("c")], [node(disk=600)], ahead=[[use("d", seconds=2.0), use("a")]], advise=False
    )

    assert ["+a +b +c", "-b +d"] == stepped(made)
    assert [4.0, 3.0] == lengths(made)
    assert 400 == pulled(made)


def test_what_makes_room_is_waited_for():
    """One image at a time: b is fetched when the episode of a is over, at 11 s, and runs from 12 s on; then a again."""
    first, second = use("a", seconds=10.0), use("b", seconds=5.0)

    made = plan([first], [node(disk=200)], ahead=[[second], [first]], advise=False)

    assert ["+a", "-a +b", "-b +a"] == stepped(made)
    assert [11.0, 6.0, 11.0] == lengths(made)


def test_what_is_there_at_the_beginning_stays():
    """Its bytes are in what is taken; it costs nothing in any batch."""
    made = plan([use("a")], [node(images={"a"}, used=900, disk=2000)], ahead=[[use("b")], [use("a")]], advise=False)

    assert ["", "+b", ""] == stepped(made)


def test_a_later_batch_may_need_what_no_node_holds():
    """It is named there, and the advice is about it."""
    made = plan([use("a")], [node()], ahead=[[use("huge", ("huge", 5_000)), use("b")]])

    assert [0, 1] == [len(batch.unplaced) for batch in made.batches]
    assert {"b": "n"} == made.ahead[0].placement
    assert made.advice is not None
    assert "all 3 images fit; without it 1 do not" == made.advice.effect


def test_the_advice_is_about_all_batches():
    """Its seconds are those of the last batch's end."""
    made = plan([use("a", rollouts=10)], [node()], ahead=[[use("b", rollouts=10)]])

    assert made.advice is not None
    assert "the 2 batches take" in made.advice.effect
    assert made.advice.complete_seconds < made.total_seconds


def test_batches_that_make_no_sense_are_refused():
    """An image twice in a batch, and one that is something else the next time."""
    with pytest.raises(ConfigurationError, match="image 'b' appears twice"):
        plan([use("a")], [node()], ahead=[[use("b"), use("b")]])
    with pytest.raises(ConfigurationError, match="image 'a' has other layers in another batch"):
        plan([use("a")], [node()], ahead=[[use("a", ("other", 1))]])
    assert [1.0 + 1.0, 0.0, 1.0] == lengths(plan([use("a")], [node()], ahead=[[], [use("a")]]))


def test_hundreds_of_images_return_to_their_nodes_and_all_is_near_the_bound():
    """Three batches of 300 images, half of which return, on ten nodes that hold all: hardly any changes its node."""
    workload = made_up(ClusterModel(), images=600, rollouts=4, seconds=30.0, seed=0)
    batches = [workload.uses[:300], workload.uses[150:450], workload.uses[300:]]

    made = plan(batches[0], workload.nodes(), ahead=batches[1:], advise=False)

    steps = [step for batch in made.batches for each in batch.nodes for step in each.steps]
    assert 600 <= len(steps) <= 630
    assert not any(step.evict for step in steps)
    assert made.total_seconds <= 1.1 * made.total_bound_seconds


def alone(batches, nodes, *, emptied):
    """
    When batches are over that know nothing of each other, and how many bytes they fetch; in the plainest way.

    Each is planned by itself and fetches from its beginning on; what was used least recently makes room, or everything
    is removed between two batches.
    """
    begins, total = 0.0, 0
    disks = {each.name: {} for each in nodes}
    for batch in batches:
        made = plan(batch, nodes, advise=False)
        uses, ends = {each.name: each for each in batch}, [begins]
        for where, planned in zip(nodes, made.nodes, strict=True):
            disk = {} if emptied else disks[where.name]
            over = dict.fromkeys(disk, begins)
            fetched = ran = begins
            for name in planned.images:
                image = uses[name].image
                if name not in disk:
                    while sum(
                        {la.digest: la.unpacked for im in (*disk.values(), image) for la in im.layers}.values()
                    ) > (where.budget):
                        oldest = next(iter(disk))
                        fetched = max(fetched, over[oldest])
                        del disk[oldest]
                    there = {la.digest for im in disk.values() for la in im.layers}
                    missing = [la for la in image.layers if la.digest not in there]
                    total += sum(la.size for la in missing)
                    fetched += sum(la.unpacked / where.unpack_rate for la in missing)
                    fetched += where.pull_overhead / where.pulls_at_once
                    at = fetched
                else:
                    del disk[name]
                    at = begins
                disk[name] = image
                start = max(ran, at)
                ran = start + uses[name].rollouts * uses[name].seconds / where.room
                over[name] = max(ran, start + uses[name].seconds)
                ends += [ran, at + uses[name].seconds]
            disks[where.name] = disk
        begins = max(ends)
    return begins, total


IMAGES = [
    use(f"{base}{n}", *([(base, size)] if base else []), (f"own {base}{n}", own))
    for base, size in (("x", 300), ("y", 150), ("", 0))
    for n, own in enumerate((100, 40, 250))
]
BATCH = st.dictionaries(
    st.sampled_from(IMAGES).map(lambda each: each.name),
    st.tuples(st.integers(1, 4), st.floats(0.5, 20.0)),
    max_size=7,
)
NODES = st.lists(
    st.tuples(st.integers(1100, 3000), st.integers(1, 4), st.sampled_from([0.0, 1.0])), min_size=1, max_size=3
)


def batch_of(chosen):
    images = {each.name: each.image for each in IMAGES}
    return [ImageUse(image=images[name], rollouts=n, seconds=seconds) for name, (n, seconds) in chosen.items()]


@settings(max_examples=200, deadline=None)
@given(st.lists(BATCH, min_size=2, max_size=4), NODES)
def test_no_look_ahead_is_never_better(chosen, figures):
    """Neither sooner nor with less to fetch: not with what was used least recently gone, nor with everything gone."""
    batches = [batch_of(each) for each in chosen]
    nodes = [node(f"n{n}", disk=disk, room=room, pull_overhead=wait) for n, (disk, room, wait) in enumerate(figures)]

    made = plan(batches[0], nodes, ahead=batches[1:], advise=False)

    for emptied in (False, True):
        seconds, size = alone(batches, nodes, emptied=emptied)
        assert made.total_seconds <= seconds + 1e-6
        assert pulled(made) <= size
    assert made.total_seconds >= made.total_bound_seconds - 1e-6


@settings(max_examples=100, deadline=None)
@given(st.lists(BATCH, min_size=2, max_size=4), NODES)
def test_the_steps_are_what_a_disk_can_do(chosen, figures):
    """What a batch uses is there by its turn, what goes is there and was used, and the budget is never exceeded."""
    batches = [batch_of(each) for each in chosen]
    nodes = [node(f"n{n}", disk=disk, room=room) for n, (disk, room, _) in enumerate(figures)]
    images = {each.name: each.image for each in IMAGES}

    made = plan(batches[0], nodes, ahead=batches[1:], advise=False)

    for at, where in enumerate(nodes):
        disk, used = set(), set()
        for batch in made.batches:
            todo = list(batch.nodes[at].steps)
            for name in batch.nodes[at].images:
                while name not in disk or (todo and Step(pull=name) in todo):
                    step = todo.pop(0)
                    if step.evict is not None:
                        assert step.evict in used
                        disk.remove(step.evict)
                    else:
                        assert name == step.pull
                        disk.add(name)
                layers = {layer.digest: layer.unpacked for image in disk for layer in images[image].layers}
                assert sum(layers.values()) <= where.budget
                used.add(name)
            assert [] == todo
