# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import attrs
import pytest

from agentsandbox.backends.simulated import ClusterModel
from agentsandbox.cli.workload import made_up
from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration import ImageUse, NodeFacts, plan
from agentsandbox.hydration.ordering import complete, waves
from agentsandbox.hydration.placing import Load, weigh
from agentsandbox.models.image import ImageManifest, Layer

GB = 1000**3


def plain(name, size, **options):
    return ImageUse(image=ImageManifest(name=name, layers=(Layer(digest=name, size=size, unpacked=size),)), **options)


def test_p50_a_window_leaves_the_kubelet_no_reason_to_collect():
    """A disk of 100 GB with 20 GB taken holds 54 images of 1.2 GB, not 66: the kubelet collects from 85 % on."""
    node = NodeFacts(name="n", disk=100 * GB, used=20 * GB)

    made = plan([plain(f"i{n}", 1_200_000_000) for n in range(54)], [node])
    more = plan([plain(f"i{n}", 1_200_000_000) for n in range(55)], [node])

    assert 65 * GB == node.budget
    assert [1] == [len(each.waves) for each in made.nodes]
    assert 3 == len(more.nodes[0].waves)
    assert all(wave.size <= node.budget // 2 for wave in more.nodes[0].waves)


def test_p50_one_image_that_is_too_large_is_named_with_the_disk_that_it_needs():
    """What no node can hold is not planned, and the plan says what would change that."""
    made = plan([plain("huge", 90 * GB), plain("small", GB)], [NodeFacts(name="n", disk=100 * GB, used=20 * GB)])

    assert {"small": "n"} == made.placement
    assert ["huge"] == [each.image for each in made.unplaced]
    assert "90.0 GB" in made.unplaced[0].reason
    assert "65.0 GB of 100.0 GB" in made.unplaced[0].reason
    assert made.advice is not None
    assert "a disk of 129 GB" in made.advice.change


@pytest.mark.parametrize(
    "options",
    [{"headroom": 1.0}, {"headroom": 0.0}, {"room": 0}, {"disk": -1}, {"unpack_rate": 0}, {"pulls_at_once": 0}],
)
def test_p50_figures_that_make_no_sense_are_refused(options):
    """A headroom of 1 means a full disk, and a node without room is none."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        NodeFacts(name="n", **options)


def test_p50_an_image_that_vanished_is_planned_again():
    """What is on a node is taken from the facts of the moment: an image that is gone has to be fetched."""
    use = plain("a", GB, seconds=1.0)
    there = NodeFacts(name="n", images=frozenset({"a"}))

    assert 0 == plan([use], [there]).pulled
    assert GB == plan([use], [attrs.evolve(there, images=frozenset())]).pulled


def test_images_and_nodes_appear_once():
    """Two of one name are a mistake."""
    node = NodeFacts(name="n")
    with pytest.raises(ConfigurationError, match="image 'a' appears twice"):
        plan([plain("a", 1), plain("a", 2)], [node])
    with pytest.raises(ConfigurationError, match="node 'n' appears twice"):
        plan([plain("a", 1)], [node, node])
    with pytest.raises(ConfigurationError, match="at least one node"):
        plan([plain("a", 1)], [])


def test_what_takes_longest_comes_first():
    """Where fetching is not the bottleneck, nothing long is left for the end."""
    uses = [plain(f"i{n}", 1000, rollouts=4, seconds=float(n)) for n in range(1, 6)]

    made = plan(uses, [NodeFacts(name="n", room=4)], advise=False)

    assert ("i5", "i4", "i3", "i2", "i1") == made.nodes[0].images


def test_fetching_that_decides_is_ordered_by_the_rule_for_two_machines():
    """What is fetched fast and runs long goes first, so that running begins early."""
    slow = plain("slow", 50_000_000, rollouts=10, seconds=10.0)
    fast = plain("fast", 1_000_000, rollouts=10, seconds=9.0)
    node = NodeFacts(name="n", room=1, unpack_rate=1e6, pull_overhead=0.0)

    made = plan([slow, fast], [node], advise=False)

    assert ("fast", "slow") == made.nodes[0].images
    assert 1.0 + 90.0 + 100.0 == made.complete_seconds
    assert 1.0 == made.stall_seconds


def test_the_next_wave_is_fetched_while_one_runs():
    """Two waves that fit together overlap; one that does not fit waits."""
    node = NodeFacts(name="n", room=1, disk=1_000, headroom=0.5, unpack_rate=100.0, pull_overhead=0.0)
    uses = [plain(f"i{n}", 200, seconds=10.0) for n in range(3)]
    load = Load(node, weigh(uses, node))
    for use in uses:
        load.add(use)

    planned = waves(load)

    assert [200, 200, 200] == [wave.size for wave in planned]
    # 2 s for the first; the second meanwhile; the third may begin when the first has run, at 12 s.
    assert (32.0, 6.0) == complete(load, planned)

    tight = attrs.evolve(node, disk=700)
    alone = Load(tight, weigh(uses, tight))
    for use in uses:
        alone.add(use)
    assert (36.0, 6.0) == complete(alone, waves(alone))


def test_no_plan_predicts_less_than_its_bound(make_instance):
    """The bound holds for whatever is planned."""
    for seed in range(5):
        uses, nodes = make_instance(seed)
        made = plan(uses, nodes, advise=False)

        assert made.complete_seconds >= made.bound_seconds - 1e-9
        assert made.load_seconds >= made.load_bound_seconds - 1e-9
        assert set(made.placement) == {use.name for use in uses}


def test_the_advice_is_what_helps_most():
    """Where episodes decide, room helps; where fetching decides, faster disks or more nodes do."""
    runs = plan([plain(f"i{n}", 1000, rollouts=100, seconds=60.0) for n in range(10)], [NodeFacts(name="n", room=10)])
    pulls = plan([plain(f"i{n}", 50 * GB, seconds=1.0) for n in range(2)], [NodeFacts(name="n", disk=1000 * GB)])

    assert runs.advice is not None
    assert runs.advice.complete_seconds < runs.complete_seconds
    assert "2 nodes instead of 1" in runs.advice.change
    assert pulls.advice is not None
    assert pulls.advice.complete_seconds < 0.7 * pulls.complete_seconds


def test_nothing_is_advised_where_nothing_helps():
    """One episode takes as long as it takes."""
    assert plan([plain("a", 10, seconds=60.0)], [NodeFacts(name="n")]).advice is None


def test_pods_scale_with_room_if_images_change_in_place():
    """Without a change in place every rollout that runs at once with others of its image needs a Pod of its own."""
    made = plan([plain(f"i{n}", 1000, rollouts=4) for n in range(50)], [NodeFacts(name="n", room=10)], advise=False)

    assert (10, 200) == (made.sandboxes, made.sandboxes_without_change)


def test_4578_images_on_10_nodes_are_near_the_bound():
    """The shape of the published benchmark: within a hundredth, in one wave, every base on few nodes."""
    model = ClusterModel()
    workload = made_up(model, images=4578, rollouts=4, seconds=30.0, seed=0)

    made = plan(workload.uses, workload.nodes(), advise=False)

    assert made.load_seconds <= 1.01 * made.load_bound_seconds
    assert made.complete_seconds <= 1.1 * made.bound_seconds
    assert [1] * 10 == [len(node.waves) for node in made.nodes]
    assert 2560 == made.sandboxes
