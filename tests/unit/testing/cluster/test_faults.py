# SPDX-License-Identifier: Apache-2.0
"""Faults to order, each suffered by a real client."""

from __future__ import annotations

import anyio
import pytest

from agentsandbox.errors import (
    ApiUnavailable,
    InvalidObject,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Throttled,
)
from agentsandbox.transport.websocket import PROTOCOLS

pytestmark = pytest.mark.anyio
BODY = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "sandbox", "image": "host"}]}}


async def test_answers_in_the_servers_stead(started) -> None:
    """So many requests as ordered get the ordered answer, and then the server is itself again."""
    async with started() as client:
        faults = client.cluster.faults
        throttle = faults.throttle("POST", r"/pods$", retry_after=7, times=2)
        for _ in range(2):
            with pytest.raises(Throttled) as caught:
                await client.api.request("POST", client.pods, body=BODY)
            assert caught.value.retry_after == 7
        await client.api.request("POST", client.pods, body=BODY)
        faults.exceed_quota()
        with pytest.raises(QuotaExceeded):
            await client.api.request("POST", client.pods, body=BODY)
        faults.answer("GET", r"/pods/a$", 503, body="upstream connect error")
        with pytest.raises(ApiUnavailable, match="upstream connect error"):
            await client.get("a")
        assert (await client.get("a"))["metadata"]["name"] == "a"
        assert throttle.hits == 2
        assert [one.status for one in client.cluster.asked("POST", "/pods$")] == [429, 429, 201, 403]
        assert repr(faults) == "<Faults [0 requests, 0 watches, 0 execs]>"


async def test_p41_lost_answers(started) -> None:
    """A request may be cut off before or after its effect; the caller cannot tell, and the object can."""
    async with started() as client:
        client.cluster.faults.cut("POST", r"/pods$")
        client.cluster.faults.cut("POST", r"/pods$", after=True)
        for count in (0, 1):
            with pytest.raises(ApiUnavailable) as caught:
                await client.api.request("POST", client.pods, body=BODY)
            assert caught.value.ambiguous
            assert len(client.cluster.pods()) == count


async def test_late_answers(started) -> None:
    """A request may wait for a time or until it is let go."""
    async with started() as client:
        client.cluster.faults.delay("GET", r"/pods$", 0.05)
        begun = anyio.current_time()
        await client.api.request("GET", client.pods)
        assert anyio.current_time() - begun >= 0.05
        fault = client.cluster.faults.stall("GET", r"/pods$")
        with pytest.raises(ApiUnavailable):
            await client.api.request("GET", client.pods, timeout=0.1)
        async with anyio.create_task_group() as group:
            again = client.cluster.faults.stall("GET", r"/pods$")
            group.start_soon(client.api.request, "GET", client.pods)
            await client.eventually(lambda: again.hits)
            again.stalled.set()
        fault.stalled.set()


async def test_p12_refused_handshakes(started) -> None:
    """A handshake may be refused with any status and words."""
    async with started() as client:
        await client.make()
        for status, error in ((403, PermissionDenied), (404, NotFound), (500, ApiUnavailable), (400, InvalidObject)):
            client.cluster.faults.exec(pod="a", status=status, body="error dialing backend: EOF")
            with pytest.raises(error, match="error dialing backend: EOF"):
                await client.run(["true"])
        assert (await client.run(["true"]))[0] == 0


async def test_protocols(started) -> None:
    """An old server speaks only v4, and one may speak none."""
    async with started(process="real") as client:
        await client.make()
        client.cluster.faults.protocols = ("v4.channel.k8s.io",)
        socket = await client.open(["head", "-c", "5"], stdin=True)
        assert (socket.protocol, await socket.end_stdin()) == ("v4.channel.k8s.io", False)
        await socket.send(b"hello")
        assert await socket.receive() == (1, b"hello")
        with pytest.raises(anyio.EndOfStream):
            await socket.receive()
        assert (socket.status.exit_code, socket.close_code) == (0, 1000)
        await socket.aclose()
        client.cluster.faults.protocols = ()
        with pytest.raises(InvalidObject, match="speaks none of"):
            await client.open(["true"], protocols=PROTOCOLS)


async def test_p01_streams_end_without_a_status(started) -> None:
    """A stream may be cut at any byte, and then there is no status."""
    async with started(process="real") as client:
        await client.make()
        client.cluster.faults.exec(cut=True, after_bytes=3)
        assert await client.run(["echo", "hello"]) == (None, b"hel", b"")
        client.cluster.faults.exec(cut=True)
        assert await client.run(["true"]) == (None, b"", b"")
        assert await client.run(["echo", "hello"]) == (0, b"hello\n", b"")


async def test_p05_silent_streams(started) -> None:
    """A stream may fall silent and stay open."""
    async with started(process="real") as client:
        await client.make()
        client.cluster.faults.exec(silent=True, after_bytes=2)
        with anyio.move_on_after(0.3) as scope:
            await client.run(["echo", "hello"])
        assert scope.cancelled_caught


async def test_p07_status_in_pieces_and_output_as_wanted(started) -> None:
    """Output comes in messages of the ordered size, a status in two, and a status may be any."""
    async with started(process="real") as client:
        await client.make()
        client.cluster.faults.exec(frame=1, split_status=40)
        assert await client.run(["sh", "-c", "echo hi; echo warn >&2; exit 3"]) == (3, b"hi\n", b"warn\n")
        client.cluster.faults.exec(status_frame=b"")
        assert (await client.run(["true"]))[0] is None


async def test_p09_discarded_stdin(started) -> None:
    """The first messages of standard input may get lost."""
    async with started(process="real") as client:
        await client.make()
        client.cluster.faults.exec(discard_stdin=1)
        assert await client.run(["cat"], stdin=b"lost") == (0, b"", b"")
        assert await client.run(["cat"], stdin=b"kept") == (0, b"kept", b"")


async def test_p10_idle_streams_are_cut(started) -> None:
    """A connection that the client leaves idle is cut; pings keep it."""
    async with started(process="real") as client:
        await client.make()
        client.cluster.faults.exec(idle=0.3, times=2)
        assert await client.run(["sh", "-c", "sleep 1; echo done"]) == (None, b"", b"")
        assert await client.run(["sh", "-c", "sleep 1; echo done"], heartbeat=0.1) == (0, b"done\n", b"")


async def test_p14_closing_a_stream_stops_nothing(started) -> None:
    """The command of a stream that its client closes runs on; the close frame is counted."""
    async with started(process="real") as client:
        await client.make()
        socket = await client.open(["sh", "-c", "echo $$; exec sleep 61"])
        pid = int((await socket.receive())[1])
        await socket.aclose()
        assert await client.run(["kill", "-0", str(pid)]) == (0, b"", b"")
        streams = client.cluster.streams
        await client.eventually(lambda: streams.closed_by_client == 1 and not streams.open)


async def test_outage(started) -> None:
    """While the API server is away nothing answers, and what runs in Pods runs on."""
    async with started(process="real") as client:
        await client.make()
        socket = await client.open(["sh", "-c", "sleep 0.3; echo done > /tmp/done; sleep 60"])
        async with client.cluster.outage():
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await socket.receive()
            with pytest.raises(ApiUnavailable):
                await client.get("a")
        await socket.aclose()
        assert await client.run(["sh", "-c", "until cat /tmp/done 2>/dev/null; do sleep 0.05; done"]) == (
            0,
            b"done\n",
            b"",
        )


async def test_clock_offset(started) -> None:
    """The cluster's clock may be wrong, in headers and in objects."""
    async with started() as client:
        client.cluster.clock.offset = 120
        await client.make()
        assert 118 <= client.api.clock_offset <= 122
