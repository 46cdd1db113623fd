# SPDX-License-Identifier: Apache-2.0
"""Options of the local backend, ids, and what is looked at beforehand."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

import pytest

from agentsandbox.backends.base import Check
from agentsandbox.backends.local import LocalBackend, Unconfined, ids, layout, preflight
from agentsandbox.backends.local.parent import Parent
from agentsandbox.errors import ConfigurationError, ProvisionError, UsageError
from agentsandbox.models.sandbox import SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"isolation": "docker"}, "'docker'"),
        ({"network": True}, "network=True is not supported"),
        ({"disk_limit": 0}, "disk_limit must be a whole number of at least 1048576, not 0"),
        ({"disk_limit": 1e9}, "disk_limit"),
        ({"max_processes": True}, "max_processes"),
        ({"open_files": 1}, "open_files"),
        ({"memory_limit": 1}, "memory_limit"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    """A wrong option is an error that names it, before anything is started."""
    with pytest.raises(ConfigurationError, match=message):
        LocalBackend(**options)


def test_no_isolation_warns() -> None:
    """Choosing no isolation is told once, when it is chosen, where it is chosen."""
    with pytest.warns(Unconfined, match="can read and change everything") as caught:
        LocalBackend(isolation="none")

    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]


async def test_unknown_image_is_refused_before_anything_is_made() -> None:
    """Validation names an image that does not exist."""
    backend = LocalBackend()
    with pytest.raises(ConfigurationError, match="there is no image 'nothing'"):
        await backend.validate([SandboxSpec(image="host"), SandboxSpec(image="nothing")])

    assert repr(backend) == "<LocalBackend [namespaces, stopped, 0 hosts, 0 sandboxes]>"


async def test_backend_that_does_not_run_makes_nothing() -> None:
    """Outside of its context a backend refuses to make sandboxes; inside it refuses to run twice."""
    backend = LocalBackend()
    with pytest.raises(UsageError, match="not running"):
        await backend.create(SandboxSpec(image="host"), "a")
    async with backend.running():
        with pytest.raises(UsageError, match="running already"):
            async with backend.running():
                pass


async def test_error_of_the_caller_stays_what_it_is() -> None:
    """What is raised within the context leaves it unchanged."""
    backend, error = LocalBackend(), ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with backend.running():
            raise error

    assert caught.value is error


async def test_spares_are_as_many_as_sandboxes() -> None:
    """One is kept ready for each that is leased."""
    assert LocalBackend().default_spares(8) == 8


async def test_parent_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The words of the program that refused are in the error."""
    shown = layout.of_root(str(tmp_path / "gone"), owner=1000)
    parent = Parent("x", shown, limits=preflight.limits(), directory=str(tmp_path))
    with pytest.raises(ProvisionError, match=r"image 'x' did not start: .*gone.*No such file"):
        await parent.run()

    assert parent.stopped.is_set()
    assert repr(parent) == "<Parent [x, ended, 0 sandboxes, 0 made]>"


# Ids.


def test_blocks_of_ids_are_nobodys() -> None:
    """Two parents have different blocks, within the ids for containers, and a block is free after its release."""
    if os.geteuid():
        assert ids.choose().kind == "single"
        return
    first, second = ids.choose(), ids.choose()
    try:
        assert first.base != second.base
        for block in (first, second):
            assert block.kind == "range"
            assert ids.FIRST <= block.base <= block.base + ids.RANGE_SIZE <= ids.LAST + 1
            assert block.base % ids.RANGE_SIZE == 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken, pytest.raises(OSError, match="in use"):
            taken.bind(f"\0agentsandbox/ids/{first.base // ids.RANGE_SIZE}")
    finally:
        first.release()
        second.release()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as free:
        free.bind(f"\0agentsandbox/ids/{first.base // ids.RANGE_SIZE}")


def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, mapping: str, capabilities: str) -> None:
    """Be root with these ids and capabilities."""
    for name in ("uid_map", "gid_map"):
        (tmp_path / name).write_text(f"{mapping}\n")
    (tmp_path / "status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(ids, "OURSELVES", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_root_without_capabilities_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root of the whole machine whose id would be the sandbox's is refused, and told what to do."""
    pretend(tmp_path, monkeypatch, mapping="0 0 4294967295", capabilities="00000000a804253b")
    with pytest.raises(ConfigurationError, match="CAP_SETUID"):
        ids.usable_range()
    assert not next(check for check in preflight.static_checks() if check.name == "ids").ok


@pytest.mark.parametrize("mapping", ["0 1000 1", "0 100000 65536", "0 1000 1\n1 100000 65536"])
def test_root_of_a_container_has_one_id(mapping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root of a user namespace is treated as an ordinary user."""
    pretend(tmp_path, monkeypatch, mapping=mapping, capabilities="000001ffffffffff")

    assert ids.usable_range() is False
    assert preflight.owner() == 0


# What is looked at.


async def test_this_machine_is_good() -> None:
    """Every check has a name and words, and the trial says what sandboxes have."""
    checks = await LocalBackend().examine()

    assert [check for check in checks if not check.ok and check.required] == []
    assert {"kernel", "python", "bwrap", "ids", "sandbox"} <= {check.name for check in checks}
    assert checks[-1].name == "sandbox"
    assert checks[-1].detail == "made and removed, with " + ("one id" if os.geteuid() else "its own ids")


@pytest.mark.parametrize(
    ("release", "expected"),
    [("6.18.44-fc", (6, 18)), ("5.4", (5, 4)), ("6.1.0-13-amd64", (6, 1)), ("7-rc1", (7, 0))],
)
def test_kernel_versions(release: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two numbers count, whatever distributions add."""
    monkeypatch.setattr(platform, "release", lambda: release)

    assert preflight.kernel_version() == expected


async def test_old_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is too old is named with the one that is needed, and there is no trial."""
    monkeypatch.setattr(platform, "release", lambda: "5.4.0-generic")
    monkeypatch.setattr(preflight, "_found_good", set())
    with pytest.raises(ConfigurationError, match=r"kernel: Linux .* Linux 5\.14 or later is needed"):
        await LocalBackend().validate([SandboxSpec(image="host")])
    assert [check.name for check in await preflight.checks() if check.name == "sandbox"] == []


async def test_kernel_too_old_for_images_is_refused_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image other than the host is refused where directories cannot be replaced in overlays."""
    (tmp_path / "usr").mkdir()
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-generic")
    await LocalBackend().validate([SandboxSpec(image="host")])
    with pytest.raises(ConfigurationError, match=r"needs Linux 6\.6 or later; this kernel has only 'host'"):
        await LocalBackend().validate([SandboxSpec(image=str(tmp_path))])


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("mount proc on /proc: Operation not permitted", "parts of /proc are hidden"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "parts of /proc are hidden"),
        ("mount overlay on /jail/root/usr: Invalid argument", "layer of an overlay"),
        ("bwrap: No permissions to create a new namespace", "--security-opt seccomp=unconfined"),
    ],
)
def test_refusals_are_explained(reason: str, fix: str) -> None:
    """What the kernel refused comes with what to do about it."""
    check = preflight._refused(reason)

    assert check == Check(name="sandbox", ok=False, detail=reason, fix=check.fix)
    assert fix in check.fix
