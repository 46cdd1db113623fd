# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from agentsandbox.protocol import frames

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Driver

NO_MORE_IMPORTS = "import sys; sys.meta_path.clear(); sys.path.clear(); sys.path_hooks.clear()"

FIRST_PROCESS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
flags = 0x20000000 | 0x00020000 | (0x10000000 if uid else 0)  # pid, mount and, if need be, user namespace
if libc.unshare(flags):
    raise OSError(ctypes.get_errno(), "unshare")
if uid:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
pid = os.fork()
if pid:
    print(pid, file=sys.stderr, flush=True)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0), os.dup2(0, 1)
    status = os.waitpid(pid, 0)[1]
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 255)
libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)  # nothing of this goes back
if libc.mount(b"proc", b"/proc", b"proc", 0, None):
    raise OSError(ctypes.get_errno(), "mount")
"""


def namespaces_allowed() -> bool:
    """Whether this user may make the namespaces above."""
    flags = 0x20000000 | 0x00020000 | (0x10000000 if os.getuid() else 0)
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(not namespaces_allowed(), reason="needs a PID namespace of its own")


@pytest.fixture
def first(make_driver: Any) -> Any:
    """A runner that is the first process of a PID namespace."""
    with make_driver(between=FIRST_PROCESS) as driver:
        assert driver.facts["pid"] == 1
        driver.outside = int(driver.process.stderr.readline())
        yield driver


def everything(driver: Driver) -> None:
    """Use every part of the runner once."""
    data = b"content"
    args = {"path": "used/file", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert driver.run(data, builtin="write", args=args).exit["code"] == 0
    assert driver.run(builtin="read", args={"path": "used/file"}).stdout == data
    packed = driver.run(builtin="pack", args={"path": "used"})
    assert packed.exit["code"] == 0
    assert driver.run(packed.stdout, builtin="unpack", args={"path": "again"}).exit["code"] == 0
    assert driver.run(b"no tar", builtin="unpack", args={"path": "again"}).exit["code"] == 1
    assert driver.run(builtin="read", args={"path": "missing"}).exit["code"] == 1
    assert driver.run(argv=["missing"]).exit["kind"] == "not_found"
    assert driver.run(argv=["x"], user="missing").exit["kind"] == "no_user"
    assert driver.run(argv=["x"], cwd="/missing").exit["kind"] in ("no_cwd", "not_found")


def test_nothing_is_imported_once_it_runs(make_driver: Any) -> None:
    """A runner that finds no modules any more does all that it does."""
    with make_driver(between=NO_MORE_IMPORTS) as driver:
        everything(driver)
        assert driver.run(b"in", script="cat #" + "x" * 100_000).stdout == b"in"
        assert driver.run(script="sleep 60 & sleep 60", timeout=0.1).exit["limit"] == "total"
        assert driver.run(script="sleep 60 & echo x").exit["leftovers"][0][1] == "sleep 60"
        assert driver.run(argv=["id", "-u"], user=os.getuid()).stdout == b"%d\n" % os.getuid()
        driver.send(frames.SHUTDOWN, 0)

        assert driver.process.communicate(timeout=20)[1] == b""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change the root directory and make devices")
def test_an_empty_root_file_system_is_enough(make_driver: Any, tmp_path: Path) -> None:
    """Without modules, shell, account files and /proc, files still work and commands fail as not found."""
    (tmp_path / "dev").mkdir()
    os.mknod(tmp_path / "dev" / "null", 0o666 | 0o020000, os.makedev(1, 3))
    between = f"{NO_MORE_IMPORTS}; import os; os.chroot({str(tmp_path)!r}); os.chdir('/')"
    with make_driver(between=between, workdir="/") as driver:
        everything(driver)
        failed = driver.run(builtin="read", args={"path": "used/file"}, user=12345)

        assert failed.stdout == b"content"
        assert driver.run(script="true").exit["message"] == "/bin/sh: No such file or directory"
        assert driver.facts["namespaces"] == {}


def test_the_memory_of_the_runner_is_closed(make_driver: Any) -> None:
    """A command of the same user without privileges can neither read the runner's environment nor its memory."""
    become = "import os; os.getuid() or (os.setgroups([]), os.setgid(54321), os.setuid(54321))"
    with make_driver(between=become, workdir="/") as driver:
        for name in ("environ", "mem", "maps", "fd/0"):
            result = driver.run(script=f"head -c 1 /proc/{driver.facts['pid']}/{name}")

            assert (result.exit["code"], result.stdout) == (1, b"")
            assert b"Permission denied" in result.stderr


def test_no_descriptors_left_is_a_failed_start(make_driver: Any) -> None:
    """With its descriptors used up, the runner refuses commands, can still kill, and goes on afterwards."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    with make_driver(between=limit) as driver:
        numbers = [driver.start(argv=["sleep", "60"]) for _ in range(80)]
        first = {frame.command: frame for frame in (driver.receive() for _ in numbers)}
        failed = [n for n in numbers if first[n].type == frames.FAILED]
        running = [n for n in numbers if first[n].type == frames.STARTED]

        assert len(failed) > 10
        assert len(running) > 10
        for number in failed:
            report = frames.load(first[number].payload)
            assert (report["kind"], report["errno"]) == ("os_error", 24)
        for number in running:
            driver.kill(number)
        for number in running:
            assert driver.finish(number).exit["survivors"] == []
        assert driver.run(script="echo good").stdout == b"good\n"


def test_thousands_of_descriptors(make_driver: Any) -> None:
    """A runner holds the pipes of hundreds of commands at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
    raise_ = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({max(soft, wanted)}, {hard}))"
    with make_driver(between=raise_) as driver:
        numbers = [driver.start(argv=["cat"], stdin=True) for _ in range(300)]
        for number in numbers:
            driver.send(frames.STDIN, number, b"%d" % number)
            driver.send(frames.STDIN_END, number)
        got = {}
        codes = []
        while len(codes) < len(numbers):
            frame = driver.receive()
            if frame.type == frames.STDOUT:
                got[frame.command] = frame.payload
            elif frame.type == frames.EXIT:
                codes.append(frames.load(frame.payload)["code"])

        assert codes == [0] * 300
        assert got == {number: b"%d" % number for number in numbers}


def test_a_full_process_table_is_a_failed_start(make_driver: Any) -> None:
    """A fork bomb within its limit makes starts fail with EAGAIN; it can be killed, and then starts work again."""
    user = 54322
    become = f"""
import os, resource
if os.getuid() == 0:
    os.setgroups([]), os.setgid({user}), os.setuid({user})
    resource.setrlimit(resource.RLIMIT_NPROC, (60, 60))
else:
    count = sum(os.stat("/proc/" + p).st_uid == os.getuid() for p in os.listdir("/proc") if p.isdigit())
    resource.setrlimit(resource.RLIMIT_NPROC, (count + 60, count + 60))
"""
    with make_driver(between=become, workdir="/") as driver:
        bomb = driver.started(script="(while :; do sleep 60 & done) 2> /dev/null; sleep 61 & echo full; exec sleep 62")
        assert driver.receive().payload.startswith(b"full\n")
        result = driver.run(argv=["true"])

        assert (result.exit["kind"], result.exit["errno"]) == ("os_error", 11)
        driver.kill(bomb)
        while (frame := driver.receive()).type != frames.EXIT:
            pass
        assert frames.load(frame.payload)["survivors"] == []
        assert driver.run(argv=["true"]).exit["code"] == 0


@needs_namespaces
def test_a_full_disk_changes_nothing(make_driver: Any, tmp_path: Path) -> None:
    """A write that does not fit is an error with its number, and the old content stays, without a half file."""
    small = tmp_path / "small"
    small.mkdir()
    mount = f"libc.mount(b'none', {os.fsencode(small)!r}, b'tmpfs', 0, b'size=64k')"
    with make_driver(between=FIRST_PROCESS + mount) as driver:
        path = f"{small}/file"
        assert driver.run(b"old", builtin="write", args={"path": path}).exit["code"] == 0
        result = driver.run(bytes(1024 * 1024), builtin="write", args={"path": path})

        assert result.exit["report"]["error"] == {
            "errno": errno.ENOSPC,
            "message": f"{path}: No space left on device",
            "path": path,
        }
        assert driver.run(script=f"cat {path}; ls -A {small}").stdout == b"oldfile\n"


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP])
def test_the_first_process_cannot_be_ended_from_inside(first: Driver, number: signal.Signals) -> None:
    """No signal from inside ends or stops it, aimed at it or at everybody: ``pkill python`` is no lost sandbox."""
    bystander = first.started(argv=["sleep", "60"])
    result = first.run(script=f"kill -{int(number)} 1; kill -{int(number)} -1; echo sent")

    assert result.stdout == b"sent\n"
    assert first.run(script="echo alive").stdout == b"alive\n"
    if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP):
        assert first.finish(bystander).exit["code"] == 128 + number
    else:
        first.kill(bystander)
        first.finish(bystander)


@needs_namespaces
def test_the_first_process_ends_on_term_from_outside(first: Any) -> None:
    """TERM from outside the namespace ends it at once, with all that is inside."""
    first.started(script="trap '' TERM; while :; do sleep 0.05; done")
    os.kill(first.outside, signal.SIGTERM)

    assert first.process.wait(timeout=20) == 0


@needs_namespaces
def test_the_first_process_reaps_everybody(first: Driver) -> None:
    """Orphans, also double-forked daemons, leave no zombies and no entry when they have ended."""
    script = "i=0; while [ $i -lt 200 ]; do (setsid sleep 0.01 &); i=$((i+1)); done"
    assert first.run(script=script).exit["code"] == 0
    wait = "while [ $(ls -d /proc/[0-9]* | wc -l) -gt 5 ]; do sleep 0.02; done"

    assert first.run(script=wait, timeout=10).exit["limit"] is None


@needs_namespaces
def test_the_first_process_kills_hostile_trees(first: Driver) -> None:
    """A bomb whose processes leave their session and their environment does not survive its command."""
    code = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
main = os.getpid()
for _ in range(5):
    os.fork()
    if os.getpid() != main:
        if os.getsid(0) != os.getpid():
            os.setsid()
        if os.fork():
            os._exit(0)
os.execve("/bin/sleep", ["sleep", "61"], {})
"""
    result = first.run(argv=[first.python, "-I", "-S", "-c", code], timeout=1.0, grace=0.1)

    assert (result.exit["limit"], result.exit["survivors"]) == ("total", [])
    assert first.run(script="set -- /proc/[0-9]*; echo $#").stdout == b"2\n"


@needs_namespaces
def test_without_proc_the_process_group_is_killed(make_driver: Any) -> None:
    """Where processes cannot be seen, a timeout still ends the command and its process group."""
    with make_driver(between=FIRST_PROCESS + "libc.mount(b'none', b'/proc', b'tmpfs', 0, None)") as driver:
        result = driver.run(script="trap '' TERM; sleep 61 & echo $!; wait; sleep 62", timeout=0.3, grace=0.1)

        assert (result.exit["limit"], result.exit["code"]) == ("total", 137)
        assert driver.run(script=f"kill -0 {int(result.stdout)}").exit["code"] == 1
        number = driver.started(argv=["sleep", "60"])
        driver.kill(number, grace=20)
        assert driver.finish(number).exit["code"] == 143


def test_it_is_subreaper_of_what_it_starts(driver: Driver) -> None:
    """An orphan becomes the runner's child, whatever process that is."""
    result = driver.run(script="(sleep 60 > /dev/null 2>&1 & echo $!) ; :")
    pid = int(result.stdout)
    parent = driver.run(argv=["cut", "-d", " ", "-f", "4", f"/proc/{pid}/stat"])

    assert int(parent.stdout) == driver.facts["pid"]
    assert ctypes.sizeof(ctypes.c_int) == 4
    driver.run(argv=["kill", "-9", str(pid)])


ACCOUNTS = """
import os
os.makedirs("{etc}")
with open("{etc}/passwd", "wb") as file:
    file.write(b"x:y\\n:::::::\\nroot:x:0:0::/r\\0oot:/bin/sh\\nbig:x:" + b"9" * 6000 + b":1::/:\\n")
    file.write(b"alice:x:1234:55::/home/alice:/bin/sh\\nmallory:x:12a:55::/:\\n\\xff\\xfe:x:1235:1::/:\\nnohome:x:1236:1:::\\n")
with open("{etc}/group", "wb") as file:
    file.write(b"one:x:77:bob,alice\\ntwo:x:78:bob\\nthree:x:zz:alice\\nfour:x:99999999999:alice\\nfive:x:79:\\n")
for name in ("passwd", "group"):
    if libc.mount(b"{etc}/" + name.encode(), b"/etc/" + name.encode(), None, 0x1000, None):
        raise OSError(ctypes.get_errno(), "mount")
"""


@needs_namespaces
def test_account_files_may_hold_anything(make_driver: Any, tmp_path: Path) -> None:
    """Users get the home and the groups of the sandbox's own files; lines that are rubbish are passed over."""
    between = FIRST_PROCESS + ACCOUNTS.format(etc=tmp_path / "etc")
    with make_driver(between=between, workdir="/") as driver:
        script = "echo $(id -u):$(id -g):$(id -G):$USER:$HOME"
        alice = driver.run(script=script, user="alice")

        if os.getuid() == 0:
            assert alice.stdout == b"1234:55:55 77:alice:/home/alice\n"
            assert driver.run(script=script, user="1234:five").stdout == b"1234:79:79 77:alice:/home/alice\n"
            assert driver.run(script=script, user="nohome").stdout == b"1236:1:1:nohome:/\n"
        else:
            assert alice.exit["kind"] == "no_user"
        for name in ("mallory", "big", "x"):
            assert driver.run(argv=["true"], user=name).exit["message"] == f"{name}: no such user"
        assert driver.run(script="echo $USER", user=os.getuid()).stdout.strip() in (b"0", b"%d" % os.getuid())


OTHER_WAYS = {
    "fork": "import agentsandbox.protocol.runner.spawn as spawn; spawn._fork_exec = None",
    "shape": "import agentsandbox.protocol.runner.spawn as spawn; spawn.sys = type('', (), {'version_info': (3, 99)})",
    "memfd": "import os; vars(os).pop('memfd_create', None)",
    "prctl": "import agentsandbox.protocol.runner.kernel as kernel; kernel._libc = None",
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_poorer_interpreters_do_the_same(make_driver: Any, way: str) -> None:
    """Without fast starts, anonymous files or system calls by hand, commands and their limits work all the same."""
    with make_driver(between=OTHER_WAYS[way]) as driver:
        result = driver.run(b"in", script="cat; echo err >&2; exit 3")
        assert (result.exit["code"], result.stdout, result.stderr) == (3, b"in", b"err\n")
        assert driver.run(b"in", script="cat #" + "x" * 200_000).stdout == b"in"
        assert driver.run(argv=["missing"]).exit["kind"] == "not_found"
        assert driver.run(argv=["/"]).exit["kind"] == "not_executable"
        assert driver.run(argv=["true"], cwd="/missing").exit["kind"] == "no_cwd"
        assert driver.run(argv=["true", "x" * 131072]).exit["kind"] == "too_large"
        limited = driver.run(script="sleep 60 & trap '' TERM; setsid sleep 60 & wait; sleep 60", timeout=0.2, grace=0.1)
        assert (limited.exit["limit"], limited.exit["code"], limited.exit["survivors"]) == ("total", 137, [])
        assert driver.run(script="sleep 60 & echo x").exit["leftovers"][0][1] == "sleep 60"
        assert driver.run(script="(yes; echo $? >&2) | head -n 1").stderr == b"141\n"
        if os.getuid() == 0:
            assert driver.run(argv=["id", "-G"], user=65534).stdout == b"65534\n"
        everything(driver)
