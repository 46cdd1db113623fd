# SPDX-License-Identifier: Apache-2.0
"""
Exec streams as the API server and the kubelet serve them: channels over a websocket, v5 or v4.

A stream begins with an empty message on channel 1. With v5 the connection ends with 1006 right after the status, with
v4 by a close handshake. The status comes when the command has ended and nobody holds its output any more.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import anyio
from aiohttp import WSMsgType, web

from agentsandbox.testing.cluster.containers import Command, Container, NotStarted, read, write
from agentsandbox.testing.cluster.peers import EchoContainer, EchoStream
from agentsandbox.testing.cluster.replies import Refusal, bad_request
from agentsandbox.testing.cluster.statuses import exit_status, start_failure

if TYPE_CHECKING:
    from agentsandbox.testing.cluster.cluster import FakeCluster
    from agentsandbox.testing.cluster.faults import ExecFault
    from agentsandbox.testing.cluster.worker import Worker

__all__ = ["ExecStreams"]

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
LINGER = 5.0
_MAX_MESSAGE = 64 * 1024 * 1024


class ExecStreams:
    """
    Serves ``pods/exec``.

    Args:
        cluster: Whose Pods.

    """

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.open = 0
        """How many streams are open."""
        self.peak = 0
        """How many were open at once, at most."""
        self.opened = 0
        """How many were opened."""
        self.closed_by_client = 0
        """How many clients sent a close frame."""
        self.received: list[bytes] | None = None
        """Set it to a list to keep every message that clients send."""
        self._live: dict[web.WebSocketResponse, tuple[str, web.Request]] = {}
        self._silent: set[str] = set()

    def __repr__(self) -> str:
        return f"<ExecStreams [{self.open} open, {self.opened} opened]>"

    def exec_id(self) -> str:
        """Return the id of a new command."""
        return self._cluster.names.exec_id()

    def cut(self, pod: str = "") -> int:
        """Break the connections of all streams whose Pod's name matches; return how many."""
        found = [http for name, http in self._live.values() if re.search(pod, name)]
        for http in found:
            if http.transport is not None:
                http.transport.close()
        return len(found)

    def silence(self, uid: str) -> None:
        """Let the streams of a Pod say nothing more, as when its node is out of reach."""
        self._silent.add(uid)

    def silent(self, uid: str) -> bool:
        """Return whether they do."""
        return uid in self._silent

    async def serve(self, http: web.Request, namespace: str, name: str, headers: dict[str, str]) -> web.StreamResponse:
        """Serve one stream to its end."""
        query = http.rel_url.query
        argv = query.getall("command", [])
        fault = self._cluster.faults.take_exec(name, " ".join(argv))
        if fault is not None and fault.status is not None:
            return web.Response(status=fault.status, text=fault.body, headers=headers)
        offered = [one.strip() for one in http.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        worker, container = self._container(namespace, name, query.get("container") or "")
        if http.headers.get("Upgrade", "").lower() != "websocket":
            raise bad_request("unable to upgrade: missing upgrade headers in request")
        if not argv:
            raise bad_request("you must specify at least 1 command for the container")
        spoken = [one for one in offered if one in self._cluster.faults.protocols]
        if not spoken:
            return web.Response(status=403, headers=headers)
        socket = web.WebSocketResponse(
            protocols=[spoken[0]], compress=False, max_msg_size=_MAX_MESSAGE, autoping=False, timeout=LINGER
        )
        socket.headers.update(headers)
        await socket.prepare(http)
        self.open += 1
        self.opened += 1
        self.peak = max(self.peak, self.open)
        self._live[socket] = (name, http)
        stdin, tty = query.get("stdin") in ("true", "1"), query.get("tty") in ("true", "1")
        stream = _Stream(self, http, socket, spoken[0], fault, worker)
        try:
            await stream.run(container, argv, stdin=stdin, tty=tty)
        except* ConnectionError:  # the client is gone
            pass
        finally:
            self.left(socket)
        return socket

    def left(self, socket: web.WebSocketResponse) -> None:
        """Note that a client is gone. What it had started may run on: nobody tells it."""
        if self._live.pop(socket, None) is not None:
            self.open -= 1

    def _container(self, namespace: str, name: str, wanted: str) -> tuple[Worker, Container | EchoContainer]:
        pod = self._cluster.rest.pod(namespace, name)
        containers = [container["name"] for container in pod.object["spec"]["containers"]]
        wanted = wanted or containers[0]
        if wanted not in containers:
            raise bad_request(f"container {wanted} is not valid for pod {name}")
        node = pod.object["spec"].get("nodeName")
        if not node:
            raise bad_request(f"pod {name} does not have a host assigned")
        worker = self._cluster.kubelet.workers.get(pod.uid)
        if node in self._cluster.kubelet.frozen:
            address = f"{worker.view.node_ip if worker else node}:10250"
            raise Refusal(500, "InternalError", f"error dialing backend: dial tcp {address}: i/o timeout")
        container = worker.container if worker is not None else None
        if worker is None or container is None or container.ended or "running" not in worker.view.container.state:
            words = f'unable to upgrade connection: container not found ("{wanted}")'
            raise Refusal(500, "InternalError", words)
        return worker, container


class _Stream:
    def __init__(
        self,
        owner: ExecStreams,
        http: web.Request,
        socket: web.WebSocketResponse,
        protocol: str,
        fault: ExecFault | None,
        worker: Worker,
    ) -> None:
        self._owner, self._http, self._socket, self._fault, self._worker = owner, http, socket, fault, worker
        self._v5 = protocol == V5
        self._sent = 0
        self._silent = False
        self._joined: dict[int, list[bytes]] = {}
        self._discard = fault.discard_stdin if fault is not None else 0

    async def run(self, container: Container | EchoContainer, argv: list[str], *, stdin: bool, tty: bool) -> None:
        await self._socket.send_bytes(b"\x01")
        async with anyio.create_task_group() as group:
            if self._fault is not None and self._fault.after_seconds is not None:
                group.start_soon(self._cut_later, self._fault.after_seconds)
            if isinstance(container, EchoContainer):
                await self._echo(container, argv, stdin=stdin)
            else:
                await self._command(container, argv, stdin=stdin, tty=tty)
            group.cancel_scope.cancel()

    async def _cut_later(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self._abort()

    def _abort(self) -> None:
        if self._http.transport is not None:
            self._http.transport.close()

    async def _command(self, container: Container, argv: list[str], *, stdin: bool, tty: bool) -> None:
        try:
            command = await container.exec(argv, stdin=stdin, tty=tty)
        except NotStarted as error:
            words = str(error) if "exec:" in str(error) else f"error in the container: {error}"
            await self._end(start_failure(words, self._owner.exec_id()))
            return
        code = 0
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read_client, command, None)
                async with anyio.create_task_group() as outputs:
                    for channel, descriptor in ((1, command.stdout), (2, command.stderr)):
                        if descriptor is not None:
                            outputs.start_soon(self._pump, channel, descriptor)
                    code = await command.wait()
                    if tty:
                        outputs.cancel_scope.deadline = anyio.current_time() + 1
                group.cancel_scope.cancel()
        finally:
            command.close()
        await self._end(exit_status(code, argv, v5=self._v5))

    async def _echo(self, container: EchoContainer, argv: list[str], *, stdin: bool) -> None:
        if not stdin:
            code, output = container.runner.answer({"argv": argv})
            if output:
                await self._output(1, output)
            await self._end(exit_status(code, argv, v5=self._v5))
            return
        stream = container.open(argv)
        await self._output(1, stream.greeting)
        code = -1
        try:
            async with anyio.create_task_group() as group:

                async def over(event: anyio.Event, exit_code: int) -> None:
                    nonlocal code
                    await event.wait()
                    code = exit_code
                    group.cancel_scope.cancel()

                group.start_soon(over, container.gone, 137)
                group.start_soon(over, stream.replaced, 0)
                await self._read_client(None, stream)
                group.cancel_scope.cancel()
        finally:
            stream.close()
        if code >= 0:
            await self._end(exit_status(code, argv, v5=self._v5))

    async def _pump(self, channel: int, descriptor: int) -> None:
        # A container runtime reads on when the client is gone, so that the command never blocks or dies of it.
        alive = True
        while data := await read(descriptor):
            if alive:
                try:
                    await self._output(channel, data)
                except ConnectionError:
                    alive = False

    async def _output(self, channel: int, data: bytes) -> None:
        fault = self._fault
        if self._silent or self._owner.silent(self._worker.uid):
            return
        if fault is not None and (fault.silent or fault.cut) and fault.after_seconds is None:
            left = (fault.after_bytes or 0) - self._sent
            if len(data) >= left:
                if left > 0:
                    await self._socket.send_bytes(bytes((channel,)) + data[:left])
                self._silent = True
                if fault.cut:
                    self._abort()
                return
        if fault is not None and fault.frame == -1:
            self._joined.setdefault(channel, []).append(data)
            return
        size = fault.frame if fault is not None and fault.frame is not None else len(data)
        for start in range(0, len(data), size):
            await self._socket.send_bytes(bytes((channel,)) + data[start : start + size])
        self._sent += len(data)

    async def _end(self, status: bytes) -> None:
        fault = self._fault
        if self._owner.silent(self._worker.uid):
            await anyio.sleep_forever()
        if self._silent:
            if fault is not None and fault.cut:
                return
            await anyio.sleep_forever()
        if fault is not None and (fault.silent or fault.cut) and fault.after_seconds is None:
            if fault.cut:
                self._abort()
                return
            await anyio.sleep_forever()
        for channel, pieces in self._joined.items():
            await self._socket.send_bytes(bytes((channel,)) + b"".join(pieces))
        if fault is not None and fault.status_frame is not None:
            status = fault.status_frame
        if status:
            if fault is not None and fault.split_status:
                await self._socket.send_bytes(b"\x03" + status[: fault.split_status])
                status = status[fault.split_status :]
            await self._socket.send_bytes(b"\x03" + status)
        if not self._v5:
            await self._socket.close()
            return
        transport = self._http.transport
        if transport is not None:
            # Unread input would turn the end of the connection into a reset, and the status would be lost.
            if transport.can_write_eof():
                transport.write_eof()
                with anyio.move_on_after(LINGER):
                    while not (await self._next()):
                        pass
            transport.close()

    async def _next(self) -> bool:
        """Read and forget one message; return whether there are no more."""
        message = await self._socket.receive()
        return message.type not in (WSMsgType.BINARY, WSMsgType.TEXT, WSMsgType.PING, WSMsgType.PONG)

    async def _read_client(self, command: Command | None, stream: EchoStream | None) -> None:
        idle = self._fault.idle if self._fault is not None else None
        while True:
            with anyio.move_on_after(idle) as scope:
                message = await self._socket.receive()
            if scope.cancelled_caught:
                self._abort()
                break
            if message.type is WSMsgType.PING:
                await self._socket.pong(message.data)
                continue
            if message.type is WSMsgType.PONG:
                continue
            if message.type is not WSMsgType.BINARY and message.type is not WSMsgType.TEXT:
                self._owner.closed_by_client += message.type is WSMsgType.CLOSE
                break
            data = message.data if isinstance(message.data, bytes) else message.data.encode()
            if self._owner.received is not None:
                self._owner.received.append(data)
            if not data:
                continue
            if data[0] == 255 and data[1:] == b"\0" and self._v5 and command is not None:
                command.end_stdin()
            elif data[0] == 0 and len(data) > 1:
                if self._discard:
                    self._discard -= 1
                elif command is not None and command.stdin is not None:
                    await write(command.stdin, data[1:])
                elif stream is not None and (output := stream.feed(data[1:])):
                    await self._output(1, output)
        self._owner.left(self._socket)
        if command is not None:
            command.end_stdin()
