# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agentsandbox.protocol import frames

from .conftest import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024 * 1024


def wait_for(driver: Driver, name: str) -> None:
    """Wait until a file in the workdir exists; the waiting is done inside."""
    result = driver.run(script=f"while ! [ -e {name} ]; do sleep 0.01; done", timeout=20)

    assert result.exit["limit"] is None


def running(driver: Driver, words: bytes) -> list[str]:
    """Return the processes below the workdir whose arguments begin like this."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == driver.workdir and (entry / "cmdline").read_bytes().startswith(words):
                    found.append(entry.name)
    return found


@pytest.mark.parametrize("size", [64 * 1024, 16 * MIB + 1])
def test_output_of_any_size_arrives_whole(driver: Driver, size: int) -> None:
    """Output many times as large as the window arrives complete and in order."""
    code = f"import sys; b = bytes(range(251)); n = {size}; sys.stdout.buffer.write((b * (n // 251 + 1))[:n])"

    result = driver.run(argv=[driver.python, "-I", "-S", "-c", code], window=100_000)

    assert result.stdout == (bytes(range(251)) * (size // 251 + 1))[:size]


def test_credit_is_never_exceeded(driver: Driver) -> None:
    """Both streams share one window: not a byte more arrives, and the rest comes with the credit for it."""
    number = driver.started(script="printf '%3000d' 1; printf '%3000d' 2 >&2; touch flow-written", window=1000)
    wait_for(driver, "flow-written")

    got: Counter[int] = Counter()
    for amount, expected in ((0, 1000), (1, 1001), (2999, 4000), (10_000, 6000)):
        if amount:
            driver.grant(number, amount)
        while sum(got.values()) < expected:
            frame = driver.receive()
            got[frame.type] += len(frame.payload)

        if expected < 6000:
            assert driver.quiet() == []
        assert sum(got.values()) == expected
    assert driver.receive().type == frames.EXIT
    assert got == {frames.STDOUT: 3000, frames.STDERR: 3000}


def test_what_the_main_process_wrote_is_never_dropped(driver: Driver) -> None:
    """A command that ended with a full pipe is not over before its last byte was taken, however late that is."""
    number = driver.started(script="printf '%60000d' 1; touch flow-full", window=10)
    wait_for(driver, "flow-full")

    assert [(frame.type, len(frame.payload)) for frame in driver.quiet()] == [(frames.STDOUT, 10)]
    driver.grant(number, 100_000)
    total = 10
    while (frame := driver.receive()).type == frames.STDOUT:
        total += len(frame.payload)

    exit_ = frames.load(frame.payload)
    assert (total, exit_["stdout"], exit_["code"]) == (60_000, 60_000, 0)


def test_one_command_without_credit_does_not_hold_others(driver: Driver) -> None:
    """Back-pressure is for the command that has no credit, and for no other."""
    number = driver.started(argv=["yes"], window=1000)
    for _ in range(20):
        assert driver.run(script="echo ok").stdout == b"ok\n"
    driver.kill(number)

    exit_ = driver.finish(number).exit
    assert exit_["limit"] == "killed"
    assert exit_["stdout"] >= 1000


def test_a_flooding_command_does_not_delay_another(driver: Driver) -> None:
    """While one command floods under endless credit, another starts and ends within a few MiB of its output."""
    flood = driver.started(argv=["yes"], window=2**31)
    between = []
    for _ in range(10):
        number, seen = driver.start(argv=["echo", "ok"]), 0
        while True:
            frame = driver.receive()
            if frame.command == flood:
                seen += len(frame.payload)
            elif frame.type == frames.EXIT:
                break
        between.append((frame.command == number, seen))
    driver.kill(flood)
    driver.grant(flood, 2**31 - 1)
    while driver.receive().type != frames.EXIT:
        pass

    assert all(own for own, _ in between)
    # A process that starts takes some milliseconds, and output flows on meanwhile.
    assert sorted(seen for _, seen in between)[5] < 32 * MIB


def test_output_of_two_commands_alternates(driver: Driver) -> None:
    """Two floods are read in turns: neither starves, however the kernel schedules who writes them."""
    first, second = (driver.start(argv=["yes"], window=2**31) for _ in range(2))
    got: Counter[int] = Counter()
    while min(got[first], got[second]) < 8 * MIB:
        frame = driver.receive()
        if frame.type == frames.STDOUT:
            got[frame.command] += len(frame.payload)
    for number in (first, second):
        driver.kill(number)
    ended = set()
    while ended != {first, second}:
        frame = driver.receive()
        if frame.type == frames.EXIT:
            ended.add(frame.command)

    assert max(got.values()) < 64 * min(got.values())


def test_p19_a_background_child_does_not_hold_the_command(driver: Driver) -> None:
    """The command ends with its main process; the child is reported, lives on, and can be killed later."""
    result = driver.run(script="sleep 60 & echo $!")

    pid = int(result.stdout)
    assert (result.exit["code"], result.exit["leftovers"]) == (0, [[pid, "sleep 60"]])
    assert driver.run(script=f"kill -0 {pid} && kill -9 {pid}").exit["code"] == 0


def test_leftovers_may_go_on_writing(driver: Driver) -> None:
    """What a leftover writes after the end is discarded: it neither blocks nor dies of a broken pipe."""
    script = "(head -c 3000000 /dev/zero && head -c 3000000 /dev/zero >&2 && touch flow-left; exec sleep 60) & echo x"

    result = driver.run(script=script)

    (pid,) = (pid for pid, words in result.exit["leftovers"] if "sleep 60" in words)
    wait_for(driver, "flow-left")
    assert driver.run(argv=["kill", "-9", str(pid)]).exit["code"] == 0


def test_leftovers_of_one_command_are_not_anothers(driver: Driver) -> None:
    """A known leftover is neither reported nor killed again by commands that come later."""
    script = "setsid sleep 60 < /dev/null > /dev/null 2>&1 & echo $!"
    pid = int(driver.run(script=script).stdout)

    assert driver.run(script="sleep 60", timeout=0.1).exit["limit"] == "total"
    assert driver.run(script="true").exit["leftovers"] == []
    assert driver.run(script=f"kill -0 {pid} && kill -9 {pid}").exit["code"] == 0


def test_p23_a_timeout_keeps_what_was_printed(driver: Driver) -> None:
    """Both limits end the command, say which they are, and lose no output."""
    total = driver.run(script="echo before; sleep 60", timeout=0.3)
    silent = driver.run(script="echo before; sleep 60", timeout=30, no_output_timeout=0.3)

    assert (total.exit["limit"], total.stdout) == ("total", b"before\n")
    assert (silent.exit["limit"], silent.stdout) == ("no_output", b"before\n")
    assert (total.exit["code"], total.exit["survivors"]) == (143, [])


def test_output_resets_the_no_output_limit(driver: Driver) -> None:
    """A command that keeps talking, or whose words nobody takes, is not silent."""
    talk = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done"

    assert driver.run(script=talk, no_output_timeout=0.5).exit["limit"] is None
    number = driver.started(script="printf '%5000d' 1; sleep 0.6", window=10, no_output_timeout=0.3)
    driver.run(argv=["sleep", "0.5"])
    driver.grant(number, 5000)
    assert driver.finish(number).exit["limit"] is None


def test_p25_a_timeout_kills_the_whole_tree(driver: Driver) -> None:
    """Children that ignore TERM die as well, and that is verified."""
    script = "trap '' TERM; sleep 321 & sleep 322 & wait"

    result = driver.run(script=script, timeout=0.3, grace=0.2)

    assert (result.exit["limit"], result.exit["code"], result.exit["survivors"]) == ("total", 137, [])
    assert running(driver, b"sleep\x00321") + running(driver, b"sleep\x00322") == []


def test_term_comes_first(driver: Driver) -> None:
    """A command may clean up within its grace period, and its exit code then is its own."""
    script = "trap 'echo cleaned; exit 9' TERM; echo ready; while :; do sleep 0.05; done"

    result = driver.run(script=script, timeout=0.3, grace=20)

    assert (result.exit["code"], result.exit["limit"]) == (9, "total")
    assert result.stdout == b"ready\ncleaned\n"


@pytest.mark.parametrize("hide", [False, True], ids=["marked", "unmarked"])
def test_daemons_die_with_their_command(driver: Driver, hide: bool) -> None:
    """A daemon that left the session, was orphaned and cleared its environment is still killed by a timeout."""
    environment = "{}" if hide else "os.environ"
    code = f"""
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.execve("/bin/sh", ["sh", "-c", "trap '' TERM; touch flow-daemon-{hide}; while :; do sleep 0.0332; done"],
                  {{**{environment}, "PATH": "/usr/bin:/bin"}})
    os._exit(0)
os.wait()
while not os.path.exists("flow-daemon-{hide}"): time.sleep(0.01)
print("up", flush=True)
time.sleep(60)
"""
    result = driver.run(argv=[driver.python, "-I", "-S", "-c", code], timeout=2.0, grace=0.1)

    assert (result.stdout, result.exit["limit"], result.exit["survivors"]) == (b"up\n", "total", [])
    assert running(driver, b"sh\x00-c\x00trap '' TERM; touch flow-daemon") == []


def test_a_marked_daemon_is_found_among_others(driver: Driver) -> None:
    """With several commands active, an orphan belongs to the command whose marker it carries, and dies with it only."""
    script = "(setsid sh -c 'touch flow-{0}; exec sleep 60{0}' > /dev/null 2>&1 &); sleep 60"
    first = driver.started(script=script.format(7))
    second = driver.started(script=script.format(8))
    wait_for(driver, "flow-7")
    wait_for(driver, "flow-8")
    driver.kill(first)
    assert driver.finish(first).exit["survivors"] == []
    left = (len(running(driver, b"sleep\x00607")), len(running(driver, b"sleep\x00608")))
    driver.kill(second)
    driver.finish(second)

    assert left == (0, 1)
    assert running(driver, b"sleep\x00608") == []


def test_a_stopped_process_can_be_ended(driver: Driver) -> None:
    """A process that stopped itself ends within its grace period like any other."""
    result = driver.run(script="kill -STOP $$; echo never", timeout=0.2, grace=20)

    assert (result.exit["code"], result.stdout) == (128 + signal.SIGTERM, b"")


def test_kill_ends_a_command_that_never_reads(driver: Driver) -> None:
    """Standard input beyond what a pipe takes waits in the runner, within its credit, and does not prevent the end."""
    number = driver.started(argv=["sleep", "60"], stdin=True)
    for _ in range(4):
        driver.send(frames.STDIN, number, bytes(256 * 1024))
    driver.kill(number)

    exit_ = driver.finish(number).exit
    assert (exit_["code"], exit_["limit"]) == (137, "killed")


def test_kill_reaches_a_command_that_is_being_drained(driver: Driver) -> None:
    """A command whose main process is gone, and whose child holds its output, ends once, as killed, with the child."""
    for grace in (0.0, 0.5):
        number = driver.start(script="(trap '' TERM; while :; do sleep 0.0351; done) & echo $!")
        main = frames.load(driver.receive().payload)["pid"]
        child = int(driver.receive().payload)
        while Path(f"/proc/{main}").exists():
            pass
        driver.kill(number, grace=grace)
        while (frame := driver.receive()).type != frames.EXIT:
            pass

        exit_ = frames.load(frame.payload)
        assert (exit_["code"], exit_["survivors"]) == (0, [])
        # On a machine that is slow enough, the command was over before it could be killed.
        assert (exit_["limit"], [pid for pid, _ in exit_["leftovers"]]) in (("killed", []), (None, [child]))
        if exit_["limit"] is None:
            assert driver.run(argv=["kill", "-9", str(child)]).exit["code"] == 0
        assert driver.run(argv=["true"]).exit["code"] == 0


def test_kill_reaches_a_command_whose_words_nobody_takes(driver: Driver) -> None:
    """Who asks for the end does not have to take the output first: EXIT comes without credit."""
    script = "sleep 60 > /dev/null 2>&1 & printf '%60000d' 1; touch flow-words"
    number = driver.started(script=script, window=10)
    wait_for(driver, "flow-words")
    driver.kill(number)

    while (frame := driver.receive()).type != frames.EXIT:
        pass

    exit_ = frames.load(frame.payload)
    assert (exit_["limit"], exit_["stdout"], exit_["leftovers"]) == ("killed", 10, [])
    assert running(driver, b"sleep\x0060") == []


def test_input_that_nobody_reads_is_swallowed(driver: Driver) -> None:
    """A command that closes its standard input gets rid of the rest, and the driver its credit back."""
    result = driver.run(bytes(8 * MIB), script="exec 0<&-; echo closed")
    again = driver.run(bytes(8 * MIB), script="head -c 5 | wc -c")

    assert (result.exit["code"], result.stdout) == (0, b"closed\n")
    assert again.stdout.split() == [b"5"]


def test_frames_for_a_command_that_has_ended_are_ignored(driver: Driver) -> None:
    """KILL, STDIN and CREDIT that crossed the EXIT do no harm."""
    number = driver.start(argv=["true"])
    driver.finish(number)
    driver.kill(number)
    driver.send(frames.STDIN, number, b"late")
    driver.send(frames.STDIN_END, number)
    driver.grant(number, 1)

    assert driver.quiet() == []
    assert driver.run(argv=["true"]).exit["code"] == 0


def test_a_second_kill_may_be_less_patient(driver: Driver) -> None:
    """The shorter grace period counts; the first reason stays."""
    number = driver.started(script="trap '' TERM; while :; do sleep 0.05; done", timeout=0.2, grace=60)
    driver.run(argv=["sleep", "0.3"])
    driver.kill(number, grace=0)

    exit_ = driver.finish(number).exit
    assert (exit_["code"], exit_["limit"]) == (137, "total")


def test_p36_no_zombies_stay(driver: Driver) -> None:
    """200 orphaned children leave no process in state Z."""
    script = "i=0; while [ $i -lt 200 ]; do (sleep 0.01 &); i=$((i+1)); done"
    assert driver.run(script=script).exit["code"] == 0
    count = "while ps -o ppid= -o stat= -A | grep -q '^ *%d *[^Z]'; do sleep 0.01; done; ps -o ppid= -o stat= -A"

    result = driver.run(script=count.replace("*%d *[^Z]", "*%d *Z") % driver.process.pid, timeout=10)

    assert result.exit["limit"] is None


def test_many_commands_at_once(driver: Driver) -> None:
    """A hundred commands run side by side, and each gets its own output and code."""
    numbers = {driver.start(script=f"read x; echo {i}; exit {i}", stdin=True): i for i in range(100)}
    for number in numbers:
        driver.send(frames.STDIN_END, number)
    outputs: dict[int, bytes] = dict.fromkeys(numbers, b"")
    codes = {}
    while len(codes) < 100:
        frame = driver.receive()
        if frame.type == frames.STDOUT:
            outputs[frame.command] += frame.payload
        elif frame.type == frames.EXIT:
            codes[frame.command] = frames.load(frame.payload)["code"]

    assert codes == numbers
    assert outputs == {number: b"%d\n" % i for number, i in numbers.items()}


@pytest.fixture
def resting(tmp_path: Path) -> Iterator[Driver]:
    """A runner that would not read on for a minute after a few bytes of output."""
    patient = "import agentsandbox.protocol.runner.commands as c; c.REST = 60.0"
    with Driver(sys.executable, tmp_path, between=patient) as driver:
        yield driver


def test_lines_written_one_by_one_come_together(driver: Driver) -> None:
    """What a command writes in many small pieces takes a few frames: each costs everybody on the way."""
    number = driver.started(script="for i in $(seq 200); do echo $i; done")
    pieces = []
    while (frame := driver.receive()).type != frames.EXIT:
        pieces.append(frame.payload)

    assert b"".join(b"%d\n" % number for number in range(1, 201)) == b"".join(pieces)
    assert len(pieces) <= 3 + frames.load(frame.payload)["wall"] / 0.004
    assert frame.command == number


def test_the_end_of_a_command_waits_for_nothing(resting: Driver) -> None:
    """What was written since the last frame arrives with the end, in order."""
    result = resting.run(script="echo 1; echo 2; sleep 0.2; echo 3; echo 4 >&2")

    assert (b"1\n2\n3\n", b"4\n") == (result.stdout, result.stderr)


def test_an_answer_is_not_kept_waiting(resting: Driver) -> None:
    """Whoever sends a line gets the answer at once, each time."""
    number = resting.started(argv=["cat"], stdin=True)
    for line in (b"one\n", b"two\n", b"three\n"):
        resting.send(frames.STDIN, number, line)
        assert (frames.STDOUT, line) == (resting.receive().type, line)
    resting.send(frames.STDIN_END, number)
    assert resting.receive().type == frames.EXIT


def test_large_output_does_not_rest(resting: Driver) -> None:
    """Pieces of some size are read one after the other."""
    result = resting.run(script="for i in 1 2 3 4 5; do printf '%5000d' $i; sleep 0.05; done; sleep 0.1")

    assert 25_000 == len(result.stdout)


def test_a_limit_on_silence_counts_what_waits(resting: Driver) -> None:
    """A command that writes while nobody reads is not silent."""
    result = resting.run(script="for i in $(seq 30); do echo $i; sleep 0.02; done", no_output_timeout=0.3)

    assert (None, 30) == (result.exit["limit"], len(result.stdout.splitlines()))
