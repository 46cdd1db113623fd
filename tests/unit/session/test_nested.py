# SPDX-License-Identifier: Apache-2.0
"""A session inside of another one: its stream is the streams of a process there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest

from agentsandbox.errors import ConfigurationError, SandboxLost, StreamBroken
from agentsandbox.models.command import Command
from agentsandbox.session import Session
from agentsandbox.session.nested import ProcessStream

from .test_with_runner import running

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024
INNER = """
import os, sys
from agentsandbox.protocol.runner.loop import main
main({"nonce": "inner", "base_env": {"PATH": os.environ["PATH"]}, "workdir": sys.argv[1]})
"""


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run in real time: the runners are real processes."""
    return str(request.param)


def inner(path: Path) -> Command:
    """Return the command of a runner that serves over its standard input and output."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return Command(command=[sys.executable, "-c", INNER, str(path)], env=paths)


async def test_a_runner_inside_of_a_runner(tmp_path: Path) -> None:
    """Commands of the inner one come to their end, also with much in both directions; its end ends its process."""
    async with running(tmp_path) as (session, _), anyio.create_task_group() as group:
        process = await session.open_process(inner(tmp_path), window=4 * MIB)
        stream = ProcessStream(process)
        within = Session(stream, nonce="inner")
        await group.start(within.run)
        assert "ProcessStream [<Process [pid" in repr(stream)

        data = bytes(range(256)) * 4096 * 8
        result = await within.exec(Command(command="cat; exit 3"), stdin=data)
        assert (3, data) == (result.exit_code, result.stdout)
        await within.aclose()
        assert not process.running
        await process.end(1.0)
        assert 0 == (await process.wait()).exit_code


async def test_a_lost_stream_outside_is_not_noticed_inside(tmp_path: Path) -> None:
    """The outer session attaches again, and then nothing is missing."""
    async with running(tmp_path) as (session, streams), anyio.create_task_group() as group:
        process = await session.open_process(inner(tmp_path))
        within = Session(ProcessStream(process), nonce="inner")
        await group.start(within.run)
        for number in range(6):
            streams[-1].left = 0 if number % 2 else streams[-1].left  # the next byte, in whichever direction, breaks it
            result = await within.exec(Command(command=f"printf %05000d {number}"))
            assert b"%05000d" % number == result.stdout
        assert 4 == len(streams)
        await within.aclose()


async def test_the_loss_of_the_place_is_the_loss_of_what_is_in_it(tmp_path: Path) -> None:
    """A command inside ends at once when the outer session is lost."""
    async with running(tmp_path) as (session, _), anyio.create_task_group() as group:
        process = await session.open_process(inner(tmp_path))
        within = Session(ProcessStream(process), nonce="inner")
        await group.start(within.run)

        def lose() -> None:
            session.lose(SandboxLost("evicted"))

        with pytest.raises(StreamBroken):
            await within.exec(Command(command="sleep 60"), on_started=lose)
        assert within.lost is not None
        await process.end(1.0)


async def test_a_process_that_does_not_end_by_itself_is_killed(tmp_path: Path) -> None:
    """Closing its standard input is a wish; after a while it is ended."""
    async with running(tmp_path) as (session, _):
        process = await session.open_process(Command(command="yes & trap '' TERM; sleep 60; wait"))
        await process.end(0.2)
        assert not process.running
        assert {} == process.report
        await process.end(0.2)


async def test_a_runner_that_makes_no_jails_says_so(tmp_path: Path) -> None:
    """It is not a place for that."""
    async with running(tmp_path) as (session, _):
        with pytest.raises(ConfigurationError, match="this runner makes no jails"):
            await session.open_builtin("jail", {"nonce": "n"})
