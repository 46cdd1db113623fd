# SPDX-License-Identifier: Apache-2.0
"""What of the host a sandbox shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from agentsandbox.backends.local import layout

HIDDEN = ("/root", "/home", "/srv", "/mnt", "/opt", "/tmp", "/run", "/boot", "/media")


def test_host_shows_the_system_and_the_interpreter_only() -> None:
    """No mount is of a home, of data or of temporary files, except below it what the interpreter needs."""
    shown = layout.of_host(owner=1000)
    needed, _ = layout.interpreter()

    for source, target in shown.mounts:
        assert source == target
        assert source not in HIDDEN
        assert source in needed or not source.startswith(tuple(f"{place}/" for place in HIDDEN))
    assert {overlay["at"] for overlay in shown.overlays} >= {"/usr", "/etc"}


def test_parents_of_what_is_shown_come_first() -> None:
    """Directories and links of the skeleton can be made in order."""
    shown = layout.of_host(owner=1000)
    made = {"/"}
    for entry in shown.skeleton:
        assert os.path.dirname(entry[1]) in made, entry
        made.add(entry[1])
    assert {*shown.binds, *(overlay["at"] for overlay in shown.overlays)} <= made
    assert ("dir", "/workspace", 0o755, 1000, 1000) in shown.skeleton


def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Pretend that the interpreter is that of a virtual environment in a project, below a version that is a link."""
    version = tmp_path / "home/versions/3.11.7"
    for directory in ("bin", "lib/python3.11", "share"):
        (version / directory).mkdir(parents=True)
    (version / "bin/python3.11").touch()
    (version / "bin/python3").symlink_to("python3.11")
    (tmp_path / "home/versions/3.11").symlink_to("3.11.7")
    project = tmp_path / "home/project"
    (project / "bin").mkdir(parents=True)
    (project / "lib").mkdir()
    (project / "pyvenv.cfg").touch()
    (project / ".env").write_text("SECRET=1")
    (project / "bin/python").symlink_to(tmp_path / "home/versions/3.11/bin/python3")
    monkeypatch.setattr(sys, "executable", str(project / "bin/python"))
    monkeypatch.setattr(sys, "_base_executable", str(tmp_path / "home/versions/3.11/bin/python3"), raising=False)
    for name in ("prefix", "exec_prefix"):
        monkeypatch.setattr(sys, name, str(project))
        monkeypatch.setattr(sys, f"base_{name}", str(tmp_path / "home/versions/3.11"))
    return project, version


def test_project_around_an_environment_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a virtual environment in a project's directory only its own parts are shown, and the links that lead to it."""
    project, version = environment(tmp_path, monkeypatch)
    shown, links = layout.interpreter()

    assert set(shown) == {
        str(project / "bin"),
        str(project / "lib"),
        str(project / "pyvenv.cfg"),
        str(version / "bin"),
        str(version / "lib"),
    }
    assert links == [(str(tmp_path / "home/versions/3.11"), "3.11.7")]
    assert layout.program() == str(version / "bin/python3.11")


def test_interpreter_comes_first_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are looked for beside the interpreter, then in the system; a missing name of it is added at the end."""
    project, _ = environment(tmp_path, monkeypatch)
    (tmp_path / "home/versions/3.11.7/bin/python3").unlink()
    monkeypatch.setattr(layout, "STANDARD_PATH", "/nonexistent")
    shown = layout.of_host(owner=1000)

    assert shown.path == f"{project}/bin:{tmp_path}/home/versions/3.11/bin:/nonexistent:/opt/agentsandbox/bin"
    # The link of the environment leads nowhere now, so that neither name is found.
    assert ("link", "/opt/agentsandbox/bin/python3", str(project / "bin/python")) in shown.skeleton


def test_image_shows_nothing_of_the_host() -> None:
    """A sandbox of an image of its own has its root and no more."""
    shown = layout.of_root("/images/x", owner=1000)

    assert [(overlay["at"], overlay["source"]) for overlay in shown.overlays] == [("/", layout.IMAGE)]
    assert ("/images/x", layout.IMAGE) in shown.mounts
    assert (shown.binds, shown.skeleton, shown.path) == ((), (), layout.STANDARD_PATH)
