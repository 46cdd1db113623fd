# SPDX-License-Identifier: Apache-2.0
"""Images of the local backend: what a name stands for, and unpacking what others made."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import stat
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentsandbox.backends.local.archive import ARCHITECTURES
from agentsandbox.backends.local.images import Image, Source, prepare, resolve
from agentsandbox.errors import ConfigurationError, ImagePullFailed

ARCHITECTURE = ARCHITECTURES.get(platform.machine(), platform.machine())
SETTINGS = {"User": "node", "WorkingDir": "/app", "Env": ["PATH=/bin", "A=b=c"]}

Entry = tuple[str, Any]


def layer(*entries: Entry) -> bytes:
    """Make a layer: text is a file, ``None`` a directory, ``("sym" | "hard", target)`` a link, a TarInfo itself."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in entries:
            info, data = tarfile.TarInfo(name), b""
            info.mode, info.mtime, info.uid, info.gid = 0o644, 1_000_000_000, os.getuid(), os.getgid()
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(content, tuple):
                info.type = tarfile.SYMTYPE if content[0] == "sym" else tarfile.LNKTYPE
                info.linkname = content[1]
            elif isinstance(content, int):
                info.type = tarfile.REGTYPE
                info.mode = content
            elif isinstance(content, bytes):
                info.type = content
                info.devmajor, info.devminor = 1, 3
            else:
                data = content.encode()
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def digest(data: bytes) -> str:
    """Return what a registry calls it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def config(layers: tuple[bytes, ...], **changes: Any) -> bytes:
    """Return the configuration of an image."""
    value = {"architecture": ARCHITECTURE, "os": "linux", "config": SETTINGS}
    value["rootfs"] = {"type": "layers", "diff_ids": [digest(data) for data in layers]}
    return json.dumps({**value, **changes}).encode()


def docker_archive(path: Path, *layers: bytes, **changes: Any) -> Path:
    """Write what ``docker save`` writes."""
    files = {"config.json": config(layers, **changes)}
    names = []
    for number, data in enumerate(layers):
        names.append(f"{number}/layer.tar")
        files[names[-1]] = data
    files["manifest.json"] = json.dumps([{"Config": "config.json", "RepoTags": ["x:y"], "Layers": names}]).encode()
    return archive(path, files)


def archive(path: Path, files: dict[str, bytes]) -> Path:
    """Write a tar archive."""
    with tarfile.open(path, "w") as target:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            target.addfile(info, io.BytesIO(data))
    return path


def oci_files(*layers: bytes, pack: Callable[[bytes], bytes] = gzip.compress, **changes: Any) -> dict[str, bytes]:
    """Return the files of an OCI layout with two platforms in its index."""
    blobs = [config(layers, **changes), *map(pack, layers)]
    manifest = {
        "schemaVersion": 2,
        "config": {"digest": digest(blobs[0])},
        "layers": [{"digest": digest(blob)} for blob in blobs[1:]],
    }
    blobs.append(json.dumps(manifest).encode())
    inner = {
        "manifests": [
            {"digest": digest(b"other"), "platform": {"architecture": "other", "os": "linux"}},
            {"digest": digest(blobs[-1]), "platform": {"architecture": ARCHITECTURE, "os": "linux"}},
        ]
    }
    blobs.append(json.dumps(inner).encode())
    files = {f"blobs/sha256/{digest(blob)[7:]}": blob for blob in blobs}
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    files["index.json"] = json.dumps({"manifests": [{"digest": digest(blobs[-1])}]}).encode()
    return files


def unpacked(path: Path, cache: Path) -> Image:
    """Unpack an image."""
    return prepare(resolve(str(path)), cache)


def tree(image: Image) -> dict[str, str]:
    """Return the files of an unpacked image."""
    root = Path(image.root)
    return {
        str(path.relative_to(root)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


# Names.


def test_host_is_the_host() -> None:
    """The name ``host`` needs no file."""
    assert resolve("host") == Source(name="host", kind="host")
    assert prepare(resolve("host"), Path("/nonexistent")) == Image(source=Source(name="host", kind="host"))


def test_directory_is_used_as_it_is(tmp_path: Path) -> None:
    """A directory with a root file system is not copied."""
    (tmp_path / "bin").mkdir()

    assert prepare(resolve(str(tmp_path)), Path("/nonexistent")).root == str(tmp_path)


def test_relative_names_are_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is meant from where the driver is."""
    (tmp_path / "image/usr").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert resolve("image") == Source(name="image", kind="directory", path=str(tmp_path / "image"))


@pytest.mark.parametrize("name", ["python:3.12", "/nonexistent", "docker.io/library/debian"])
def test_unknown_image_is_refused_with_what_is_accepted(name: str) -> None:
    """A name that stands for nothing is an error that names it and what would do."""
    with pytest.raises(ConfigurationError, match="OCI image layout") as caught:
        resolve(name)

    assert repr(name) in str(caught.value)


def test_directory_without_a_system_is_refused(tmp_path: Path) -> None:
    """A directory that is no root file system is refused, and so is the whole machine."""
    with pytest.raises(ConfigurationError, match="without a root file system"):
        resolve(str(tmp_path))
    with pytest.raises(ConfigurationError, match='use "host"'):
        resolve("/")


# Contents.


def test_docker_archive(tmp_path: Path) -> None:
    """Layers of ``docker save`` come on top of each other, and the configuration is read."""
    path = docker_archive(tmp_path / "i.tar", layer(("bin", None), ("bin/sh", "1"), ("f", "1")), layer(("f", "2")))
    image = unpacked(path, tmp_path / "cache")

    assert tree(image) == {"bin/sh": "1", "f": "2"}
    assert (image.user, image.workdir, dict(image.env)) == ("node", "/app", {"PATH": "/bin", "A": "b=c"})


@pytest.mark.parametrize("pack", [gzip.compress, bytes], ids=["gzip", "plain"])
@pytest.mark.parametrize("form", ["layout", "archive"])
def test_oci_image(tmp_path: Path, form: str, pack: Callable[[bytes], bytes]) -> None:
    """Layouts and archives of the OCI are read, of several platforms this one, packed or not."""
    files = oci_files(layer(("etc", None), ("etc/f", "1")), layer(("g", "2")), pack=pack)
    path = tmp_path / "i.tar"
    if form == "archive":
        archive(path, files)
    else:
        path = tmp_path / "layout"
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    assert resolve(str(path)).kind == form
    assert tree(unpacked(path, tmp_path / "cache")) == {"etc/f": "1", "g": "2"}


def test_whiteouts(tmp_path: Path) -> None:
    """A whiteout removes what lower layers have, an opaque one all of it, and neither what its own layer has."""
    path = docker_archive(
        tmp_path / "i.tar",
        layer(("a", None), ("a/x", "1"), ("a/y", "1"), ("b", None), ("b/deep", None), ("b/deep/x", "1"), ("c", "1")),
        layer(("a/new", "2"), ("a/.wh..wh..opq", ""), (".wh.b", ""), ("c", "2"), (".wh.c", ""), (".wh.none", "")),
        layer(("b", None), ("b/y", "3")),
    )

    assert tree(unpacked(path, tmp_path / "cache")) == {"a/new": "2", "b/y": "3", "c": "2"}


def test_kinds_replace_each_other(tmp_path: Path) -> None:
    """A file over a directory, a directory over a link and a link over a file replace it."""
    path = docker_archive(
        tmp_path / "i.tar",
        layer(("d", None), ("d/x", "1"), ("t", None), ("l", ("sym", "t")), ("f", "1"), ("keep", None), ("keep/x", "1")),
        layer(("d", "2"), ("l", None), ("l/y", "2"), ("f", ("sym", "d")), ("keep", None), ("keep/y", "2")),
    )

    assert tree(unpacked(path, tmp_path / "cache")) == {
        "d": "2", "f": "-> d", "keep/x": "1", "keep/y": "2", "l/y": "2"
    }  # fmt: skip


def test_permissions_times_and_links_are_kept(tmp_path: Path) -> None:
    """Modes, also of directories that may not be written, times and hard links are those of the layers."""
    closed = tarfile.TarInfo("closed")
    data = layer(("closed", None), ("closed/f", "1"), ("x", 0o4755), ("hard", ("hard", "closed/f")))
    image = unpacked(docker_archive(tmp_path / "i.tar", data), tmp_path / "cache")
    root = Path(image.root)
    assert closed.name == "closed"
    assert stat.S_IMODE((root / "x").stat().st_mode) == 0o4755
    assert (root / "x").stat().st_mtime == (root / "closed").stat().st_mtime == 1_000_000_000
    assert (root / "hard").samefile(root / "closed/f")


def test_devices_are_left_out(tmp_path: Path) -> None:
    """No device or pipe is made."""
    data = layer(("null", tarfile.CHRTYPE), ("disk", tarfile.BLKTYPE), ("pipe", tarfile.FIFOTYPE), ("f", "1"))

    assert tree(unpacked(docker_archive(tmp_path / "i.tar", data), tmp_path / "cache")) == {"f": "1"}


# Hostility.


@pytest.mark.parametrize(
    "entries",
    [
        [("../outside", "x")],
        [("a/../../outside", "x")],
        [("d", ("hard", "../../../../../../outside"))],
    ],
    ids=["up", "down and up", "hard link"],
)
def test_paths_that_lead_out_are_refused(tmp_path: Path, entries: list[Entry]) -> None:
    """A layer that names a place outside of its image is refused, and nothing of it stays."""
    (tmp_path / "outside").write_text("mine")
    with pytest.raises(ImagePullFailed, match="leads out of it") as caught:
        unpacked(docker_archive(tmp_path / "i.tar", layer(*entries)), tmp_path / "cache")

    assert not caught.value.retryable
    assert (tmp_path / "outside").read_text() == "mine"
    assert [path.suffix for path in (tmp_path / "cache/images").iterdir()] == [".lock"]


@pytest.mark.parametrize("target", ["/etc", "../../../../../../../../../../etc", "{outside}"])
def test_links_are_not_followed_out(tmp_path: Path, target: str) -> None:
    """What is written through a link lands where the link leads in the image, as in a running container."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target = target.format(outside=outside)
    data = layer(("l", ("sym", target)), ("l/agentsandbox-test", "x"), (".wh.l", ""), ("l/.wh.passwd", ""))
    image = unpacked(docker_archive(tmp_path / "i.tar", data), tmp_path / "cache")

    inside = "etc" if "etc" in target else str(outside).lstrip("/")
    assert tree(image) == {f"{inside}/agentsandbox-test": "x", "l": f"-> {target}"}
    assert list(outside.iterdir()) == []
    assert not Path("/etc/agentsandbox-test").exists()
    assert Path("/etc/passwd").exists()


def test_absolute_names_are_of_the_image(tmp_path: Path) -> None:
    """An absolute name means the root of the image."""
    data = layer(("/etc/agentsandbox-test", "x"), ("/hard", ("hard", "/etc/agentsandbox-test")))

    assert tree(unpacked(docker_archive(tmp_path / "i.tar", data), tmp_path / "cache")) == {
        "etc/agentsandbox-test": "x",
        "hard": "x",
    }
    assert not Path("/etc/agentsandbox-test").exists()


def test_endless_links_are_refused(tmp_path: Path) -> None:
    """Links in a circle end the unpacking with an error."""
    data = layer(("a", ("sym", "b")), ("b", ("sym", "a")), ("a/x", "1"))
    with pytest.raises(ImagePullFailed, match="too many links"):
        unpacked(docker_archive(tmp_path / "i.tar", data), tmp_path / "cache")


# Damage.


def test_changed_layer_is_refused(tmp_path: Path) -> None:
    """A layer with another content than the configuration says is refused."""
    wanted, given = layer(("f", "good")), layer(("f", "evil"))
    path = docker_archive(tmp_path / "i.tar", given, rootfs={"type": "layers", "diff_ids": [digest(wanted)]})
    with pytest.raises(ImagePullFailed, match=f"digest {digest(given)}, and should have {digest(wanted)}"):
        unpacked(path, tmp_path / "cache")


def test_changed_blob_is_refused(tmp_path: Path) -> None:
    """A blob whose content is not what its name says is refused."""
    files = oci_files(layer(("f", "1")))
    name = next(name for name, data in files.items() if b'"layers"' in data and b'"rootfs"' not in data)
    files[name] += b" "
    with pytest.raises(ImagePullFailed, match="other content than its name"):
        unpacked(archive(tmp_path / "i.tar", files), tmp_path / "cache")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"x": b""}, "manifest.json"),
        ({"manifest.json": b"{"}, "damaged"),
        ({"manifest.json": b"{}"}, "malformed"),
        ({"manifest.json": b"[]"}, "holds 0 images"),
        ({"index.json": b'{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}'}, "no sha256 digest"),
        ({"index.json": b'{"manifests": []}'}, "damaged"),
    ],
    ids=["empty", "no JSON", "no list", "no image", "path as digest", "empty index"],
)
def test_damaged_archive_is_refused(tmp_path: Path, files: dict[str, bytes], reason: str) -> None:
    """An archive that is no image is refused for good, with its name and the reason."""
    path = archive(tmp_path / "i.tar", files)
    with pytest.raises(ImagePullFailed, match=reason) as caught:
        unpacked(path, tmp_path / "cache")

    assert str(path) in str(caught.value)
    assert not caught.value.retryable


def test_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    """Any other file is refused."""
    (tmp_path / "i.tar").write_text("no archive")
    with pytest.raises(ImagePullFailed, match="damaged or no image"):
        unpacked(tmp_path / "i.tar", tmp_path / "cache")


def test_image_of_another_machine_is_refused(tmp_path: Path) -> None:
    """An image for another processor is refused before it is unpacked."""
    path = docker_archive(tmp_path / "i.tar", layer(("f", "1")), architecture="other")
    with pytest.raises(ImagePullFailed, match="is for linux on other"):
        unpacked(path, tmp_path / "cache")

    assert not (tmp_path / "cache").exists()


# The cache.


def test_image_is_unpacked_once(tmp_path: Path) -> None:
    """The same content is the same directory, whatever its name; other content is another."""
    data = layer(("f", "1"))
    first = unpacked(docker_archive(tmp_path / "a.tar", data), tmp_path / "cache")
    (Path(first.root) / "mark").touch()
    second = unpacked(docker_archive(tmp_path / "b.tar", data), tmp_path / "cache")
    other = unpacked(docker_archive(tmp_path / "c.tar", layer(("f", "2"))), tmp_path / "cache")

    assert first.root == second.root != other.root
    assert (Path(second.root) / "mark").exists()
    assert stat.S_IMODE((tmp_path / "cache/images").stat().st_mode) == 0o700


def test_what_a_killed_unpacker_left_is_removed(tmp_path: Path) -> None:
    """Half an image is never used."""
    path = docker_archive(tmp_path / "a.tar", layer(("f", "1")))
    root = Path(unpacked(path, tmp_path / "cache").root)
    half = root.parent.with_name(root.parent.name + ".part-1234")
    root.parent.rename(half)

    assert tree(unpacked(path, tmp_path / "cache")) == {"f": "1"}
    assert not half.exists()


def test_concurrent_unpackers_share_one_result(tmp_path: Path) -> None:
    """Many at once unpack one image once, and all get it whole."""
    path = docker_archive(tmp_path / "a.tar", layer(*((f"f{number}", str(number)) for number in range(200))))
    images: list[Image] = []
    threads = [threading.Thread(target=lambda: images.append(unpacked(path, tmp_path / "cache"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({image.root for image in images}) == 1
    assert len(images) == 8
    assert len(tree(images[0])) == 200
    assert len(list((tmp_path / "cache/images").iterdir())) == 2
