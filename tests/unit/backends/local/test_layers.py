# SPDX-License-Identifier: Apache-2.0
"""Masks: what the layers above the host's directories hide and replace."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from agentsandbox.protocol.runner import layers, mounts

USER = ["sandbox", 1000, "/home/sandbox"]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Offer an /etc with secrets."""
    monkeypatch.setattr(layers, "MASKS", str(tmp_path / "masks"))
    etc = tmp_path / "etc"
    (etc / "ssl/private").mkdir(parents=True)
    (etc / "ssl/private/key").write_text("secret")
    (etc / "ssl/private").chmod(0o710)
    (etc / "ssl").chmod(0o751)
    (etc / "open").mkdir()
    for name, mode in (("shadow", 0o640), ("open/secret", 0o600), ("open/fine", 0o644), ("ssl/fine", 0o644)):
        (etc / name).write_text(name)
        (etc / name).chmod(mode)
    (etc / "link").symlink_to("shadow")
    (etc / "passwd").write_text(
        "daemon:x:1:1::/:/bin/sh\nalice:x:1000:1000:Alice:/home/alice:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
    )
    (etc / "group").write_text("root:x:0:\nsudo:x:27:alice,daemon\nalice:x:1000:\n")
    return etc


def built(source: Path, **overlay: Any) -> tuple[Path, dict[str, Any]]:
    """Build the mask of one overlay; return it and the plan."""
    plan: dict[str, Any] = {
        "overlays": [{"at": "/etc", "name": "etc", "source": str(source), "etc": "", "user": USER, **overlay}],
        "binds": [],
    }
    layers.build(plan)
    return Path(layers.MASKS) / "etc", plan


def is_whiteout(path: Path) -> bool:
    """Whether a path says that there is nothing."""
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def test_what_not_everybody_may_read_is_hidden(source: Path) -> None:
    """Files and directories that the host keeps to itself are hidden, and nothing else is; parents keep their modes."""
    mask, plan = built(source, scan=["."])

    hidden = {str(path.relative_to(mask)) for path in mask.rglob("*") if not path.is_dir() and is_whiteout(path)}
    assert hidden == {"shadow", "open/secret", "ssl"}
    assert plan["overlays"] == [["/etc", [str(mask), str(source)]]]


def test_only_what_is_asked_for_is_searched(source: Path) -> None:
    """Nothing outside of the parts that are searched is hidden, and no empty mask is used."""
    (source / "open/secret").unlink()
    _, plan = built(source, scan=["open"])

    assert plan["overlays"] == [["/etc", [str(source)]]]


def test_parents_look_like_those_below(source: Path) -> None:
    """Directories on the way to what is hidden keep their permissions."""
    (source / "ssl").chmod(0o755)
    mask, _ = built(source, scan=["ssl"])

    assert is_whiteout(mask / "ssl/private")
    assert stat.S_IMODE((mask / "ssl").stat().st_mode) == 0o755


def test_accounts_of_the_host_are_those_of_its_system(source: Path) -> None:
    """People and their passwords are left out, the sandbox's user is there, and accounts are locked."""
    mask, _ = built(source, scan=["."], accounts="host")

    assert (mask / "passwd").read_text().splitlines() == [
        "root:x:0:0:root:/root:/bin/sh",
        "daemon:x:1:1::/:/bin/sh",
        "nobody:x:65534:65534::/:/bin/false",
        "sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh",
    ]
    assert (mask / "group").read_text() == "root:x:0:\nsudo:x:27:daemon\nsandbox:x:1000:\n"
    assert {line.split(":")[1] for line in (mask / "shadow").read_text().splitlines()} == {"*"}
    assert stat.S_IMODE((mask / "shadow").stat().st_mode) == 0o600
    assert (mask / "hostname").read_text() == "sandbox\n"


def test_accounts_of_an_image_are_kept(source: Path) -> None:
    """An image keeps its people; only what is missing is added, and its passwords are its own affair."""
    root = source.parent
    mask, _ = built(root, accounts="image", etc="etc")

    lines = (mask / "etc/passwd").read_text().splitlines()
    assert lines[0] == "root:x:0:0:root:/root:/bin/sh"
    assert "alice:x:1000:1000:Alice:/home/alice:/bin/sh" in lines
    assert lines[-1] == "sandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh"
    assert not (mask / "etc/shadow").exists()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_image_with_a_strange_etc_is_left_alone(tmp_path: Path, source: Path, kind: str) -> None:
    """Where /etc is no directory, nothing is put through it."""
    root = tmp_path / "root"
    root.mkdir()
    if kind == "link":
        (root / "etc").symlink_to(source)
    else:
        (root / "etc").touch()
    mask, plan = built(root, accounts="image", etc="etc")

    assert list(mask.iterdir()) == []
    assert plan["overlays"] == [["/etc", [str(root)]]]


def test_accounts_that_are_no_file_are_not_read(source: Path) -> None:
    """A link or a pipe in place of the account file counts as empty."""
    (source / "passwd").unlink()
    os.mkfifo(source / "passwd")
    (source / "group").unlink()
    (source / "group").symlink_to("/etc/group")
    mask, _ = built(source, accounts="host")

    assert (mask / "passwd").read_text().splitlines()[0].startswith("root:")
    assert (mask / "group").read_text() == "root:x:0:\nsandbox:x:1000:\n"


def test_what_cannot_be_a_layer_is_copied_or_shown(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With something mounted below it, the directory of accounts is copied without secrets, another is read-only."""
    table = source.parent / "mountinfo"
    table.write_text(f"36 35 98:0 / / rw - ext4 x rw\n37 36 98:0 /x {source}/hosts rw - ext4 x rw\n")
    monkeypatch.setattr(mounts, "TABLE", str(table))
    mask, plan = built(source, scan=["."], accounts="host")

    assert plan == {"overlays": [["/etc", [str(mask)]]], "binds": []}
    names = {str(path.relative_to(mask)) for path in mask.rglob("*")}
    assert names == {"open", "open/fine", "link", "passwd", "group", "shadow", "gshadow", "hosts", "hostname"}
    assert "sandbox" in (mask / "shadow").read_text()

    _, plan = built(source)
    assert plan == {"overlays": [], "binds": [str(source)]}
