# SPDX-License-Identifier: Apache-2.0
"""The backend contract on the cluster double, with each way of reaching a sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from agentsandbox.client import SandboxClient
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.testing import conformance, exec_checks
from agentsandbox.testing.cluster import FakeCluster, Image

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

GUARD = 90.0
"""Seconds that a check may take. Only what ends inside of the loop leaves it to the checks that follow."""

IMAGES = {"host": Image(command=("sleep", "infinity"))}
"""What a Pod keeps whose first process is not ours to choose."""

ROOT = {"user": 0, "run_as_root": True, "capabilities": ["SETUID", "SETGID"]}
"""What it takes to run commands as several users."""

SHELL_LACKS = {"check_result_says_what_it_cost", "check_user"}

NOT_APPLICABLE = {
    ExecLevel.RUNNER: {"check_user"},
    ExecLevel.SHELL: SHELL_LACKS,
    ExecLevel.DIRECT: {
        *SHELL_LACKS,
        *(
            "check_string_is_a_script_and_list_is_argv",
            "check_start_errors_are_typed",
            "check_large_arguments_and_scripts",
        ),
        *("check_environment", "check_working_directory", "check_merge_keeps_order"),
        *("check_p14_cancelling_kills_the_tree", "check_p19_background_child_does_not_hold_the_call"),
        *("check_p23_timeout_keeps_the_output", "check_p25_timeout_kills_the_whole_tree"),
        *("check_timeout_spares_other_commands", "check_p36_zombies_are_reaped", "check_open_process_is_live"),
        *("check_files_round_trip", "check_p09_large_files_arrive_whole", "check_files_are_replaced_whole"),
        *("check_file_errors_are_pythons", "check_file_permissions", "check_read_limit"),
        "check_directories_round_trip",
    },
}
"""The rules that do not apply at a level, or not whole, where no Pod runs as root. Every other one holds."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Kubernetes backends are asyncio's."""
    return "asyncio"


@pytest.fixture(scope="module")
async def kubeconfig(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> AsyncIterator[str]:
    """One cluster for all."""
    async with FakeCluster(images=IMAGES) as cluster:
        yield cluster.kubeconfig(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module", params=list(ExecLevel), ids=str)
def level(request: pytest.FixtureRequest) -> ExecLevel:
    """Each way of reaching a sandbox."""
    return ExecLevel(request.param)


@pytest.fixture(scope="module")
async def source(level: ExecLevel, kubeconfig: str) -> AsyncIterator[SandboxClient]:
    """Grant sandboxes to all checks of a level; each gets fresh ones."""
    options = {"kubeconfig": kubeconfig, "exec_mode": str(level)}
    async with SandboxClient("kubernetes", images={"host": 2}, spares=1, backend_options=options) as client:
        yield client


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_rule_holds(check: conformance.Check, level: ExecLevel, source: SandboxClient) -> None:
    """The rule in the check's docstring holds, or it is one that cannot at that level."""
    try:
        with anyio.fail_after(GUARD):
            await check(source, "host")
    except conformance.NotApplicable as reason:
        assert check.__name__ in NOT_APPLICABLE[level]
        pytest.skip(str(reason))
    assert check.__name__ not in NOT_APPLICABLE[level]


@pytest.mark.parametrize("level", [ExecLevel.RUNNER, ExecLevel.SHELL], ids=str)
async def test_commands_run_as_several_users_where_the_pod_runs_as_root(level: ExecLevel, kubeconfig: str) -> None:
    """With root and the capabilities for it, commands run as any user of the image, also without Python."""
    options = {"kubeconfig": kubeconfig, "exec_mode": str(level), **ROOT}
    async with SandboxClient("kubernetes", images={"host": 1}, backend_options=options) as client:
        await exec_checks.check_user(client, "host")


async def test_a_workdir_needs_a_shell(kubeconfig: str) -> None:
    """Relative paths begin in the pool's ``workdir`` with a shell too; without one it is refused by name."""
    options = {"kubeconfig": kubeconfig, "exec_mode": "shell"}
    async with SandboxClient("kubernetes", images={"host": 1}, workdir="/tmp", backend_options=options) as client:
        async with await client.acquire("host") as lease:
            await lease.write_file("made/here", b"x")
            assert (await lease.exec("pwd; cat /tmp/made/here")).stdout == b"/tmp\nx"
            assert (await lease.exec("pwd", cwd="made")).stdout == b"/tmp/made\n"

    options["exec_mode"] = "direct"
    async with SandboxClient("kubernetes", images={"host": 1}, workdir="/tmp", backend_options=options) as client:
        with pytest.raises(ConfigurationError, match="workdir='/tmp'"):
            await client.acquire("host")
