# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PTH101, PTH103, PTH110, PTH112, PTH113, PTH118, PTH120, PTH123, PTH208
# Paths of other roots, as the kernel takes them.
"""
What a process does to itself on its way to be a container's first process, or a command in one.

Runs inside the boundary of the local backend, in a child between fork and exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import termios
from typing import Any

from agentsandbox.protocol.runner import jail, users

COUNTERS = (
    ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill %d\n"),
    ("/sys/fs/cgroup/memory.events", "low 0\nhigh 0\nmax %d\noom %d\noom_kill %d\noom_group_kill 0\n"),
)
"""Where a container reads how many of its processes were killed for memory, by the version of control groups."""


class NoStart(Exception):
    """A command cannot be started, in the words of a container runtime."""


def fresh(kept: list[int]) -> None:
    """Leave behind what belongs to the parent."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in [int(entry) for entry in os.listdir("/proc/self/fd")]:
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    os.setsid()


def fail(channel: socket.socket, stage: str) -> None:
    """Tell the parent what cannot be done."""
    channel.send(json.dumps({"stage": stage, "errno": 0}).encode())


def mount_volumes(volumes: Any, plan: dict[str, Any]) -> None:
    """Show directories that outlive the container, at the same path that the sandbox will have them."""
    if not volumes:
        return
    jail.unshare(jail.CLONE_NEWNS, "mount")
    jail.mount(b"none", b"/", b"", jail.MS_REC | jail.MS_PRIVATE)
    entries, binds = list(plan["entries"]), list(plan["binds"])
    for kept, target, files in volumes:
        for directory in (kept, target):
            os.makedirs(directory, 0o777, exist_ok=True)
        os.chmod(kept, 0o777)  # noqa: S103 - as an emptyDir is
        for name, text in files.items():
            with open(os.path.join(kept, name), "w") as file:
                file.write(text)
        jail.mount(os.fsencode(kept), os.fsencode(target), b"", jail.MS_BIND)
        parts = target.strip("/").split("/")
        entries += [["dir", "/" + "/".join(parts[: n + 1]), 0o755, 0, 0] for n in range(len(parts))]
        binds.append(target)
    plan["entries"], plan["binds"] = entries, binds


def counters(message: dict[str, Any]) -> None:
    """Show how often memory was short: never yet."""
    path, text = COUNTERS[message.get("cgroup", 1) - 1]
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text % ((0,) * text.count("%d")))


def become(message: dict[str, Any], directory: str | None) -> None:
    """Take on user, capabilities, environment and working directory."""
    account = users.resolve(message["user"])
    workdir = message.get("workdir") or directory or "/"
    _have(account, workdir)
    if directory is None:
        with contextlib.suppress(OSError):
            _have(account, account.home)
    for number in message.get("drop") or ():
        jail.libc.prctl(jail.PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
    if users.may_change():
        group = message.get("group")
        os.setgroups(list(account.groups))
        os.setresgid(*[account.gid if group is None else group] * 3)
        os.setresuid(*[account.uid] * 3)
    os.umask(0o022)
    os.chdir(workdir)
    message["env"].setdefault("HOME", directory or account.home)


def _have(account: users.Account, directory: str) -> None:
    """Make a directory of a user, unless it is there."""
    if not os.path.isdir(directory):
        os.makedirs(directory, 0o755)
        if users.may_change():
            os.chown(directory, account.uid, account.gid)


def terminal(link: int) -> int:
    """Take a new terminal as one's own; send its other end over *link*."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, termios.TIOCGPTN if hasattr(termios, "TIOCGPTN") else 0x80045430, number := bytearray(4))
    fcntl.ioctl(master, 0x40045431, b"\0" * 4)
    slave = os.open(f"/dev/pts/{int.from_bytes(number, sys.byteorder)}", os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    with socket.socket(fileno=os.dup(link)) as end:
        socket.send_fds(end, [b"m"], [master])
    os.close(master)
    return slave


def run(message: dict[str, Any], stream: list[int]) -> None:
    """Become the command."""
    argv, env = message["argv"], message["env"]
    path = _look(argv[0], env.get("PATH", ""))
    for number, descriptor in enumerate([fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in stream]):
        os.dup2(descriptor, number)
    for descriptor in set(stream) - {0, 1, 2}:
        os.close(descriptor)  # or whatever the command leaves behind would hold its output
    try:
        os.execve(path, [os.fsencode(word) for word in argv], env)  # noqa: S606 - that is what it is for
    except OSError as error:
        if error.errno == errno.E2BIG:
            os.write(2, b"exec %s: argument list too long\n" % os.fsencode(path))
            os._exit(1)
        raise NoStart(f'exec: "{argv[0]}": {os.strerror(error.errno or 0).lower()}') from error


def _look(name: str, path: str) -> str:
    if "/" in name:
        if not os.path.exists(name):
            raise NoStart(f'exec: "{name}": stat {name}: no such file or directory')
        if os.path.isdir(name) or not os.access(name, os.X_OK):
            raise NoStart(f'exec: "{name}": permission denied')
        return name
    for directory in path.split(":"):
        whole = os.path.join(directory or ".", name)
        if os.path.isfile(whole) and os.access(whole, os.X_OK):
            return whole
    raise NoStart(f'exec: "{name}": executable file not found in $PATH')
