# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: PTH115, PTH123, PTH208
# Paths of other roots, as the kernel takes them.
"""
The parent of containers: it runs inside the boundary of the local backend and makes jails whose first process is any.

Beside what :mod:`agentsandbox.protocol.runner.host` answers, it takes commands to run in a jail that is there: they
enter its namespaces from outside, as a container runtime does it. Requests come in a memory file, so that they may be
of any size; it is the first descriptor of ``spawn`` and ``exec``, the others become standard input, output and error.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING, Any

from agentsandbox.protocol.runner import jail, users
from agentsandbox.protocol.runner.host import Child, Host
from agentsandbox.testing.cluster import entering

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MESSAGE = 64 * 1024
WATCH_EVERY = 0.02
PAGE = resource.getpagesize()
SYS_ADMIN = 21
KINDS = (
    ("ipc", jail.CLONE_NEWIPC),
    ("uts", jail.CLONE_NEWUTS),
    ("net", jail.CLONE_NEWNET),
    ("mnt", jail.CLONE_NEWNS),
    ("user", jail.CLONE_NEWUSER),
)
"""In this order: the last one takes away what the others need."""


class Container(Child):
    """One container, or one command in it."""

    def __init__(self, name: str, pid: int, channel: socket.socket | None) -> None:
        super().__init__(name, pid, channel)
        self.report: dict[str, Any] | None = None
        self.within: str | None = None
        self.memory: int | None = None
        self.counter = 0
        self.kills = 0
        self.out_of_memory = False


class ContainerHost(Host):
    """The loop, for containers."""

    def _receive(self, _: Any) -> None:
        size = array.array("i").itemsize
        try:
            data, ancillary, _flags, _address = self._control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(4 * size))
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        given = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                given.frombytes(content[: len(content) - len(content) % size])
        descriptors = list(given)
        if not data:
            self._running = False
            return
        try:
            message = json.loads(data.decode())
            if message["op"] in ("spawn", "exec"):
                with open(descriptors.pop(0), "rb") as file:
                    message.update(json.loads(file.read()))
            if message["op"] == "spawn":
                self._spawn(message, descriptors)  # type: ignore[arg-type]
                self._adopt(message)
            elif message["op"] == "exec":
                self._exec(message, descriptors)
            elif message["op"] == "signal":
                child = self._children.get(message["id"])
                if child is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, message["signal"])
            elif message["op"] == "kill":
                self._kill(message["id"])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _adopt(self, message: dict[str, Any]) -> None:
        plain = self._children.get(message["id"])
        if plain is None:
            return
        child = self._wrap(plain.name, plain.pid, plain.channel)
        child.slot, child.directory = plain.slot, plain.directory
        child.memory, child.counter = message.get("memory"), message.get("cgroup", 1)
        if child.memory is not None:
            signal.signal(signal.SIGALRM, lambda _number, _frame: None)
            signal.setitimer(signal.ITIMER_REAL, WATCH_EVERY, WATCH_EVERY)

    def _wrap(self, name: str, pid: int, channel: socket.socket | None) -> Container:
        child = Container(name, pid, channel)
        self._children[name] = self._pids[pid] = child
        if channel is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(channel)
            self._selector.register(channel, selectors.EVENT_READ, lambda _: self._report(child))
        return child

    def _report(self, child: Child) -> None:
        """Hear from a process in the making: it asks for maps, tells its namespaces, and falls silent by its exec."""
        assert isinstance(child, Container)
        channel = child.channel
        if channel is None:  # its end was heard of before its turn came
            return
        try:
            data = channel.recv(65536)
            if data == b"map":
                self._map(child.pid)
                channel.send(b"go")
                return
        except OSError:
            data = b""
        if data:
            child.report = json.loads(data.decode())
            if "stage" not in child.report:
                return
        self._selector.unregister(channel)
        channel.close()
        child.channel = None
        if child.report is not None:
            event = "failed" if "stage" in child.report else "spawned"
            self._tell(event=event, id=child.name, **child.report)

    def _exec(self, message: dict[str, Any], descriptors: list[int]) -> None:
        name, target = message["id"], self._children.get(message["container"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        entered: dict[str, int] = {}
        try:
            if target is None:
                raise OSError(errno.ESRCH, "no running task found: task not found")
            if self._plan is not None:
                for kind in ("pid", *(kind for kind, _ in KINDS)):
                    entered[kind] = os.open(f"/proc/{target.pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                jail.setns(entered["pid"], jail.CLONE_NEWPID, "PID")
            try:
                pid = os.fork()
                if pid == 0:
                    self._command(message, descriptors, theirs, entered, target.directory)
            finally:
                if self._plan is not None:
                    jail.setns(self._namespace, jail.CLONE_NEWPID, "PID")
        except (OSError, jail.JailError) as error:
            ours.close()
            self._tell(event="failed", id=name, stage="no running task found: task not found", errno=error.errno or 0)
            self._tell(event="ended", id=name, code=None, signal=9, left=None)
            return
        finally:
            theirs.close()
            for descriptor in entered.values():
                os.close(descriptor)
        self._wrap(name, pid, ours).within = target.name

    def _child(self, message: Any, stream: Any, channel: Any, slot: int | None, directory: str | None) -> None:
        """Become the first process of a container. Never returns."""
        try:
            entering.fresh([*stream, channel.fileno()])
            try:
                report: dict[str, Any] = {"namespaces": {}}
                if self._plan is not None:
                    plan = dict(self._plan, slot=slot)
                    if message.get("nested"):
                        plan["nested"] = [SYS_ADMIN]
                    entering.mount_volumes(message.get("volumes") or (), plan)
                    report = {"namespaces": jail.enter(plan, channel)}
                    entering.counters(message)
                else:
                    jail.limits(self._config["limits"])
                entering.become(message, directory)
                channel.send(json.dumps(report).encode())
                entering.run(message, stream)
            except jail.JailError as error:
                entering.fail(channel, error.stage + ": " + os.strerror(error.errno))
            except users.NoUser as error:
                entering.fail(channel, f"unable to find user {error}")
            except entering.NoStart as error:
                entering.fail(channel, str(error))
            except OSError as error:
                entering.fail(channel, f"{error.filename or 'set up'}: {os.strerror(error.errno or 0).lower()}")
        except BaseException:  # noqa: BLE001 - the process must not return into the loop of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(128)

    def _command(
        self,
        message: dict[str, Any],
        stream: list[int],
        channel: socket.socket,
        entered: dict[str, int],
        directory: str | None,
    ) -> None:
        """Become a command in a container that is there. Never returns."""
        try:
            entering.fresh([*stream, channel.fileno(), *entered.values()])
            try:
                if entered:
                    jail.write_text("/proc/self/oom_score_adj", "500")
                    jail.limits(self._plan or {})
                    for kind, flag in KINDS:
                        jail.setns(entered[kind], flag, kind)
                    jail.prctl(jail.PR_SET_NO_NEW_PRIVS, 1)
                    for number in range(jail.LAST_CAPABILITY + 1):
                        if number not in jail.KEPT_CAPABILITIES:
                            jail.libc.prctl(jail.PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
                entering.become(message, directory)
                if message.get("tty"):
                    stream = [entering.terminal(stream[0])] * 3
                channel.send(b'{"namespaces": {}}')
                entering.run(message, stream)
            except jail.JailError as error:
                entering.fail(channel, error.stage + ": " + os.strerror(error.errno))
            except users.NoUser as error:
                entering.fail(channel, f"unable to find user {error}")
            except entering.NoStart as error:
                entering.fail(channel, str(error))
            except OSError as error:
                entering.fail(channel, f"{error.filename or 'set up'}: {os.strerror(error.errno or 0).lower()}")
        except BaseException:  # noqa: BLE001 - the process must not return into the loop of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(126)

    def _ended(self, child: Child, status: int) -> None:
        if not isinstance(child, Container) or child.within is None:
            for other in list(self._children.values()):
                if isinstance(other, Container) and other.within == child.name and self._plan is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other.pid, signal.SIGKILL)
            if getattr(child, "out_of_memory", False):
                self._tell(event="oom", id=child.name)
            self._hear_out(child)
            super()._ended(child, status)
            return
        self._hear_out(child)
        del self._children[child.name]
        signalled = os.WIFSIGNALED(status)
        code, number = (None, os.WTERMSIG(status)) if signalled else (os.WEXITSTATUS(status), None)
        self._tell(event="ended", id=child.name, code=code, signal=number, left=None)

    def _hear_out(self, child: Child) -> None:
        while isinstance(child, Container) and child.channel is not None:
            self._report(child)

    def _reap(self, key: Any) -> None:
        super()._reap(key)
        limited = [one for one in self._children.values() if isinstance(one, Container) and one.memory is not None]
        if limited:
            self._watch_memory(limited)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _watch_memory(self, limited: list[Container]) -> None:
        """Do what the kernel does for a control group: kill the largest process of a container over its limit."""
        groups = _groups([container.pid for container in limited])
        for container in limited:
            members = groups.get(container.pid, [])
            if container.memory is None or sum(size for size, _ in members) <= container.memory:
                continue
            victim = max(members)[1]
            container.kills += 1
            container.out_of_memory = victim == container.pid
            path, text = entering.COUNTERS[container.counter - 1]
            with contextlib.suppress(OSError):
                words = text % ((container.kills,) * text.count("%d"))
                jail.write_text(f"/proc/{container.pid}/root{path}", words)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)


def _groups(firsts: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the processes of containers with their sizes, by first process: who is in its namespace, or below such."""
    spaces: dict[str, int] = {}
    sizes: dict[int, int] = {}
    parents: dict[int, int] = {}
    owner: dict[int, int] = {}
    for first in firsts:
        with contextlib.suppress(OSError):
            spaces[os.readlink(f"/proc/{first}/ns/pid")] = first
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm") as file:
                sizes[pid] = int(file.read().split()[1]) * PAGE
            with open(f"/proc/{pid}/stat") as file:
                parents[pid] = int(file.read().rpartition(")")[2].split()[1])
            if (first := spaces.get(os.readlink(f"/proc/{pid}/ns/pid"), 0)) > 0:
                owner[pid] = first
    found: dict[int, list[tuple[int, int]]] = {}
    for pid, size in sizes.items():
        above = pid
        while above and above not in owner:
            above = parents.get(above, 0)
        if above:
            found.setdefault(owner[above], []).append((size, pid))
    return found


def main(config: Mapping[str, Any]) -> None:
    """Be the parent of containers. *config* has the descriptor of the ``control`` socket; the rest comes over it."""
    control = socket.socket(fileno=config["control"])

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("containers run programs, and no runner")

    try:
        ContainerHost(control, json.loads(control.recv(1024 * 1024).decode()), never).run()
    except (OSError, jail.JailError) as error:
        sys.exit(f"host: {error}")
