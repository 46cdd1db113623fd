# SPDX-License-Identifier: Apache-2.0
"""One command of a shell session as the driver knows it: pure, fed with what the sandbox tells."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio
import attrs

from agentsandbox.errors import (
    CommandNotExecutable,
    CommandNotFound,
    ConfigurationError,
    StartError,
    UserNotFound,
    WorkingDirectoryNotFound,
)
from agentsandbox.session.levels.scripts import exports, quote

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentsandbox.models.command import Command

__all__ = ["MAX_WORD", "Call", "Record", "start_code"]

MAX_WORD = 96 * 1024
"""Bytes of a script beyond which it is run from a file: the kernel takes 128 KiB an argument."""

CLOCK_TICKS = 100.0
"""Ticks a second in which Linux tells processor time to programs, on every architecture that it is built for today."""


@attrs.frozen(kw_only=True)
class Record:
    """The end of a command."""

    code: int
    """Exit code; 128 + n when signal n ended it."""
    wall: float
    """Seconds from start to end, on the sandbox's clock, to a hundredth."""
    cpu: float
    """Seconds of processor time, to a hundredth."""
    cut: bool
    """Whether some of it could not be stored in the sandbox."""
    leftovers: tuple[int, ...]
    """Processes of it that were still alive."""

    @classmethod
    def parse(cls, words: list[str]) -> Record | None:
        """Read the words after ``X`` and the number; ``None`` if they are none of ours."""
        try:
            code, wall, cpu, cut, *leftovers = (int(word) for word in words)
        except ValueError:
            return None
        if not 0 <= code <= 255 or wall < 0 or cpu < 0:
            return None
        return cls(
            code=code,
            wall=max(wall, 0.5) / 100,
            cpu=cpu / CLOCK_TICKS,
            cut=cut != 0,
            leftovers=tuple(leftovers),
        )


class Call:
    """
    The state of one command.

    Args:
        number: Its number in the session.
        command: What it is.
        on_started: Called when it has started.

    """

    __slots__ = (
        "_changed",
        "asked",
        "began",
        "command",
        "dead",
        "done",
        "killing",
        "limit",
        "looked",
        "number",
        "on_started",
        "outgrown",
        "pid",
        "raised",
        "record",
        "refusal",
        "silent_since",
        "silent_sizes",
        "staged",
        "survivors",
        "token",
    )

    def __init__(self, number: int, command: Command, on_started: Callable[[], None] | None = None) -> None:
        self.number = number
        self.command = command
        self.on_started = on_started
        self.token = f"{number}.{secrets.token_hex(8)}"
        """In the environment of everything that it starts."""
        self.staged = False
        """Whether anything of it is in the sandbox, to be removed again."""
        self.pid: int | None = None
        self.began: float | None = None
        """When it was told to start; when it has started, that instead."""
        self.asked: float | None = None
        """When it was certain that the sandbox was told."""
        self.record: Record | None = None
        self.refusal: str | None = None
        """Why it did not start."""
        self.limit: str | None = None
        """Why it is being killed: ``total``, ``no_output``, ``killed`` or ``spool``."""
        self.killing = False
        """Whether the sandbox was told to kill it."""
        self.dead = anyio.Event()
        """Set when the sandbox has confirmed that it killed everything of it, or could not."""
        self.survivors: tuple[int, ...] = ()
        self.outgrown = False
        self.silent_since = 0.0
        self.silent_sizes = (0, 0)
        self.looked = 0.0
        self.raised: Exception | None = None
        """What a callback of the caller raised."""
        self.done = anyio.Event()
        """Set when nothing more will come: it ended, never started, or the session is lost."""
        self._changed = anyio.Event()

    def __repr__(self) -> str:
        state = (
            "refused" if self.refusal else "ended" if self.record else "lost" if self.done.is_set() else
            "being killed" if self.killing else "running" if self.pid else "starting"
        )  # fmt: skip
        return f"<Call {self.number} [{state}]>"

    @property
    def settled(self) -> bool:
        """Whether it is done, and if it is being killed, all that it started is too."""
        return self.done.is_set() and (not self.killing or (self.dead.is_set() and not self.survivors))

    @property
    def changed(self) -> anyio.Event:
        """An event that is set at the next change."""
        return self._changed

    def notify(self) -> None:
        """Wake who waits for a change."""
        self._changed.set()
        self._changed = anyio.Event()

    def finish(self) -> None:
        """Nothing more will come."""
        self.done.set()
        self.notify()

    def started(self, pid: int, now: float) -> None:
        """Note that it runs."""
        if self.pid is not None:
            return
        self.pid = pid
        self.began = self.silent_since = now
        if self.on_started is not None:
            try:
                self.on_started()
            except Exception as error:  # noqa: BLE001  the caller's, and passed on to it
                self.raised = error
        self.notify()

    def tell(self, words: list[str], now: float) -> None:
        """Take what the sandbox tells: the kind and what follows the number. What makes no sense is ignored."""
        kind, rest = words[0], words[1:]
        if kind == "S" and len(rest) == 1 and rest[0].isdigit():
            self.started(int(rest[0]), now)
        elif kind == "F" and rest and self.record is None:
            self.refusal = rest[0]
            self.dead.set()
            self.finish()
        elif kind == "X" and self.record is None and self.refusal is None:
            self.record = Record.parse(rest)
            if self.record is not None:
                if self.pid is None:
                    self.started(1, now)
                self.finish()
        elif kind == "K":
            self.survivors = tuple(int(word) for word in rest if word.isdigit())
            self.dead.set()
            self.notify()

    def error(self) -> StartError | ConfigurationError:
        """Return the exception for a command that did not start."""
        command, kind = self.command, self.refusal or ""
        program = command.command if isinstance(command.command, str) else command.command[0]
        if kind in ("not_found", "127"):
            return CommandNotFound(f"{program}: No such file or directory", subject=program)
        if kind in ("not_executable", "126"):
            return CommandNotExecutable(f"{program}: Permission denied", subject=program)
        if kind == "no_cwd":
            cwd = command.cwd or "the working directory"
            return WorkingDirectoryNotFound(f"{cwd}: No such file or directory", subject=cwd)
        if kind == "no_user":
            return UserNotFound(f"{command.user}: no such user", subject=str(command.user))
        if kind == "no_users":
            return UserNotFound(
                f"{command.user}: this sandbox can run commands as one user only", subject=str(command.user)
            )
        if kind == "no_fork":
            return StartError("no process could be made in the sandbox", subject=program[:200])
        if kind == "full":
            return StartError("the sandbox's disk is full: output could not be kept", subject=program[:200])
        return StartError(f"{program[:200]}: cannot be started ({kind})", subject=program[:200])


def start_code(call: Call, *, workdir: str, env: Mapping[str, str], state: str) -> str:
    """
    Return the code that defines what :func:`_aspawn` in the sandbox starts.

    Args:
        call: The command.
        workdir: Where relative directories start.
        env: Variables of the sandbox.
        state: The private directory there.

    """
    command = call.command
    own, others = exports({**env, **command.env})
    cwd = command.cwd or "."
    if not cwd.startswith("/"):
        cwd = f"{workdir.rstrip('/')}/{cwd}"
    what = command.command
    odd = ['"$_aenvp"', *map(quote, others)] if others else []
    if isinstance(what, str):
        body = [quote(f"{state}/{call.number}.script")] if len(os.fsencode(what)) > MAX_WORD else ["-c", quote(what)]
        words = [*odd, '"$_ash"', *body]
        program = ""
    else:
        # A shell passes no variable on whose name is none to it: those are set behind it.
        words = ['"$_ash"', "-c", '"$_alaunch"', '"$_aS/$_an.fail"', *odd, *map(quote, what)]
        program = what[0] or "/"  # an empty word here would mean that there is a script
    return "\n".join(
        [
            f"_acwd={quote(cwd)}",
            f"_aprog={quote(program)}",
            f"_aenv(){{\n:\n{own}}}",
            f"_ago(){{\n{' '.join(['exec', '$_apre', *words])}\n}}",
        ]
    )
