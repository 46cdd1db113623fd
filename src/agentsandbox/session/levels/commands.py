# SPDX-License-Identifier: Apache-2.0
"""The commands of one shell session: how they get into the sandbox, are watched, and killed."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from agentsandbox.errors import ConfigurationError, SandboxLost
from agentsandbox.session.calls import GRACE, KILL_GRACE
from agentsandbox.session.levels import results
from agentsandbox.session.levels.call import MAX_WORD, Call, start_code
from agentsandbox.session.levels.limits import due
from agentsandbox.session.levels.scripts import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentsandbox.models.command import Command
    from agentsandbox.session.levels.control import Control
    from agentsandbox.session.levels.store import Store

__all__ = ["Commands"]

KILL_LAST = 4.0
"""Seconds in which KILL is repeated before processes count as not to be killed."""

KILL_CONFIRM = 10.0
"""Seconds beyond all that in which it has to be confirmed that a command is dead."""

KILL_AGAIN = 2.0
"""Seconds beyond grace and last attempts after which the sandbox is told once more: what was to kill may be dead."""

KILL_TRIES = 4
"""How often it is told."""

LOOK, LAST_LOOK = 2.0, 15.0
"""Seconds without news after which a command is looked up, at first and at last: what watched it may be gone."""

BORN = 5.0
"""Seconds after which a command that is asked for and has no process yet is given up."""


class Commands:
    """
    The commands in flight in one sandbox.

    Args:
        env: Variables of every command.

    """

    control: Control
    store: Store

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._running: dict[int, Call] = {}
        self._wakeup = anyio.Event()
        self._looking = False
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
        if isinstance(what, str) and len(os.fsencode(what)) > MAX_WORD:
            await self.store.stage(f"{call.number}.script", os.fsencode(what))
        code = start_code(call, workdir=facts["workdir"], env=self._env, state=facts["state"])
        if '"$_aenvp"' in code and "env" in self.control.missing:
            raise ConfigurationError("this sandbox has no program 'env', and some of the variables need it")
        code = await self.store.short(code, f"{call.number}.code")
        user = "" if command.user is None else str(command.user)
        words = f"{call.number} {call.token} {mode} {int(command.merge)} {quote(user)}"
        call.began = anyio.current_time()
        self._wakeup.set()
        await self.control.request(f"{code}\n_aspawn {words}")
        call.asked = anyio.current_time()

    async def wait(self, call: Call) -> None:
        """Wait until a command is done; raise what its start callback raised, after killing it."""
        while not call.settled and call.raised is None:
            await call.changed.wait()
        if call.raised is not None:
            raise call.raised

    async def kill(self, call: Call) -> None:
        """Kill a command and wait, shielded, until that is confirmed; give the sandbox up if it is not."""
        if call.settled or self.control.lost is not None:
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
            try:
                await self._have_killed(call, grace)
            except SandboxLost:
                return
        while not call.dead.is_set():
            await call.changed.wait()
        if call.survivors:
            with suppress(SandboxLost):
                found = await results.processes(self.control, call.survivors[:5])
                names = ", ".join(f"{process.pid} {process.command}" for process in found)
                self.control.lose(SandboxLost("unkillable", names))
            return
        for _ in range(2):
            with anyio.move_on_after(2 * LOOK):
                await call.done.wait()
            if call.done.is_set():
                return
            await self._look(call)
        if not call.done.is_set():
            detail = f"command {call.number} was killed, and nothing tells how it ended"
            self.control.lose(SandboxLost("killed", detail))

    async def _have_killed(self, call: Call, grace: float) -> None:
        """Tell the sandbox to kill a command until it confirms that; give it up if it never does."""
        for _ in range(KILL_TRIES):
            words = f"{call.number} {call.token} {round(grace * 100)} {round(KILL_LAST * 100)} '{call.pid or ''}'"
            await self.control.request(f"_astop {words} </dev/null >/dev/null &")
            connection = self.control.connections
            with anyio.move_on_after(grace + KILL_LAST + KILL_AGAIN):
                while not call.dead.is_set() and connection == self.control.connections:
                    await call.changed.wait()
            if call.dead.is_set():
                return
            grace = 0.0
        self.control.lose(SandboxLost("unkillable", f"the death of command {call.number} was not confirmed"))

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
        """Look every command up, and tell again which are to die: what was told meanwhile is lost."""
        self._looking = True
        self._wakeup.set()
        for call in self._running.values():
            call.notify()

    def on_lost(self) -> None:
        """End every command: nothing more will come."""
        calls, self._running = self._running, {}
        for call in calls.values():
            call.dead.set()
            call.survivors = ()
            call.finish()
        self._wakeup.set()

    # What happens beside the callers.

    async def tend(self) -> None:
        """Keep time for all commands, and look up those that were not heard of for long."""
        async with anyio.create_task_group() as group:
            while True:
                now = anyio.current_time()
                next_look = math.inf
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
                    next_look = min(next_look, call.looked + self._interval(call), self._deadline(call))
                self._wakeup = anyio.Event()
                with anyio.move_on_after(max(0.0, next_look - anyio.current_time())):
                    await self._wakeup.wait()

    def _deadline(self, call: Call) -> float:
        if call.limit is not None or call.began is None:
            return math.inf
        return self._due(call)[0]

    def _due(self, call: Call) -> tuple[float, str]:
        return due(call.command, call.began or 0.0, None if call.pid is None else call.silent_since)

    def _interval(self, call: Call) -> float:
        """Return after how many seconds a command is looked up; its silence is measured that way."""
        silent = call.command.no_output_timeout
        usual = min(max(LOOK, (call.looked - (call.began or 0.0)) / 2), LAST_LOOK)
        return usual if silent is None else min(LOOK, max(silent / 10, 0.05))

    def _check_time(self, call: Call, now: float) -> bool:
        if call.limit is not None or call.began is None:
            return False
        fires, limit = self._due(call)
        if call.outgrown:
            call.limit = "spool"
        elif now >= fires:
            call.limit = limit
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
        words = reply.result.split()
        if call.done.is_set() or len(words) < 3:
            return
        stdout, stderr, *words = words
        if words[0] in ("X", "F"):
            self.tell(words)
        elif words[0] == "run":
            if len(words) == 2 and words[1].isdigit():
                call.started(int(words[1]), now)
        elif words[0] == "claimed" or (words[0] == "none" and call.pid is None):
            asked = call.began if words[0] == "claimed" else call.asked
            if asked is not None and now >= asked + BORN:
                # What was to start it could not: there was no process to be had. From here on it never will.
                await self._quietly(f"_agiveup {call.number}")
        elif words[0] == "ended":
            # It may just be about to be told; if not, what was to tell it is gone, or waits for a process that hides.
            await anyio.sleep(0.2)
            if not call.done.is_set():
                end = f"_an={call.number};_atoken={call.token};_amode=;_amerge={int(call.command.merge)};_aend again"
                await self._quietly(f"( {end} ) </dev/null >/dev/null &")
        elif words[0] == "gone":
            await self._undone(call)
        elif words[0] == "none":
            self.control.lose(SandboxLost("no_state", f"the state of command {call.number} was removed"))
        if stdout.isdigit() and stderr.isdigit():
            sizes = int(stdout), int(stderr)
            if sizes != call.silent_sizes:
                call.silent_sizes, call.silent_since = sizes, now
            if sum(sizes) > results.SPOOL_LIMIT:
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
