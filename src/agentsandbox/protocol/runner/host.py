# SPDX-License-Identifier: Apache-2.0
"""
The parent of local sandboxes: it has the runner loaded already, so that a new sandbox costs a fork.

It is the first process of the outer boundary that ``bwrap`` made, and it answers one driver over a socket whose
messages are JSON objects, one a datagram:

- ``{"op": "spawn", "id", "nonce", "user", "workdir", "env"}`` with one descriptor: the runner's stream. Answered by
  ``{"event": "spawned", "id", "namespaces"}`` or ``{"event": "failed", "id", "stage", "errno"}``.
- ``{"op": "kill", "id"}``: answered by the ``ended`` event, at once if there is no such sandbox.
- ``{"event": "ended", "id", "code", "signal"}`` comes for whatever reason a sandbox ends, when nothing of it is left.

When the driver's end closes, everything is killed and this process exits.

This module runs inside the boundary, so it keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import json
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from typing import Any, Callable, Dict, Mapping, Optional, Set

from . import jail, layers, users
from .unconfined import descendants, kill, kill_strays, remove

MAX_MESSAGE = 1024 * 1024
"""The largest message of the control socket, in bytes."""

Serve = Callable[..., Any]


class Child:
    """One sandbox, from its fork to its end."""

    def __init__(self, name: str, pid: int, channel: Optional[socket.socket]) -> None:
        self.name = name
        self.pid = pid
        self.channel = channel
        self.slot: Optional[int] = None
        self.directory: Optional[str] = None

    def __repr__(self) -> str:
        return "<Child [%s, pid %d, %s]>" % (self.name, self.pid, "starting" if self.channel else "running")


class Host:
    """
    The loop.

    Args:
        control: The socket to the driver.
        config: ``plan`` for :mod:`.jail`, or ``None`` for no confinement, then with ``limits`` and a ``directory`` for
            those of sandboxes; ``ids``: ``range`` or ``single``; ``slots``: the first and their number; ``user``.
        serve: What a sandbox runs when it is made, see :func:`.loop.serve`.

    """

    def __init__(self, control: socket.socket, config: Dict[str, Any], serve: Serve) -> None:
        self._control = control
        self._plan: Optional[Dict[str, Any]] = config["plan"]
        self._config = config
        self._serve = serve
        self._children: Dict[str, Child] = {}
        self._pids: Dict[int, Child] = {}
        self._slots: Set[int] = set()
        self._next_slot = 0
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        self._namespace = -1
        self._running = True

    def __repr__(self) -> str:
        return "<Host [%d sandboxes, %s]>" % (len(self._children), "running" if self._running else "ending")

    def run(self) -> None:
        """Answer the driver until it is gone."""
        os.umask(0o022)
        jail.set_name(b"sandbox-parent")
        if self._plan is not None:
            self._namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
            layers.build(self._plan)
            # The limit of the whole is what the driver's was; a sandbox lowers it for itself.
            hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
            resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        else:
            jail.prctl(jail.PR_SET_CHILD_SUBREAPER, 1)
        for end in (self._wakes, self._woken, self._control):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a terminal's signals are for the driver, which closes the socket
        if self._plan is None:
            # Besides the end of the control socket, which a child of the driver may have inherited.
            signal.signal(signal.SIGTERM, self._terminated)
            jail.prctl(jail.PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ, self._receive)
        self._selector.register(self._wakes, selectors.EVENT_READ, self._reap)
        gc.collect()
        gc.freeze()  # what is loaded now stays shared with every sandbox
        self._tell(event="ready", python="%d.%d.%d" % sys.version_info[:3])
        while self._running:
            for key, _ in self._selector.select():
                key.data(key)
        self._end()

    def _terminated(self, _number: int, _frame: Any) -> None:
        self._running = False

    def _tell(self, **message: Any) -> None:
        self._control.setblocking(True)
        try:
            self._control.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)
        except OSError:
            self._running = False
        self._control.setblocking(False)

    def _receive(self, _: Any) -> None:
        size = array.array("i").itemsize
        try:
            data, ancillary, _flags, _address = self._control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(size))
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % size])
        if not data:
            self._running = False
            return
        try:
            message = json.loads(data.decode())
            if message["op"] == "spawn":
                self._spawn(message, descriptors[0])
            elif message["op"] == "kill":
                self._kill(message["id"])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _spawn(self, message: Dict[str, Any], stream: int) -> None:
        name, directory = message["id"], None
        if self._plan is None:
            directory = tempfile.mkdtemp(prefix=self._config["prefix"], dir=self._config["directory"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        slot = None
        try:
            if self._plan is not None:
                if self._config["ids"] == "range":
                    slot = self._slot()
                jail.unshare(jail.CLONE_NEWPID, "PID")
            pid = os.fork()
        except (OSError, jail.JailError) as error:
            self._free(slot)
            ours.close()
            theirs.close()
            remove(directory)
            self._tell(event="failed", id=name, stage=getattr(error, "stage", "fork"), errno=error.errno)
            return
        if pid == 0:
            self._child(message, stream, theirs, slot, directory)
        if self._plan is not None:
            jail.setns(self._namespace, jail.CLONE_NEWPID, "PID")
        theirs.close()
        child = Child(name, pid, ours)
        child.slot, child.directory = slot, directory
        self._children[name] = self._pids[pid] = child
        self._selector.register(ours, selectors.EVENT_READ, lambda _: self._report(child))

    def _slot(self) -> int:
        first, count = self._config["slots"]
        if len(self._slots) >= count:
            raise jail.JailError("more than %d sandboxes" % count, errno.EAGAIN)
        while self._next_slot in self._slots:
            self._next_slot = (self._next_slot + 1) % count
        slot = self._next_slot
        self._slots.add(slot)
        self._next_slot = (slot + 1) % count
        return int(first + slot)

    def _free(self, slot: Optional[int]) -> None:
        if slot is not None:
            self._slots.discard(slot - self._config["slots"][0])

    def _child(
        self,
        message: Dict[str, Any],
        stream: int,
        channel: socket.socket,
        slot: Optional[int],
        directory: Optional[str],
    ) -> None:
        """Become a sandbox. Never returns."""
        code = 70
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            for descriptor in [int(entry) for entry in os.listdir("/proc/self/fd")]:
                if descriptor > 2 and descriptor not in (stream, channel.fileno()):
                    with contextlib.suppress(OSError):  # that of the listing itself
                        os.close(descriptor)
            os.setsid()
            jail.set_name(b"sandbox")
            try:
                report: Dict[str, Any] = {"namespaces": {}}
                if self._plan is not None:
                    report = {"namespaces": jail.enter(dict(self._plan, slot=slot), channel)}
                else:
                    jail.limits(self._config["limits"])
                workdir = message["workdir"] or directory or "/"
                self._prepare(message["user"], workdir)
            except jail.JailError as error:
                report = {"stage": error.stage, "errno": error.errno}
            except OSError as error:
                report = {"stage": str(error.filename or "set up"), "errno": error.errno or 0}
            except users.NoUser as error:
                report = {"stage": str(error), "errno": 0}
            channel.send(json.dumps(report).encode())
            channel.close()
            if "stage" not in report:
                env = dict({"HOME": directory} if directory else {}, **message["env"])
                self._serve(
                    stream,
                    nonce=message["nonce"],
                    base_env=env,
                    workdir=workdir,
                    user=message["user"],
                    uppers=jail.UPPERS,
                )
                code = 0
        except BaseException:  # the process must not return into the loop of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _prepare(self, user: Any, workdir: str) -> None:
        """Make the working directory and the home, unless they are there."""
        if os.path.isdir(workdir) and (self._plan is None or self._plan["skeleton"]):
            return
        account = users.resolve(user)
        alone = not users.may_change()
        for directory, wanted in ((workdir, True), (account.home, False)):
            try:
                if not os.path.isdir(directory):
                    os.makedirs(directory, 0o755)
                    if not alone:
                        os.chown(directory, account.uid, account.gid)
            except OSError:
                if wanted:
                    raise

    def _report(self, child: Child) -> None:
        """Hear from a sandbox in the making."""
        channel = child.channel
        if channel is None:  # its end was in the same batch of events, and says it all
            return
        try:
            data = channel.recv(65536)
            if data == b"map":
                self._map(child.pid)
                channel.send(b"go")
                return
        except OSError:
            # It was killed meanwhile. If the kernel refused the map it waits for it: its end says so.
            data = b""
            kill(child.pid)
        self._selector.unregister(channel)
        channel.close()
        child.channel = None
        if data:
            report = json.loads(data.decode())
            self._tell(event="failed" if "stage" in report else "spawned", id=child.name, **report)
        # Otherwise it died, and its end is reported when it is reaped.

    def _map(self, pid: int) -> None:
        """Map the ids of a sandbox onto ours, so that nothing in it is more than an unprivileged user outside."""
        if self._config["ids"] == "range":
            lines = ("0 0 65536", "0 0 65536")
        else:
            lines = ("%d 0 1" % self._config["user"], "%d 0 1" % self._config["user"])
        jail.write_text("/proc/%d/uid_map" % pid, lines[0])
        jail.write_text("/proc/%d/gid_map" % pid, lines[1])

    def _reap(self, _: Any) -> None:
        try:
            self._wakes.recv(4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = self._pids.pop(pid, None)
            if child is not None:
                self._ended(child, status)

    def _ended(self, child: Child, status: int) -> None:
        """The first process of a sandbox has been reaped: with a PID namespace the kernel has ended all others."""
        if child.channel is not None:
            self._selector.unregister(child.channel)
            child.channel.close()
        self._free(child.slot)
        left = None
        if self._plan is None:
            kill_strays(set(self._pids))
            left = remove(child.directory)
        del self._children[child.name]
        signalled = os.WIFSIGNALED(status)
        self._tell(
            event="ended",
            id=child.name,
            code=None if signalled else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if signalled else None,
            left=left,
        )

    def _kill(self, name: str) -> None:
        child = self._children.get(name)
        if child is None:
            self._tell(event="ended", id=name, code=None, signal=None, left=None)
            return
        if self._plan is None:
            for pid in descendants(child.pid):
                kill(pid)
        kill(child.pid)

    def _end(self) -> None:
        """Leave nothing. As the first process of a PID namespace, exiting is enough."""
        if self._plan is not None:
            return
        for child in list(self._children.values()):
            for pid in descendants(child.pid):
                kill(pid)
            kill(child.pid)
        kill_strays(set())
        for child in self._children.values():
            remove(child.directory)


def main(config: Mapping[str, Any]) -> None:
    """Be the parent of sandboxes. *config* has the descriptor of the ``control`` socket; the rest comes over it."""
    from .loop import serve

    control = socket.socket(fileno=config["control"])
    try:
        Host(control, json.loads(control.recv(MAX_MESSAGE).decode()), serve).run()
    except (OSError, jail.JailError) as error:
        sys.exit("host: %s" % error)
