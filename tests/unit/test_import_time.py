# SPDX-License-Identifier: Apache-2.0
"""What an import costs, told by what it imports."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "kubernetes_asyncio",
    "aiohttp",
    "yaml",
    "trio",
    "inspect_ai",
    "typer",
    "rich",
    "jinja2",
    "matplotlib",
    "prometheus_client",
    "opentelemetry",
    "numpy",
    "pytest",
}


def imported_by(statement: str) -> set[str]:
    """Return the top-level modules that *statement* imports in a fresh interpreter."""
    script = f"import sys; {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import agentsandbox",
        "from agentsandbox import SandboxPool, SandboxClient, BlockingPool, gather_rollouts",
        "import agentsandbox.backends.local",
        "import agentsandbox.report, agentsandbox.metrics",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    """Neither a cluster's client nor anything optional is loaded before it is used."""
    assert {name.partition(".")[0] for name in imported_by(statement)} & HEAVY == set()


def test_records_need_no_event_loop() -> None:
    """Reading records and errors loads neither anyio nor asyncio."""
    loaded = imported_by("from agentsandbox import Episode, RolloutResult, SandboxError")

    assert {"anyio", "asyncio", "agentsandbox.client", "agentsandbox.pool"} & loaded == set()


@pytest.mark.parametrize(
    "name",
    [
        "errors",
        "models.command",
        "models.episode",
        "models.events",
        "models.reset",
        "models.sandbox",
        "models.timing",
        "metrics.quantiles",
        "metrics.recorder",
        "report.summary",
        "rollouts.accounting",
        "rollouts.grading",
        "rollouts.source",
        "rollouts.verdict",
        "warmpool.book",
        "warmpool.matching",
        "warmpool.ratelimit",
        "warmpool.replenisher",
    ],
)
def test_what_decides_knows_no_event_loop(name: str) -> None:
    """Records and policies are plain Python: they import no event loop, no clock and no thread."""
    module = importlib.import_module(f"agentsandbox.{name}")
    tree = ast.parse(Path(module.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert {found.partition(".")[0] for found in names} & {"anyio", "asyncio", "trio", "time", "threading"} == set()
