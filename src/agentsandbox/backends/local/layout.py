# SPDX-License-Identifier: Apache-2.0
"""What of the host a sandbox shows: the operating system's own directories and the interpreter, and nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

import attrs

__all__ = ["HOME", "STANDARD_PATH", "USER", "USER_ID", "WORKDIR", "Layout", "of_host", "of_root"]

USER = "sandbox"
USER_ID = 1000
HOME = "/home/sandbox"
WORKDIR = "/workspace"

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

SYSTEM = ("usr", "etc", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""The operating system's own directories, by the file system hierarchy standard. Links among them stay links."""

STORES = ("nix/store", "gnu/store")
"""Where some distributions keep all programs, readable by everybody."""

PACKAGES = "var/lib/dpkg"
"""The package database: without it, installed packages look missing."""

INTERPRETER_PARTS = ("bin", "lib", "lib64", "include", "ssl", "pyvenv.cfg")
"""
What is shown of an interpreter's prefix. Never all of it: a virtual environment may have been made in a project's
directory, beside its secrets, and ``~/.local`` is a prefix too.
"""

IMAGE = "/image"
"""Where the parent of the sandboxes has the root file system of an image that is not the host's."""

OWN_PROGRAMS = "/opt/agentsandbox/bin"
"""Where the interpreter is found as ``python`` and ``python3`` if it has no such name of its own."""

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


@attrs.frozen(kw_only=True)
class Layout:
    """What the parent process of an image shows and how a sandbox is put together from it."""

    mounts: tuple[tuple[str, str], ...]
    """Directories and files of the host, and where the parent has them. All are read-only."""
    links: tuple[tuple[str, str], ...]
    """Links in the parent's root: where, and to what."""
    overlays: tuple[dict[str, Any], ...]
    """See ``protocol/runner/layers.py``."""
    skeleton: tuple[tuple[Any, ...], ...]
    """Directories and links of an otherwise empty root. Empty for an image that brings its root."""
    entries: tuple[tuple[Any, ...], ...]
    """What is created in every sandbox unless it is there, with the capabilities of the boundary."""
    binds: tuple[str, ...]
    """What sandboxes show read-only at the parent's own path."""
    path: str = STANDARD_PATH
    """Where commands are looked for."""


def of_host(*, owner: int) -> Layout:
    """
    Show the host's own system.

    Args:
        owner: What the sandbox user's id is to the parent of the sandboxes.

    """
    mounts, links, overlays = _system()
    shown, shown_links = interpreter()
    binds = [path for path in shown if not _within(path, [target for _, target in mounts])]
    stores = [target for _, target in mounts if target.lstrip("/") in STORES]
    mounts += [(path, path) for path in binds]
    binds += stores
    path = _search_path()
    skeleton: list[tuple[Any, ...]] = []
    for name, mode in (("proc", 0o555), ("dev", 0o755), ("sys", 0o555), ("mnt", 0o755), ("opt", 0o755), ("srv", 0o755)):
        skeleton.append(("dir", f"/{name}", mode, 0, 0))
    skeleton += [("link", where, target) for where, target in links]
    if names := _missing_names(path):
        path += ":" + OWN_PROGRAMS
        skeleton += _parents([OWN_PROGRAMS], leaf="dir")
        skeleton += [("link", f"{OWN_PROGRAMS}/{name}", sys.executable) for name in names]
    skeleton += [
        ("dir", "/tmp", 0o1777, 0, 0),  # noqa: S108 - inside
        ("dir", "/home", 0o755, 0, 0),
        ("dir", HOME, 0o755, owner, owner),
        ("dir", WORKDIR, 0o755, owner, owner),
        ("dir", "/run", 0o755, 0, 0),
        ("dir", "/run/lock", 0o1777, 0, 0),
        ("dir", "/var", 0o755, 0, 0),
        ("dir", "/var/tmp", 0o1777, 0, 0),  # noqa: S108 - inside
        *(("dir", f"/var/{name}", 0o755, 0, 0) for name in ("cache", "lib", "log", "spool")),
        ("link", "/var/run", "/run"),
        ("link", "/var/lock", "/run/lock"),
    ]
    skeleton += _parents([overlay["at"] for overlay in overlays], leaf="dir")
    for where, target in _linked(shown_links, mounts):
        skeleton += [*_parents([where], leaf="dir")[:-1], ("link", where, target)]
    for bind in binds:
        skeleton += _parents([bind], leaf="dir" if os.path.isdir(bind) else "file")
    skeleton.append(("dir", "/root", 0o700, 0, 0))  # after the interpreter's, which may have to be reached through it
    return Layout(
        mounts=tuple(mounts),
        links=tuple(links) + tuple(_linked(shown_links, mounts)),
        overlays=tuple(overlays),
        skeleton=tuple(dict.fromkeys(skeleton)),
        entries=(),
        binds=tuple(binds),
        path=path,
    )


def of_root(root: str, *, owner: int) -> Layout:
    """
    Show a root file system of its own.

    Args:
        root: The directory on the host.
        owner: What the sandbox user's id is to the parent of the sandboxes.

    """
    mounts, links, _ = _system()
    shown, shown_links = interpreter()
    mounts += [(path, path) for path in shown if not _within(path, [target for _, target in mounts])]
    mounts.append((root, IMAGE))
    overlay = {
        "at": "/",
        "name": "root",
        "source": IMAGE,
        "accounts": "image",
        "etc": "etc",
        "user": [USER, USER_ID, HOME],
    }
    entries = [("dir", f"/{name}", 0o755, 0, 0) for name in ("proc", "dev", "sys", "etc", "home", "run", "var")]
    entries += [("dir", HOME, 0o755, owner, owner)]
    entries += [("dir", name, 0o1777, 0, 0) for name in ("/tmp", "/var/tmp")]  # noqa: S108 - inside
    return Layout(
        mounts=tuple(mounts),
        links=tuple(links) + tuple(_linked(shown_links, mounts)),
        overlays=(overlay,),
        skeleton=(),
        entries=tuple(entries),
        binds=(),
    )


def interpreter() -> tuple[list[str], list[tuple[str, str]]]:
    """
    Return what must be visible for this very interpreter to work: real paths, and the links that lead there.
    """
    programs = [program for program in (sys.executable, getattr(sys, "_base_executable", None)) if program]
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    links: dict[str, str] = {}
    for program in programs:
        prefixes += [os.path.dirname(os.path.dirname(hop)) for hop in _hops(program, links)]
    found: dict[str, None] = {}
    for prefix in dict.fromkeys(prefixes):
        for part in INTERPRETER_PARTS:
            path = os.path.join(prefix, part)
            if os.path.lexists(path):
                for hop in _hops(path, links):
                    real = os.path.realpath(hop)
                    if os.path.exists(real) and real.count("/") > 1:
                        found[real] = None
    paths = [path for path in found if not _within(path, [other for other in found if other != path])]
    return paths, [(where, target) for where, target in links.items() if not _within(where, paths)]


def program() -> str:
    """Return the path of the interpreter that the parent of sandboxes runs on."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _hops(path: str, links: dict[str, str]) -> list[str]:
    """Follow *path* one link at a time, noting each link on the way; return every path that it had meanwhile."""
    hops = [os.path.abspath(path)]
    for _ in range(40):  # the kernel's limit
        parts = PurePosixPath(hops[-1]).parts
        for depth in range(2, len(parts) + 1):
            prefix = os.path.join(*parts[:depth])
            if os.path.islink(prefix):
                target = os.readlink(prefix)
                links[prefix] = target
                onward = os.path.join(os.path.dirname(prefix), target, *parts[depth:])
                hops.append(os.path.normpath(onward))
                break
        else:
            break
    return hops


def _system() -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[dict[str, Any]]]:
    mounts: list[tuple[str, str]] = []
    links: list[tuple[str, str]] = []
    overlays: list[dict[str, Any]] = []
    for name in (*SYSTEM, PACKAGES):
        path = "/" + name
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            mounts.append((path, path))
            overlays.append({"at": path, "name": name.replace("/", "-"), "source": path})
            if name == "usr":
                overlays[-1].update(scan=["local"])
            elif name == "etc":
                overlays[-1].update(scan=["."], accounts="host", etc="", user=[USER, USER_ID, HOME])
    mounts += [("/" + name, "/" + name) for name in STORES if os.path.isdir("/" + name)]
    return mounts, links, overlays


def _search_path() -> str:
    own = [os.path.dirname(sys.executable), os.path.join(sys.prefix, "bin"), os.path.join(sys.base_prefix, "bin")]
    standard = STANDARD_PATH.split(":")
    return ":".join(dict.fromkeys([path for path in own if path not in standard] + standard))


def _missing_names(path: str) -> list[str]:
    return [name for name in ("python", "python3") if not any(os.path.exists(f"{p}/{name}") for p in path.split(":"))]


def _linked(links: Iterable[tuple[str, str]], mounts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out the links that a mount shows anyway."""
    return [(where, target) for where, target in links if not _within(where, [path for _, path in mounts])]


def _parents(paths: Iterable[str], *, leaf: str) -> list[tuple[Any, ...]]:
    made: list[tuple[Any, ...]] = []
    for path in paths:
        above = [str(parent) for parent in reversed(PurePosixPath(path).parents)][1:]
        made += [("dir", parent, 0o755, 0, 0) for parent in above]
        made.append(("dir", path, 0o755, 0, 0) if leaf == "dir" else ("file", path))
    return made


def _within(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith(other.rstrip("/") + "/") for other in others)
