# SPDX-License-Identifier: Apache-2.0
"""Directories of an image that tell by themselves whether anything below them was touched, on a real overlay."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from agentsandbox.protocol.runner import mounts, sealing

from .conftest import Driver

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None,
    reason="needs root, unshare and setpriv",
)

PYTHON = os.path.realpath(sys.executable)
SYSTEM = ("bin", "lib", "lib64", "usr/bin", "usr/lib", "usr/lib64", "usr/local")
"""What it takes to run programs of this machine."""

CHANGES = {
    "a new file": "echo x > {deep}/new",
    "contents": "printf X | dd of={deep}/file conv=notrunc 2>/dev/null",
    "contents, with the old time": (
        "cp -p {deep}/file /tmp/t; echo y > {deep}/file; touch -r /tmp/t {deep}/file; rm /tmp/t"
    ),
    "a removed file": "rm {deep}/file",
    "a mode": "chmod 700 {deep}/file",
    "the mode of a directory": "chmod 700 {deep}",
    "a renamed file": "mv {deep}/file {deep}/other",
    "a hard link": "ln {deep}/file {deep}/other",
    "one of two names": "echo x >> {deep}/twin",
    "a link": "ln -sf elsewhere {deep}/link",
    "a new directory": "mkdir {deep}/directory",
    "a memory map": (
        '{python} -ISBc \'import mmap; f = open("{deep}/file", "r+b"); m = mmap.mmap(f.fileno(), 0); m[0]; m[0] = 1\''
    ),
}


@pytest.fixture
def image():
    """A directory whose contents are older than any container."""
    with tempfile.TemporaryDirectory(prefix="sealing-", dir="/var/tmp") as top:
        place = Path(top)
        place.chmod(0o755)
        for name in ("layer/usr/share/deep", "layer/workspace/package", "work", "root"):
            (place / name).mkdir(parents=True)
        deep = place / "layer/usr/share/deep"
        (deep / "file").write_text("contents\n")
        (deep / "twin").write_text("twin\n")
        os.link(deep / "twin", place / "layer/usr/share/twin")
        os.symlink("file", deep / "link")
        (place / "layer/workspace/f.py").write_text("answer = 42\n")
        (place / "layer/workspace/package/g.py").write_text("answer = 43\n")
        yield place


@pytest.fixture
def pod(image):
    """
    A runner whose root file system is an overlay with the image below and this machine's programs mounted; it is root.

    Nobody waits until the image is old, so the runner is told that containers start within no time.
    """
    prefix = sys.base_prefix.lstrip("/")
    mounts = [*SYSTEM] + [prefix] * (not f"{prefix}/".startswith(tuple(f"{name}/" for name in SYSTEM)))
    script = ["set -e", f"cd {image}", "mkdir -p layer/proc layer/tmp layer/dev layer/sys layer/var/tmp"]
    for name in mounts:
        if os.path.islink(f"/{name}"):
            script.append(f"ln -sfn {os.readlink(f'/{name}')} layer/{name}")
        elif os.path.isdir(f"/{name}"):
            script.append(f"mkdir -p layer/{name}")
    script += ["mount -t overlay overlay -o lowerdir=layer,upperdir=upper,workdir=work root"]
    for name in mounts:
        if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}"):
            script += [f"mount --bind /{name} root/{name}", f"mount -o remount,bind,ro root/{name}"]
    script += [
        "mount -t proc proc root/proc",
        "mount --rbind /sys root/sys",
        "mount -t tmpfs tmpfs root/dev; mknod -m 666 root/dev/null c 1 3",
        'exec unshare --root=root setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$0" "$@"',
    ]
    wrapper = image / "python"
    quoted = "\n".join(script).replace("'", "'\\''")
    wrapper.write_text(
        f"#!/bin/sh\nmkdir {image}/upper\n"
        f"exec unshare --fork --pid --mount --ipc --net --kill-child sh -c '{quoted}' {PYTHON} \"$@\"\n"
    )
    wrapper.chmod(0o755)
    between = (
        "import agentsandbox.protocol.runner.pristine as p; o = p.older_than; "
        "p.older_than = lambda root: o(root) and o(root) + 10**10"
    )
    with Driver(str(wrapper), "/workspace", between=between) as driver:
        yield driver


def builtin(driver: Driver, name: str, **arguments: Any) -> dict[str, Any]:
    report = driver.run(builtin=name, args={"path": "", **arguments}).exit["report"]
    assert isinstance(report, dict)
    return report


def baseline(driver: Driver, **more: Any) -> dict[str, Any]:
    return builtin(driver, "baseline", scope=["/tmp", "/var/tmp"], exclude=[], copies=1 << 20, **more)


def reset(driver: Driver, taken: dict[str, Any]) -> dict[str, Any]:
    return builtin(driver, "reset", manifest=taken["manifest"], stamps=taken["stamps"])


def test_what_nobody_touched_is_not_looked_at(pod):
    """Of what is below a directory of the image, nothing is looked at; with ``whole``, everything is."""
    taken = baseline(pod)
    assert (True, "") == (taken["verified"], taken["reason"])
    assert taken["scope"] == ["/tmp", "/var/tmp", "/workspace"]
    whole = baseline(pod, whole=True)
    assert taken["outside"] + 5 <= whole["outside"]

    assert 0 == pod.run(script="true").exit["code"]
    report = reset(pod, whole)
    assert (True, whole["outside"]) == (report["verified"], report["outside"])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_below_is_found(pod, change):
    """Whatever is changed below a directory that was not looked into, the directory tells, and so does its path."""
    taken = baseline(pod)
    command = change.format(deep="/usr/share/deep", python=PYTHON)
    result = pod.run(script=command)
    assert (0, b"") == (result.exit["code"], result.stderr)

    report = reset(pod, taken)

    assert not report["verified"]
    assert report["reason"].startswith("changed outside of the scope: /usr/share"), report["reason"]


def test_the_scope_is_restored_time_after_time(pod):
    """Directories of the scope that nobody touched are passed over, and those that somebody touched are restored."""
    taken = baseline(pod)
    for number in range(3):
        script = ("echo x > f.py", "echo x > package/g.py; mkdir package/new", "mv package/g.py .; rmdir package")[
            number
        ]
        assert 0 == pod.run(script=script).exit["code"]
        report = reset(pod, taken)
        taken["stamps"] = report["stamps"]

        assert (True, "") == (report["verified"], report["reason"])
        text = pod.run(script="cat f.py package/g.py; ls -R").stdout.decode()
        assert text == "answer = 42\nanswer = 43\n.:\nf.py\npackage\n\n./package:\ng.py\n"
    assert reset(pod, taken)["changed"] == []


def test_the_age_of_the_uppermost_layer_is_what_counts(image, monkeypatch):
    """A layer that was made long before the first process, or after it, says that the clock was put back."""
    root = mounts.Mount("/", ["rw"], "overlay", ["rw", "lowerdir=/a:/b", "index=off"])
    age = float(Path("/proc/uptime").read_text().split()[0])
    began = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    start = time.time() - (age - began)
    for before, sealed in ((0.5, True), (9.0, True), (11.0, False), (-1.0, False)):
        born = int((start - before) * 1e9)
        monkeypatch.setattr(sealing, "_birth", lambda _path, born=born: born)
        expected = born - int(sealing.START_WITHIN * 1e9) if sealed else 0
        assert sealing.older_than(root) == expected, before


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ext4", "rw"), ("tmpfs", "rw"), ("overlay", "rw,index=on"), ("overlay", "rw,index=off,nfs_export=on")],
)
def test_nothing_is_concluded_elsewhere(monkeypatch, kind, options):
    """Other file systems say nothing by a directory, nor do overlays where a hard link leads past it."""
    monkeypatch.setattr(sealing, "_birth", lambda _path: time.time_ns())
    assert 0 == sealing.older_than(mounts.Mount("/", ["rw"], kind, options.split(",")))


def test_the_birth_of_a_file_is_what_the_kernel_says(image):
    """Or nothing is said."""
    before = time.time_ns()
    (image / "new").write_text("x")
    born = sealing._birth(str(image / "new"))
    if not born:
        pytest.skip("this file system does not keep it")
    assert before - 10**8 < born <= time.time_ns()
    assert 0 == sealing._birth(str(image / "nothing"))
    assert stat.S_ISREG(os.stat(image / "new").st_mode)


def test_every_directory_above_is_known():
    """A directory that holds a mount or the scope says nothing by itself."""
    assert {"/", "/a", "/a/b"} == sealing.ancestors(["/a/b/c", "/a", "/"])
