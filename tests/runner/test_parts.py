# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import select
import socket
from typing import Any

import pytest

from agentsandbox.protocol import frames
from agentsandbox.protocol.runner import family, pipes, poller, processes, requests, spawn, stream, timers, users


def table(*rows: tuple[int, int, int]) -> processes.Table:
    """Return a process table of (pid, parent, session); start times are ten times the pid."""
    return {pid: processes.Process(pid, parent, session, pid * 10, alive=True) for pid, parent, session in rows}


def tree(rows: processes.Table, **more: Any) -> list[int]:
    """Return who belongs to command 1, whose main process is 10, below the runner 1."""
    known: dict[str, Any] = {
        "main": 10,
        "command": 1,
        "runner": 1,
        "seen": set(),
        "foreign": set(),
        "others": set(),
        "alone": False,
    }
    return sorted(processes.tree(rows, **{**known, **more}))


def test_a_tree_is_the_session_and_all_below_it() -> None:
    """Members of the session and descendants in sessions of their own belong to a command; strangers do not."""
    rows = table((1, 0, 1), (10, 1, 10), (11, 10, 10), (12, 11, 12), (13, 12, 12), (20, 1, 20), (21, 20, 20))

    assert tree(rows, others={20}) == [10, 11, 12, 13]


def test_orphans_belong_to_the_only_command_there_is() -> None:
    """An orphan is the active command's if there is no other, and it was not left behind by an earlier one."""
    rows = table((1, 0, 1), (10, 1, 10), (4_000_001, 1, 4_000_001), (4_000_002, 1, 4_000_002))

    assert tree(rows) == [10]
    assert tree(rows, alone=True) == [10, 4_000_001, 4_000_002]
    assert tree(rows, alone=True, foreign={(4_000_002, 40_000_020)}) == [10, 4_000_001]
    assert tree(rows, seen={(4_000_001, 40_000_010)}) == [10, 4_000_001]
    assert tree(rows, seen={(4_000_001, 1)}) == [10]


def test_own_process_is_in_the_table() -> None:
    """The table shows this process with its parent and session, and describes it by its arguments."""
    own = processes.table()[os.getpid()]

    assert (own.parent, own.session, own.alive) == (os.getppid(), os.getsid(0), True)
    assert own == processes.read(os.getpid())
    assert processes.visible()
    assert "py" in processes.describe(os.getpid())
    assert processes.read(2**22 + 1) is None


def test_cancelled_timers_do_not_pile_up() -> None:
    """Timers run in order; cancelled ones neither run nor are kept until their time."""
    clock = timers.Timers()
    now = 0.0
    clock.now = lambda: now
    ran: list[str] = []
    for _ in range(1000):
        clock.after(300, lambda: ran.append("never")).cancel()
    clock.after(2, lambda: ran.append("second"))
    clock.after(1, lambda: ran.append("first"))

    assert clock.until_next() == 1
    now = 5.0
    clock.run()
    assert ran == ["first", "second"]
    assert clock.until_next() == -1
    assert len(clock._heap) < 200
    assert repr(clock) == "<Timers [0 waiting]>"


def test_engines_show_their_state() -> None:
    """Each stateful part has a one-line summary."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert repr(stream.Stream(ours.fileno(), ours.fileno())).endswith("0 bytes pending]>")
        wait = poller.Poller(2)
        wait.watch(ours.fileno(), select.EPOLLIN, lambda _events: None)
        wait.read_outputs(lambda _events: None)
        assert repr(wait) == "<Poller [2 descriptors]>"
        wait.put_off(off=True)
        assert repr(wait) == "<Poller [2 descriptors, output put off]>"
    assert repr(family.Family()) == "<Family [0 commands, 0 left behind]>"
    assert repr(pipes.Input(None, 1, None)) == "<Input [closed, 0 bytes waiting]>"  # type: ignore[arg-type]


def test_a_stream_keeps_what_the_other_side_does_not_take() -> None:
    """Whatever does not fit is written later, in order and once."""
    ours, theirs = socket.socketpair()
    data = os.urandom(4 * 1024 * 1024)
    with ours, theirs:
        out = stream.Stream(ours.fileno(), ours.fileno())
        assert out.write([data[:1_000_000], data[1_000_000:]])
        assert out.pending > 0
        got = b""
        while len(got) < len(data):
            got += theirs.recv(1 << 20)
            assert out.write([])
        assert got == data
        assert (out.pending, out.read()) == (0, None)
        theirs.close()
        assert out.read() == b""
        assert not out.write([b"x"])


@pytest.mark.parametrize(
    ("value", "argv"),
    [
        ({"script": "x" * (96 * 1024 - 1)}, [b"/bin/sh", b"-c", b"x" * (96 * 1024 - 1)]),
        ({"script": "x" * 96 * 1024}, []),
        ({"argv": ["a", "\udcff"]}, [b"a", b"\xff"]),
    ],
    ids=["short", "long", "argv"],
)
def test_requests_become_arguments(value: dict[str, Any], argv: list[bytes]) -> None:
    """A script below 96 KiB is an argument of the shell; a longer one is kept apart."""
    request = requests.Request(value)

    assert request.argv == argv
    assert (request.script is None) == bool(argv)
    assert (request.grace, request.timeout, request.window) == (1.0, None, 0)


def test_a_failed_start_reports_what_the_frame_needs() -> None:
    """The payload of FAILED has kind, errno, message and subject."""
    failed = spawn.StartFailed("not_found", "x", number=2)

    assert failed.report() == {
        "kind": "not_found",
        "errno": 2,
        "message": "x: No such file or directory",
        "subject": "x",
    }
    assert frames.load(frames.dump(failed.report())) == failed.report()


def test_who_we_are_needs_no_account_file() -> None:
    """The runner's own user is found, with or without an entry."""
    account = users.resolve(None)

    assert (account.uid, account.gid) == (os.getuid(), os.getgid())
    assert account.gid in account.groups
    assert users.resolve("4000000001") == users.Account(4000000001, 0, (0,), "4000000001", "/")
    for wrong in ("4294967295", "99999999999999999999", "no-such-user", "", "0:no-such-group", "²"):
        with pytest.raises(users.NoUser, match="no such"):
            users.resolve(wrong)
