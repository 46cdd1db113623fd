# SPDX-License-Identifier: Apache-2.0
"""From a START frame to a running command."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from typing import TYPE_CHECKING, Dict, List, Mapping, Optional, Tuple, Union

from agentsandbox.protocol import frames

from . import capture, files, kernel, pristine, spawn, users
from .commands import Command
from .pipes import Output, enlarge
from .processes import MARKER
from .requests import Request, path_of
from .spawn import StartFailed

if TYPE_CHECKING:
    from .loop import Runner

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

PRISTINE = ("baseline", "reset") + tuple(capture.WORK)
"""Builtins that are about the whole sandbox, and not about what some user may do in it."""

SPARE_DESCRIPTORS = 32
"""So many descriptors stay free for the runner itself: it must be able to look at processes in order to kill them."""

SCRIPT_PLACES = (b"/dev/shm", b"/tmp", b"/var/tmp")
"""Where a long script is kept, unlinked, if the interpreter has no anonymous files."""


class Starter:
    """
    What all commands of a runner have in common.

    Args:
        base_env: Their environment, before what each asks for.
        workdir: Their working directory, if they ask for none.
        user: Who they run as, if they ask for nobody; ``None`` is the runner's own user.

    """

    def __init__(self, base_env: Mapping[str, str], workdir: str, user: Union[str, int, None]) -> None:
        self.own = users.resolve(None)
        self.may_change = users.may_change()
        self.default = self.own if user is None else users.resolve(user)
        self.workdir = os.fsencode(workdir)
        self._launch = spawn.Launch()
        self._lives = False
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        # Kept for long scripts: a shell can close only descriptors of one digit.
        self._slot = fcntl.fcntl(self._null, fcntl.F_DUPFD_CLOEXEC, 3)
        self._env = {_encode(name): _encode(value) for name, value in base_env.items()}
        self._env.setdefault(b"PATH", _encode(DEFAULT_PATH))
        for name, value in _personal(self.default).items():
            self._env.setdefault(name, value)
        change = self._change(self.default)  # refuse now what no command could do
        if change is not None and os.getpid() == 1 and self._launch.set_groups:
            self._lives = kernel.live_as(change.uid, change.gid, change.groups)
            self.own = self.default if self._lives else self.own

    def start(self, runner: Runner, number: int, request: Request) -> Command:
        """
        Start a command.

        Raises:
            StartFailed: If nothing was started.

        """
        account = self.default
        env = self._env.copy()
        if request.user is not None:
            try:
                account = users.resolve(request.user)
            except users.NoUser as error:
                raise StartFailed("no_user", str(request.user), str(error).partition(": ")[2]) from error
            except OSError as error:
                raise StartFailed("os_error", str(request.user), number=error.errno) from error
            if account != self.default:
                env.update(_personal(account))
        become = self._change(account)
        env.update(request.env)
        env[MARKER] = b"%d" % number
        if request.builtin not in PRISTINE:
            runner.vault.users.add(account.uid)
        cwd = self.workdir if request.cwd is None else os.path.join(self.workdir, request.cwd)
        pipes = _Pipes()
        try:
            stdin = pipes.open(ours=1) if request.stdin else None
            stdout = pipes.open(ours=0)
            report = pipes.open(ours=0) if request.builtin else None
            stderr = None if request.merge or request.builtin else pipes.open(ours=0)
            _check_spare(stdout[0])
            stdio = (
                self._null if stdin is None else stdin[0],
                stdout[1],
                (self._null if request.builtin else stdout[1]) if stderr is None else stderr[1],
            )
            began = runner.timers.now()
            if runner.signals.blocked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, runner.signals.blocked)
            if report is not None:
                enlarge(stdout[0])
                if request.builtin == "jail":
                    pid = self._jail(request, stdio, report[1], runner)
                elif request.builtin in PRISTINE:
                    pid = self._pristine(request, cwd, stdio, report[1], runner)
                else:
                    pid = self._builtin(
                        request, cwd, stdio, report[1], account if self._lives else become, runner.poller.highest
                    )
            elif request.script is not None:
                pid = self._script(request.script, cwd, env, stdio, become)
            else:
                pid = self._launch(request.argv, cwd=cwd, env=env, stdio=stdio, account=become)
        except OSError as error:
            pipes.close_all()
            raise StartFailed("os_error", "", number=error.errno) from error
        except BaseException:
            pipes.close_all()
            raise
        finally:
            if runner.signals.blocked:
                signal.pthread_sigmask(signal.SIG_BLOCK, runner.signals.blocked)
        pipes.close_theirs()
        outputs = [Output(stdout[0], frames.STDOUT)]
        if stderr is not None:
            outputs.append(Output(stderr[0], frames.STDERR))
        return Command(
            runner,
            number,
            request,
            pid,
            outputs=outputs,
            stdin=None if stdin is None else stdin[1],
            report=None if report is None else report[0],
            began=began,
        )

    def _change(self, account: users.Account) -> Optional[users.Account]:
        if account.uid == self.own.uid and (account.gid == self.own.gid or not self.may_change):
            return None
        if not self.may_change:
            raise StartFailed(
                "no_user", account.name, "this sandbox runs everything as user %d" % self.own.uid, number=errno.EPERM
            )
        return account

    def _script(
        self,
        script: bytes,
        cwd: bytes,
        env: Dict[bytes, bytes],
        stdio: Tuple[int, int, int],
        account: Optional[users.Account],
    ) -> int:
        file, slot = _anonymous_file(), self._slot
        try:
            # The script's first words close the descriptor that it came by; its lines keep their numbers.
            for part in (b"exec %d<&-; " % slot if slot <= 9 else b"", script):
                view = memoryview(part)
                while view:
                    view = view[os.write(file, view) :]
            os.dup2(file, slot)
            argv = [b"/bin/sh", b"-c", b". /proc/self/fd/%d" % slot]
            return self._launch(argv, cwd=cwd, env=env, stdio=stdio, account=account)
        finally:
            os.dup2(self._null, slot, inheritable=False)
            os.close(file)

    def _builtin(
        self,
        request: Request,
        cwd: bytes,
        stdio: Tuple[int, int, int],
        report: int,
        account: Optional[users.Account],
        highest: int,
    ) -> int:
        path = path_of(request.args, cwd)
        pid = os.fork()
        if pid:
            return pid
        try:
            report = spawn.above_stdio(report)
            spawn.become(account, stdio, set_groups=self._launch.set_groups)
            os.dup2(report, 3, inheritable=False)
            os.closerange(4, highest + 64)
            assert request.builtin is not None
            code = files.run(request.builtin, path, request.args, 3)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            code = 1
        os._exit(code)

    def _jail(self, request: Request, stdio: Tuple[int, int, int], report: int, runner: Runner) -> int:
        """Keep a jail, with all the rights that the runner has."""
        if runner.jails is None:
            raise StartFailed("bad_request", "", "this runner makes no jails")
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            report = spawn.above_stdio(report)
            spawn.become(None, stdio, set_groups=False)
            os.dup2(report, 3, inheritable=False)
            os.closerange(4, runner.poller.highest + 64)
            code = runner.jails(request.args, 3)
        finally:
            os._exit(code)

    def _pristine(self, request: Request, cwd: bytes, stdio: Tuple[int, int, int], report: int, runner: Runner) -> int:
        """Take a baseline, reset, or show or install files, with all the rights that the runner has."""
        path = path_of(request.args, cwd)
        vault = runner.vault
        relay = runner.relay()
        if request.builtin == "baseline":
            vault.home = self.default.home
            vault.open(relay)
        pid = os.fork()
        if pid:
            return pid
        try:
            if os.getresuid()[2] == 0:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            kernel.forbid_tracing()
            os.setsid()
            needed = stdio + vault.descriptors + (report,) + tuple(vault.uppers.values())
            held = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, len(needed)) for fd in needed]
            for target, fd in enumerate(held):
                os.dup2(fd, target, inheritable=False)
            os.closerange(len(held), max(held) + runner.poller.highest + 64)
            first = len(held) - len(vault.uppers)
            vault.uppers = {place: first + number for number, place in enumerate(vault.uppers)}
            assert request.builtin is not None
            if request.builtin in capture.WORK:
                code = capture.run(request.builtin, path, request.args, first - 1, vault, relay)
            else:
                code = pristine.run(request.builtin, path, request.args, first - 1, vault)
        except BaseException:
            code = 1
        os._exit(code)


class _Pipes:
    """The pipes of one command while it is being started."""

    def __init__(self) -> None:
        self._ours: List[int] = []
        self._theirs: List[int] = []

    def open(self, *, ours: int) -> Tuple[int, int]:
        ends = os.pipe()
        self._ours.append(ends[ours])
        self._theirs.append(ends[1 - ours])
        os.set_blocking(ends[ours], False)
        return ends

    def close_theirs(self) -> None:
        for fd in self._theirs:
            os.close(fd)

    def close_all(self) -> None:
        self.close_theirs()
        for fd in self._ours:
            os.close(fd)


def _personal(account: users.Account) -> Dict[bytes, bytes]:
    return {
        b"HOME": _encode(account.home),
        b"USER": _encode(account.name),
        b"LOGNAME": _encode(account.name),
    }


def _check_spare(fd: int) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft != resource.RLIM_INFINITY and fd + SPARE_DESCRIPTORS >= soft:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("script")
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
    problem = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for place in SCRIPT_PLACES:
        path = b"%s/.agentsandbox-%s" % (place, os.urandom(12).hex().encode())
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            problem = error
            continue
        os.unlink(path)
        return fd
    raise problem


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
