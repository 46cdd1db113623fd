# SPDX-License-Identifier: Apache-2.0
"""The driver's end of one parent of sandboxes: starts it, asks it for sandboxes, and hears of their ends."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import anyio
import anyio.abc
import attrs

from agentsandbox.backends.local.boundary import as_root, enclosed
from agentsandbox.backends.local.ids import RANGE_SIZE, SLOTS, Ids, choose
from agentsandbox.backends.local.layout import Layout, program
from agentsandbox.errors import ConfigurationError, InfrastructureError, ProvisionError
from agentsandbox.protocol import bootstrap

__all__ = ["Child", "Parent"]

START_LIMIT = 60.0
"""Seconds in which the parent of sandboxes must be ready. It takes a twentieth of one."""

SPAWN_LIMIT = 60.0
"""Seconds in which a sandbox must be there; it takes a few thousandths, and more when the machine is busy."""

KILL_LIMIT = 30.0
"""Seconds in which a killed sandbox must be gone."""

STOP_LIMIT = 10.0
"""Seconds in which the parent must be gone after its control socket was closed."""

MAX_MESSAGE = 1024 * 1024
KEPT_ERRORS = 4096

ENTRY = "agentsandbox.protocol.runner.host:main"
MODULES = tuple(f"agentsandbox.protocol.runner.{name}" for name in ("host", "jail", "layers", "unconfined"))


@attrs.define(eq=False)
class Child:
    """One sandbox as its parent tells of it."""

    id: str
    """Its name between driver and parent; never used twice."""
    settled: anyio.Event = attrs.field(factory=anyio.Event, repr=False)
    """Set when it is there or has failed."""
    ended: anyio.Event = attrs.field(factory=anyio.Event, repr=False)
    """Set when nothing of it is left."""
    namespaces: dict[str, int] | None = None
    """The inode numbers of its namespaces, once it is there."""
    failure: str | None = None
    """Why it could not be made."""
    mistake: bool = False
    """Whether that is the caller's mistake, which comes again each time."""
    end: str | None = None
    """How its first process ended."""
    left: str | None = None
    """A directory of it that could not be removed."""
    on_end: Callable[[], None] | None = None
    """Called when it has ended, for whatever reason."""


class Parent:
    """
    A process that forks sandboxes of one image.

    Args:
        image: The image, for messages.
        layout: What it shows; ``None`` confines nothing.
        limits: ``disk_limit``, ``inodes``, ``max_processes``, ``open_files``, ``address_space``.
        directory: Where directories of unconfined sandboxes are made.
        prefix: What their names begin with.

    """

    entry: ClassVar[str] = ENTRY
    """What the process runs."""

    modules: ClassVar[tuple[str, ...]] = MODULES
    """What it needs for that beside the runner."""

    def __init__(
        self,
        image: str,
        layout: Layout | None,
        *,
        limits: dict[str, Any],
        directory: str,
        prefix: str = "agentsandbox-",
    ) -> None:
        self.image = image
        self.layout = layout
        self.ids = Ids("single")
        self.plain: list[str] = []
        """What could not be shown with mapped ids."""
        self.pid = 0
        self.stopped = anyio.Event()
        """Set when the process is gone, and with it everything that it made."""
        self._limits = limits
        self._directory = directory
        self._prefix = prefix
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._children: dict[str, Child] = {}
        self._count = 0
        self._errors = b""
        self._lost: str | None = None

    def __repr__(self) -> str:
        state = "alive" if self.alive else "ended" if self._lost else "new"
        return f"<Parent [{self.image}, {state}, {len(self._children)} sandboxes, {self._count} made]>"

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return self._control is not None and self._lost is None

    @property
    def last_words(self) -> str:
        """The end of what it has written to standard error."""
        return self._errors.decode("utf-8", "replace").strip()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Start it, and listen to it until it ends or :meth:`close` is called.

        Raises:
            ProvisionError: Only while starting.

        """
        self.ids = choose() if self.layout is not None else Ids("single")
        errors, theirs = os.pipe()
        os.set_blocking(errors, False)
        try:
            try:
                report = self._launch(theirs)
            finally:
                os.close(theirs)
            failure = None
            async with anyio.create_task_group() as group:
                group.start_soon(self._listen_to_errors, errors)
                failure = await self._listen(report, task_status)
                group.cancel_scope.cancel()
            if failure is not None:
                raise ProvisionError(f"the parent of sandboxes of image {self.image!r} did not start: {failure}")
        finally:
            with anyio.move_on_after(STOP_LIMIT + 1, shield=True):
                await self._stop()
            anyio.notify_closing(errors)
            os.close(errors)

    async def spawn(self, request: dict[str, Any], stream: socket.socket) -> Child:
        """
        Ask for a sandbox, and return without waiting for it.

        Args:
            request: ``nonce``, ``user``, ``workdir``, ``env``.
            stream: The sandbox's end of its stream.

        """
        self._count += 1
        child = Child(str(self._count))
        self._children[child.id] = child
        try:
            await self._send({"op": "spawn", "id": child.id, **request}, [stream.fileno()])
        except BaseException:
            del self._children[child.id]
            raise
        return child

    async def kill(self, child: Child) -> None:
        """
        End a sandbox, and return when nothing of it is left. Idempotent.

        Raises:
            InfrastructureError: If it will not end.

        """
        if child.ended.is_set():
            return
        with anyio.move_on_after(KILL_LIMIT):
            if self.alive:
                await self._send({"op": "kill", "id": child.id})
            await child.ended.wait()
        if not child.ended.is_set():
            raise InfrastructureError(
                f"a sandbox of image {self.image!r} is not gone {KILL_LIMIT:g} s after it was killed"
            )

    def close(self) -> None:
        """Ask it to end, and everything that it made."""
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)

    def _launch(self, errors: int) -> int:
        """Start the process. Returns a descriptor from which what could not be mapped can be read."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        report, told = os.pipe()
        source = os.memfd_create("agentsandbox")
        try:
            text = bootstrap.program(entry=self.entry, config={"control": theirs.fileno()}, modules=self.modules)
            os.write(source, text)
            os.lseek(source, 0, os.SEEK_SET)
            argv = [program(), "-I", "-S", "-B", "-"]
            if self.layout is not None:
                argv = enclosed(self.layout, argv, single=self.ids.kind == "single")
                if self.ids.kind == "range":
                    argv = as_root(self.layout, argv, self.ids.base, told)
            for end in (ours, theirs):
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    end.setsockopt(socket.SOL_SOCKET, option, MAX_MESSAGE)
            # Not through the event loop: some would start it from a thread, whose end is the parent's end to bwrap.
            self._process = subprocess.Popen(
                argv,
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={},
                cwd="/",
                pass_fds=(theirs.fileno(), told) if self.ids.kind == "range" else (theirs.fileno(),),
                start_new_session=True,
            )
            self.pid = self._process.pid
            ours.settimeout(0)
            self._control = ours
            ours.send(json.dumps(self._config()).encode())
        except BaseException:
            os.close(report)
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(told)
            os.close(source)
        return report

    def _config(self) -> dict[str, Any]:
        if self.layout is None:
            return {"plan": None, "limits": self._limits, "directory": self._directory, "prefix": self._prefix}
        plan = {
            **self._limits,
            "skeleton": self.layout.skeleton,
            "entries": self.layout.entries,
            "overlays": self.layout.overlays,
            "binds": self.layout.binds,
            "hostname": "sandbox",
        }
        return {"plan": plan, "ids": self.ids.kind, "slots": [RANGE_SIZE // 2, SLOTS], "user": 1000}

    async def _listen(self, report: int, task_status: anyio.abc.TaskStatus[None]) -> str | None:
        """Hear what it says until it ends. Returns why it did not start, if it did not."""
        ready = None
        try:
            with anyio.move_on_after(START_LIMIT):
                ready = await self._receive()
                if ready is not None:
                    self.plain = json.loads(os.read(report, 65536) or b"[]")
        finally:
            os.close(report)
        if ready is None:
            return await self._reason()
        task_status.started()
        while True:
            message = await self._receive()
            if message is None:
                return None
            self._hear(message)

    async def _receive(self) -> dict[str, Any] | None:
        assert self._control is not None
        while True:
            try:
                await anyio.wait_readable(self._control)
                data = self._control.recv(MAX_MESSAGE)
            except BlockingIOError:
                continue
            except OSError:
                return None
            return dict(json.loads(data)) if data else None

    def _hear(self, message: dict[str, Any]) -> None:
        child = self._children.get(message["id"])
        if child is None:
            return
        if message["event"] == "spawned":
            child.namespaces = message["namespaces"]
        elif message["event"] == "failed":
            reason = os.strerror(message["errno"]) if message["errno"] else ""
            child.failure = f"{message['stage']}: {reason}" if reason else message["stage"]
            child.mistake = not reason
        else:
            child.left = message["left"]
            self._gone(child, _how(message))
        child.settled.set()

    def _gone(self, child: Child, how: str) -> None:
        self._children.pop(child.id, None)
        child.end = how
        child.settled.set()
        child.ended.set()
        if child.on_end is not None:
            child.on_end()

    async def _send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        data = json.dumps(message).encode()
        while True:
            if self._control is None or self._lost is not None:
                raise ProvisionError(f"the parent of sandboxes of image {self.image!r} has ended: {self._lost}")
            try:
                if descriptors:
                    socket.send_fds(self._control, [data], descriptors, socket.MSG_NOSIGNAL)
                else:
                    self._control.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                await anyio.wait_writable(self._control)
            except OSError as error:
                if error.errno == errno.EMSGSIZE:
                    raise ConfigurationError(f"the environment of a sandbox is too large: {len(data)} bytes") from error
                raise ProvisionError(f"the parent of sandboxes of image {self.image!r} is gone: {error}") from error
            else:
                return

    async def _listen_to_errors(self, descriptor: int) -> None:
        while True:
            await anyio.wait_readable(descriptor)
            try:
                data = os.read(descriptor, 65536)
            except BlockingIOError:
                continue
            if not data:
                return
            self._errors = (self._errors + data)[-KEPT_ERRORS:]

    async def _reason(self) -> str:
        with anyio.move_on_after(1):
            await self._exit()
        await anyio.lowlevel.checkpoint()
        code = self._process.returncode if self._process else None
        return self.last_words or f"no reason given (exit code {code})"

    async def _exit(self) -> None:
        """Wait until the process has ended."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        descriptor = os.pidfd_open(process.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            anyio.notify_closing(descriptor)
            os.close(descriptor)
        process.wait()

    async def _stop(self) -> None:
        """End the process, and with it everything that it made."""
        if self._control is not None:
            anyio.notify_closing(self._control)
            self._control.close()
            self._control = None
        with anyio.move_on_after(STOP_LIMIT):
            await self._exit()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            await self._exit()
        self.ids.release()
        self._lost = self.last_words or "it was closed"
        for child in list(self._children.values()):
            child.failure = child.failure or self._lost
            self._gone(child, f"the parent of the sandboxes ended ({self._lost})")
        self.stopped.set()


def _how(message: dict[str, Any]) -> str:
    if message["signal"] is not None:
        return f"its first process was ended by signal {message['signal']}"
    return f"its first process ended with exit code {message['code']}"
