# SPDX-License-Identifier: Apache-2.0
"""Starting processes: the shortest way that the interpreter offers, with errors that say what could not be done."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import users

_fork_exec: Optional[Callable[..., int]]
try:
    from _posixsubprocess import fork_exec as _fork_exec
except ImportError:  # not CPython
    _fork_exec = None

MAX_ARGUMENT = 128 * 1024 - 1
"""The longest single argument or environment variable that Linux takes, in bytes (MAX_ARG_STRLEN)."""

MAX_ARGUMENTS = 6 * 1024 * 1024
"""The most that all arguments and the environment may take together, in bytes (three quarters of 8 MiB)."""

STACK = 4 * MAX_ARGUMENTS
"""A quarter of the stack limit may hold arguments."""

Environment = Dict[bytes, bytes]


class StartFailed(Exception):
    """Nothing ran. The fields are those of the FAILED frame."""

    def __init__(self, kind: str, subject: str, reason: str = "", *, number: Optional[int] = None) -> None:
        text = reason or (os.strerror(number) if number else "")
        super().__init__("%s: %s" % (subject, text) if subject else text)
        self.kind = kind
        self.subject = subject
        self.errno = number

    def report(self) -> Dict[str, Any]:
        """Return the payload of the FAILED frame."""
        return {"kind": self.kind, "errno": self.errno, "message": str(self), "subject": self.subject}


class Launch:
    """How to start processes here; finds out once what the interpreter takes."""

    def __init__(self) -> None:
        self._shape = {(3, 7): 17, (3, 8): 17, (3, 9): 21, (3, 10): 21}.get(sys.version_info[:2], 23)
        self.set_groups = users.may_set_groups()

    def __call__(
        self,
        argv: Sequence[bytes],
        *,
        cwd: bytes,
        env: Environment,
        stdio: Tuple[int, int, int],
        account: Optional[users.Account],
    ) -> int:
        """
        Start a program in a session of its own.

        Args:
            argv: Its arguments; the first is looked for in ``PATH``.
            cwd: Its working directory.
            env: Its whole environment.
            stdio: What becomes its descriptors 0, 1 and 2.
            account: The user to become; ``None`` stays.

        Returns:
            The process id.

        Raises:
            StartFailed: If it could not be started.

        """
        program = argv[0]
        if b"/" in program:
            candidates: Tuple[bytes, ...] = (program,)
        else:
            path = env.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin")
            candidates = tuple((place or b".") + b"/" + program for place in path.split(b":"))
        size = sum(map(len, argv)) + 9 * len(argv)
        raised = _raise_stack() if size > 1024 * 1024 else None
        try:
            reader, writer = os.pipe()
            try:
                pid = self._start(argv, candidates, cwd, env, stdio, (reader, writer), account)
            finally:
                os.close(writer)
                # Closed by the child as soon as it has become the program, so this waits for just that.
                trouble = part = os.read(reader, 4096)
                while part:
                    part = os.read(reader, 4096)
                    trouble += part
                os.close(reader)
        except OSError as error:
            raise StartFailed("os_error", _text(program), number=error.errno) from error
        finally:
            if raised is not None:
                resource.setrlimit(resource.RLIMIT_STACK, raised)
        if trouble:
            os.waitpid(pid, 0)
            raise _explain(trouble, program, candidates, cwd, account)
        return pid

    def _start(
        self,
        argv: Sequence[bytes],
        candidates: Tuple[bytes, ...],
        cwd: bytes,
        env: Environment,
        stdio: Tuple[int, int, int],
        errors: Tuple[int, int],
        account: Optional[users.Account],
    ) -> int:
        variables = [b"%s=%s" % item for item in env.items()]
        shape = self._shape
        while _fork_exec is not None and shape >= (21 if account is not None else 17):
            stdin, stdout, stderr = stdio
            head = (
                (list(argv), candidates, False, (), cwd, variables)
                + (stdin, -1, -1, stdout, -1, stderr)
                + errors
                + (True, True)
            )
            ids: Tuple[Any, ...] = (None, None, None, -1)
            if account is not None:
                ids = (account.gid, list(account.groups) if self.set_groups else None, account.uid, -1)
            tail = {
                17: (None,),
                21: ids + (None,),
                22: (-1,) + ids + (None,),
                23: (-1,) + ids + (None, True),
            }[shape]
            try:
                return _fork_exec(*head, *tail)
            except TypeError:  # an interpreter of another shape than its version suggests: nothing has run yet
                shape = self._shape = {23: 22, 22: 21, 21: 17, 17: 0}[shape]
        return self._fork(argv, candidates, cwd, variables, stdio, errors, account)

    def _fork(
        self,
        argv: Sequence[bytes],
        candidates: Tuple[bytes, ...],
        cwd: bytes,
        variables: List[bytes],
        stdio: Tuple[int, int, int],
        errors: Tuple[int, int],
        account: Optional[users.Account],
    ) -> int:
        env = dict(item.split(b"=", 1) for item in variables)
        pid = os.fork()
        if pid:
            return pid
        stage = b"noexec:chdir"
        try:
            report = above_stdio(errors[1])
            os.chdir(cwd)
            stage = b"noexec:user"
            become(account, stdio, set_groups=self.set_groups)
            stage, number = b"", errno.ENOENT
            for candidate in candidates:
                try:
                    os.execve(candidate, list(argv), env)
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                        number = error.errno or number
            raise OSError(number, "")
        except OSError as error:
            os.write(report, b"OSError:%X:%s" % (error.errno or 0, stage))
        finally:
            os._exit(127)


def become(account: Optional[users.Account], stdio: Tuple[int, int, int], *, set_groups: bool) -> None:
    """Make a freshly forked process what a command is: own session, default signals, given descriptors, given user."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        try:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    for target, fd in enumerate([above_stdio(fd) for fd in stdio]):
        os.dup2(fd, target)
    if account is not None:
        if set_groups:
            os.setgroups(account.groups)
        os.setgid(account.gid)
        os.setuid(account.uid)


def above_stdio(fd: int) -> int:
    """Return the descriptor, or a copy of it if it is in the way of the standard ones."""
    held = []
    while fd <= 2:
        held.append(fd)
        fd = os.dup(fd)
    for lower in held[1:]:
        os.close(lower)
    return fd


def _raise_stack() -> Optional[Tuple[int, int]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK if hard == resource.RLIM_INFINITY else min(STACK, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    except (OSError, ValueError):
        return None
    return (soft, hard)


def _explain(
    trouble: bytes, program: bytes, candidates: Tuple[bytes, ...], cwd: bytes, account: Optional[users.Account]
) -> StartFailed:
    parts = trouble.split(b":", 2)
    try:
        number = int(parts[1], 16)
    except (IndexError, ValueError):
        return StartFailed("os_error", _text(program), _text(trouble))
    stage = parts[2] if len(parts) > 2 else b""
    if stage:
        if account is not None and b"chdir" not in stage and number in (errno.EPERM, errno.EINVAL):
            return StartFailed(
                "no_user", account.name, "this sandbox cannot run as user %d" % account.uid, number=number
            )
        if number in (errno.EAGAIN, errno.ENOMEM):
            return StartFailed("os_error", _text(program), number=number)
        return StartFailed("no_cwd", _text(cwd), number=number)
    if number == errno.E2BIG:
        reason = "%s: at most %d bytes in one argument or variable and %d in all" % (
            os.strerror(number),
            MAX_ARGUMENT,
            MAX_ARGUMENTS,
        )
        return StartFailed("too_large", _text(program), reason, number=number)
    if number in (errno.ENOENT, errno.ENOTDIR):
        reason = ""
        if any(os.path.isfile(os.path.join(cwd, candidate)) for candidate in candidates):
            reason = "the interpreter that it names does not exist"
        return StartFailed("not_found", _text(program), reason, number=number)
    if number in (errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ETXTBSY, errno.ELIBBAD, errno.EISDIR):
        return StartFailed("not_executable", _text(program), number=number)
    return StartFailed("os_error", _text(program), number=number)


def _text(value: bytes) -> str:
    text = value.decode("utf-8", "surrogateescape")
    return text if len(text) <= 1024 else text[:1024] + "…"
