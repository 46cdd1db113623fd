# SPDX-License-Identifier: Apache-2.0
"""
The builtin ``jail``: a sandbox of its own inside a container that may make some, with a runner of its own.

The first process of the container runs it like any command: its standard input and output are the stream of the runner
inside, killing it kills the jail, and its end says that nothing of the jail is left. So a container with many jails has
one stream, and a jail survives the loss of that stream as every command does.

The command itself is the process that :func:`run` keeps: outside of the jail, it maps its ids and waits for its end.
This module keeps to the standard library and to Python 3.7.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
from typing import Any, Dict, List, Mapping, Optional

from . import cell, groups, jail, sieve, users
from .loop import serve
from .place import environment

SURVIVED = 5.0
"""Seconds in which the memory and the files of a dead jail must be gone."""


def run(args: Mapping[str, Any], report: int) -> int:
    """
    Be the keeper of one jail, from its making until nothing of it is left.

    Called in a forked child of the runner whose standard input and output are the stream for the runner inside.

    Args:
        args: ``nonce``, ``env``, ``workdir``, ``user`` for the runner inside; ``name``; ``number``: tells it from the
            other jails of the container; ``network``: whether it shares that of the container; ``storage``: a directory
            for what it writes, or ``None`` for memory; ``limits`` and ``groups``: see :mod:`.cell` and :mod:`.groups`.
        report: Where to say how it ended: ``code`` or ``signal``; ``stage`` and ``errno`` if it could not be made, with
            ``mistake`` if that is the caller's; ``left``: what is still there of it.

    """
    jail.set_name(b"jail-keeper")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the jail, whose end is to be told
    fence: Optional[groups.Group] = None
    directory: Optional[str] = None
    outcome: Dict[str, Any] = {}
    try:
        home = os.getcwd()
        jail.unshare(jail.CLONE_NEWNS, "mount")
        jail.mount(b"none", b"/", b"", jail.MS_REC | jail.MS_PRIVATE)
        if args["storage"] is not None:
            directory = os.path.join(args["storage"], args["name"])
            os.mkdir(directory, 0o755)
        fence = groups.make(args["name"], args["groups"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        jail.unshare(jail.CLONE_NEWPID, "PID")
        pid = os.fork()
        if pid == 0:
            ours.close()
            _become(args, directory, fence, theirs, report, home)
        theirs.close()
        null = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1):
            os.dup2(null, target)
        outcome = _see_through(pid, ours)
    except jail.JailError as error:
        outcome = {"stage": error.stage, "errno": error.errno}
    except OSError as error:
        outcome = {"stage": str(error.filename or "set up"), "errno": error.errno or 0}
    outcome["left"] = _left(fence, directory)
    os.write(report, json.dumps(outcome).encode())
    return 1 if "stage" in outcome else 0


def _see_through(pid: int, channel: socket.socket) -> Dict[str, Any]:
    """Help the jail into being, and wait for its end."""
    outcome: Dict[str, Any] = {}
    while True:
        try:
            data = channel.recv(65536)
        except OSError:
            data = b""
        if not data:
            break
        if data == b"map":
            try:
                _map(pid)
            except OSError as error:
                outcome = {"stage": "map the ids of the jail", "errno": error.errno or 0}
                os.kill(pid, signal.SIGKILL)
                break
            channel.send(b"go")
        else:
            outcome = json.loads(data.decode())
    _, status = os.waitpid(pid, 0)
    outcome["signal" if os.WIFSIGNALED(status) else "code"] = (
        os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    )
    return outcome


def _map(pid: int) -> None:
    """Let the jail have the ids that the container has: its files belong to them."""
    for kind in ("uid", "gid"):
        with open("/proc/self/%s_map" % kind) as file:
            own = [line.split() for line in file]
        lines = "\n".join("%s %s %s" % (inside, inside, count) for inside, _, count in own)
        jail.write_text("/proc/%d/%s_map" % (pid, kind), lines)


def _become(
    args: Mapping[str, Any],
    directory: Optional[str],
    fence: Optional[groups.Group],
    channel: socket.socket,
    report: int,
    home: str,
) -> None:
    """Become the first process of the jail. Never returns."""
    code = 70
    try:
        os.close(report)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        jail.set_name(b"sandbox")
        kinds = fence.kinds if fence is not None else []
        if fence is not None:
            fence.join()
        workdir = os.path.join(home, args["workdir"] or "")
        told: Dict[str, Any] = {}
        try:
            uppers = cell.enter(args, directory, channel)
            prepare(args["user"], workdir)
            sifted = sieve.apply()
        except jail.JailError as error:
            told = {"stage": error.stage, "errno": error.errno}
        except OSError as error:
            told = {"stage": str(error.filename or "set up"), "errno": error.errno or 0}
        except users.NoUser as error:
            told = {"stage": str(error), "errno": 0, "mistake": True}
        if told:
            channel.send(json.dumps(told).encode())
        else:
            channel.close()
            base = environment({"HOSTNAME": "sandbox", **args["env"]})
            stream = _above(0), _above(1)
            null = os.open(os.devnull, os.O_RDWR)
            for target in (0, 1):
                os.dup2(null, target)
            code = serve(
                stream,
                nonce=args["nonce"],
                base_env=base,
                workdir=workdir,
                user=args["user"],
                uppers=uppers,
                facts={"groups": kinds, "sifted": sifted},
                witness=groups.Witness(args["name"], kinds, shared=directory is not None),
            )
    except BaseException as error:  # the process must not return into the runner that it was forked from
        sys.stderr.write("%s: %s\n" % (type(error).__name__, error))
    finally:
        os._exit(code)


def _above(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def prepare(user: Any, workdir: str) -> None:
    """Make the working directory, unless it is there."""
    if not os.path.isdir(workdir):
        account = users.resolve(user)
        os.makedirs(workdir, 0o755)
        os.chown(workdir, account.uid, account.gid)


def _left(fence: Optional[groups.Group], directory: Optional[str]) -> List[str]:
    """Remove what was made for the jail; return what is still there."""
    left: List[str] = []
    if fence is not None:
        left += fence.remove(SURVIVED)
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
        if os.path.lexists(directory):
            left.append(directory)
    return left
