# SPDX-License-Identifier: Apache-2.0
"""One episode: break the project, show that its tests fail, let the policy act, and let the tests judge."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from agentsandbox.errors import ConfigurationError
from agentsandbox.models.episode import Graded
from agentsandbox.rollouts.grading import grade_tests, require_failing
from examples.mutation_repair.mutants import Edit, apply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentsandbox.client import Lease
    from agentsandbox.models.command import ExecResult
    from agentsandbox.models.episode import Episode

__all__ = ["rollout", "run_tests", "unpack"]

TEST_TIMEOUT = 60.0
"""Seconds for the tests of one function: they take less than one."""

MEMORY_LIMIT = 512 * 1024
"""Address space for the tests of one function, in KiB: they take less than 100 MiB."""


async def rollout(sandbox: Lease, episode: Episode) -> Graded:
    """
    Repair a mutant, or fail to.

    Args:
        sandbox: The sandbox of this attempt.
        episode: Inputs: ``project`` (``path`` and ``sha256`` of a source archive), ``mutant`` (an edit), ``action``
            (the edits of the policy), ``tests`` (test classes) and ``required`` (tests that must run).

    Returns:
        1 if every required test passes after the action, else 0; with the patch that the episode made.

    Raises:
        InvalidTask: If the tests pass before anything was repaired.
        EvidenceMissing: If a test report does not show what the tests said.

    """
    inputs = episode.inputs
    await unpack(sandbox, inputs["project"])
    mutant = Edit(**inputs["mutant"])
    broken = await _change(sandbox, mutant)
    before = require_failing(await run_tests(sandbox, inputs["tests"]), what="the mutant")
    grade_tests(before, tests=inputs["required"])  # it failed because a test did, not because none ran

    for action in inputs["action"]:  # the policy acts here: a stand-in whose actions were drawn with the task
        await _change(sandbox, Edit(**action))

    reward = grade_tests(await run_tests(sandbox, inputs["tests"]), tests=inputs["required"])
    repaired = (await sandbox.read_file(mutant.path)).decode()
    diff = difflib.unified_diff(
        broken.splitlines(keepends=True), repaired.splitlines(keepends=True), f"a/{mutant.path}", f"b/{mutant.path}"
    )
    return Graded(reward=reward, patch="".join(diff), info={"tests": inputs["tests"], "policy": inputs.get("policy")})


async def unpack(sandbox: Lease, project: dict[str, Any]) -> None:
    """Put the project into the working directory of a sandbox."""
    archive = await anyio.to_thread.run_sync(_read, project["path"], project["sha256"])
    await sandbox.write_file("project.tar.gz", archive)
    await sandbox.exec(["tar", "-xzf", "project.tar.gz", "--strip-components=1"], check=True, timeout=TEST_TIMEOUT)


async def run_tests(sandbox: Lease, tests: Sequence[str]) -> ExecResult:
    """Run test classes, in so much memory that a fault which fills a list for ever soon ends."""
    script = f'ulimit -v {MEMORY_LIMIT}; exec python3 -B -m unittest -v "$@"'
    return await sandbox.exec(["sh", "-c", script, "sh", *tests], timeout=TEST_TIMEOUT)


async def _change(sandbox: Lease, edit: Edit) -> str:
    source = apply((await sandbox.read_file(edit.path)).decode(), edit)
    await sandbox.write_file(edit.path, source)
    return source


def _read(path: str, digest: str) -> bytes:
    try:
        archive = Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read the project of this task: {error}") from error
    if hashlib.sha256(archive).hexdigest() != digest:
        raise ConfigurationError(f"{path} is not the archive that the tasks were made from")
    return archive
