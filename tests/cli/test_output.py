# SPDX-License-Identifier: Apache-2.0
"""What a command writes: whole or not at all, and a clear word where it cannot be written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agentsandbox.cli.output import write_json
from agentsandbox.errors import ConfigurationError


def fill(path: Path) -> None:
    """Let the disk be full where *path* is written."""
    path.with_name(f".{path.name}.{os.getpid()}").symlink_to("/dev/full")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """An earlier file is whole, no part of the new one stays, and the error names the file and what to do."""
    path = tmp_path / "results.json"
    write_json(path, {"reward": 1})
    fill(path)

    with pytest.raises(ConfigurationError, match=rf"cannot write {path}: No space left on device; make room there"):
        write_json(path, {"reward": 2})

    assert json.loads(path.read_text()) == {"reward": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_results_that_cannot_be_written_end_a_run_with_a_clear_word(
    tmp_path: Path, invoke: Callable[..., tuple[int, str]]
) -> None:
    """What came of the batch is printed all the same, the exit code is 2, and the journal still has the records."""
    output = tmp_path / "out"
    assert invoke("run", "--count", "1", "--output", output)[0] == 0
    (output / "results.json").unlink()
    fill(output / "results.json")

    code, text = invoke("run", "--resume", output)

    assert code == 2
    assert "episodes=1 successful_episodes=1 reward_sum=1" in text
    assert f"cannot write {output}/results.json: No space left on device" in text
    assert invoke("run", "--resume", output)[0] == 0
    assert json.loads((output / "results.json").read_text())["reward_sum"] == 1.0


@pytest.mark.parametrize("where", ["missing/ttfc.json", "file/ttfc.json"])
def test_a_report_that_has_no_place_is_refused_before_anything_is_measured(
    tmp_path: Path, where: str, invoke: Callable[..., tuple[int, str]]
) -> None:
    """The error names the directory."""
    (tmp_path / "file").touch()

    code, text = invoke("ttfc", "--backend", "local", "--output", tmp_path / where)

    assert code == 2
    assert "is no directory that takes files" in text.replace("\n", " ")
