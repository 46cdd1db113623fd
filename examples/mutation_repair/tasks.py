# SPDX-License-Identifier: Apache-2.0
"""
Make ``tasks.jsonl``: mutants that the project's own tests kill, each with an action whose reward is known.

Everything that a task claims is tried in a sandbox first: that the original passes, that the mutant fails, and that the
wrong patch fails, too. The same seed gives the same tasks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from agentsandbox.errors import InvalidTask
from agentsandbox.models.episode import Episode, Graded
from agentsandbox.pool import SandboxPool
from agentsandbox.rollouts.grading import TestOutcome, grade_tests, parse_outcomes
from examples.mutation_repair.mutants import Edit, Mutant, apply, covering_tests, mutants
from examples.mutation_repair.rollout import run_tests, unpack

if TYPE_CHECKING:
    from agentsandbox.client import Lease

MODULES = {"more_itertools/more.py": "tests.test_more", "more_itertools/recipes.py": "tests.test_recipes"}
POLICIES = {"gold": 1.0, "no-op": 0.0, "wrong": 0.0}
MOST_PER_FUNCTION = 2
TRIAL_TIMEOUT = 15.0
"""Seconds for one trial. A mutant that does not end is no task; those that do take less than one."""


def fetch(cache: Path) -> Path:
    """Download the pinned source archive into *cache*, unless it is there; pip checks its hash."""
    requirements = Path(__file__).with_name("requirements.txt")
    pin = next(line.split()[0] for line in requirements.read_text().splitlines() if "==" in line)
    name, version = pin.split("==")
    archive = cache / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", name, "--require-hashes", "--dest", str(cache), "--requirement", str(requirements)]
        subprocess.run(command, check=True)
    return archive.resolve()


@attrs.frozen
class Project:
    """The unmodified project."""

    archive: Path
    sources: dict[str, str]

    @classmethod
    def load(cls, archive: Path) -> Project:
        """Read it from its source archive."""
        with tarfile.open(archive) as tar:
            members = {name.partition("/")[2]: name for name in tar.getnames() if name.endswith(".py")}
            wanted = [*MODULES, *(f"{module.replace('.', '/')}.py" for module in MODULES.values())]
            return cls(archive, {path: tar.extractfile(members[path]).read().decode() for path in wanted})  # type: ignore[union-attr]

    def describe(self) -> dict[str, str]:
        """Name it as a task does."""
        return {"path": str(self.archive), "sha256": hashlib.sha256(self.archive.read_bytes()).hexdigest()}

    def tests(self) -> dict[str, list[str]]:
        """Map each function to the test classes that call it, at most two."""
        found: dict[str, list[str]] = {}
        for module in MODULES.values():
            for function, classes in covering_tests(self.sources[f"{module.replace('.', '/')}.py"], module).items():
                found[function] = (found.get(function, []) + classes)[:2]
        return found

    def mutants(self) -> list[Mutant]:
        """List every mutant of a function that has tests."""
        tests = self.tests()
        return [m for path in MODULES for m in mutants(self.sources[path], path) if m.function in tests]


async def trial(sandbox: Lease, episode: Episode) -> Graded:
    """Try a state of the project: 1 if its tests pass, 0 if they fail, no reward if they do not end."""
    await unpack(sandbox, episode.inputs["project"])
    for fields in episode.inputs["edits"]:
        edit = Edit(**fields)
        await sandbox.write_file(edit.path, apply((await sandbox.read_file(edit.path)).decode(), edit))
    result = await run_tests(sandbox, episode.inputs["tests"])
    if "MemoryError" in result.error_text:
        raise InvalidTask("it fills the memory")
    required = episode.inputs["required"]
    if required is None:
        shown = parse_outcomes(result.error_text)
        required = sorted(name for name, outcome in shown.items() if "." in name and outcome is not TestOutcome.SKIPPED)
    return Graded(reward=grade_tests(result, tests=required), info={"required": required})


def candidates(project: Project, seed: int) -> Iterator[tuple[Mutant, str, list[Edit]]]:
    """Yield mutants in seeded order, each with a policy and the edits that it makes."""
    rng = random.Random(seed)
    everything = project.mutants()
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in everything:
        by_line.setdefault((mutant.edit.path, mutant.edit.line), []).append(mutant)
    order = sorted(everything, key=lambda mutant: (mutant.edit.path, mutant.edit.line, mutant.edit.new))
    rng.shuffle(order)
    taken: Counter[str] = Counter()
    for mutant in order:
        if taken[mutant.function] >= MOST_PER_FUNCTION:
            continue
        edit = mutant.edit
        others = [other.edit.new for other in by_line[edit.path, edit.line] if other.edit.new != edit.new]
        policy = rng.choice(list(POLICIES) if others else ["gold", "no-op"])
        new = {"gold": [edit.old], "no-op": [], "wrong": [rng.choice(others)] if others else []}[policy]
        taken[mutant.function] += 1
        yield mutant, policy, [Edit(edit.path, edit.line, edit.new, text) for text in new]


async def make(project: Project, pool: SandboxPool, *, count: int, seed: int, image: str) -> list[dict[str, Any]]:
    """
    Make *count* tasks.

    Raises:
        ValueError: If the project does not have so many.

    """
    tests, described = project.tests(), project.describe()
    required: dict[str, list[str]] = {}
    tasks: list[dict[str, Any]] = []
    stream = candidates(project, seed)

    def describe(item: tuple[Mutant, str, list[Edit]], number: int) -> dict[str, Any]:
        mutant, policy, edits = item
        inputs = {
            "project": described,
            "function": mutant.function,
            "kind": mutant.kind,
            "mutant": attrs.asdict(mutant.edit),
            "tests": tests[mutant.function],
            "required": required[mutant.function],
            "policy": policy,
            "action": [attrs.asdict(edit) for edit in edits],
            "known_reward": POLICIES[policy],
        }
        return {"id": f"mutant-{number:03}", "image": image, "group": mutant.function, "inputs": inputs}

    async def judge(states: Sequence[tuple[str, list[Edit], list[str] | None]]) -> list[Graded | None]:
        batch = [
            Episode(
                id=str(number),
                image=image,
                timeout=TRIAL_TIMEOUT,
                inputs={
                    "project": described,
                    "edits": [attrs.asdict(edit) for edit in edits],
                    "tests": tests[function],
                    "required": needed,
                },
            )
            for number, (function, edits, needed) in enumerate(states)
        ]
        result = await pool.rollout(batch, rollout=trial)
        return [None if r.reward is None else Graded(reward=r.reward, info=r.info) for r in result.records]

    while len(tasks) < count:
        chosen = list(islice(stream, count - len(tasks)))
        if not chosen:
            raise ValueError(f"the project has {len(tasks)} usable mutants, fewer than {count}")
        functions = sorted({mutant.function for mutant, _, _ in chosen} - set(required))
        for function, verdict in zip(functions, await judge([(f, [], None) for f in functions]), strict=True):
            required[function] = verdict.info["required"] if verdict and verdict.reward == 1.0 else []
        chosen = [item for item in chosen if required[item[0].function]]
        # What the gold patch leads to is the original, and what doing nothing leads to is the mutant: both are tried.
        states = [(m.function, [m.edit], required[m.function]) for m, _, _ in chosen]
        wrong = [item for item in chosen if item[1] == "wrong"]
        states += [(m.function, [m.edit, *edits], required[m.function]) for m, _, edits in wrong]
        failed = [verdict is not None and verdict.reward == 0.0 for verdict in await judge(states)]
        stays_wrong = {id(item): fails for item, fails in zip(wrong, failed[len(chosen) :], strict=True)}
        for item, fails in zip(chosen, failed, strict=False):
            if fails and stays_wrong.get(id(item), True):
                tasks.append(describe(item, len(tasks)))
    return tasks


def write(tasks: Iterable[dict[str, Any]], path: Path) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(f"{json.dumps(task, sort_keys=True)}\n" for task in tasks), encoding="utf-8")


async def main(arguments: argparse.Namespace) -> None:
    """Fetch, make, write."""
    project = Project.load(fetch(arguments.cache))
    async with SandboxPool(arguments.backend, images={arguments.image: arguments.parallelism}) as pool:
        tasks = await make(project, pool, count=arguments.count, seed=arguments.seed, image=arguments.image)
    write(tasks, arguments.output)
    policies = Counter(task["inputs"]["policy"] for task in tasks)
    print(
        f"{len(tasks)} tasks in {arguments.output}: "
        + ", ".join(f"{n} {policy}" for policy, n in sorted(policies.items()))
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.mutation_repair.tasks", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("tasks.jsonl"), help="the file to write")
    parser.add_argument("--cache", type=Path, required=True, help="directory for the downloaded project")
    parser.add_argument("--count", type=int, default=64, help="how many tasks")
    parser.add_argument("--seed", type=int, default=0, help="which tasks")
    parser.add_argument("--parallelism", type=int, default=4, help="how many sandboxes at once")
    parser.add_argument("--backend", default="local")
    parser.add_argument("--image", default="host", help="what sandboxes are made from; it needs Python 3 and tar")
    anyio.run(main, parser.parse_args())
