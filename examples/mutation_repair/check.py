# SPDX-License-Identifier: Apache-2.0
"""Compare the rewards of a run with those that are known beforehand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["known_rewards", "mismatches"]


def known_rewards(tasks: Path) -> dict[str, float]:
    """Read the known reward of each task."""
    lines = tasks.read_text(encoding="utf-8").splitlines()
    return {task["id"]: task["inputs"]["known_reward"] for task in map(json.loads, filter(None, lines))}


def mismatches(known: Mapping[str, float], rewards: Iterable[tuple[str, float | None]]) -> list[str]:
    """Say, a line each, what differs. An absent reward differs from every number."""
    got = dict(rewards)
    return [
        f"{i}: known {known.get(i)}, got {got.get(i)}" for i in sorted({*known, *got}) if known.get(i) != got.get(i)
    ]


def main(tasks: Path, results: Path) -> int:
    """Print what differs, and return how many do."""
    records: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))["records"]
    known = known_rewards(tasks)
    wrong = mismatches(known, ((record["episode"], record["reward"]) for record in records))
    print("\n".join([*wrong, f"{len(known) - len(wrong)} of {len(known)} rewards are the known ones"]))
    return len(wrong)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.mutation_repair.check TASKS.jsonl RESULTS.json")
    sys.exit(bool(main(Path(sys.argv[1]), Path(sys.argv[2]))))
