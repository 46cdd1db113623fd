# SPDX-License-Identifier: Apache-2.0
"""Pods without processes, whose runner is a peer in this process."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from agentsandbox.backends.kubernetes.api import KubernetesApi
from agentsandbox.errors import SandboxLost
from agentsandbox.models.command import Command
from agentsandbox.session import Session
from agentsandbox.testing.cluster.peers import EchoContainer
from agentsandbox.transport.websocket import ExecStream

pytestmark = pytest.mark.anyio


def answer(request):
    """Say what was asked for."""
    argv = request.get("argv") or [request.get("script")]
    return (3, b"") if argv == ["false"] else (0, " ".join(argv).encode())


async def attach(client, group, pod="a", reopen=None):
    """Open a session to a Pod."""
    stream = ExecStream(await client.open(["python3", "-c", "relay"], pod=pod, stdin=True))
    assert await stream.receive() == b"runner\n"
    session = Session(stream, nonce="any", reopen=reopen)
    await group.start(session.run)
    return session


async def test_sessions_work(started) -> None:
    """A session runs commands and reads back what it wrote."""
    async with started(answer=answer) as client, anyio.create_task_group() as group:
        await client.make()
        session = await attach(client, group)
        result = await session.exec(Command(command=("echo", "x")))
        assert (result.exit_code, result.stdout) == (0, b"echo x")
        assert (await session.exec(Command(command=("false",)))).exit_code == 3
        assert (await session.exec(Command(command=("cat",)), stdin=b"swallowed")).exit_code == 0
        await session.write_file("/f", b"content")
        assert await session.read_file("/f") == b"content"
        with pytest.raises(FileNotFoundError):
            await session.read_file("/g")
        await session.aclose()


async def test_streams_are_replaced_and_lost_streams_are_resumed(started) -> None:
    """A new stream takes the place of one that was cut, and the session goes on."""
    async with started() as client, anyio.create_task_group() as group:
        await client.make()

        async def reopen():
            stream = ExecStream(await client.open(["python3", "-c", "relay"], stdin=True))
            await stream.receive()
            return stream

        session = await attach(client, group, reopen=reopen)
        assert client.cluster.streams.cut("^a$") == 1
        assert (await session.exec(Command(command=("true",)))).exit_code == 0
        await session.aclose()


async def test_the_end_of_the_pod_ends_streams(started) -> None:
    """When the Pod goes, its stream ends with exit code 137, and the session is lost."""
    async with started() as client, anyio.create_task_group() as group:
        await client.make()
        session = await attach(client, group)
        client.cluster.delete_behind("a")
        with pytest.raises(SandboxLost):
            with anyio.fail_after(10):
                while True:
                    await session.exec(Command(command=("true",)))


async def test_many_pods_in_one_process(started) -> None:
    """Hundreds of Pods with an open stream each answer at once."""
    count = 200
    async with started(max_connections=count, events=False) as client, anyio.create_task_group() as group:
        async with anyio.create_task_group() as making:
            for number in range(count):
                making.start_soon(client.make, f"p{number}")
        sessions = [await attach(client, group, f"p{number}") for number in range(count)]
        codes = []

        async def run(session):
            codes.append((await session.exec(Command(command=("true",)))).exit_code)

        async with anyio.create_task_group() as running:
            for session in sessions:
                running.start_soon(run, session)
        assert codes == [0] * count
        assert (client.cluster.streams.open, client.cluster.streams.peak) == (count, count)
        group.cancel_scope.cancel()


async def test_exit_by_itself() -> None:
    """An echo container may be told to end with an exit code."""
    container = EchoContainer()
    container.exit(42)

    assert (await container.wait(), container.ended) == (42, True)
    assert repr(container) == "<EchoContainer [ended, 0 commands]>"


async def test_in_a_process_of_its_own(tmp_path) -> None:
    """The double can be started as a program: it writes a kubeconfig, says where it is, and ends with its input."""
    file = tmp_path / "kubeconfig"
    command = [sys.executable, "-m", "agentsandbox.testing.cluster", str(file), "--process", "echo-runner"]
    async with await anyio.open_process(command, stdin=subprocess.PIPE, stderr=None) as process:
        lines = BufferedByteReceiveStream(process.stdout)
        url = (await lines.receive_until(b"\n", 1000)).decode()
        api = await KubernetesApi.connect(kubeconfig=str(file), max_connections=4)
        try:
            assert api.host == url
            assert (await api.request("GET", "/version"))["minor"] == "36"
        finally:
            await api.aclose()
        await process.stdin.aclose()
        assert (await lines.receive_until(b"\n", 1000)).startswith(b"<FakeCluster ")
        assert await process.wait() == 0
