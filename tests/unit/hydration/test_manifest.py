# SPDX-License-Identifier: Apache-2.0
"""What manifests say, and what does not count as one."""

from __future__ import annotations

import hashlib
import json

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.manifest import Platform, Resolution, read, verify
from agentsandbox.models.image import EXPANSION, Layer

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


def digest(number):
    return f"sha256:{number:064}"


def entry(number, platform=None, **more):
    return {"digest": digest(number), "size": 1, **({"platform": platform} if platform else {}), **more}


def target_of(platform, *entries):
    """Which entry of an index is gone on with."""
    way = Resolution(target="latest", platform=Platform(name=platform), where="an image")
    way.take(json.dumps({"manifests": entries}).encode())
    assert way.layers is None
    return int(way.target.partition(":")[2])


def layers_of(*entries, **document):
    way = Resolution(target="latest", platform=Platform(name="linux/amd64"), where="an image")
    way.take(json.dumps({"layers": entries, **document}).encode())
    return way.layers


AMD = {"os": "linux", "architecture": "amd64"}
ARM = {"os": "linux", "architecture": "arm64", "variant": "v8"}
V7 = {"os": "linux", "architecture": "arm", "variant": "v7"}


@pytest.mark.parametrize(
    ("platform", "entries", "chosen"),
    [
        ("linux/amd64", [entry(1, ARM), entry(2, AMD)], 2),
        ("linux/amd64", [entry(1, {**AMD, "variant": "v3"}), entry(2, AMD)], 2),
        ("linux/amd64", [entry(1), entry(2, {"os": "linux"}), entry(3, AMD)], 3),
        ("linux/amd64", [entry(1), entry(2, {"os": "linux"})], 2),
        ("linux/amd64", [entry(1), entry(2, AMD, annotations={"vnd.docker.reference.type": "x"})], 1),
        ("linux/amd64", [entry(1, {"os": "windows", "architecture": "amd64"}), entry(2, AMD), entry(3, AMD)], 2),
        ("linux/arm64", [entry(1, AMD), entry(2, ARM)], 2),
        ("linux/arm64/v8", [entry(1, {"os": "linux", "architecture": "arm64"}), entry(2, ARM)], 2),
        ("linux/arm/v7", [entry(1, {**V7, "variant": "v6"}), entry(2, V7)], 2),
    ],
)
def test_an_index_is_followed_to_the_platform(platform, entries, chosen):
    """Who says most of what was asked for comes first, and attestations never."""
    assert chosen == target_of(platform, *entries)


def test_an_index_without_the_platform_says_what_it_has():
    """By names of platforms, and nothing else that it may hold."""
    strange = {"os": "\x1b[31m", "architecture": "amd64"}
    with pytest.raises(ConfigurationError) as caught:
        target_of("linux/s390x", entry(1, ARM), entry(2, AMD), entry(3, strange))

    assert "an image: no image for linux/s390x, only for linux/amd64, linux/arm64" == str(caught.value)


@pytest.mark.parametrize("name", ["linux", "linux/", "linux/arm64/v8/x", "linux/x86_64", ""])
def test_a_platform_has_two_or_three_parts(name):
    """Anything else is refused by its name."""
    with pytest.raises(ConfigurationError, match=f"'{name}' is no platform such as linux/amd64"):
        Platform(name=name)


def test_layers_count_once_and_what_is_not_compressed_is_as_large_as_it_says():
    """The base first; what a compressed one takes on disk is the estimate that all layers share."""
    plain = {"digest": "b", "size": 10, "mediaType": "application/vnd.oci.image.layer.v1.tar"}
    zipped = {"digest": "a", "size": 100, "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip"}

    found = layers_of(zipped, plain, zipped, mediaType=MANIFEST)

    assert (Layer(digest="a", size=100), Layer(digest="b", size=10, unpacked=10)) == found
    assert round(100 * EXPANSION) == found[0].unpacked


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"schemaVersion": 1, "layers": []}, "Docker's schema 1"),
        ({"fsLayers": []}, "Docker's schema 1"),
        ({}, "it lacks 'layers'"),
        ({"layers": [], "manifests": []}, "an index and a manifest at once"),
        ({"layers": [], "mediaType": INDEX}, "an index and a manifest at once"),
        ({"manifests": [], "mediaType": MANIFEST}, "an index and a manifest at once"),
        ({"manifests": []}, "no image for linux/amd64$"),
        ({"manifests": [1]}, "'manifests' is no list of objects"),
        ({"manifests": [{"digest": "../x"}]}, "is no digest"),
        ({"layers": {}}, "'layers' is no list of objects"),
        ({"layers": []}, "an image of 0 layers"),
        ({"layers": [{"digest": "a", "size": 1}] * 501}, "an image of 501 layers"),
        ({"layers": [{"size": 1}]}, "layer 1 lacks 'digest'"),
        ({"layers": [{"digest": "a"}]}, "layer 1 lacks 'size'"),
        ({"layers": [{"digest": "a", "size": True}]}, "layer 1 lacks 'size'"),
        ({"layers": [{"digest": "a", "size": -1}]}, "layer 1 lacks 'size'"),
        ({"layers": [{"digest": "a", "size": 2**63}]}, "layer 1 lacks 'size'"),
    ],
)
def test_what_says_nothing_of_an_image_is_refused(document, why):
    """With the image's name, and the reason."""
    way = Resolution(target="latest", platform=Platform(name="linux/amd64"), where="an image")

    with pytest.raises(ConfigurationError, match=f"an image: .*{why}"):
        way.take(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"<html>", "6 bytes that are no JSON"), (b"[" * 100_000, "no JSON"), (b"\xff", "no JSON"), (b"[]", "no object")],
)
def test_what_is_no_document_is_refused(body, why):
    """Whatever it is made of."""
    with pytest.raises(ConfigurationError, match=why):
        read(body, "an image")


def test_indexes_do_not_lead_on_for_ever():
    """Three in each other lead to an image; of a fourth nobody asks."""
    leaf = json.dumps({"layers": [{"digest": "a", "size": 1}]}).encode()
    bodies = [leaf]
    for _ in range(4):
        above = {"manifests": [{"digest": f"sha256:{hashlib.sha256(bodies[-1]).hexdigest()}"}]}
        bodies.append(json.dumps(above).encode())

    def follow(depth):
        way = Resolution(target="latest", platform=Platform(name="linux/amd64"), where="an image")
        for body in reversed(bodies[: depth + 1]):
            way.take(body)
        return way.layers

    assert (Layer(digest="a", size=1),) == follow(3)
    with pytest.raises(ConfigurationError, match="an index in an index, 4 deep"):
        follow(4)


def test_what_is_not_what_its_digest_says_is_refused():
    """By any of the algorithms that are known."""
    for algorithm in ("sha256", "sha384", "sha512"):
        verify(f"{algorithm}:{hashlib.new(algorithm, b'x').hexdigest()}", b"x", "an image")
        with pytest.raises(ConfigurationError, match=f"an image: what {algorithm}:.* should be has the digest"):
            verify(f"{algorithm}:{hashlib.new(algorithm, b'x').hexdigest()}", b"y", "an image")
    way = Resolution(target=digest(1), platform=Platform(name="linux/amd64"), where="an image")
    with pytest.raises(ConfigurationError, match="should be has the digest"):
        way.take(b"{}")
