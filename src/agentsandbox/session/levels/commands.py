# SPDX-License-Identifier: Apache-2.0
"""The commands of one shell session: how they get into the sandbox, are watched, killed, and read back."""

from __future__ import annotations

import math
from typing import IO, TYPE_CHECKING

import anyio
import anyio.lowlevel

from agentsandbox.errors import (
    CommandTimeout,
    ConfigurationError,
    InfrastructureError,
    OutputLimitExceeded,
    SandboxLost,
    StreamBroken,
)
from agentsandbox.models.command import Command, ExecResult, OutputSizes, ProcessInfo
from agentsandbox.session.files import in_thread
from agentsandbox.session.levels import bulk
from agentsandbox.session.levels.call import MAX_WORD, Call, start_code
from agentsandbox.session.levels.scripts import quote

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping

    from agentsandbox.session.levels.control import Control, Reply

__all__ = ["BLOCK", "Commands"]

GRACE = 1.0
"""Seconds between TERM and KILL when a time limit fires."""

KILL_GRACE = 0.5
"""The same when the caller was cancelled."""

KILL_LAST = 4.0
"""Seconds in which KILL is repeated before processes count as not to be killed."""

KILL_CONFIRM = 10.0
"""Seconds beyond all that in which it has to be confirmed that a command is dead."""

LOOK = 2.0
"""Seconds without news after which a command is looked up: what watched it may have been killed."""

BLOCK = 4096
"""Bytes of a block of ``dd``, in which files are read."""

PIECE = 256 * 1024
"""Bytes read in one request. Others wait meanwhile."""

INLINE = 6 * 1024
"""Characters of code that go in a request itself: the shell reads them byte by byte."""

SPOOL_LIMIT = 2 * 1024**3
"""Bytes that a command's output may take in the sandbox: what is more would fill the disk of the node."""

TRANSFER = 1024 * 1024
"""Bytes from which on data goes over a connection of its own."""

TRANSFER_TIMEOUT = 300.0
"""Seconds that one transfer may take."""

TRANSFER_ATTEMPTS = 4
"""How often a transfer is begun anew when its connection is lost."""


class Commands:
    """
    The commands in flight in one sandbox.

    Args:
        env: Variables of every command.

    """

    control: Control

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._running: dict[int, Call] = {}
        self._transfers = anyio.Semaphore(4)
        self._wakeup = anyio.Event()
        self._looking = False
        self._asked = 0
        self.count = 0
        """How many commands were started."""

    def __repr__(self) -> str:
        return f"<Commands [{len(self._running)} running of {self.count}]>"

    def __len__(self) -> int:
        return len(self._running)

    # A command's life.

    def register(self, command: Command, on_started: Callable[[], None] | None = None) -> Call:
        """Make a command known: from here on it will be killed if its caller goes away."""
        if self.control.lost is not None:
            raise self.control.loss()
        self.count += 1
        call = Call(self.count, command, on_started)
        self._running[call.number] = call
        return call

    async def start(self, call: Call, mode: str) -> None:
        """
        Tell the sandbox to start a command. If it did already, it does nothing.

        Args:
            call: The command.
            mode: Its standard input: ``null``, ``file`` (staged before) or ``live``.

        """
        command = call.command
        facts = self.control.facts
        call.staged = True
        what = command.command
        if isinstance(what, str) and len(what.encode()) > MAX_WORD:
            await self.stage(f"{call.number}.script", what.encode())
        code = start_code(call, workdir=facts["workdir"], env=self._env, state=facts["state"])
        if '"$_aenvp"' in code and "env" in self.control.missing:
            raise ConfigurationError("this sandbox has no program 'env', and some of the variables need it")
        code = await self._short(code, f"{call.number}.code")
        user = "" if command.user is None else str(command.user)
        words = f"{call.number} {call.token} {mode} {int(command.merge)} {quote(user)}"
        call.began = anyio.current_time()
        self._wakeup.set()
        await self.control.request(f"{code}\n_aspawn {words}")

    async def wait(self, call: Call) -> None:
        """Wait until a command is done; raise what its start callback raised, after killing it."""
        while not call.done.is_set() and call.raised is None:
            await call.changed.wait()
        if call.raised is not None:
            raise call.raised

    async def kill(self, call: Call) -> None:
        """Kill a command and wait, shielded, until that is confirmed; give the sandbox up if it is not."""
        if call.done.is_set() or self.control.lost is not None:
            return
        call.limit = call.limit or "killed"
        with anyio.move_on_after(KILL_GRACE + KILL_LAST + KILL_CONFIRM, shield=True):
            await self._stop(call, KILL_GRACE)
            return
        self.control.lose(SandboxLost("unkillable", f"the death of command {call.number} was not confirmed"))

    async def _stop(self, call: Call, grace: float) -> None:
        """Kill everything of a command, and settle how it ended."""
        if not call.killing:
            call.killing = True
            words = f"{call.number} {call.token} {round(grace * 100)} {round(KILL_LAST * 100)} '{call.pid or ''}'"
            try:
                await self.control.request(f"_astop {words} </dev/null >/dev/null &")
            except SandboxLost:
                return
        while not (call.dead.is_set() or call.done.is_set()):
            await call.changed.wait()
        if call.survivors:
            self.control.lose(SandboxLost("unkillable", await self._names(call.survivors[:5])))
            return
        with anyio.move_on_after(2 * LOOK):
            await call.done.wait()
        if not call.done.is_set():
            await self._look(call)

    def release(self, call: Call) -> None:
        """Forget a command that is done."""
        self._running.pop(call.number, None)
        call.done.set()

    async def clean(self, *calls: Call) -> None:
        """Remove what is left of commands in the sandbox. Nobody needs to know how that went."""
        numbers = " ".join(f'"$_aS/{call.number}".*' for call in calls if call.staged)
        if not numbers or self.control.lost is not None:
            return
        try:
            await self.control.request(f"rm -f {numbers} 2>/dev/null")
        except SandboxLost:
            return

    # What the sandbox tells.

    def tell(self, words: list[str]) -> None:
        """Take a line about a command."""
        if len(words) < 2 or not words[1].isdigit():
            return
        call = self._running.get(int(words[1]))
        if call is not None:
            call.looked = anyio.current_time()
            call.tell([words[0], *words[2:]], anyio.current_time())

    def on_attached(self) -> None:
        """Look every command up: what was told meanwhile is lost."""
        self._looking = True
        self._wakeup.set()

    def on_lost(self) -> None:
        """End every command: nothing more will come."""
        calls, self._running = self._running, {}
        for call in calls.values():
            call.dead.set()
            call.finish()
        self._wakeup.set()

    # What happens beside the callers.

    async def tend(self) -> None:
        """Keep time for all commands, and look up those that were not heard of for long."""
        async with anyio.create_task_group() as group:
            while True:
                now = anyio.current_time()
                due = math.inf
                again, self._looking = self._looking, False
                for call in list(self._running.values()):
                    if call.began is None or call.done.is_set():
                        continue
                    if self._check_time(call, now):
                        group.start_soon(self._stop, call, GRACE)
                        continue
                    call.looked = max(call.looked, call.began)
                    if again or now >= call.looked + self._interval(call):
                        call.looked = now
                        group.start_soon(self._look, call)
                    due = min(due, call.looked + self._interval(call), self._deadline(call))
                self._wakeup = anyio.Event()
                with anyio.move_on_after(max(0.0, due - anyio.current_time())):
                    await self._wakeup.wait()

    def _deadline(self, call: Call) -> float:
        if call.limit is not None or call.began is None:
            return math.inf
        total = call.command.timeout
        silent = call.command.no_output_timeout
        due = math.inf if total is None else call.began + total
        return due if silent is None or call.pid is None else min(due, call.silent_since + silent)

    def _interval(self, call: Call) -> float:
        """Return after how many seconds a command is looked up; its silence is measured that way."""
        silent = call.command.no_output_timeout
        return LOOK if silent is None else min(LOOK, max(silent / 10, 0.05))

    def _check_time(self, call: Call, now: float) -> bool:
        if call.limit is not None or call.began is None:
            return False
        command = call.command
        if call.outgrown:
            call.limit = "spool"
        elif command.timeout is not None and now >= call.began + command.timeout:
            call.limit = "total"
        elif (
            command.no_output_timeout is not None
            and call.pid is not None
            and now >= call.silent_since + command.no_output_timeout
        ):
            call.limit = "no_output"
        return call.limit is not None

    async def _look(self, call: Call) -> None:
        """Ask what became of a command."""
        try:
            reply = await self.control.request(
                f'_afind {call.number};_aw=$_ar;_asize "$_aS/{call.number}.out";_ao=$_ar;'
                f'_asize "$_aS/{call.number}.err";_ar="$_ao "$_ar" $_aw"'
            )
        except SandboxLost:
            return
        now = anyio.current_time()
        call.looked = now
        stdout, stderr, *words = reply.result.split()
        if call.done.is_set() or not words:
            return
        if words[0] in ("X", "F"):
            self.tell(words)
        elif words[0] == "run":
            if len(words) == 2 and words[1].isdigit():
                call.started(int(words[1]), now)
        elif words[0] == "ended":
            # It may just be about to be told; if not, what was to tell it is gone, or waits for a process that hides.
            await anyio.sleep(0.2)
            if not call.done.is_set():
                end = f"_an={call.number};_atoken={call.token};_amode=;_aend"
                await self._quietly(f"( {end} ) </dev/null >/dev/null &")
        elif words[0] == "gone" and call.pid is not None:
            await self._undone(call)
        elif words[0] == "none" and call.pid is not None:
            self.control.lose(SandboxLost("no_state", f"the state of command {call.number} was removed"))
        if stdout.isdigit() and stderr.isdigit():
            sizes = int(stdout), int(stderr)
            if sizes != call.silent_sizes:
                call.silent_sizes, call.silent_since = sizes, now
            if sum(sizes) > SPOOL_LIMIT:
                call.outgrown = True
                self._wakeup.set()

    async def _undone(self, call: Call) -> None:
        """End a command whose end nobody saw: what waited for it was killed, and the exit code with it."""
        await anyio.sleep(0.2)
        if not call.done.is_set():
            await self._quietly(f"_astop {call.number} {call.token} 0 100 '{call.pid or ''}' </dev/null >/dev/null &")
            detail = f"the shell that waited for command {call.number} was killed, so that its exit code is unknown"
            self.control.lose(SandboxLost("killed", detail))

    async def _quietly(self, code: str) -> None:
        try:
            await self.control.request(code)
        except SandboxLost:
            return

    async def _names(self, pids: tuple[int, ...]) -> str:
        found = await self.processes(pids)
        return ", ".join(f"{process.pid} {process.command}" for process in found)

    # Results.

    async def processes(self, pids: tuple[int, ...]) -> tuple[ProcessInfo, ...]:
        """Return the command lines of processes."""
        found = []
        for pid in pids[:100]:
            reply = await self.control.request(f"cat /proc/{pid}/cmdline 2>/dev/null")
            command = reply.data.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
            found.append(ProcessInfo(pid=pid, command=command[:200]))
        return tuple(found)

    async def outcome(self, call: Call, kept: tuple[bytes, bytes] | None = None) -> ExecResult:
        """
        Return what came of a command that is done, or raise it.

        Args:
            call: The command.
            kept: Its output, if it was read already; else it is read now.

        """
        if self.control.lost is not None:
            raise self.control.loss(*(kept or (b"", b"")))
        command, record = call.command, call.record
        if call.refusal is not None and (call.refusal != "killed" or call.limit is None):
            if call.refusal == "no_state":
                self.control.lose(SandboxLost("no_state", "the directory with the state of commands is gone"))
                raise self.control.loss()
            raise call.error()
        sizes = record.sizes if record else (0, 0)
        if kept is None:
            limit = command.output_limit
            kept = (
                await self.read(f"{call.number}.out", sizes[0], limit),
                await self.read(f"{call.number}.err", sizes[1], limit),
            )
        elapsed = record.wall if record else 0.0
        if call.limit in ("total", "no_output"):
            seconds = command.timeout if call.limit == "total" else command.no_output_timeout
            # Clocks differ, and the sandbox's has but hundredths: a limit that fired had passed.
            raise CommandTimeout(call.limit, seconds or 0.0, max(elapsed, seconds or 0.0), *kept)
        if call.limit == "spool":
            raise OutputLimitExceeded(SPOOL_LIMIT)
        if record is None:
            raise StreamBroken("killed", f"command {call.number} was killed before it started")
        if record.cut:
            detail = f"the output of command {call.number} could not be stored: its disk is full or its state was removed"
            self.control.lose(SandboxLost("disk_full", detail))
            raise self.control.loss(*kept)
        return ExecResult(
            exit_code=record.code,
            stdout=kept[0],
            stderr=kept[1],
            truncated=max(record.sizes) > command.output_limit,
            sizes=OutputSizes(stdout=record.sizes[0], stderr=record.sizes[1]),
            wall_seconds=record.wall,
            cpu_seconds=record.cpu,
            leftovers=await self.processes(record.leftovers) if record.leftovers else (),
        )

    async def read(self, name: str, size: int, limit: int) -> bytes:
        """Read a file of ours: all of it, or its head and its tail."""
        if size <= limit:
            return await self.read_range(name, 0, size)
        tail = limit // 2
        return await self.read_range(name, 0, limit - tail) + await self.read_range(name, size - tail, tail)

    async def read_range(self, name: str, start: int, size: int) -> bytes:
        """Read a range of a file of ours, which must have it."""
        data = b""
        if size > TRANSFER:
            skip, blocks = start // BLOCK, -(-(start + size) // BLOCK) - start // BLOCK
            path = quote(f"{self.control.facts['state']}/{name}")
            outcome = await self.transfer(f"exec dd if={path} bs={BLOCK} skip={skip} count={blocks} 2>/dev/null")
            data = outcome.stdout[start % BLOCK :][:size]
        else:
            parts: list[bytes] = []
            have = 0
            while have < size and (part := await self.read_some(name, start + have)):
                parts.append(part)
                have += len(part)
            data = b"".join(parts)[:size]
        if len(data) != size:
            self.control.lose(StreamBroken("damaged", f"{len(data)} bytes of {size} were left of a command's output"))
            raise self.control.loss()
        return data

    async def read_some(self, name: str, start: int) -> bytes:
        """Read a file of ours from *start* on: what there is, up to a piece."""
        reply = await self.control.request(f"_aget {quote(name)} {start // BLOCK} {PIECE // BLOCK}")
        return reply.data[start % BLOCK :]

    # Data into the sandbox.

    async def ask(self, code: str, data: bytes = b"") -> Reply:
        """Have any code run, however long; it ends with its result in ``_ar``."""
        self._asked += 1
        name = f"ask{self._asked}"
        short = await self._short(code, name)
        return await self.control.request(short if short is code else f'{short};rm -f "$_aS/{name}"', data)

    async def _short(self, code: str, name: str) -> str:
        """Return code that does the same and is short text: the rest goes into a file."""
        try:
            size = len(code.encode())
        except UnicodeEncodeError:  # some shells read lines as text
            size = INLINE + 1
        if size <= INLINE:
            return code
        await self.stage(name, code.encode("utf-8", "surrogateescape"))
        return f'[ ! -r "$_aS/{name}" ]||. "$_aS/{name}"'

    async def stage(self, name: str, data: bytes) -> None:
        """Put a file of ours into the sandbox, whole."""
        if self.control.facts.get("exact") and len(data) <= TRANSFER:
            if not data:
                reply = await self.control.request(f"_ar=1;{{ printf '' >\"$_aS/{name}\"&&_ar=0;}} 2>/dev/null")
            else:
                reply = await self.control.request(f'_aput "$_aS/{name}" {len(data)}', data)
            if reply.result != "0":
                await self._no_room(name)
            return
        path = quote(f"{self.control.facts['state']}/{name}")
        code = f'umask 077;head -c {len(data)} >{path}||exit 1;[ "$(($(wc -c <{path})))" = {len(data)} ]'
        for attempt in range(TRANSFER_ATTEMPTS):
            outcome = await self.transfer(code, data=data)
            if outcome.exit_code == 0:
                return
            if attempt == 1:
                break
        await self._no_room(name)

    async def _no_room(self, name: str) -> None:
        reply = await self.control.request('_ar=gone;[ ! -s "$_aS/key" ]||_ar=there')
        if reply.result == "gone":
            self.control.lose(SandboxLost("no_state", "the directory with the state of commands is gone"))
            raise self.control.loss()
        raise SandboxLost("disk_full", f"{name!r} could not be stored in the sandbox")

    async def transfer(
        self, code: str, *, data: bytes = b"", take: bulk.Take | None = None, timeout: float = TRANSFER_TIMEOUT
    ) -> bulk.Outcome:
        """Run code over a connection of its own, again if that is lost and nobody took anything yet."""
        last: InfrastructureError | None = None
        for attempt in range(TRANSFER_ATTEMPTS):
            try:
                return await self._transfer(code, data, take, timeout)
            except InfrastructureError as error:
                if take is not None or self.control.lost is not None or not bulk.passing(error):
                    raise
                last = error
            await anyio.sleep(0.1 * 2**attempt)
        assert last is not None
        raise last

    async def transfer_file(self, code: str, file: IO[bytes], *, timeout: float) -> bulk.Outcome | None:
        """Run code that reads a file of this side, once; ``None`` if its connection was lost."""

        async def pieces() -> AsyncIterator[bytes]:
            while data := await in_thread(file.read, PIECE):
                yield data

        try:
            return await self._transfer(code, pieces(), None, timeout)
        except InfrastructureError as error:
            if self.control.lost is not None or not bulk.passing(error):
                raise
            return None

    async def _transfer(
        self, code: str, data: bytes | AsyncIterable[bytes], take: bulk.Take | None, timeout: float
    ) -> bulk.Outcome:
        if self.control.lost is not None:
            raise self.control.loss()
        control = self.control
        async with self._transfers:
            return await bulk.run(control.connect, control.shell, code, data=data, take=take, timeout=timeout)
