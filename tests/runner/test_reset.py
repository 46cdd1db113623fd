# SPDX-License-Identifier: Apache-2.0
"""A reset as in a Pod: the runner is the first process, all are one user without capabilities, files are on disk."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

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
