# SPDX-License-Identifier: Apache-2.0
"""The mutation-repair job: its pure part, and a small run whose rewards are known."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from agentsandbox.models.episode import Episode
from agentsandbox.pool import SandboxPool
from examples.mutation_repair.check import known_rewards, mismatches
from examples.mutation_repair.mutants import Edit, Mutant, apply, covering_tests, mutants
from examples.mutation_repair.rollout import rollout
from examples.mutation_repair.tasks import Project, fetch, make, write

SOURCE = '''\
def clamp(x, low=0, high=None):
    """Clamp: 1 < 2 and 3."""
    if (x) < (low) and not high:
        return low
    return x * 2 + high if x == 1 else None


def _private(x):
    return x + 1


class Box:
    def full(self):
        return len(self) >= 10 or True
'''


def news(found: list[Mutant], line: int) -> list[tuple[str, str]]:
    return sorted((mutant.kind, mutant.edit.new.strip()) for mutant in found if mutant.edit.line == line)


def test_mutants_change_one_thing_of_one_line() -> None:
    """Every operator, constant and return of public code is mutated; docstrings and private functions are not."""
    found = mutants(SOURCE, "m.py")

    assert news(found, 1) == [("constant", "def clamp(x, low=1, high=None):")]
    assert news(found, 2) == []
    assert news(found, 3) == [
        ("boolean", "if (x) < (low) and high:"),
        ("boolean", "if (x) < (low) or not high:"),
        ("comparison", "if (x) <= (low) and not high:"),
    ]
    assert news(found, 4) == [("return", "return None")]
    assert news(found, 5) == [
        ("arithmetic", "return x * 2 - high if x == 1 else None"),
        ("arithmetic", "return x + 2 + high if x == 1 else None"),
        ("comparison", "return x * 2 + high if x != 1 else None"),
        ("constant", "return x * 2 + high if x == 2 else None"),
        ("constant", "return x * 3 + high if x == 1 else None"),
        ("return", "return None"),
    ]
    assert news(found, 9) == []
    assert {mutant.function for mutant in found} == {"clamp", "Box"}
    assert all(mutant.edit.old == SOURCE.split("\n")[mutant.edit.line - 1] for mutant in found)


def test_mutants_of_lines_that_are_not_ascii() -> None:
    """Positions are bytes in the parser and characters in the edit."""
    (first, *_) = mutants("def f(a):\n    return 'é✨' if a < 1 else a\n", "m.py")

    assert first.edit.new in {"    return 'é✨' if a <= 1 else a", "    return None"}


def test_apply_insists_on_the_line_it_expects() -> None:
    """An edit changes exactly its line, and refuses a source that is not the one it was made for."""
    edit = Edit("m.py", 2, "b", "c")
    assert apply("a\nb\nd\n", edit) == "a\nc\nd\n"
    for source in ("a\nx\n", "a", ""):
        with pytest.raises(ValueError, match=r"m\.py:2"):
            apply(source, edit)


def test_covering_tests_are_the_steady_and_specific_ones() -> None:
    """Tests that depend on chance or time are left out; the class that calls the fewest functions comes first."""
    source = """
class Wide(TestCase):
    def test_a(self): mi.first(mi.take(1)); mi.last()

class Narrow(TestCase):
    def test_b(self): mi.first(2)

class Chance(TestCase):
    def test_c(self): mi.first(random())

class Helper:
    def run(self): mi.first(3)
"""
    assert covering_tests(source, "t")["first"] == ["t.Narrow", "t.Wide"]
    assert set(covering_tests(source, "t")) == {"first", "take", "last"}


def test_check_counts_absent_rewards_as_wrong() -> None:
    """An absent reward is not a 0, and a missing or unknown episode is a difference, too."""
    known = {"a": 1.0, "b": 0.0, "c": 0.0}

    assert mismatches(known, [("a", 1.0), ("b", 0.0), ("c", 0.0)]) == []
    assert mismatches(known, [("a", 0.0), ("b", None), ("d", 1.0)]) == [
        "a: known 1.0, got 0.0",
        "b: known 0.0, got None",
        "c: known 0.0, got None",
        "d: known None, got 1.0",
    ]


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned project; without a network there is nothing to repair."""
    try:
        return fetch(tmp_path_factory.mktemp("mutation-repair"))
    except subprocess.CalledProcessError:
        pytest.skip("pip cannot fetch the project that is mutated")


@pytest.mark.anyio
@pytest.mark.timeout(180)
async def test_rewards_are_the_known_ones(archive: Path, tmp_path: Path, anyio_backend_name: str) -> None:
    """Every reward of a small batch is the one that was known; the policies behind it are not all the same."""
    async with SandboxPool("local", images={"host": 4}) as pool:
        tasks = await make(Project.load(archive), pool, count=6, seed=1, image="host")
        write(tasks, tmp_path / "tasks.jsonl")
        result = await pool.rollout([Episode(**task) for task in tasks], rollout=rollout)

    known = known_rewards(tmp_path / "tasks.jsonl")
    assert mismatches(known, [(record.episode.id, record.reward) for record in result.records]) == []
    assert set(known.values()) == {0.0, 1.0}
    assert len(Counter(task["inputs"]["policy"] for task in tasks)) >= 2
    for record in result.records:
        assert bool(record.patch) == bool(record.episode.inputs["action"])
        assert record.attempts == 1
