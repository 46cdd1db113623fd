# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from random import Random

import attrs
import pytest

from agentsandbox.backends.simulated import ClusterModel, StartModel
from agentsandbox.backends.simulated.catalogue import catalogue, unknown_image
from agentsandbox.backends.simulated.chance import draw
from agentsandbox.backends.simulated.controlplane import ApiServer, Scheduler, choose
from agentsandbox.backends.simulated.node import Node
from agentsandbox.errors import ConfigurationError, ProvisionError, Throttled
from agentsandbox.models.image import ImageManifest, Layer

MODEL = ClusterModel(
    nodes=2, disk=1000, disk_used=0, pulls_at_once=2, unpack_rate=100.0, network_rate=1e9, pull_overhead=1.0
)


def image(name, own, *shared):
    return ImageManifest(name=name, layers=(*shared, Layer(digest=name, size=own, unpacked=own)))


def test_pulls_wait_for_a_free_lane():
    """Two at a time, each with half of the rate; the third begins when the first has ended."""
    node = Node("n", MODEL)

    ends = [node.pull(image(name, 100), 0.0) for name in "abc"]

    # One lane unpacks 50 bytes a second: 2 s, and 1 s besides.
    assert [3.0, 3.0, 6.0] == ends
    assert (300, 3) == (node.bytes_pulled, node.pulls)
    assert not node.has("c", 5.9)
    assert node.has("c", 6.0)


def test_a_shared_layer_is_fetched_once_and_waited_for():
    """The second image fetches its own layer only, and is there when the base is unpacked, which comes first."""
    node = Node("n", MODEL)
    base = Layer(digest="base", size=500, unpacked=500)

    first = node.pull(image("a", 100, base), 0.0)
    second = node.pull(image("b", 100, base), 0.0)

    assert 13.0 == first
    assert 11.0 == second  # its own layer was there at 3 s
    assert 700 == node.disk


def test_an_image_that_is_there_costs_nothing():
    """A second Pod of it waits for the pull that is under way, and a third one not at all."""
    node = Node("n", MODEL)
    end = node.pull(image("a", 100), 0.0)

    assert end == node.pull(image("a", 100), 1.0)
    assert end == node.pull(image("a", 100), 100.0)
    assert 1 == node.pulls


def test_the_kubelet_removes_what_was_unused_for_longest():
    """Above 85 % of the disk, down to 80 %, and never what a Pod uses."""
    node = Node("n", MODEL)
    for name in "abcd":
        node.pull(image(name, 200), 0.0)
    for name in "ba":
        node.leave(name)

    node.pull(image("e", 100), 50.0)

    assert {"a", "c", "d", "e"} == set(node.images())
    assert (700, 1) == (node.disk, node.removed)
    assert 800 == node.disk_peak
    assert "<Node 'n' [0 of 256 Pods, 4 images, 0.0 of 0 GB]>" == repr(node)


def test_a_disk_that_is_full_of_what_is_used_takes_nothing():
    """The error says what is missing."""
    node = Node("n", MODEL)
    node.pull(image("a", 900), 0.0)

    with pytest.raises(ProvisionError, match="no space left on the disk of n"):
        node.pull(image("b", 200), 0.0)


def test_the_scheduler_hears_of_the_largest_images_only():
    """A node tells of so many images, whatever else it has."""
    model = attrs.evolve(MODEL, status_images=2)
    node = Node("n", model)
    for name, size in (("small", 10), ("middle", 20), ("large", 30)):
        node.hydrate(image(name, size))

    assert [False, True, True] == [node.tells_of(name, 0.0) for name in ("small", "middle", "large")]
    assert not node.tells_of("unknown", 0.0)


def test_a_pod_goes_where_there_is_room_and_its_image():
    """The emptier node, unless the image is large and known to be on the other; nowhere if all are full."""
    model = ClusterModel(nodes=2)
    nodes = [Node("a", model), Node("b", model)]
    nodes[0].pods = 3
    big = image("big", 2_000_000_000)

    assert nodes[1] is choose(nodes, "big", big.unpacked, 0.0)

    nodes[0].hydrate(big)
    assert nodes[0] is choose(nodes, "big", big.unpacked, 0.0)

    for node in nodes:
        node.pods = model.room
    assert choose(nodes, "big", big.unpacked, 0.0) is None


def test_the_api_server_takes_writes_at_its_rate_and_refuses_what_would_wait_too_long():
    """Ten a second: the hundredth is ten seconds late, and then everybody is asked to come back."""
    api = ApiServer(ClusterModel(api_writes=10.0, api_patience=5.0, api_latency=0.5))

    assert 0.5 == api.write(0.0, 30)
    assert 3.5 == api.write(0.0, 30)
    with pytest.raises(Throttled) as caught:
        api.write(0.0, 1)

    assert 1.0 == caught.value.retry_after
    assert (60, 1, 10) == (api.writes, api.refused, api.peak)
    assert "<ApiServer [60 writes, 10 in the busiest second, 1 refused]>" == repr(api)
    assert 6.5 == api.write(6.0, 1)


def test_the_scheduler_binds_one_after_another():
    """At its rate."""
    scheduler = Scheduler(ClusterModel(scheduler_rate=10.0))

    assert [0.1, 0.2, 5.1] == pytest.approx([scheduler.next_at(0.0), scheduler.next_at(0.0), scheduler.next_at(5.0)])
    assert "<Scheduler [busy until 5.100 s]>" == repr(scheduler)


def test_tries_have_their_median_their_spread_and_their_floor():
    """Of ten thousand, half are below the median, and a twentieth above the 95th percentile."""
    start = StartModel(median=2.0, p95=3.0, floor=1.5)
    random = Random(1)

    drawn = sorted(draw(start, random) for _ in range(10_000))

    assert 1.5 == drawn[0]
    assert 2.0 == pytest.approx(drawn[5_000], rel=0.02)
    assert 3.0 == pytest.approx(drawn[9_500], rel=0.05)
    assert drawn[-1] <= 4 * 3.0


@pytest.mark.parametrize("options", [{"floor": 3.0}, {"fails": 1.0}, {"fails_again": -0.1}])
def test_a_start_that_makes_no_sense_is_refused(options):
    """A floor above the median; tries that all fail."""
    with pytest.raises(ConfigurationError):
        StartModel(**{"median": 2.0, "p95": 3.0, "floor": 1.5, **options})


@pytest.mark.parametrize(
    "options",
    [{"nodes": 0}, {"gc_low": 0.9}, {"cpu_request": 0.0}, {"cpu_request": 1000.0}, {"disk": 0}],
)
def test_a_model_that_makes_no_sense_is_refused(options):
    """No nodes, thresholds the wrong way round, a sandbox larger than a node."""
    with pytest.raises(ConfigurationError):
        ClusterModel(**options)


def test_a_start_that_is_no_distribution_is_refused():
    """The median is not below the floor."""
    with pytest.raises(ConfigurationError, match="floor"):
        StartModel(median=1.0, p95=2.0, floor=1.5)


def test_room_is_what_runs_out_first():
    """Pods, processors or memory."""
    assert 256 == ClusterModel().room
    assert 96 == ClusterModel(cpu_request=1.0).room
    assert 12 == ClusterModel(memory_request=32 * 1024**3).room


def test_the_catalogue_is_the_same_each_time_and_shares_bases():
    """A seed decides; ten families; the mean is the model's."""
    model = ClusterModel()

    images = catalogue(model, 2000, seed=3)

    assert images == catalogue(model, 2000, seed=3)
    assert images != catalogue(model, 2000, seed=4)
    assert 10 == len({image.layers[0].digest for image in images})
    assert model.image_size == pytest.approx(sum(image.size for image in images) / 2000, rel=0.02)
    assert model.image_size == unknown_image(model, "x").size


def test_a_layer_and_an_image_need_sizes_and_layers():
    """Bytes are whole numbers."""
    with pytest.raises(ConfigurationError, match="whole number of at least 0"):
        Layer(digest="a", size=-1)
    with pytest.raises(ConfigurationError, match="has no layers"):
        ImageManifest(name="a", layers=())
