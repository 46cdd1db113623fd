# SPDX-License-Identifier: Apache-2.0
"""What an episode can leave outside of files: processes, IPC objects, sockets, mounts, keys, limits, clocks."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

from . import ports, processes
from .kernel import _libc as libc
from .kernel import last_error
from .mounts import by_place
from .scan import Unverifiable

KILL_WITHIN = 5.0
"""Seconds in which everything must be dead."""

ALONE_WITHIN = 2.0
"""Seconds in which what was started before a baseline must have ended."""

CLOSED_WITHIN = 0.5
"""Seconds that the kernel may take for the end of a connection."""

PROCESS_GROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/pids")
"""Where a container finds its own control group, by the version of those."""

FULL = 0.75
"""The share of all processes that may be in use when all of them have been killed."""

IPC_RMID = 0

KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280, "armv7l": 311, "i686": 288}
KEYCTL_CLEAR = 7
KEYRINGS = (-3, -4, -5)
"""Those of our session, of a user, and of a user's sessions."""

TIME_WAIT, LISTENING = "06", "0A"
"""States in the kernel's socket tables."""

CAP_SYS_TIME = 25
POWERS = (16, 17, 19, 21)
"""Loading modules, raw devices, tracing, administration: who has one of these can change what we look at."""


def unlike(pid: int, ours: Set[int]) -> Dict[int, processes.Process]:
    """Return every process that is neither the first, nor we, nor one of *ours*; zombies too."""
    return {
        process.pid: process
        for process in processes.table().values()
        if process.pid not in (1, pid) and process.pid not in ours
    }


def kill_all(relay: Optional[processes.Key]) -> List[List[object]]:
    """
    Kill every process but the first one and ourselves, and wait until none is left.

    To be called only in a namespace whose first process the runner is: elsewhere this ends the machine's processes.

    Args:
        relay: The process that holds the driver's stream open; it came from outside before any episode did.

    Returns:
        What was alive, as it is reported.

    Raises:
        Unverifiable: If something is still there.

    """
    own = os.getpid()
    ours: Set[int] = set()
    if relay is not None:
        process = processes.read(relay[0])
        if process is not None and process.key == relay and process.parent == 0:
            ours.add(relay[0])
    found = {key: process for key, process in unlike(own, ours).items() if process.alive}
    killed = processes.listed(found.values())
    limit = time.monotonic() + KILL_WITHIN
    pause = 0.0005
    while True:
        try:
            # All at once, so that none can have a child in between.
            os.kill(-1, signal.SIGSTOP if ours else signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise Unverifiable("processes of other users cannot be killed") from error
        left = unlike(own, ours)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        for pid in ours:
            os.kill(pid, signal.SIGCONT)
        if not left:
            return killed
        if time.monotonic() > limit:
            names = ", ".join(str(line[1]) for line in processes.listed(left.values())[:5])
            raise Unverifiable("%d processes cannot be killed: %s" % (len(left), names))
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def wait_alone(relay: Optional[processes.Key]) -> None:
    """
    Wait a moment for what is just ending.

    Raises:
        Unverifiable: If something goes on running.

    """
    limit = time.monotonic() + ALONE_WITHIN
    while True:
        left = unlike(os.getpid(), set() if relay is None else {relay[0]})
        if not left:
            return
        if time.monotonic() > limit:
            names = ", ".join(str(line[1]) for line in processes.listed(left.values())[:5])
            raise Unverifiable("processes run already: %s" % names)
        time.sleep(0.01)


def check_alone() -> None:
    """
    Make sure that nothing has appeared meanwhile; what comes from outside has no parent here, unlike all of an episode.

    Raises:
        Unverifiable: If something has.

    """
    for process in unlike(os.getpid(), set()).values():
        if process.parent != 0 and process.alive:
            raise Unverifiable(
                "process %d (%s) appeared during the reset" % (process.pid, processes.describe(process.pid))
            )


def check_room(places: Tuple[str, ...] = PROCESS_GROUPS) -> None:
    """
    Make sure that the next episode can start processes: what is dead, or hidden from us, may count all the same.

    Args:
        places: Where the counter and the limit of our control group are.

    Raises:
        Unverifiable: If hardly any are left.

    """
    for place in places:
        now, most = ("".join(_lines(place + "/pids." + name)) for name in ("current", "max"))
        if now.isdigit() and most.isdigit() and int(now) > FULL * int(most):
            raise Unverifiable("%s of %s processes are in use although none is left" % (now, most))


def remove_ipc(known: Dict[str, List[int]]) -> List[str]:
    """
    Remove System V objects that were not there before.

    Raises:
        Unverifiable: If that does not work.

    """
    removed = []
    for kind, present in system_v().items():
        for number, owner in present.items():
            if number in known.get(kind, ()):
                continue
            removed.append("ipc:%s:%d" % (kind, number))
            with _As(owner):
                gone = remove_object(kind, number)
            if not gone:
                raise Unverifiable("System V %s %d cannot be removed" % (kind, number))
    return removed


def remove_object(kind: str, number: int) -> bool:
    """Remove a System V object, and say whether that worked."""
    if not hasattr(libc, kind + "ctl"):
        return False
    arguments = (0, IPC_RMID) if kind == "sem" else (IPC_RMID, None)
    return bool(getattr(libc, kind + "ctl")(number, *arguments) >= 0)


class _As:
    """Be a user for a moment: what belongs to one is nobody else's, also not that of root in a namespace."""

    def __init__(self, user: int) -> None:
        self._user = user
        self._own = os.geteuid()

    def __enter__(self) -> None:
        if self._user != self._own and self._own == 0:
            os.setresuid(self._user, self._user, 0)

    def __exit__(self, *_: object) -> None:
        if os.geteuid() != self._own:
            os.setresuid(self._own, self._own, self._own)


def system_v() -> Dict[str, Dict[int, int]]:
    """Return the ids of System V objects by kind, and whose they are."""
    found = {}
    for kind, column in (("shm", 7), ("sem", 4), ("msg", 7)):
        lines = [line.split() for line in _lines("/proc/sysvipc/" + kind)[1:]]
        found[kind] = {int(line[1]): int(line[column]) for line in lines}
    return found


def clear_keys(users: Iterable[int]) -> None:
    """
    Remove the keys that users have in the kernel.

    Raises:
        Unverifiable: If they do not allow it.

    """
    number = KEYCTL.get(os.uname().machine)
    if libc is None or number is None:
        return
    for user in users:
        with _As(user):
            for keyring in KEYRINGS:
                if libc.syscall(number, KEYCTL_CLEAR, keyring) < 0 and last_error() in (errno.EACCES, errno.EBUSY):
                    raise Unverifiable("the keys of user %d cannot be removed" % user)


def sockets() -> List[Tuple[str, ...]]:
    """Return who listens or is bound, and ports that the kernel keeps for a while after their use."""
    found = set()
    low, high = (int(word) for word in ("".join(_lines("/proc/sys/net/ipv4/ip_local_port_range")) or "0 0").split())
    # The kernel goes through the table of the whole machine to list those of one namespace: milliseconds for each file.
    for name in (() if _no_tcp() else ("tcp", "tcp6")) + ("udp", "udp6", "raw", "raw6", "udplite"):
        for line in _lines("/proc/net/" + name)[1:]:
            fields = line.split()
            if name.startswith("tcp") and fields[3] != LISTENING:
                ours, theirs = (int(field.rpartition(":")[2], 16) for field in fields[1:3])
                if fields[3] == TIME_WAIT and low <= ours <= high and not low <= theirs <= high:
                    continue  # a client's port, which nobody chose and nobody will
                found.add((name, fields[1], "closing" if fields[3] == TIME_WAIT else "connected"))
            else:
                found.add((name, fields[1], "bound"))
    for line in _lines("/proc/net/unix")[1:]:
        fields = line.split(None, 7)
        if len(fields) > 7:
            found.add(("unix", fields[7].rstrip("\n"), "bound"))
    return sorted(found)


def _no_tcp() -> bool:
    """Whether the namespace has no TCP socket that a table would list, also none that waits after its end."""
    counts = {}
    for line in _lines("/proc/net/sockstat") + _lines("/proc/net/sockstat6"):
        protocol, _, rest = line.partition(":")
        words = rest.split()
        counts.update({(protocol, name): value for name, value in zip(words[::2], words[1::2])})
    return {counts.get(which) for which in (("TCP", "inuse"), ("TCP", "tw"), ("TCP6", "inuse"))} == {"0"}


def own_state() -> Dict[str, Any]:
    """Return what commands inherit from the runner, and others of its user may change."""
    state: Dict[str, Any] = {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "policy": os.sched_getscheduler(0),
        "limits": [
            list(resource.getrlimit(getattr(resource, name)))
            for name in sorted(dir(resource))
            if name.startswith("RLIMIT_")
        ],
        "oom": "".join(_lines("/proc/self/oom_score_adj")).strip(),
        "host": list(os.uname())[1],
        "mounts": sorted((path, mount.kind, mount.read_only) for path, mount in by_place().items()),
    }
    if libc is not None:
        state["io"] = _io_priority()
    return state


def take() -> Dict[str, Any]:
    """Return everything that is compared at a reset."""
    return {"own": own_state(), "ipc": system_v(), "sockets": sockets(), "clock": clock()}


def compare(known: Dict[str, Any], excluded: Iterable[str] = ()) -> List[str]:
    """
    Return what is not as it was, in words.

    Connections whose ends were killed get a moment to go away, and ports that the kernel keeps are taken from it.

    Args:
        known: What :func:`take` returned.
        excluded: Directories below which mounts may come and go.

    """
    limit, released = time.monotonic() + CLOSED_WITHIN, False
    while True:
        differences = _compare(known, tuple(place + "/" for place in excluded))
        if not released and any(line.endswith("closing") for line in differences):
            released = True
            ports.release()
            continue
        if not any(line.endswith("connected") for line in differences) or time.monotonic() > limit:
            return differences
        time.sleep(0.01)


def _compare(known: Dict[str, Any], excluded: Tuple[str, ...]) -> List[str]:
    differences = []
    own = own_state()
    for name, value in known["own"].items():
        if name == "mounts":
            changed = sorted(set(map(tuple, value)) ^ set(map(tuple, own[name])))
            differences += ["mount at %s" % line[0] for line in changed if not line[0].startswith(excluded)]
        elif own.get(name) != value:
            differences.append("the runner's %s" % name)
    before = set(map(tuple, known["sockets"]))
    for protocol, place, state in sockets():
        if (protocol, place, state) not in before:
            differences.append("%s socket %s is still %s" % (protocol, place, state))
    if abs(clock() - known["clock"]) > 2.0:
        differences.append("the clock was set")
    return differences


def clock() -> float:
    """Return what moves only when somebody sets the clock, or it is corrected slowly."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", 7))


def status() -> Dict[str, int]:
    """Return what of our privileges matters, as numbers."""
    found = {}
    for line in _lines("/proc/self/status"):
        name, _, value = line.partition(":")
        if name in ("CapBnd", "CapEff", "CapPrm"):
            found[name] = int(value, 16)
        elif name == "NoNewPrivs":
            found[name] = int(value)
    return found


def obstacle(*, may_be_root: bool, relay: Optional[processes.Key]) -> str:
    """Return why an episode could escape being looked at; empty if it cannot."""
    if relay is not None:
        try:
            os.close(os.open("/proc/%d/mem" % relay[0], os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass  # we have no right to, so commands have none
        else:
            return "the process that holds the stream open is not protected"
    if not processes.visible():
        return "processes cannot be seen"
    if libc is None or libc.prctl(3, 0, 0, 0, 0) != 0:
        return "the runner's memory cannot be protected"
    if any("hidepid=" in line and "hidepid=0" not in line for line in _lines("/proc/self/mountinfo")):
        return "processes are hidden"
    powers = status()
    bound = powers.get("CapBnd", -1)
    for power in POWERS + (CAP_SYS_TIME,):
        if may_be_root and bound >> power & 1:
            return "commands may have capability %d" % power
    return ""


def _io_priority() -> int:
    number = {"x86_64": 252, "aarch64": 31, "riscv64": 31}.get(os.uname().machine)
    return -1 if number is None else int(libc.syscall(number, 1, 0))


def _lines(path: str) -> List[str]:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
