# SPDX-License-Identifier: Apache-2.0
"""
Who commands may run as.

The account files are read by hand: name services would load libraries of the image into the runner, and a jail without
them has numeric ids all the same.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import List, NamedTuple, Optional, Tuple, Union

from .kernel import read_up_to

MAX_FILE = 4 * 1024 * 1024
"""Account files are read up to this size, in bytes: an episode may have written them."""

CAP_SETGID, CAP_SETUID = 6, 7
MAX_ID = 2**32 - 2
MAX_DIGITS = 10


class Account(NamedTuple):
    """A user as a command needs it."""

    uid: int
    gid: int
    groups: Tuple[int, ...]
    name: str
    home: str


class NoUser(Exception):
    """There is no such user here, or the runner may not become it."""


def resolve(user: Union[str, int, None]) -> Account:
    """
    Look a user up.

    Args:
        user: A name, an id, ``"name:group"``, or ``None`` for whoever the runner is.

    Raises:
        NoUser: If there is none of that name.

    """
    if user is None:
        user = os.getuid()
        group = str(os.getgid())
    else:
        user, _, group = str(user).partition(":")
    text = str(user)
    uid, gid, name, home = _number(text), 0, text, "/"
    for entry in _entries("/etc/passwd", 7):
        numbers = _number(entry[2]), _number(entry[3])
        if text in (entry[0], entry[2]) and numbers[0] is not None and numbers[1] is not None:
            uid, gid, name, home = numbers[0], numbers[1], entry[0], entry[5] or "/"
            break
    else:
        # A user without an entry is in group 0, as container runtimes have it.
        if text == "root":
            uid, home = 0, "/root"
    if uid is None:
        raise NoUser("%s: no such user" % text)
    if group:
        gid = _group(group)
    groups = {gid}
    for entry in _entries("/etc/group", 4):
        number = _number(entry[2])
        if number is not None and name in entry[3].split(","):
            groups.add(number)
    return Account(uid, gid, tuple(sorted(groups)), name, home)


def may_change() -> bool:
    """Whether the runner can become other users: it has the capabilities, and there is more than one id here."""
    if not _capable():
        return False
    try:
        with open("/proc/self/uid_map", "rb") as file:
            return sum(int(line.split()[2]) for line in file) > 1
    except (OSError, ValueError, IndexError):
        return True


def may_set_groups() -> bool:
    """Whether supplementary groups can be set: a user namespace made by an ordinary user forbids it."""
    try:
        with open("/proc/self/setgroups", "rb") as file:
            return file.read().strip() != b"deny"
    except OSError:
        return True


def _capable() -> bool:
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"CapEff:"):
                    effective = int(line.split()[1], 16)
                    return bool(effective >> CAP_SETUID & 1 and effective >> CAP_SETGID & 1)
    except (OSError, ValueError, IndexError):
        pass
    return os.geteuid() == 0


def _number(text: str) -> Optional[int]:
    """Return a user or group id, or ``None`` if the text is none."""
    if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) > MAX_ID:
        return None
    return int(text)


def _group(text: str) -> int:
    number = _number(text)
    for entry in _entries("/etc/group", 4):
        if text == entry[0] and _number(entry[2]) is not None:
            number = _number(entry[2])
            break
    if number is None:
        raise NoUser("%s: no such group" % text)
    return number


def _entries(path: str, fields: int) -> List[List[str]]:
    content = _content(path)
    if content is None:
        return []
    lines = (line.split(":") for line in content.decode("utf-8", "surrogateescape").split("\n") if "\0" not in line)
    return [line for line in lines if len(line) >= fields and line[0]]


def _content(path: str) -> Optional[bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return read_up_to(fd, MAX_FILE)
    except OSError:
        return None
    finally:
        os.close(fd)
