# SPDX-License-Identifier: Apache-2.0
"""Trees of files as plain dictionaries, on disk, and as a runner tells of them."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess

import attrs

from agentsandbox.session.changes import Entry, Pair

ROOT = "/w"


def write(tree, top):
    """Make a tree: name → ``("f", mode, bytes)`` or ``("l", 0o777, target)``; directories come with what is in them."""
    os.makedirs(top, exist_ok=True)
    for name, (kind, mode, content) in tree.items():
        path = os.path.join(os.fsencode(top), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if kind == "l":
            os.symlink(content, path)
        else:
            with open(path, "wb") as file:
                file.write(content)
            os.chmod(path, mode)


def read(top):
    """Return what is there, likewise."""
    tree, top = {}, os.fsencode(top)
    for place, directories, files in os.walk(top):
        for name in [*directories, *files]:
            path = os.path.join(place, name)
            key = os.path.relpath(path, top)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                tree[key] = ("l", 0o777, os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    tree[key] = ("f", stat.S_IMODE(status.st_mode), file.read())
    return tree


def entry(kind, mode, content=b"", **more):
    """An entry as a runner tells of it."""
    common = (kind, mode, 0, 0, 0, 0, ())
    if kind == "f":
        made = Entry(*common, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    elif kind == "l":
        made = Entry(*common, target=os.fsdecode(content))
    else:
        made = Entry(*common)
    return attrs.evolve(made, **more)


_TYPES = {"f": stat.S_IFREG, "l": stat.S_IFLNK, "d": stat.S_IFDIR}


def pairs(before, after):
    """Return what a runner tells of two trees."""
    sides = []
    for tree in (before, after):
        entries = {}
        for name, (kind, mode, content) in tree.items():
            entries[name] = (entry(kind, _TYPES[kind] | mode, content), content if kind == "f" else None)
            above = os.path.dirname(name)
            while above:
                entries[above] = (entry("d", stat.S_IFDIR | 0o755), None)
                above = os.path.dirname(above)
        sides.append(entries)
    found = []
    for name in sides[0].keys() | sides[1].keys():
        (old, a), (new, b) = (side.get(name, (None, None)) for side in sides)
        if old == new:
            continue
        if old is not None and new is not None and a == b:
            a = b = None
        found.append(Pair(f"{ROOT}/{os.fsdecode(name)}", old, new, a, b))
    return found


def apply(tool, patch, top):
    """Apply a patch in a directory; return what the tool said, or ``None`` if it went well."""
    env = {"PATH": os.environ["PATH"], "HOME": str(top), "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    env["GIT_CEILING_DIRECTORIES"] = os.path.dirname(os.path.abspath(top))
    done = subprocess.run(tool, input=patch, cwd=top, env=env, capture_output=True, check=False)
    return None if done.returncode == 0 else (done.stdout + done.stderr).decode("utf-8", "replace")


GIT = ["git", "apply", "--whitespace=nowarn", "-"]
PATCH = ["patch", "-p1", "-s"]
