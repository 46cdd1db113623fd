# SPDX-License-Identifier: Apache-2.0
"""What a runner tells of files, and installs, under every Python, as the first process of a namespace."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from .conftest import Driver

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")


@pytest.fixture
def place():
    """A directory on disk with a working directory in it."""
    with tempfile.TemporaryDirectory(prefix="capture-", dir="/var/tmp") as top:
        place = Path(top)
        place.chmod(0o755)
        work = place / "work"
        work.mkdir()
        (work / "a.txt").write_text("one\n")
        (work / "sub").mkdir()
        (work / "sub/b.bin").write_bytes(bytes(range(256)))
        (work / "link").symlink_to("a.txt")
        os.link(work / "a.txt", work / "twin")
        yield place


def start(python: str, place: Path) -> Driver:
    """A runner that sees itself as the first process."""
    wrapper = place / "python"
    wrapper.write_text(f'#!/bin/sh\nexec unshare --fork --pid --mount-proc --ipc --kill-child {python} "$@"\n')
    wrapper.chmod(0o755)
    return Driver(str(wrapper), place / "work")


@pytest.fixture
def pod(python, place):
    """One of them under each Python."""
    with start(python, place) as driver:
        yield driver


@pytest.fixture
def own(place):
    """One of them under this Python."""
    with start(sys.executable, place) as driver:
        yield driver


def builtin(driver: Driver, name: str, stdin: bytes | None = None, **arguments: Any) -> tuple[dict[str, Any], bytes]:
    result = driver.run(stdin=stdin, builtin=name, args={"path": "", **arguments})
    return result.exit["report"], result.stdout


def captured(driver: Driver, place: Path) -> dict[str, list[Any]]:
    report, output = builtin(driver, "capture", scope=[str(place / "work")], limit=1 << 20)
    assert report["verified"], report
    return dict(json.loads(line) for line in output.splitlines())


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value, separators=(",", ":")).encode() + b"\n" for value in values)


def install(driver: Driver, entries: dict[str, Any], blobs: list[bytes], place: Path, **head: Any) -> dict[str, Any]:
    body = lines({"scope": [str(place / "work")], "entries": len(entries), "blobs": len(blobs), **head})
    body += lines(*([path, entries[path]] for path in sorted(entries)))
    for blob in blobs:
        body += lines([hashlib.sha256(blob).hexdigest(), len(blob)]) + blob
    return builtin(driver, "install", body, kill=True)[0]


def test_what_was_captured_can_be_installed_again(pod, place):
    """Every name with all its properties, whatever was in its place, and processes are ended first."""
    work = place / "work"
    before = captured(pod, place)
    names = ("a.txt", "sub", "sub/b.bin", "link", "twin")
    assert {str(work), *(str(work / name) for name in names)} == set(before)
    pod.run(script="rm a.txt; mkdir a.txt; echo x > sub/b.bin; chmod 700 sub; ln -sf nowhere link; setsid sleep 60 &")
    report = install(pod, before, [b"one\n", bytes(range(256))], place)

    assert (True, True) == (report["verified"], report["touched"]), report
    assert before == captured(pod, place)
    assert (work / "a.txt").samefile(work / "twin")
    assert b"" == pod.run(script="cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep 'sleep 6[0]'").stdout


def test_contents_are_sent_as_they_are(own, place):
    """Each with its size, and an error that names a file that is not there."""
    work = place / "work"
    report, output = builtin(own, "contents", lines(str(work / "a.txt"), str(work / "sub/b.bin")))

    assert report["verified"]
    assert output == lines([str(work / "a.txt"), 4]) + b"one\n" + lines([str(work / "sub/b.bin"), 256]) + bytes(
        range(256)
    )
    report, _ = builtin(own, "contents", lines(str(work / "none")))
    assert (2, str(work / "none")) == (report["error"]["errno"], report["error"]["path"])


def test_a_link_on_the_way_is_not_followed(own, place):
    """What an episode put there cannot make the runner read elsewhere."""
    (place / "work/way").symlink_to("/etc")
    report, output = builtin(own, "contents", lines(str(place / "work/way/passwd")))

    assert "error" in report
    assert b"" == output


@pytest.mark.parametrize(
    ("blobs", "reason"),
    [([], "too large: no copy of it was kept"), ([b"two\n"], "too large: no copy of it was kept")],
    ids=["missing", "other"],
)
def test_what_was_not_sent_cannot_be_installed(own, place, blobs, reason):
    """It says so, and that it had begun."""
    before = captured(own, place)
    (place / "work/sub/b.bin").write_bytes(b"x")
    report = install(own, before, blobs, place)

    assert (False, True) == (report["verified"], report["touched"])
    assert reason in report["reason"]


@pytest.mark.parametrize(
    ("head", "tail", "reason"),
    [
        ({"blobs": 1}, b"", "JSONDecodeError"),
        ({"blobs": 1}, lines(["0" * 64, 4]) + b"one\n", f"{'0' * 64} did not arrive as it was sent"),
        ({"blobs": 1}, lines(["0" * 64, 9]) + b"one\n", "what is to be installed ends early"),
        ({"blobs": 0, "scope": ["/nowhere"]}, b"", "/nowhere: not all of these are directories here"),
    ],
    ids=["cut", "damaged", "short", "elsewhere"],
)
def test_nothing_is_touched_before_everything_has_come(own, place, head, tail, reason):
    """Whatever is wrong with what comes."""
    before = captured(own, place)
    body = lines(
        {"scope": [str(place / "work")], "entries": 1, **head}, [str(place / "work"), before[str(place / "work")]]
    )
    report, _ = builtin(own, "install", body + tail)

    assert (False, False) == (report["verified"], report["touched"])
    assert reason in report["reason"]
    assert before == captured(own, place)


def test_what_is_too_much_is_named(own, place):
    """The path at which the limit was passed."""
    report, _ = builtin(own, "capture", scope=[str(place / "work")], limit=300)

    assert report["too_large"].startswith(str(place / "work"))
    assert not report["verified"]


def test_there_are_no_changes_without_a_baseline(own):
    """Not none, but nobody knows."""
    report, output = builtin(own, "changes", manifest="0" * 64, stamps="0" * 64, limit=1 << 20)

    assert (False, "baseline missing", b"") == (report["verified"], report["reason"], output)


def test_a_runner_that_is_not_first_keeps_nothing_and_installs_nothing(place):
    """What is around it is somebody else's."""
    with Driver(sys.executable, place / "work") as driver:
        for name in ("capture", "contents", "changes", "install"):
            report, output = builtin(driver, name, b"" if name in ("contents", "install") else None, scope=["/tmp"])

            assert (False, False, b"") == (report["verified"], report["touched"], output)
            assert "the runner is not the first process of a namespace" == report["reason"]
