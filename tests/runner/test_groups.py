# SPDX-License-Identifier: Apache-2.0
"""What control groups tell about the memory of a container, and what is made of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from agentsandbox.protocol.runner import cell, groups, jail, mounts


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A container's own group."""
    path = tmp_path / "memory.oom_control"
    path.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    monkeypatch.setattr(groups, "BASES", (str(path),))
    return path


def test_a_kill_in_the_container_is_counted(base):
    """Every process that is killed for the memory of all is everybody's business."""
    witness = groups.Witness("jail-1", [], shared=False)
    assert {"oom": 0} == witness()
    base.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")

    assert {"oom": 2} == witness()
    assert "<Witness [{'oom': 2}]>" == repr(witness)


def test_the_second_version_of_groups_is_read_as_well(base):
    """The same count is in a file of another form."""
    base.write_text("low 0\nhigh 0\nmax 7\noom 3\noom_kill 1\noom_group_kill 0\n")

    assert {"oom": 1} == groups.Witness("jail-1", [], shared=False)()


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill x\n"])
def test_a_file_that_says_nothing_counts_nothing(base, text):
    """What cannot be read is no evidence."""
    base.write_text(text)

    assert {"oom": 0} == groups.Witness("jail-1", [], shared=False)()


def test_a_kill_for_the_jails_own_limit_is_its_own(base, tmp_path):
    """The kernel counts kills where the victim is, and shortages where the limit is: only both together tell whose."""
    witness = groups.Witness("jail-1", ["memory"], shared=False)
    witness._own = str(tmp_path / "own")
    os.mkdir(witness._own)
    killed, failed = tmp_path / "own/memory.oom_control", tmp_path / "own/memory.failcnt"

    def happens(kills, failures):
        killed.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        failed.write_text(f"{failures}\n")
        return witness()["oom"]

    assert [0, 0, 1, 1, 1, 3] == [happens(*one) for one in [(0, 0), (1, 9), (2, 9), (2, 9), (3, 12), (5, 12)]]


def test_a_full_disk_that_is_shared_is_told(base, monkeypatch):
    """Somebody else may have filled it."""
    room = SimpleNamespace(f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _path: room)

    assert {"oom": 0, "full": True} == groups.Witness("jail-1", [], shared=True)()
    room.f_bavail = 1 << 20
    assert {"oom": 0, "full": False} == groups.Witness("jail-1", [], shared=True)()


def test_groups_are_made_where_that_is_allowed(tmp_path, monkeypatch):
    """One a kind that is limited; what is refused is left out."""
    for kind in ("memory", "pids", "cpu,cpuacct", "freezer"):
        (tmp_path / kind).mkdir()
    (tmp_path / "pids/jail-1").mkdir()  # as if it could not be made
    mounted = [
        mounts.Mount(str(tmp_path / kind), ["ro", "nosuid"], "cgroup", ["rw", kind])
        for kind in ("memory", "pids", "cpu,cpuacct", "freezer")
    ]
    monkeypatch.setattr(mounts, "table", lambda: mounted)
    remounted = []
    monkeypatch.setattr(cell, "remount", lambda place, options: remounted.append((place, options)))
    written = {}
    monkeypatch.setattr(jail, "write_text", written.__setitem__)

    group = groups.make("jail-1", {"memory": 100, "pids": 10, "cpu": 1024})

    assert "<Group [cpu, memory]>" == repr(group)
    memory, cpu = tmp_path / "memory/jail-1", tmp_path / "cpu,cpuacct/jail-1"
    assert {f"{memory}/memory.limit_in_bytes": "100", f"{cpu}/cpu.shares": "1024"} == written
    assert (str(tmp_path / "memory"), ["nosuid"]) in remounted
    group.join()
    assert {f"{memory}/cgroup.procs", f"{cpu}/cgroup.procs"} < set(written)
    assert [] == group.remove(1.0)
    assert not memory.exists()
    assert [] == group.remove(1.0)
    assert groups.make("jail-2", {"memory": None}) is None


def test_a_group_that_is_not_empty_is_told(tmp_path):
    """Something of the jail is left then."""
    place = tmp_path / "jail-1"
    (place / "child").mkdir(parents=True)

    assert [str(place)] == groups.Group({"memory": str(place)}).remove(0.0)


def test_the_table_of_mounts_is_read(monkeypatch, tmp_path):
    """Places, also with spaces and letters beyond ASCII, options and kinds, in order."""
    table = tmp_path / "mountinfo"
    table.write_text(
        "663 504 0:152 / / rw,relatime - overlay overlay rw,lowerdir=/a\n"
        "664 663 0:154 /x /a\\040bü ro,nosuid shared:1 - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(mounts, "TABLE", str(table))

    assert [
        mounts.Mount("/", ["rw", "relatime"], "overlay", ["rw", "lowerdir=/a"]),
        mounts.Mount("/a bü", ["ro", "nosuid"], "tmpfs", ["rw"]),
    ] == mounts.table()
    assert [False, True] == [mount.read_only for mount in mounts.by_place().values()]
