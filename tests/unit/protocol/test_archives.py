# SPDX-License-Identifier: Apache-2.0
"""Archives that some ``tar`` in a sandbox has made: nothing that they say can do harm on this side."""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agentsandbox.protocol import archives


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> Any:
    """Return one member and its contents."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), mode
    return info, data


def packed(*members: Any, style: int = tarfile.GNU_FORMAT) -> bytes:
    """Return an archive as some tar writes it: the directory itself first, every name below ``./``."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=style) as archive:
        for info, data in (member(".", kind=tarfile.DIRTYPE, mode=0o755), *members):
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def unpacked(data: bytes, target: Path) -> list[str]:
    """Unpack an archive and return what is there."""
    with open(os.memfd_create("archive"), "wb") as file:
        file.write(data)
        file.flush()
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        archives.unpack(os.fsencode(target), file.fileno(), modes=0o755, foreign=True)
    return sorted(str(path.relative_to(target)) for path in target.rglob("*"))


def test_hard_links_become_files_of_their_own(tmp_path: Path) -> None:
    """Each name of a file comes out as a file, with its contents and mode, and changing one changes no other."""
    data = packed(
        member("./a", b"x" * 70_000, mode=0o4750),
        member("./d", kind=tarfile.DIRTYPE, mode=0o700),
        member("./d/b", kind=tarfile.LNKTYPE, link="./a"),
        member("./d/c", kind=tarfile.LNKTYPE, link="./d/b"),
    )

    assert unpacked(data, tmp_path / "t") == ["a", "d", "d/b", "d/c"]
    for name in ("a", "d/b", "d/c"):
        path = tmp_path / "t" / name
        assert (path.read_bytes(), path.stat().st_nlink, path.stat().st_mode & 0o7777) == (b"x" * 70_000, 1, 0o750)


def test_a_file_that_its_owner_may_not_read_comes_out_readable(tmp_path: Path) -> None:
    """A file without any permission comes out so that whoever copies it can use it, and so do its other names."""
    data = packed(member("./a", b"secret", mode=0), member("./b", kind=tarfile.LNKTYPE, link="./a"))

    assert unpacked(data, tmp_path / "t") == ["a", "b"]
    assert {path.read_bytes() for path in (tmp_path / "t").iterdir()} == {b"secret"}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "t").iterdir()} == {0o600}


def test_a_hard_link_to_a_symbolic_link_is_another_one(tmp_path: Path) -> None:
    """The second name of a symbolic link leads where the first one leads, as long as that is inside."""
    link = member("./d/link", kind=tarfile.SYMTYPE, link="../a")
    inside = packed(member("./a", b"x"), link, member("./d/e/again", kind=tarfile.LNKTYPE, link="./d/link"))
    outside = packed(member("./a", b"x"), link, member("./again", kind=tarfile.LNKTYPE, link="./d/link"))

    assert unpacked(inside, tmp_path / "t") == ["a", "d", "d/e", "d/e/again", "d/link"]
    assert os.readlink(tmp_path / "t" / "d" / "e" / "again") == "../a"
    with pytest.raises(archives.Refused, match="out of the directory"):
        unpacked(outside, tmp_path / "u")


def test_devices_and_pipes_are_left_out(tmp_path: Path) -> None:
    """What is neither file nor directory nor link is left out with all its names; the rest is there."""
    data = packed(
        member("./null", kind=tarfile.CHRTYPE),
        member("./disk", kind=tarfile.BLKTYPE),
        member("./pipe", kind=tarfile.FIFOTYPE),
        member("./again", kind=tarfile.LNKTYPE, link="./pipe"),
        member("./and again", kind=tarfile.LNKTYPE, link="./again"),
        member("./f", b"x"),
    )

    assert unpacked(data, tmp_path / "t") == ["f"]


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
def test_long_and_odd_names_arrive(tmp_path: Path, style: int) -> None:
    """Names of any length and of any bytes arrive, whichever way a tar has to write them."""
    names = ["n" * 200, "/".join(["deep" * 20] * 5), "line\nbreak", "\udcff\udc80", "é✨", "-rf", " "]

    found = unpacked(packed(*(member(f"./{name}", b"x") for name in names), style=style), tmp_path / "t")
    assert set(names) <= set(found)


HOSTILE = {
    "absolute name": [member("/etc/x", b"x")],
    "name that climbs": [member("./a/../../escaped", b"x")],
    "absolute link": [member("./link", kind=tarfile.SYMTYPE, link="/etc/passwd")],
    "link that climbs": [member("./d/link", kind=tarfile.SYMTYPE, link="../../escaped")],
    "absolute hard link": [member("./hard", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "hard link that climbs": [member("./hard", kind=tarfile.LNKTYPE, link="../escaped")],
    "hard link to a directory": [member("./hard", kind=tarfile.LNKTYPE, link=".")],
    "file in the place of the directory": [member(".", b"x")],
    "unknown kind": [member("./what", kind=b"?")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused(tmp_path: Path, case: str) -> None:
    """Whatever leads out of the directory is refused, and nothing of it is there."""
    with pytest.raises(archives.Refused):
        unpacked(packed(*HOSTILE[case], member("./later", b"x")), tmp_path / "t")

    assert [path.name for path in tmp_path.rglob("*") if path.name != "d"] == ["t"]


THROUGH = {
    "file": [member("./link/f", b"x")],
    "directory": [member("./link/d", kind=tarfile.DIRTYPE)],
    "link": [member("./link/l", kind=tarfile.SYMTYPE, link="x")],
    "hard link": [member("./f", b"x"), member("./link/f", kind=tarfile.LNKTYPE, link="./f")],
    "hard link from there": [member("./hard", kind=tarfile.LNKTYPE, link="./link/f")],
}


@pytest.mark.parametrize("case", THROUGH)
def test_nothing_is_reached_through_a_link(tmp_path: Path, case: str) -> None:
    """A link that is there, from the archive or from before, is never followed: neither to write nor to read."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("secret")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "link").symlink_to(outside)

    with pytest.raises((OSError, archives.Malformed)):
        unpacked(packed(*THROUGH[case]), tmp_path / "t")
    with pytest.raises((OSError, archives.Malformed)):
        unpacked(packed(member("./sub", kind=tarfile.DIRTYPE), inside_link(), *THROUGH[case]), tmp_path / "u")

    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("f", "secret")]
    assert not (tmp_path / "t" / "hard").exists()
    assert list((tmp_path / "u" / "sub").iterdir()) == []


def inside_link() -> Any:
    """Return a link to a directory of the archive, under the name that the cases above use."""
    return member("./link", kind=tarfile.SYMTYPE, link="sub")


def test_what_is_there_is_replaced(tmp_path: Path) -> None:
    """Files and links take the place of files and links; directories are filled, and take the place of files."""
    first = packed(member("./a", b"1"), member("./d/x", b"1"), member("./l", kind=tarfile.SYMTYPE, link="a"))
    second = packed(
        member("./a", kind=tarfile.DIRTYPE),
        member("./a/y", b"2"),
        member("./d", kind=tarfile.DIRTYPE),
        member("./d/x", b"2"),
        member("./l", kind=tarfile.LNKTYPE, link="./d/x"),
    )

    assert unpacked(first, tmp_path / "t") == ["a", "d", "d/x", "l"]
    assert unpacked(second, tmp_path / "t") == ["a", "a/y", "d", "d/x", "l"]
    assert {(tmp_path / "t" / name).read_bytes() for name in ("a/y", "d/x", "l")} == {b"2"}
    assert not (tmp_path / "t" / "l").is_symlink()


def test_a_hard_link_to_nothing_is_damage(tmp_path: Path) -> None:
    """A further name of what never came says that something is missing: that is no whole archive."""
    data = packed(member("./hard", kind=tarfile.LNKTYPE, link="./d/missing"))

    with pytest.raises(archives.Malformed, match="not there"):
        unpacked(data, tmp_path / "t")
    assert os.listdir(tmp_path / "t") == []


def test_no_filter_of_tarfile_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is used that Python has since 3.11.4 only."""
    for name in ("data_filter", "tar_filter", "fully_trusted_filter"):
        monkeypatch.delattr(tarfile, name, raising=False)
    monkeypatch.delattr(tarfile.TarFile, "extractall")
    monkeypatch.delattr(tarfile.TarFile, "extract")

    assert unpacked(packed(member("./f", b"x")), tmp_path / "t") == ["f"], sys.version
