# SPDX-License-Identifier: Apache-2.0
"""The first process of a container and the relays that bring streams to it, as real processes of this machine."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import sys
from urllib.parse import quote_plus

import pytest

from agentsandbox.protocol import bootstrap, frames
from agentsandbox.protocol.runner.attaching import GREETING

NONCE = "0123456789abcdef" * 2
BARE = [sys.executable, "-ISB"]


class Container:
    """A first process that waits for its program, and the relays to it."""

    def __init__(self, tmp_path) -> None:
        self.name = f"asb-test-{secrets.token_hex(6)}"
        digest = hashlib.sha256(NONCE.encode()).hexdigest()
        self.process = subprocess.Popen(
            [*BARE, "-uc", bootstrap.WAITING, self.name, digest],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "IMAGE": "own", "KUBERNETES_PORT": "tcp://10.0.0.1"},
        )
        self.relays: list[subprocess.Popen[bytes]] = []

    def relay(self) -> subprocess.Popen[bytes]:
        """Bring a stream, as an exec does."""
        relay = subprocess.Popen(
            [*BARE, "-c", bootstrap.RELAY, self.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.relays.append(relay)
        return relay

    def close(self) -> None:
        for process in (*self.relays, self.process):
            process.kill()
            process.wait()
            for end in (process.stdin, process.stdout):
                if end is not None:
                    end.close()


@pytest.fixture
def container(tmp_path):
    """Run a container's first process."""
    container = Container(tmp_path)
    yield container
    container.close()


def hello(nonce: str = NONCE) -> bytes:
    """Return the first words of a driver."""
    payload = frames.dump({"version": frames.VERSION, "nonce": nonce, "received": 0})
    return frames.encode(frames.HELLO, 0, payload) + payload


def say(relay: subprocess.Popen[bytes], data: bytes) -> None:
    """Send bytes through a relay."""
    assert relay.stdin is not None
    relay.stdin.write(data)
    relay.stdin.flush()


def hear(relay: subprocess.Popen[bytes], size: int = 65536) -> bytes:
    """Return the next bytes of a relay."""
    assert relay.stdout is not None
    return os.read(relay.stdout.fileno(), size)


def frame(relay: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Return the next frame of a relay."""
    assert relay.stdout is not None
    data = relay.stdout.read(frames.HEADER.size)
    kind, _, length = frames.HEADER.unpack(data)
    return kind, relay.stdout.read(length)


def start(container: Container, **config: object) -> subprocess.Popen[bytes]:
    """Give the first process its program and attach."""
    relay = container.relay()
    assert hear(relay).startswith(bootstrap.WAITING_GREETING)
    program = bootstrap.program(entry=bootstrap.ATTACHED_ENTRY, config={"nonce": NONCE, **config})
    say(relay, bootstrap.handover(NONCE, program) + hello())
    kind, _ = frame(relay)
    assert kind == frames.WELCOME
    return relay


def test_both_programs_are_small() -> None:
    """Every watch event carries the one, and a URL the other; neither may grow."""
    assert len(bootstrap.WAITING) < 1536
    assert len(quote_plus(bootstrap.RELAY)) < 1024


def test_the_first_process_becomes_the_runner(container: Container, tmp_path) -> None:
    """The program arrives on the first stream, and what follows on it is for the runner."""
    relay = start(container, env={"MORE": "x"})
    payload = frames.dump({"script": "pwd; echo $IMAGE $MORE $KUBERNETES_PORT", "window": 1 << 20})
    say(relay, frames.encode(frames.START, 1, payload) + payload)

    said = b""
    while (answer := frame(relay))[0] != frames.EXIT:
        said += answer[1] if answer[0] == frames.STDOUT else b""
    assert f"{tmp_path}\nown x\n".encode() == said


def test_who_lacks_the_nonce_gives_it_no_program(container: Container) -> None:
    """A stream with another nonce is dropped, and the first process goes on waiting."""
    relay = container.relay()
    assert hear(relay).startswith(bootstrap.WAITING_GREETING)
    say(relay, bootstrap.handover("f" * 32, b"print('taken over')"))
    assert 0 == relay.wait(10)
    assert b"" == hear(relay)

    start(container)


def test_a_program_that_breaks_off_can_be_sent_again(container: Container) -> None:
    """A stream that ends within the program leaves the first process waiting for another one."""
    relay = container.relay()
    assert hear(relay).startswith(bootstrap.WAITING_GREETING)
    say(relay, bootstrap.handover(NONCE, b"x" * 1000)[:500])
    assert relay.stdin is not None
    relay.stdin.close()
    assert 0 == relay.wait(10)

    start(container)


def test_another_stream_replaces_the_first(container: Container) -> None:
    """Who shows the nonce is attached; the relay of the stream before it leaves."""
    first = start(container)
    second = container.relay()
    assert GREETING == hear(second)
    say(second, hello())
    assert frames.WELCOME == frame(second)[0]
    assert 0 == first.wait(10)


def test_a_stranger_is_refused_and_the_driver_stays(container: Container) -> None:
    """Who lacks the nonce is told so; the attached stream is not touched."""
    first = start(container)
    stranger = container.relay()
    assert GREETING == hear(stranger)
    say(stranger, hello("f" * 32))
    assert (frames.REFUSED, b'{"reason":"wrong nonce"}') == frame(stranger)
    assert 0 == stranger.wait(10)

    say(first, frames.encode(frames.PING, 0, b"still") + b"still")
    assert (frames.PONG, b"still") == frame(first)


def test_connections_that_bring_nothing_are_dropped(container: Container) -> None:
    """Whoever connects and hands nothing over costs nothing but its own connection."""
    first = start(container)
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    for end in silent:
        end.connect(f"\0{container.name}")
        end.settimeout(10)
    silent[0].send(b"no descriptors")
    for end in silent:
        try:
            assert b"" == end.recv(1)
        except ConnectionResetError:
            assert end is silent[0]
    say(first, frames.encode(frames.PING, 0, b"x") + b"x")
    assert (frames.PONG, b"x") == frame(first)
    for end in silent:
        end.close()


def test_nothing_is_cleaned_outside_of_a_container(container: Container) -> None:
    """Only the first process of a container owns what it shares with the one before it."""
    path = f"/dev/shm/{container.name}"
    with open(path, "w") as file:
        file.write("somebody's")
    try:
        start(container)
        assert os.path.exists(path)
    finally:
        os.unlink(path)


@pytest.mark.parametrize("code", [0, 42])
def test_it_ends_with_the_code_that_it_is_asked_for(container: Container, code: int) -> None:
    """The driver decides what the first process exits with, and every relay leaves."""
    relay = start(container)
    payload = frames.dump({"code": code}) if code else b""
    say(relay, frames.encode(frames.SHUTDOWN, 0, payload) + payload)
    assert code == container.process.wait(10)
    assert 0 == relay.wait(10)


def test_term_ends_it_while_it_waits(container: Container) -> None:
    """A container that nobody has attached to yet ends at once when it is told to."""
    assert hear(container.relay()).startswith(bootstrap.WAITING_GREETING)
    container.process.terminate()
    assert 0 == container.process.wait(10)


def test_a_nonce_of_another_length_is_refused() -> None:
    """What the first process could not take apart is never sent."""
    with pytest.raises(ValueError, match="32"):
        bootstrap.handover("short", b"")
