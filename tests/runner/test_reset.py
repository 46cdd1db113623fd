# SPDX-License-Identifier: Apache-2.0
"""A reset as in a Pod: the runner is the first process, all are one user without capabilities, files are on disk."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agentsandbox.protocol.runner import ports, scan, surroundings

from .conftest import Driver

USER = 65534

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None,
    reason="needs root, unshare and setpriv",
)


@pytest.fixture
def place():
    """A directory of that user, on disk."""
    with tempfile.TemporaryDirectory(prefix="reset-", dir="/var/tmp") as top:
        place = Path(top)
        place.chmod(0o755)
        (place / "work").mkdir()
        (place / "work/f.py").write_text("answer = 42\n")
        (place / "work/closed").mkdir()
        (place / "outside").mkdir()
        (place / "outside/kept").write_text("kept\n")
        for path in place.rglob("*"):
            os.chown(path, USER, USER)
        yield place


@pytest.fixture
def pod(place):
    """A runner that sees itself as the first process."""
    wrapper = place / "python"
    wrapper.write_text(
        "#!/bin/sh\n"
        f"exec unshare --fork --pid --mount-proc --ipc --net --kill-child setpriv --reuid={USER} --regid={USER} "
        f'--clear-groups --bounding-set=-all --no-new-privs {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    with Driver(str(wrapper), place / "work") as driver:
        yield driver


def builtin(driver: Driver, name: str, **arguments: Any) -> dict[str, Any]:
    report = driver.run(builtin=name, args={"path": "", **arguments}).exit["report"]
    assert isinstance(report, dict)
    return report


def baseline(driver: Driver, place: Path) -> dict[str, Any]:
    """Look at nothing of this machine but the place."""
    above = {f"/{name}" for name in os.listdir("/")} - {"/var"}
    beside = {f"/var/{name}" for name in os.listdir("/var")} - {"/var/tmp"}
    others = {f"/var/tmp/{name}" for name in os.listdir("/var/tmp")} - {str(place)}
    return builtin(driver, "baseline", scope=[], exclude=sorted(above | beside | others), copies=3 << 19)


def reset(driver: Driver, taken: dict[str, Any]) -> dict[str, Any]:
    return builtin(driver, "reset", manifest=taken["manifest"], stamps=taken["stamps"])


def test_what_changed_is_put_back_and_everything_is_killed(pod, place):
    """Files, modes and processes are as they were, time after time, without a capability."""
    taken = baseline(pod, place)
    assert (True, [str(place / "work")]) == (taken["verified"], taken["scope"]), taken["reason"]
    for _ in range(2):
        pod.run(script="echo x > f.py; chmod 0 f.py; mkdir -p a/b; chmod 0 a; chmod 777 closed; setsid sleep 60 &")
        report = reset(pod, taken)

        assert (True, "") == (report["verified"], report["reason"])
        assert ["a", "closed", "f.py"] == sorted(Path(path).name for path in report["changed"])
        assert ["sleep 60"] == [command for _, command in report["killed"]]
        assert "answer = 42\n" == (place / "work/f.py").read_text()
        assert ["closed", "f.py"] == sorted(os.listdir(place / "work"))
        taken["stamps"] = report["stamps"]


@pytest.mark.parametrize(
    "change",
    [
        "echo x > ../outside/new",
        "echo x >> ../outside/kept",
        "touch -r f.py ../outside/kept",
        "chmod 600 ../outside/kept",
        "rm ../outside/kept",
        "mv ../outside ../elsewhere",
    ],
)
def test_a_change_outside_of_the_scope_is_found(pod, place, change):
    """It cannot be undone here, so the sandbox is not clean."""
    os.chown(place, USER, USER)
    taken = baseline(pod, place)
    assert 0 == pod.run(script=change).exit["code"]

    report = reset(pod, taken)

    assert not report["verified"]
    assert report["reason"].startswith(f"changed outside of the scope: {place}")


def test_a_large_file_with_holes_takes_no_room(pod, place):
    """It is kept although it is larger than what may be kept, and has its holes again."""
    huge = place / "work/huge"
    with huge.open("wb") as file:
        file.truncate(1 << 28)
        file.seek(1 << 27)
        file.write(b"middle")
    os.chown(huge, USER, USER)
    blocks = huge.stat().st_blocks
    taken = baseline(pod, place)
    assert taken["copied"] < 2 << 20
    pod.run(script="printf X | dd of=huge bs=1 seek=99999999 conv=notrunc 2>/dev/null")
    report = reset(pod, taken)

    assert (True, [str(huge)]) == (report["verified"], report["changed"]), report["reason"]
    assert (1 << 28, True) == (huge.stat().st_size, huge.stat().st_blocks <= blocks)
    with huge.open("rb") as file:
        file.seek(1 << 27)
        assert b"middle\0" == file.read(7)


def test_the_limits_of_the_runner_are_looked_at(pod, place):
    """What is done to the first process is done to every command after it."""
    taken = baseline(pod, place)
    assert 0 == pod.run(script="prlimit --pid 1 --nofile=64:64").exit["code"]

    assert "the runner's limits" == reset(pod, taken)["reason"]


def test_only_the_hashes_that_were_given_are_believed(pod, place):
    """Neither another manifest nor other stamps are restored from, and nothing is killed for them."""
    taken = baseline(pod, place)
    for name in ("manifest", "stamps"):
        report = reset(pod, {**taken, name: "0" * 64})

        assert (False, "the baseline is not the one that was taken") == (report["verified"], report["reason"])
    assert reset(pod, taken)["verified"]


def test_there_is_no_reset_without_a_baseline(pod, place):
    """It says so, and does nothing."""
    report = reset(pod, {"manifest": "0" * 64, "stamps": "0" * 64})

    assert (False, "baseline missing") == (report["verified"], report["reason"])


def test_nothing_may_run_when_a_baseline_is_taken(pod, place):
    """What runs could change what is being looked at."""
    pod.run(script="setsid sleep 60 >/dev/null 2>&1 &")

    assert "processes run already: sleep 60" == baseline(pod, place)["reason"]


def test_an_episode_cannot_reach_what_the_runner_keeps(pod, place):
    """Neither its descriptors nor its memory, although it is the same user."""
    baseline(pod, place)
    result = pod.run(script="ls /proc/1/fd; cat /proc/1/mem; kill -9 1; echo alive")

    assert b"alive\n" == result.stdout
    assert 2 == result.stderr.count(b"ermission denied")


@pytest.mark.parametrize(("now", "most", "room"), [("960", "1024", False), ("3", "1024", True), ("960", "max", True)])
def test_p36_a_sandbox_without_processes_to_spare_is_not_used_again(
    tmp_path: Path, now: str, most: str, room: bool
) -> None:
    """What counts against the limit although everything was killed makes the next episode fail to fork."""
    (tmp_path / "pids.current").write_text(now + "\n")
    (tmp_path / "pids.max").write_text(most + "\n")
    if room:
        surroundings.check_room((str(tmp_path), "/nowhere"))
        return
    with pytest.raises(scan.Unverifiable, match="960 of 1024 processes are in use although none is left"):
        surroundings.check_room((str(tmp_path), "/nowhere"))


def test_flags_are_put_back_and_no_others_with_them(pod, place):
    """What says how a disk keeps a file is not the episode's and stays as it is."""
    fd = os.open(place / "work/f.py", os.O_RDONLY)
    try:
        try:
            before = fcntl.ioctl(fd, scan.FS_IOC_GETFLAGS, b"\0" * 4)
        except OSError:
            pytest.skip("this file system has no flags")
        taken = baseline(pod, place)
        if pod.run(script="chattr +d f.py").exit["code"] != 0:
            pytest.skip("this machine has no chattr")
        assert before != fcntl.ioctl(fd, scan.FS_IOC_GETFLAGS, b"\0" * 4)
        report = reset(pod, taken)

        assert (True, [str(place / "work/f.py")]) == (report["verified"], report["changed"]), report["reason"]
        assert before == fcntl.ioctl(fd, scan.FS_IOC_GETFLAGS, b"\0" * 4)
    finally:
        os.close(fd)


def test_a_directory_of_somebody_else_keeps_the_time_of_its_last_change(pod, place):
    """As ``/tmp`` where nobody is root: what was made in it goes, and only its owner could set its time."""
    shared = place / "work/shared"
    shared.mkdir()
    shared.chmod(0o1777)
    taken = baseline(pod, place)
    for _ in range(2):
        assert 0 == pod.run(script="echo x > shared/new; mkdir shared/d").exit["code"]
        report = reset(pod, taken)

        assert (True, ["d", "new"]) == (report["verified"], sorted(map(os.path.basename, report["changed"])))
        assert [] == os.listdir(shared)
        taken["stamps"] = report["stamps"]


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ("0100007F:223E", ("127.0.0.1", 8766)),
        ("00000000000000000000000001000000:0050", ("::1", 80)),
        ("0000000000000000FFFF00000100007F:1F90", ("::ffff:127.0.0.1", 8080)),
    ],
    ids=["v4", "v6", "mapped"],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="written as this kernel writes them")
def test_addresses_in_the_kernels_tables(words, address):
    """Each word of an address is written as a number of this machine."""
    assert address == ports._address(words)
