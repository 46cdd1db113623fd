# SPDX-License-Identifier: Apache-2.0
"""
Containers without processes: a peer in this process speaks the runner's protocol and says that all went well.

They cost some kilobytes each, so that thousands of Pods with an open stream each fit into one process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from agentsandbox.protocol import frames
from agentsandbox.protocol.connection import Connection
from agentsandbox.protocol.runner.attaching import GREETING

__all__ = ["Answer", "EchoContainer", "EchoStream", "well"]

Answer = Callable[[dict[str, Any]], tuple[int, bytes]]
"""Given what START holds, returns exit code and output."""

_STUB = re.compile(r"b,n=\[\],(\d+)")
"""How the program begins that reads another one from its standard input, and how long that is."""
_STDIN_WINDOW = 1024 * 1024


def well(_request: dict[str, Any]) -> tuple[int, bytes]:
    """Say that it went well, and nothing else."""
    return 0, b""


class _Runner:
    """A runner as its driver sees it; it outlives its streams."""

    def __init__(self, answer: Answer, end: Callable[[int], None]) -> None:
        self.connection = Connection(frames.TO_RUNNER)
        self.end = end
        self.stream: EchoStream | None = None
        self.commands = 0
        self.files: dict[str, bytes] = {}
        self.answer = answer
        self._writing: dict[int, tuple[dict[str, Any], bytearray]] = {}

    def act(self, frame: frames.Frame) -> None:
        if frame.type == frames.START:
            self._start(frame.command, frames.load(frame.payload))
        elif frame.type == frames.SHUTDOWN:
            self.end(int(frames.load(frame.payload).get("code") or 0) if frame.payload else 0)
        elif frame.type == frames.PING:
            self.connection.send(frames.PONG, 0, frame.payload)
        elif frame.type == frames.STDIN and frame.command in self._writing:
            self._writing[frame.command][1].extend(frame.payload)
            self.connection.send(frames.CREDIT, frame.command, frames.AMOUNT.pack(len(frame.payload)))
        elif frame.type == frames.STDIN_END and frame.command in self._writing:
            self._end_of_input(frame.command, *self._writing.pop(frame.command))
        elif frame.type == frames.KILL and frame.command in self._writing:
            del self._writing[frame.command]
            self._exit(frame.command, 137, limit="killed")

    def _start(self, number: int, request: dict[str, Any]) -> None:
        self.commands += 1
        self.connection.send(frames.STARTED, number, frames.dump({"pid": self.commands + 1}))
        if request.get("stdin"):
            self._writing[number] = (request, bytearray())
            return
        self._end_of_input(number, request, bytearray())

    def _end_of_input(self, number: int, request: dict[str, Any], data: bytearray) -> None:
        path = str((request.get("args") or {}).get("path"))
        if request.get("builtin") == "write":
            self.files[path] = bytes(data)
            report = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            self._exit(number, 0, report=report)
        elif request.get("builtin") == "read":
            content = self.files.get(path)
            if content is None:
                error = {"errno": 2, "message": f"{path}: No such file or directory", "path": path}
                self._exit(number, 1, report={"error": error})
            else:
                self._exit(number, 0, content[: request.get("window", 0)], report={"size": len(content)})
        else:
            self._exit(number, *self.answer(request))

    def _exit(self, number: int, code: int, output: bytes = b"", **more: Any) -> None:
        if output:
            self.connection.send(frames.STDOUT, number, output)
        report: dict[str, Any] = {"code": code, "signal": None, "limit": None}
        report |= {"wall": 0.001, "cpu": 0.001, "memory": 4096}
        report |= {"stdout": len(output), "stderr": 0, "leftovers": [], "survivors": [], "report": None, **more}
        self.connection.send(frames.EXIT, number, frames.dump(report))


class EchoStream:
    """
    One exec stream to such a runner.

    Args:
        runner: The runner.
        argv: The command that is said to carry the stream.

    """

    def __init__(self, runner: _Runner, argv: Sequence[str]) -> None:
        self._runner = runner
        found = _STUB.search(" ".join(argv))
        self._skip = int(found[1]) if found else 0
        self._hello = bytearray()
        self._attached = False
        self.replaced = anyio.Event()
        """Set when another stream has taken its place."""

    greeting = GREETING
    """What the runner says first."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of standard input and return those of standard output."""
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        if not self._attached:
            self._hello += data
            if len(self._hello) < frames.HEADER.size:
                return b""
            kind, _, length = frames.HEADER.unpack_from(self._hello)
            end = frames.HEADER.size + length
            if kind != frames.HELLO or len(self._hello) < end:
                return b""
            hello = frames.load(bytes(self._hello[frames.HEADER.size : end]))
            data = bytes(self._hello[end:])
            self._attach(int(hello.get("received") or 0))
        if self._runner.stream is not self:
            return b""
        connection = self._runner.connection
        for frame in connection.receive_data(data):
            self._runner.act(frame)
        return b"".join(connection.data_to_send())

    def _attach(self, received: int) -> None:
        runner, connection = self._runner, self._runner.connection
        if runner.stream is not None:
            runner.stream.replaced.set()
        connection.detach()
        runner.stream = self
        self._attached = True
        facts: dict[str, Any] = {"python": "3.11.7", "pid": 1, "uid": 1000, "gid": 1000, "home": "/home/sandbox"}
        facts |= {"workdir": "/workspace", "user": "sandbox", "users": False, "kernel": "6.18", "machine": "x86_64"}
        facts |= {"boot_id": "", "namespaces": {}}
        welcome = {"version": frames.VERSION, "received": connection.received, "facts": facts}
        connection.send(frames.WELCOME, 0, frames.dump(welcome))
        connection.attach(received)

    def close(self) -> None:
        """Detach: the stream is gone, and the runner stays."""
        if self._runner.stream is self:
            self._runner.stream = None
            self._runner.connection.detach()


class EchoContainer:
    """A container whose first process is such a runner."""

    def __init__(self, answer: Answer = well) -> None:
        self.output: list[int] = []
        self.out_of_memory = False
        self.runner = _Runner(answer, self.exit)
        self.code = 137
        self.gone = anyio.Event()
        """Set when it has ended."""

    def __repr__(self) -> str:
        return f"<EchoContainer [{'ended' if self.ended else 'running'}, {self.runner.commands} commands]>"

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left."""
        return self.gone.is_set()

    async def wait(self) -> int:
        """Wait for its end."""
        await self.gone.wait()
        return self.code

    async def signal(self, number: int) -> None:
        """End at once, as our own first process does on TERM."""
        self.code = 128 + number if number == 9 else 0
        self.gone.set()

    async def kill(self) -> None:
        """End."""
        self.gone.set()

    def exit(self, code: int) -> None:
        """End by itself."""
        self.code = code
        self.gone.set()

    def open(self, argv: Sequence[str]) -> EchoStream:
        """Run a command that carries a stream to the runner, which greets it with :data:`GREETING`."""
        return EchoStream(self.runner, argv)
