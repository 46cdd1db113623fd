# SPDX-License-Identifier: Apache-2.0
"""Tasks files and rollout names."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentsandbox.cli.tasks import load_rollout, load_tasks
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.episode import Episode


def test_a_line_becomes_an_episode(tmp_path: Path) -> None:
    """Every key of a line reaches the episode; what is not said has its default."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"id": "a", "image": "x.tar", "group": 3, "inputs": {"k": [1]}, "artifacts": ["log"], "timeout": 7}\n'
        "\n"
        '{"id": "b"}\n'
    )

    episodes = load_tasks(path, image="host")

    assert episodes == [
        Episode(id="a", image="x.tar", group=3, inputs={"k": [1]}, artifacts=("log",), timeout=7),
        Episode(id="b", image="host"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("{", "line 2: Expecting property name", id="not JSON"),
        pytest.param("[1]", r"line 2: a task is a JSON object, not \[1\]", id="not an object"),
        pytest.param("{}", "line 2: key 'id' is missing", id="no id"),
        pytest.param(
            '{"id": 7}', "line 2: an episode id is a string that is not empty, not 7", id="id of another type"
        ),
        pytest.param('{"id": "a"}', "line 2: id 'a' is already used in line 1", id="id twice"),
        pytest.param(
            '{"id": "b", "imgae": "x"}', "line 2: unknown key 'imgae'; known are artifacts", id="misspelt key"
        ),
        pytest.param('{"id": "b", "inputs": []}', "line 2: 'inputs' must be a JSON object", id="inputs"),
        pytest.param('{"id": "b", "artifacts": "x"}', "line 2: 'artifacts' must be a JSON array", id="artifacts"),
        pytest.param('{"id": "b", "group": {}}', "line 2: 'group' must be a string or a number", id="group"),
        pytest.param('{"id": "b", "timeout": 0}', "line 2: timeout of episode 'b' must be above 0", id="timeout"),
        pytest.param('{"id": "b", "timeout": "x"}', "line 2: ", id="timeout of another type"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path, line: str, words: str) -> None:
    """Whoever wrote the file learns which line cannot work, and why."""
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a"}\n' + line + "\n")

    with pytest.raises(ConfigurationError, match=words):
        load_tasks(path, image="host")


def test_a_file_without_tasks_is_refused(tmp_path: Path) -> None:
    """An empty file is a mistake, not an empty batch."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n\n")

    with pytest.raises(ConfigurationError, match="contains no task"):
        load_tasks(path, image="host")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The error names the path."""
    with pytest.raises(ConfigurationError, match=r"cannot read the tasks file .*nowhere\.jsonl"):
        load_tasks(tmp_path / "nowhere.jsonl", image="host")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_colon", "--rollout takes module:function, not 'no_colon'"),
        (":f", "--rollout takes module:function, not ':f'"),
        ("no_such_module_at_all:f", "cannot import 'no_such_module_at_all'"),
        ("math:no_such_thing", "module 'math' has no 'no_such_thing'"),
        ("math:pi", "which is not a function"),
    ],
)
def test_a_rollout_that_cannot_be_had_is_refused(name: str, words: str) -> None:
    """The error names what was asked for."""
    with pytest.raises(ConfigurationError, match=words):
        load_rollout(name)


def test_a_rollout_is_found_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script beside the tasks needs no installation."""
    (tmp_path / "beside_the_tasks.py").write_text("class C:\n    @staticmethod\n    async def f(s, e): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])

    assert load_rollout("beside_the_tasks:C.f").__qualname__ == "C.f"
