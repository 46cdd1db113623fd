# SPDX-License-Identifier: Apache-2.0
"""A cluster for the command line: in a thread of its own, since each command has an event loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from typer.testing import CliRunner

from agentsandbox.cli.app import app
from agentsandbox.testing.cluster import FakeCluster

IMAGE = "python:3.12-alpine"


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    """The way into the thread of clusters."""
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture
def start_cluster(
    portal: BlockingPortal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FakeCluster]]:
    """Start a cluster; its kubeconfig is the current one. What happens in it must happen through the portal."""
    with ExitStack() as stack:

        def start(**options) -> FakeCluster:
            cluster = FakeCluster(**{"images": {IMAGE: "host"}, **options})
            stack.enter_context(portal.wrap_async_context_manager(cluster))
            monkeypatch.setenv("KUBECONFIG", cluster.kubeconfig(tmp_path))
            return cluster

        yield start


@pytest.fixture
def invoke() -> Callable[..., tuple[int, str]]:
    """Run the command line; return its exit code and what it printed."""

    def run(*words: str | Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, [str(word) for word in words])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run
