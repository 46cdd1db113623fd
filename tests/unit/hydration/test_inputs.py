# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from agentsandbox.errors import ConfigurationError
from agentsandbox.hydration.inputs import from_csv, from_oci_layout, read_list
from agentsandbox.models.image import ImageManifest, Layer


def test_a_csv_names_images_and_what_they_share(tmp_path):
    """A base that two lines name is the same layer; what is not said is taken from the arguments."""
    path = tmp_path / "images.csv"
    path.write_text("image,size,base,base_size,rollouts,seconds\na,100,b0,900,4,12.5\nc,200,b0,900,,\n")

    first, second = from_csv(path, rollouts=7, seconds=60.0)

    assert (
        ImageManifest(name="a", layers=(Layer(digest="b0", size=900), Layer(digest="own of a", size=100)))
        == first.image
    )
    assert (4, 12.5, 7, 60.0) == (first.rollouts, first.seconds, second.rollouts, second.seconds)
    assert first.image.layers[0] == second.image.layers[0]
    assert (1000, 2700) == (first.image.size, first.image.unpacked)


def test_a_csv_may_list_layers(tmp_path):
    """A digest has a colon of its own."""
    path = tmp_path / "images.csv"
    path.write_text("image,layers\na,sha256:00:10 sha256:11:20\n")

    (use,) = from_csv(path)

    assert (Layer(digest="sha256:00", size=10), Layer(digest="sha256:11", size=20)) == use.image.layers


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name,size\na,1\n", "needs the columns image and size"),
        ("image,size,colour\na,1,red\n", "column 'colour'"),
        ("image,size\n", "has no images"),
        ("image,size\na,many\n", "line 2"),
        ("image,size\n,5\n", "line 2: the image has no name"),
        ("image,layers\na,sha256:zz\n", "line 2: 'sha256:zz' is no layer"),
        ("image,size,rollouts\na,5,0\n", "line 2: rollouts must be above 0"),
    ],
)
def test_a_csv_that_makes_no_sense_is_refused_by_its_line(tmp_path, text, reason):
    """The error says where."""
    path = tmp_path / "images.csv"
    path.write_text(text)

    with pytest.raises(ConfigurationError, match=reason):
        from_csv(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """Both kinds."""
    with pytest.raises(ConfigurationError, match="cannot read"):
        from_csv(tmp_path / "no.csv")
    with pytest.raises(ConfigurationError, match="no OCI layout"):
        from_oci_layout(tmp_path)


def blob(root, document):
    import hashlib

    text = json.dumps(document).encode()
    digest = hashlib.sha256(text).hexdigest()
    (root / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (root / "blobs" / "sha256" / digest).write_bytes(text)
    return {"digest": f"sha256:{digest}", "size": len(text)}


def test_an_oci_layout_is_read_by_its_manifests(tmp_path):
    """The layers need not be there, an index of platforms is followed, and names come from annotations."""
    layers = [{"digest": "sha256:aa", "size": 5}, {"digest": "sha256:bb", "size": 7}]
    plain = blob(tmp_path, {"layers": layers})
    nested = blob(
        tmp_path,
        {
            "manifests": [
                {**plain, "platform": {"os": "windows"}},
                {**blob(tmp_path, {"layers": layers[:1]}), "platform": {"os": "linux"}},
            ]
        },
    )
    index = {
        "manifests": [
            {**plain, "annotations": {"org.opencontainers.image.ref.name": "one"}},
            {**nested, "annotations": {"io.containerd.image.name": "registry/two:1"}},
        ]
    }
    (tmp_path / "index.json").write_text(json.dumps(index))

    first, second = from_oci_layout(tmp_path, rollouts=4, seconds=9.0)

    assert ("one", (Layer(digest="sha256:aa", size=5), Layer(digest="sha256:bb", size=7))) == (
        first.image.name,
        first.image.layers,
    )
    assert ("registry/two:1", (Layer(digest="sha256:aa", size=5),)) == (second.image.name, second.image.layers)
    assert (4, 9.0) == (first.rollouts, first.seconds)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"manifests": []}, "has no images"),
        ([], "holds no object"),
        ({"manifests": [{"digest": "../../etc/passwd"}]}, "is no digest"),
        ({"manifests": [{"digest": f"sha256:{'0' * 64}"}]}, "cannot read"),
        ({"manifests": {}}, "'manifests' is no list of objects"),
    ],
)
def test_an_oci_layout_that_makes_no_sense_is_refused(tmp_path, index, reason):
    """Nothing outside of the layout is read, either."""
    (tmp_path / "index.json").write_text(json.dumps(index))

    with pytest.raises(ConfigurationError, match=reason):
        from_oci_layout(tmp_path)


def test_manifests_that_lack_something_are_refused(tmp_path):
    """Without layers, and without an image for the platform."""
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [blob(tmp_path, {"config": {}})]}))
    with pytest.raises(ConfigurationError, match="lacks 'layers'"):
        from_oci_layout(tmp_path)

    windows = {"os": "windows", "architecture": "amd64"}
    other = blob(tmp_path, {"manifests": [{"digest": "sha256:00", "platform": windows}]})
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [other]}))
    with pytest.raises(ConfigurationError, match="no image for linux/amd64, only for windows/amd64"):
        from_oci_layout(tmp_path)


def test_an_oci_layout_may_be_for_another_platform_and_is_verified(tmp_path):
    """The platform is chosen by name, and a file that is not what it is called is refused."""
    entries = [
        {
            **blob(tmp_path, {"layers": [{"digest": f"sha256:{name}", "size": 5}]}),
            "platform": {"os": "linux", "architecture": name},
        }
        for name in ("amd64", "arm64")
    ]
    index = blob(tmp_path, {"manifests": entries})
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [{**index, "annotations": [1]}]}))

    (use,) = from_oci_layout(tmp_path, platform="linux/arm64")
    assert (index["digest"], "sha256:arm64") == (use.name, use.image.layers[0].digest)

    (tmp_path / "blobs" / entries[0]["digest"].replace(":", "/")).write_text("{}")
    with pytest.raises(ConfigurationError, match=f"what {entries[0]['digest']} should be has the digest"):
        from_oci_layout(tmp_path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\n\n# b\n  c:1  \n", [("a", 7, 60.0), ("c:1", 7, 60.0)]),
        ("\ufeffimage\na\n", [("a", 7, 60.0)]),
        ("# first\nimage,seconds,rollouts\na,2.5,3\nb,,\nc\n", [("a", 3, 2.5), ("b", 7, 60.0), ("c", 7, 60.0)]),
        ("image , rollouts\r\na , 3\r\n", [("a", 3, 60.0)]),
        ("image:1\n", [("image:1", 7, 60.0)]),
    ],
)
def test_a_list_has_one_image_a_line(tmp_path, text, found):
    """Comments and empty lines do not count; with a header there are columns."""
    path = tmp_path / "images.txt"
    path.write_text(text, encoding="utf-8")

    wanted = read_list(path, rollouts=7, seconds=60.0)

    assert found == [(one.reference.name, one.rollouts, one.seconds) for one in wanted]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no images"),
        ("# a\n", "has no images"),
        ("image,rollouts\n", "has no images"),
        ("image,size\na,1\n", "has a column 'size'; known are image, rollouts, seconds"),
        ("a\nB\n", "line 2: 'B' is no image reference"),
        ("a,3\n", "line 1: one image a line; for more columns, the first line is image,rollouts,seconds"),
        ("image,rollouts\na,3,4\n", "line 2: one image a line"),
        ("image,rollouts\na,many\n", "line 2: invalid literal"),
        ("image,rollouts\na,0\n", "line 2: rollouts must be above 0"),
        ("a\n#\na\n", "line 3: 'a' appears twice"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused_by_its_line(tmp_path, text, why):
    """Before anybody is asked."""
    path = tmp_path / "images.txt"
    path.write_text(text)

    with pytest.raises(ConfigurationError, match=why):
        read_list(path)


def test_a_list_that_cannot_be_read_is_refused(tmp_path):
    """Because it is not there, or no text."""
    (tmp_path / "images.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("no.txt", "images.txt"):
        with pytest.raises(ConfigurationError, match=f"cannot read .*{name}"):
            read_list(tmp_path / name)
