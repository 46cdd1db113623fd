# SPDX-License-Identifier: Apache-2.0
"""The Inspect AI adapter: Inspect's own checks, and an evaluation from end to end."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai", reason="the Inspect adapter has a session of its own")

from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import Generate, TaskState, solver
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError, sandbox
from inspect_ai.util._sandbox.limits import override_max_exec_output_size
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - 44 checks that Inspect ships

from agentsandbox.adapters.inspect_ai import AgentSandboxConfig, AgentSandboxEnvironment
from agentsandbox.errors import ConfigurationError, UsageError
from agentsandbox.testing.subject import processes

pytestmark = pytest.mark.anyio

CONFIG = AgentSandboxConfig(size=2)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run Inspect's checks on asyncio, or on what the environment asks for."""
    return os.environ.get("AGENTSANDBOX_TEST_LOOP", "asyncio")


def test_inspect_ships_the_checks_that_we_count() -> None:
    """All 44 checks of Inspect are collected here."""
    from inspect_ai.util._sandbox import self_check

    assert len(self_check.__all__) == 44


def test_registered_by_entry_point() -> None:
    """Inspect finds the adapter by name."""
    assert registry_find_sandboxenv("agentsandbox") is AgentSandboxEnvironment


async def test_output_over_the_limit_is_an_error(sandbox_env: AgentSandboxEnvironment) -> None:
    """Output over Inspect's limit raises its error with what was kept, and names the limit."""
    with override_max_exec_output_size(1024), pytest.raises(OutputLimitExceededError, match="1 KiB") as caught:
        await sandbox_env.exec(["seq", "1", "100000"])

    assert caught.value.truncated_output is not None
    assert caught.value.truncated_output.startswith("1\n2\n3\n")


async def test_undecodable_file_is_an_error(sandbox_env: AgentSandboxEnvironment) -> None:
    """A file that is not UTF-8 raises when text is asked for, and is bytes otherwise; line ends are kept."""
    await sandbox_env.write_file("f", b"\xc3\x28")
    with pytest.raises(UnicodeDecodeError):
        await sandbox_env.read_file("f")
    assert await sandbox_env.read_file("f", text=False) == b"\xc3\x28"
    await sandbox_env.write_file("g", "a\r\nb\n")
    assert await sandbox_env.read_file("g") == "a\r\nb\n"


async def test_missing_program_is_a_failed_result(sandbox_env: AgentSandboxEnvironment) -> None:
    """A program that does not exist gives a failed result that names it."""
    result = await sandbox_env.exec(["no-such-program"])

    assert (result.success, result.returncode) == (False, 127)
    assert "no-such-program" in result.stderr


async def test_released_sandbox_is_refused() -> None:
    """A sample without a task is a usage error, and so is a sandbox that was given back."""
    with pytest.raises(UsageError, match="before task_init"):
        await AgentSandboxEnvironment.sample_init("test", CONFIG, {})
    await AgentSandboxEnvironment.task_init("test", CONFIG)
    environments = await AgentSandboxEnvironment.sample_init("test", CONFIG, {})
    await AgentSandboxEnvironment.sample_cleanup("test", CONFIG, environments, True)
    with pytest.raises(UsageError):
        await environments["default"].exec(["true"])
    await AgentSandboxEnvironment.task_cleanup("test", CONFIG, True)


async def test_lost_sandbox_is_unavailable(sandbox_env: AgentSandboxEnvironment) -> None:
    """A sandbox that is gone is Inspect's ``SandboxUnavailableError``."""
    await sandbox_env.lease.exec("true")
    host = int(sandbox_env.lease.identity.uid.rpartition("/")[2])  # the process that holds the local sandboxes
    os.kill(host, signal.SIGKILL)

    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["sleep", "60"])
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.read_file("/etc/passwd")


async def test_tasks_share_a_pool() -> None:
    """Two tasks of one configuration share a pool; it closes with the last of them."""
    equal = AgentSandboxConfig(size=2)
    await AgentSandboxEnvironment.task_init("one", CONFIG)
    await AgentSandboxEnvironment.task_init("two", equal)
    await AgentSandboxEnvironment.task_cleanup("one", CONFIG, True)
    environments = await AgentSandboxEnvironment.sample_init("two", equal, {})
    assert (await environments["default"].exec(["echo", "here"])).stdout == "here\n"
    await AgentSandboxEnvironment.sample_cleanup("two", equal, environments, False)
    await AgentSandboxEnvironment.task_cleanup("two", equal, True)
    with pytest.raises(UsageError):
        await AgentSandboxEnvironment.sample_init("two", equal, {})


async def test_bad_configuration_is_named(tmp_path: Path) -> None:
    """A configuration that cannot work is refused with its file or its value, before anything is created."""
    file = tmp_path / "agentsandbox.yaml"
    file.write_text("image: host\nsise: 3\n")
    with pytest.raises(ConfigurationError, match="sise"):
        await AgentSandboxEnvironment.task_init("test", str(file))
    with pytest.raises(ConfigurationError, match="no-such-backend"):
        await AgentSandboxEnvironment.task_init("test", AgentSandboxConfig(backend="no-such-backend"))
    with pytest.raises(ConfigurationError, match="no_such_option"):
        options = {"no_such_option": 1}
        await AgentSandboxEnvironment.task_init("test", AgentSandboxConfig(backend_options=options))
    file.write_text("size: 3\nenv: {A: b}\n")
    await AgentSandboxEnvironment.task_init("test", str(file))
    environments = await AgentSandboxEnvironment.sample_init("test", str(file), {})
    assert (await environments["default"].exec(["printenv", "A"])).stdout == "b\n"
    await AgentSandboxEnvironment.sample_cleanup("test", str(file), environments, False)
    await AgentSandboxEnvironment.task_cleanup("test", str(file), True)


async def test_backend_options_reach_the_backend(tmp_path: Path) -> None:
    """The options of a backend come from the configuration, and those that differ make a pool of their own."""
    file = tmp_path / "agentsandbox.yaml"
    file.write_text("size: 1\nbackend_options: {open_files: 100}\n")
    other = AgentSandboxConfig(size=1, backend_options={"open_files": 200})
    for config, limit in ((str(file), "100\n"), (other, "200\n")):
        await AgentSandboxEnvironment.task_init("test", config)
        environments = await AgentSandboxEnvironment.sample_init("test", config, {})
        assert (await environments["default"].exec(["sh", "-c", "ulimit -n"])).stdout == limit
        await AgentSandboxEnvironment.sample_cleanup("test", config, environments, False)
    for config in (str(file), other):
        await AgentSandboxEnvironment.task_cleanup("test", config, True)


@solver
def fix_the_file():
    """Stand in for a model that acts in the sandbox."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        assert await sandbox().read_file("given.txt") == state.input_text
        await sandbox().exec(["sh", "-c", "tr a-z A-Z < given.txt > made.txt; sleep 334 >/dev/null 2>&1 &"])
        return state  # no model is asked: what a model would say is not the point

    return solve


@scorer(metrics=[accuracy()])
def file_is_right():
    """Score by what is in the sandbox."""

    async def score(state: TaskState, target: Target) -> Score:
        made = await sandbox().read_file("made.txt")
        lease = sandbox().as_type(AgentSandboxEnvironment).lease
        return Score(value=float(made == target.text and len(await processes(lease, "sleep 334")) == 1))

    return score


INSPECTS_OWN = ["ignore::DeprecationWarning", "ignore::ResourceWarning"]


@pytest.mark.filterwarnings(*INSPECTS_OWN)
async def test_evaluation_end_to_end(tmp_path: Path) -> None:
    """A whole evaluation without a model: each sample has its own sandbox, and every score is right."""
    task = Task(
        dataset=[Sample(input=f"text {n}", target=f"TEXT {n}", files={"given.txt": f"text {n}"}) for n in range(4)],
        solver=fix_the_file(),
        scorer=file_is_right(),
        sandbox=("agentsandbox", str(write_config(tmp_path))),
    )
    (log,) = await eval_async(task, model="mockllm/model", log_dir=str(tmp_path), max_samples=4)

    gc.collect()  # what Inspect leaves unclosed is complained about here, where that is ignored
    assert log.status == "success"
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1.0


def write_config(directory: Path) -> Path:
    """Write a configuration with fewer sandboxes than samples."""
    file = directory / "two.yaml"
    file.write_text("backend: local\nimage: host\nsize: 2\n")
    return file
