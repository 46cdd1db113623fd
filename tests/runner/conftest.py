# SPDX-License-Identifier: Apache-2.0
"""The real runner under every Python of this machine, and a driver that is as simple as can be."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from agentsandbox.protocol import bootstrap, frames
from agentsandbox.protocol.connection import Connection
from agentsandbox.protocol.frames import Frame

NONCE = "6e6f6e6365"
STDIN_WINDOW = 1024 * 1024
WAIT = 15.0
"""How long to wait for the runner before a test fails, in seconds."""


def interpreters() -> list[str]:
    """Return one interpreter of each version from 3.7 on."""
    candidates = [sys.executable]
    candidates += [path for minor in range(7, 16) if (path := shutil.which(f"python3.{minor}"))]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += [str(path) for path in sorted(root.glob("versions/3.*/bin/python"))]
    found: dict[tuple[int, ...], str] = {}
    for path in candidates:
        code = "import sys; print(*sys.version_info[:2])"
        answer = subprocess.run([path, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            version = tuple(map(int, answer.stdout.split()))
            if version >= (3, 7):
                found.setdefault(version, path)
    return list(found.values())


PYTHONS = interpreters()


class Result(NamedTuple):
    """What a command came to: ``exit`` is the payload of EXIT or FAILED."""

    exit: dict[str, Any]
    stdout: bytes
    stderr: bytes


class Driver:
    """A runner in a process of its own, and the other end of its stream."""

    def __init__(self, python: str, workdir: Path | str, *, between: str = "", **config: Any) -> None:
        self.python = python
        self.workdir = Path(workdir)
        self.socket, theirs = socket.socketpair()
        self.config = {"nonce": NONCE, "workdir": str(workdir), "base_env": {"LANG": "C.UTF-8"}, **config}
        modules = bootstrap.source().decode()
        call = bootstrap.program(config=self.config).decode()[len(modules) :]
        # *between* runs when everything is imported and nothing has begun.
        text = f"{modules}import {bootstrap.STDIO_ENTRY.partition(':')[0]}\n{between}\n{call}"
        arguments = [python, "-I", "-S", "-B", "-c", text]
        self.process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
        theirs.close()
        self.connection = Connection(frames.TO_DRIVER)
        self.last = 0
        self.frames: deque[Frame] = deque()
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> Self:
        try:
            self.attach()
        except (AssertionError, OSError, EOFError) as error:
            raise AssertionError(f"the runner did not come up: {self.close()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> str:
        """End the stream; return what the runner wrote to standard error."""
        self.socket.close()
        if self.process.poll() is None and "listen" in self.config:
            self.process.terminate()
        try:
            errors = self.process.communicate(timeout=WAIT)[1]
        finally:
            self.process.kill()
        return str(errors.decode())

    def attach(self, stream: socket.socket | None = None, nonce: str = NONCE) -> None:
        """Say HELLO and wait for WELCOME."""
        if stream is not None:
            self.connection.detach()
            self.socket.close()
            self.socket = stream
        self.socket.settimeout(WAIT)
        hello = {"version": frames.VERSION, "nonce": nonce, "received": self.connection.received}
        self.connection.send(frames.HELLO, 0, frames.dump(hello))
        self.flush()
        welcome = self.receive()
        assert welcome.type == frames.WELCOME, welcome
        answer = frames.load(welcome.payload)
        self.facts = answer["facts"]
        self.connection.attach(answer["received"])
        self.flush()

    def flush(self) -> None:
        """Write all that is to be written."""
        for chunk in self.connection.data_to_send():
            self.socket.sendall(chunk)

    def send(self, kind: int, command: int, payload: bytes = b"") -> None:
        """Send one frame."""
        self.connection.send(kind, command, payload)
        self.flush()

    def send_object(self, kind: int, command: int, **value: Any) -> None:
        """Send one frame with a JSON payload."""
        self.send(kind, command, frames.dump(value))

    def receive(self) -> Frame:
        """Return the next frame."""
        while not self.frames:
            data = self.socket.recv(256 * 1024)
            if not data:
                raise EOFError
            self.frames.extend(self.connection.receive_data(data))
            self.flush()
        return self.frames.popleft()

    def start(self, **request: Any) -> int:
        """Start a command; return its number."""
        self.last += 1
        self.send_object(frames.START, self.last, **{"window": 1024 * 1024, **request})
        return self.last

    def started(self, **request: Any) -> int:
        """Start a command and wait until it runs."""
        number = self.start(**request)
        frame = self.receive()
        assert (frame.type, frame.command) == (frames.STARTED, number), frame
        return number

    def grant(self, command: int, amount: int) -> None:
        """Give a command credit."""
        self.send(frames.CREDIT, command, frames.AMOUNT.pack(amount))

    def kill(self, command: int, grace: float = 0.0) -> None:
        """Ask for the end of a command."""
        self.send_object(frames.KILL, command, grace=grace)

    def finish(self, command: int, stdin: bytes | None = None) -> Result:
        """Feed a command within its credit, take what it writes, and wait for its end; frames of others stay."""
        aside: list[Frame] = []
        output: dict[int, list[bytes]] = {frames.STDOUT: [], frames.STDERR: []}
        credit, rest = STDIN_WINDOW, memoryview(stdin or b"")
        open_ = stdin is not None
        while True:
            while credit and rest:
                size = min(credit, frames.MAX_DATA, len(rest))
                self.send(frames.STDIN, command, bytes(rest[:size]))
                credit, rest = credit - size, rest[size:]
            if open_ and not rest:
                open_ = False
                self.send(frames.STDIN_END, command)
            frame = self.receive()
            if frame.command != command:
                aside.append(frame)
                continue
            if frame.type in output:
                output[frame.type].append(frame.payload)
                self.grant(command, len(frame.payload))
            elif frame.type == frames.CREDIT:
                credit += frames.AMOUNT.unpack(frame.payload)[0]
            elif frame.type in (frames.EXIT, frames.FAILED):
                result = Result(
                    frames.load(frame.payload), b"".join(output[frames.STDOUT]), b"".join(output[frames.STDERR])
                )
                if frame.type == frames.EXIT:
                    sizes = (result.exit["stdout"], result.exit["stderr"])
                    assert sizes == (len(result.stdout), len(result.stderr))
                self.frames.extendleft(reversed(aside))
                return result

    def run(self, stdin: bytes | None = None, **request: Any) -> Result:
        """Run a command to its end."""
        return self.finish(self.start(stdin=stdin is not None, **request), stdin)

    def quiet(self) -> list[Frame]:
        """Return the frames that arrive before the runner has answered a PING: all that it had to say."""
        seen = []
        self.send(frames.PING, 0, b"quiet")
        while True:
            frame = self.receive()
            if (frame.type, frame.payload) == (frames.PONG, b"quiet"):
                return seen
            seen.append(frame)


@pytest.fixture(scope="session", params=PYTHONS, ids=lambda path: Path(os.path.realpath(path)).name)
def python(request: pytest.FixtureRequest) -> str:
    """Every interpreter."""
    return str(request.param)


@pytest.fixture(scope="module")
def shared(python: str) -> Any:
    """A runner that the tests of a module share."""
    # Not below pytest's own directory, where other users may not go.
    with tempfile.TemporaryDirectory(prefix="runner-") as workdir:
        os.chmod(workdir, 0o777)
        with Driver(python, Path(workdir)) as driver:
            yield driver
            assert driver.quiet() == []
        assert driver.process.returncode == 0


@pytest.fixture
def driver(shared: Driver) -> Any:
    """The shared runner, in order before and after."""
    assert shared.quiet() == []
    yield shared
    shared.quiet()


@pytest.fixture
def make_driver(python: str, tmp_path: Path) -> Any:
    """A function that starts a runner of the test's own."""
    made: list[Driver] = []

    def make(**config: Any) -> Driver:
        driver = Driver(python, config.pop("workdir", tmp_path), **config)
        made.append(driver)
        return driver

    tmp_path.chmod(0o777)
    yield make
    for driver in made:
        driver.close()
