# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import pytest

from agentsandbox.protocol import frames
from agentsandbox.protocol.connection import Connection

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Driver

Make = Any


def connect(path: Path) -> socket.socket:
    """Connect to a runner that listens."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(20)
    stream.connect(str(path))
    return stream


def packed(*chunks: tuple[int, int, bytes]) -> bytes:
    """Return frames as bytes."""
    return b"".join(frames.encode(kind, number, payload) + payload for kind, number, payload in chunks)


def hello(nonce: str, received: int = 0, version: int = frames.VERSION) -> bytes:
    """Return a HELLO."""
    payload = frames.dump({"version": version, "nonce": nonce, "received": received})
    return packed((frames.HELLO, 0, payload))


def all_of(stream: socket.socket) -> list[frames.Frame]:
    """Return every frame until the stream ends."""
    connection = Connection(frames.TO_DRIVER)
    found = []
    try:
        while data := stream.recv(65536):
            found += connection.receive_data(data)
    except ConnectionResetError:
        pass
    return found


def ended(driver: Driver) -> tuple[int, str]:
    """Return how the runner ended by itself: exit status and what it complained about."""
    errors = driver.process.communicate(timeout=20)[1].decode()
    return driver.process.returncode, errors


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (hello("wrong"), "wrong nonce"),
        (hello(""), "wrong nonce"),
        (hello("6e6f6e6365", version=99), "version 99 is not spoken here, only 1"),
        (hello("6e6f6e6365", received=-1), "HELLO without a count of received frames"),
        (packed((frames.HELLO, 0, b"[]")), "payload is not a JSON object"),
        (packed((frames.HELLO, 0, b"\xff{")), "payload is not JSON"),
        (packed((frames.START, 1, b"{}")), "the stream does not begin with HELLO"),
        (b"GET / HTTP/1.1\r\n\r\n", "the stream does not begin with HELLO"),
        (frames.encode(frames.HELLO, 0, bytes(5000)), "the stream does not begin with HELLO"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_does_not_know_the_nonce_is_refused(make_driver: Make, first: bytes, reason: str) -> None:
    """A bad HELLO gets REFUSED with its reason and nothing else; the runner ends without a traceback."""
    driver = make_driver()
    driver.socket.settimeout(20)
    driver.socket.sendall(first)

    found = all_of(driver.socket)

    assert [(frame.type, frames.load(frame.payload)) for frame in found] == [(frames.REFUSED, {"reason": reason})]
    assert ended(driver) == (0, "")


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (packed((99, 0, b"")), "type 99"),
        (frames.HEADER.pack(frames.STDIN, 1, frames.MAX_DATA + 1), "limit"),
        (frames.HEADER.pack(frames.START, 1, 2**32 - 1), "limit"),
        (packed((frames.START, 5, b"{}")), "comes after"),
        (packed((frames.START, 6, b"not json")), "not JSON"),
        (packed((frames.START, 6, b"[" * 100_000)), "payload"),
        (packed((frames.STDIN, 6, b"x")), "never started"),
        (packed((frames.KILL, 0, b"{}")), "never started"),
        (packed((frames.CREDIT, 5, b"abc")), "3 bytes"),
        (packed((frames.KILL, 5, b'{"grace":"soon"}')), "grace"),
        (packed((frames.ACK, 0, frames.COUNT.pack(10**6))), "claims"),
        (hello("6e6f6e6365"), "second HELLO"),
        (packed((frames.STDOUT, 5, b"x")), "type 34"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_frames_end_the_session(make_driver: Make, chunk: bytes, reason: str) -> None:
    """A frame that breaks the rules ends the session with REFUSED, everything is killed, and there is no traceback."""
    with make_driver() as driver:
        driver.last = 4
        number = driver.started(script="sleep 60 & echo $!; exec sleep 60", stdin=True)
        while (frame := driver.receive()).type != frames.STDOUT:
            pass
        assert number == 5
        driver.socket.sendall(chunk)
        while (refused := driver.receive()).type != frames.REFUSED:
            pass

        assert reason in frames.load(refused.payload)["reason"]
        with pytest.raises((EOFError, ConnectionResetError)):
            driver.receive()
        assert ended(driver) == (0, "")
        assert not os.path.exists(f"/proc/{int(frame.payload)}")


def test_input_beyond_its_credit_ends_the_session(make_driver: Make) -> None:
    """The window for standard input, which both sides know of, is a limit and not an advice."""
    with make_driver() as driver:
        number = driver.started(argv=["sleep", "60"], stdin=True)
        with contextlib.suppress(ConnectionError):
            for _ in range(12):  # what a pipe takes counts as consumed, and no pipe takes 2 MiB
                driver.send(frames.STDIN, number, bytes(256 * 1024))
        while (refused := driver.receive()).type != frames.REFUSED:
            pass

        assert "exceeds its credit" in frames.load(refused.payload)["reason"]
        assert ended(driver) == (0, "")


def test_the_end_of_the_stream_is_the_end_of_everything(make_driver: Make) -> None:
    """A runner whose only stream ends kills what it started, daemons included, and ends."""
    with make_driver() as driver:
        result = driver.run(script="setsid sleep 60 > /dev/null 2>&1 & echo $!")
        driver.start(script="trap '' TERM; while :; do sleep 0.0311; done")
        driver.quiet()
        driver.socket.close()

        assert ended(driver) == (0, "")
    assert not os.path.exists(f"/proc/{int(result.stdout)}")


@pytest.mark.parametrize("how", ["shutdown", "term"])
def test_shutdown_and_term_end_everything_at_once(make_driver: Make, tmp_path: Path, how: str) -> None:
    """SHUTDOWN and SIGTERM end a runner that would wait for another driver, and all that it started."""
    with make_driver(listen=str(tmp_path / "socket")) as driver:
        pid = int(driver.run(script="trap '' TERM; (sleep 60; :) > /dev/null 2>&1 & echo $!").stdout)
        if how == "term":
            driver.process.send_signal(signal.SIGTERM)
        else:
            driver.send(frames.SHUTDOWN, 0)

        assert ended(driver) == (0, "")
        assert not os.path.exists(f"/proc/{pid}")


def test_commands_go_on_while_nobody_is_attached(make_driver: Make, tmp_path: Path) -> None:
    """Output waits in the runner, within its credit, and continues on the next stream where it stopped."""
    with make_driver(listen=str(tmp_path / "socket")) as driver:
        number = driver.started(
            script="while ! [ -e go ]; do sleep 0.01; done; seq 1 20000; touch done; exit 4", window=2**20
        )
        driver.socket.close()
        (tmp_path / "go").touch()
        driver.attach(connect(tmp_path / "socket"))
        result = driver.finish(number)

        assert (result.exit["code"], result.stdout.split()) == (4, [b"%d" % i for i in range(1, 20001)])


def test_a_second_stream_replaces_the_first(make_driver: Make, tmp_path: Path) -> None:
    """The old stream is closed when another driver shows the nonce, and only then."""
    with make_driver(listen=str(tmp_path / "socket")) as driver:
        with connect(tmp_path / "socket") as stranger:
            stranger.sendall(hello("wrong"))
            assert [frame.type for frame in all_of(stranger)] == [frames.REFUSED]
        assert driver.run(script="echo still").stdout == b"still\n"
        old, driver.socket = driver.socket, socket.socket()
        driver.attach(connect(tmp_path / "socket"))

        assert all_of(old) == []
        assert driver.run(script="echo new").stdout == b"new\n"
        old.close()


def test_strangers_cannot_use_up_the_runner(make_driver: Make, tmp_path: Path) -> None:
    """Streams that say nothing give way to newer ones; a driver with the nonce still gets in."""
    with make_driver(listen=str(tmp_path / "socket")) as driver:
        silent = [connect(tmp_path / "socket") for _ in range(40)]
        driver.attach(connect(tmp_path / "socket"))

        assert driver.run(script="echo in").stdout == b"in\n"
        assert silent[0].recv(1) == b""
        for stream in silent:
            stream.close()


def test_a_driver_that_lost_count_is_refused(make_driver: Make, tmp_path: Path) -> None:
    """A HELLO that claims frames which were never sent ends the session: its outcome is unknown."""
    driver = make_driver(listen=str(tmp_path / "socket"))
    driver.attach()
    with connect(tmp_path / "socket") as stream:
        stream.sendall(hello("6e6f6e6365", received=1000))
        found = all_of(stream)

    assert "claims 1000 frames" in frames.load(found[-1].payload)["reason"]
    assert ended(driver) == (0, "")


class Cut(Exception):
    """The stream was cut on purpose."""


class Cutting:
    """A stream that is cut after so many bytes out, or so many bytes in."""

    def __init__(self, stream: socket.socket, out: int | None, into: int | None) -> None:
        self._stream, self._out, self._into = stream, out, into

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def sendall(self, data: bytes) -> None:
        if self._out is None:
            self._stream.sendall(data)
            return
        part = bytes(data)[: self._out]
        self._stream.sendall(part)
        self._out -= len(part)
        if len(part) < len(data):
            raise Cut

    def recv(self, size: int) -> bytes:
        if self._into is None:
            return self._stream.recv(size)
        if self._into == 0:
            raise Cut
        data = self._stream.recv(min(size, self._into))
        self._into -= len(data)
        return data


@pytest.mark.parametrize("direction", ["out", "into"])
def test_p06_commands_run_once_wherever_the_stream_is_cut(make_driver: Make, tmp_path: Path, direction: str) -> None:
    """Whatever byte the stream breaks at, in either direction, each command runs once and its output comes whole."""
    with make_driver(listen=str(tmp_path / "socket")) as driver:
        for position in range(0, 420, 7):
            data = b"line %d\n" % position
            driver.last += 1
            script = f"cat >> log-{position}; echo out-{position}; echo err >&2; exit 3"
            request = {"script": script, "stdin": True, "window": 1000}
            driver.connection.send(frames.START, driver.last, frames.dump(request))
            driver.connection.send(frames.STDIN, driver.last, data)
            driver.connection.send(frames.STDIN_END, driver.last)
            seen: list[frames.Frame] = []
            stream: Any = driver.socket
            driver.socket = Cutting(stream, **{"out": None, "into": None, direction: position})  # type: ignore[assignment]
            try:
                until_exit(driver, seen)
                driver.socket = stream
            except Cut:
                driver.attach(connect(tmp_path / "socket"))
                until_exit(driver, seen)

            assert sorted(frame.type for frame in seen) == [
                frames.STARTED,
                frames.STDOUT,
                frames.STDERR,
                frames.EXIT,
            ]
            assert {frame.payload for frame in seen} >= {b"out-%d\n" % position, b"err\n"}
            assert frames.load(seen[-1].payload)["code"] == 3
            assert (tmp_path / f"log-{position}").read_bytes() == data


def until_exit(driver: Driver, seen: list[frames.Frame]) -> None:
    """Write what is queued and collect frames up to an EXIT."""
    driver.flush()
    while not seen or seen[-1].type != frames.EXIT:
        seen.append(driver.receive())
