# SPDX-License-Identifier: Apache-2.0
"""The exec websocket against a server that answers as a real one was recorded."""

from __future__ import annotations

import base64
import json
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest
from aiohttp import web

from agentsandbox.transport.websocket import (
    PROTOCOLS,
    SEND_SIZE,
    STATUS_LIMIT,
    STDERR,
    STDERR_KEPT,
    STDOUT,
    ExecSocket,
    ExecStatus,
    ExecStream,
)

pytestmark = pytest.mark.anyio

FACTS = json.loads((Path(__file__).parents[2] / "contract" / "facts" / "exec.json").read_text())["cases"]
STREAMS = {name: case for name, case in FACTS.items() if case.get("frames") and "frame_count" not in case}
OK = b'\x03{"metadata":{},"status":"Success"}'
FAILED = (
    b'\x03{"status":"Failure","reason":"NonZeroExitCode","details":{"causes":[{"reason":"ExitCode","message":"3"}]}}'
)


@pytest.fixture
def anyio_backend():
    """Run on the event loop that the websocket library needs."""
    return "asyncio"


@asynccontextmanager
async def connected(play, *, protocols=PROTOCOLS, max_size=0):
    """Connect to a server that plays a scene on the websocket; yield our end and what the server received."""
    received = []

    async def handler(request):
        socket = web.WebSocketResponse(protocols=protocols)
        await socket.prepare(request)
        await play(socket, request, received)
        return socket

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        async with aiohttp.ClientSession() as session:
            socket = await session.ws_connect(f"http://127.0.0.1:{port}/", protocols=PROTOCOLS, max_msg_size=max_size)
            yield ExecSocket(socket), received
            await socket.close()
    finally:
        await runner.cleanup()


def scene(*messages, abort=True):
    """Return a scene: send these messages, then end, by default as the real server does, without a close frame."""

    async def play(socket, request, _received):
        for message in messages:
            await socket.send_bytes(message)
        if abort:
            request.transport.close()

    return play


async def listen(socket, _request, received):
    """Take whatever comes."""
    async for message in socket:
        received.append(message.data)


async def output(socket):
    """Collect everything that a socket says."""
    said = {STDOUT: b"", STDERR: b""}
    with pytest.raises(anyio.EndOfStream):
        while True:
            channel, data = await socket.receive()
            said[channel] += data
    return said[STDOUT], said[STDERR]


def raw(frame):
    """Return the payload of a recorded frame."""
    data = frame["data"]
    return base64.b64decode(data["base64"]) if isinstance(data, dict) else data.encode()


@pytest.mark.parametrize("name", STREAMS)
async def test_recorded_streams_are_read_right(name):
    """What a real server sent is told apart by channel, and its status gives the exit code, or none."""
    case = STREAMS[name]
    want = {STDOUT: b"", STDERR: b"", 3: b""}
    for frame in case["frames"]:
        want[frame["channel"]] += raw(frame)
    code = {"exit_0": 0, "exit_3_out_err": 3, "exit_3_v4": 3, "killed_by_sigkill": 137, "oom_in_child": 137}.get(name)

    async with connected(scene(*(bytes([f["channel"]]) + raw(f) for f in case["frames"]))) as (socket, _):
        assert (want[STDOUT], want[STDERR]) == await output(socket)

        if not want[3]:
            assert socket.status is None
        elif name in ("command_not_found", "not_executable"):
            assert (None, "InternalError") == (socket.status.exit_code, socket.status.reason)
            assert "exec" in socket.status.message
        else:
            assert socket.status.exit_code is not None
        if code is not None:
            assert code == socket.status.exit_code


async def test_p07_the_exit_code_arrives_however_the_status_is_cut():
    """Output is told apart by channel, and a status in two frames is one status."""
    async with connected(
        scene(b"\x01", b"\x02", b"\x03", b"\x01hi\n", b"\x02warn\n", FAILED[:41], b"\x03" + FAILED[41:])
    ) as (socket, _):
        assert (b"hi\n", b"warn\n") == await output(socket)
        assert ExecStatus(exit_code=3, reason="NonZeroExitCode") == socket.status


async def test_p01_an_end_without_a_status_has_no_exit_code():
    """A stream that is cut says nothing about how its command ended, whatever was printed."""
    async with connected(scene(b"\x01all passed\n")) as (socket, _):
        assert (b"all passed\n", b"") == await output(socket)
        assert socket.status is None
        assert socket.close_code == 1006


async def test_p02_bytes_stay_bytes_wherever_they_are_cut():
    """Half a character is not decoded."""
    async with connected(scene(b"\x01\xe2\x82", b"\x01\xac\xff", OK)) as (socket, _):
        assert (b"\xe2\x82\xac\xff", b"") == await output(socket)


async def test_p04_a_message_may_be_large_and_too_large_is_an_error():
    """The limit is ours: a large message arrives, one beyond the limit breaks the stream and nothing else."""
    async with connected(scene(b"\x01" + b"x" * 5_000_000, OK), max_size=6_000_000) as (socket, _):
        assert 5_000_000 == len((await output(socket))[0])
    async with connected(scene(b"\x01" + b"x" * 5_000_000, OK), max_size=1_000_000) as (socket, _):
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await socket.receive()
        assert socket.status is None


@pytest.mark.parametrize(
    "status", [b"[]", b"7", b'{"status":"Failure"}', b'{"status":"Failure","reason":"NonZeroExitCode","details":[]}']
)
async def test_a_status_that_makes_no_sense_is_no_success(status):
    """A status without an exit code has none."""
    async with connected(scene(b"\x03" + status)) as (socket, _):
        await output(socket)
        assert socket.status.exit_code is None


async def test_a_status_without_end_is_bounded():
    """A server that sends a status for ever costs a bounded amount of memory."""
    async with connected(scene(*[b"\x03" + b"{" * 30_000] * 10)) as (socket, _):
        await output(socket)
        assert socket.status is None
        assert len(socket._status_bytes) == STATUS_LIMIT


async def test_p08_v5_ends_standard_input():
    """On v5 the end of standard input is one message of its own."""
    async with connected(listen) as (socket, received):
        await socket.send(b"hello")
        assert await socket.end_stdin() is True
        await socket.aclose()
        assert [b"\x00hello", b"\xff\x00"] == received


async def test_p08_v4_cannot_end_standard_input_and_is_not_asked_to():
    """On v4 the message that ends standard input is never sent: that server would hang."""
    async with connected(listen, protocols=["v4.channel.k8s.io"]) as (socket, received):
        assert "v4.channel.k8s.io" == socket.protocol
        await socket.send(b"hello")
        assert await socket.end_stdin() is False
        await socket.aclose()
        assert [b"\x00hello"] == received


async def test_standard_input_is_cut_into_bearable_messages():
    """However much is sent at once, no message is larger than the limit, and the bytes keep their order."""
    data = bytes(range(256)) * 4096
    async with connected(listen) as (socket, received):
        await ExecStream(socket).send([data[:10], data[10:700_000], data[700_000:]])
        await socket.aclose()
        assert all(len(message) <= SEND_SIZE + 1 and message[0] == 0 for message in received)
        assert data == b"".join(message[1:] for message in received)


async def test_small_chunks_travel_together():
    """Many small chunks are one message."""
    async with connected(listen) as (socket, received):
        await ExecStream(socket).send([b"a", b"b", b"", b"c"])
        await socket.aclose()
        assert [b"\x00abc"] == received


async def test_p10_keeping_alive_is_traffic_that_changes_nothing():
    """The keep-alive is a terminal size, which a command without a terminal never sees."""
    async with connected(listen) as (socket, received):
        await socket.keep_alive()
        await socket.aclose()
        assert [4] == [message[0] for message in received]
        assert {"Width", "Height"} == set(json.loads(received[0][1:]))


async def test_a_stream_is_standard_output_and_keeps_what_was_said_beside_it():
    """Standard output is the stream; the end of standard error is kept to explain a failure."""
    noise = b"x" * STDERR_KEPT
    async with connected(scene(b"\x02" + noise, b"\x01one", b"\x02no such file", b"\x01two", FAILED)) as (socket, _):
        stream = ExecStream(socket)
        assert b"one" == await stream.receive()
        assert b"two" == await stream.receive()
        with pytest.raises(anyio.EndOfStream):
            await stream.receive()
        assert (noise + b"no such file")[-STDERR_KEPT:] == stream.stderr
        assert 3 == stream.status.exit_code


async def test_closing_wakes_whoever_receives():
    """A receive that waits ends at once when its own side is closed, and says so; so does whatever comes later."""
    async with connected(listen) as (socket, _):
        stream = ExecStream(socket)
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(stream.aclose)
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await stream.receive()
        with pytest.raises(anyio.ClosedResourceError):
            await stream.send([b"x"])
        await stream.aclose()


async def test_p14_closing_is_a_handshake():
    """The server sees a close frame: some runtimes leak what is only cut off."""
    closed = []

    async def play(socket, _request, _received):
        closed.append((await socket.receive()).type)

    async with connected(play) as (socket, _):
        await ExecStream(socket).aclose()
        assert [aiohttp.WSMsgType.CLOSE] == closed


async def test_sending_into_nothing_is_a_broken_stream():
    """When the server is gone, sending raises what sessions attach again for."""
    async with connected(scene()) as (socket, _):
        await output(socket)
        with pytest.raises(anyio.BrokenResourceError):
            await ExecStream(socket).send([b"x"])
