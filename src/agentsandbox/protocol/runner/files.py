# SPDX-License-Identifier: Apache-2.0
"""Reading and writing files for the driver, in a process of their own that runs as the user who asked."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
from typing import Any, Callable, Dict, Optional, Tuple

from agentsandbox.protocol import archives, frames

CHUNK = 1024 * 1024

STDIN, STDOUT = 0, 1

Report = Dict[str, Any]


class Refused(OSError):
    """A request that cannot be served, with more to report than an error number."""

    def __init__(self, number: int, reason: str, path: bytes, **more: Any) -> None:
        super().__init__(number, reason, path)
        self.more = more


def run(builtin: str, path: bytes, args: Dict[str, Any], report: int) -> int:
    """
    Do what was asked and report on it.

    Args:
        builtin: ``read``, ``write``, ``pack`` or ``unpack``.
        path: What it is about.
        args: The rest of the request.
        report: Where the report goes to.

    Returns:
        The exit code.

    """
    code = 1
    signal.signal(signal.SIGTERM, _stop)
    try:
        answer = BUILTINS[builtin](path, args)
        code = 0
    except OSError as error:
        answer = failure(error, path)
    except MemoryError:
        answer = failure(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), path)
    except RecursionError:
        answer = failure(OSError(errno.ELOOP, "nested too deeply"), path)
    except archives.Malformed as error:
        answer = failure(OSError(errno.EBADMSG, str(error)), path)
    os.write(report, frames.dump(answer))
    return code


def _stop(number: int, _frame: Any) -> None:
    """End in a way that removes what is half done."""
    raise SystemExit(128 + number)


def failure(error: OSError, path: bytes) -> Report:
    """Return the report of an error, about the path that it names or else the one asked for."""
    name = error.filename if isinstance(error.filename, (str, bytes)) else path
    shown = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
    number = error.errno or errno.EIO
    reason = error.strerror or os.strerror(number)
    report: Report = {"error": {"errno": number, "message": "%s: %s" % (shown, reason), "path": shown}}
    report.update(getattr(error, "more", {}))
    return report


def read(path: bytes, args: Dict[str, Any]) -> Report:
    """Send a file, unless it is larger than the limit."""
    limit: Optional[int] = args.get("limit")
    fd, size = open_regular(path)
    if limit is not None and size > limit:
        raise Refused(errno.EFBIG, os.strerror(errno.EFBIG), path, size=size)
    if size == 0:
        # Files of the kernel do not know their size: read before anything is sent.
        parts = []
        while limit is None or size <= limit:
            part = os.read(fd, CHUNK)
            if not part:
                break
            if limit is None:
                write_all(STDOUT, part)
            else:
                parts.append(part)
            size += len(part)
        if limit is not None and size > limit:
            raise Refused(errno.EFBIG, os.strerror(errno.EFBIG), path, size=size)
        write_all(STDOUT, b"".join(parts))
        return {"size": size}
    sent = 0
    while True:
        part = os.read(fd, CHUNK)
        if not part:
            return {"size": sent}
        sent += len(part)
        if limit is not None and sent > limit:
            raise Refused(errno.EFBIG, "it grew over the limit while it was read", path, size=sent)
        write_all(STDOUT, part)


def write(path: bytes, args: Dict[str, Any]) -> Report:
    """Put standard input in the place of a file, whole or not at all."""
    path = os.path.realpath(path)
    directory, name = os.path.split(path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    old = _existing(path)
    if args.get("parents", True):
        os.makedirs(directory, exist_ok=True)
    temporary = os.path.join(directory, b".%s.%s.new" % (name[:200], os.urandom(8).hex().encode()))
    try:
        # What is to have a mode of its own may be secret: nobody else reads it before it has that.
        first = 0o666 if args.get("mode") is None else 0o600
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, first)
    except OSError as error:
        error.filename = path
        raise
    try:
        report = _receive(fd, path, args)
        mode = args.get("mode")
        if mode is None and old is not None:
            mode = stat.S_IMODE(old.st_mode)
        if old is not None:
            own = os.fstat(fd)
            if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid):
                _keep_owner(fd, old)
        if mode is not None:
            os.fchmod(fd, mode)
        os.close(fd)
        os.rename(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == temporary:
            error.filename = path
        try:
            os.unlink(temporary)
        except OSError:
            pass  # renamed already, or taken away by somebody else
        raise
    return report


def open_regular(path: bytes) -> Tuple[int, int]:
    """Open a regular file for reading; nothing else, because a FIFO or a device might never end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd, status.st_size


def write_all(fd: int, data: Any) -> None:
    """Write to a blocking descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _existing(path: bytes) -> Optional[os.stat_result]:
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(old.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)
    # Replacing it needs only the directory; a file that may not be written stays as it is all the same.
    if not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return old


def _keep_owner(fd: int, old: os.stat_result) -> None:
    try:
        os.fchown(fd, old.st_uid, old.st_gid)
    except PermissionError:
        pass  # an ordinary user cannot give files away


def _receive(fd: int, path: bytes, args: Dict[str, Any]) -> Report:
    size, digest = 0, hashlib.sha256()
    while True:
        part = os.read(STDIN, CHUNK)
        if not part:
            break
        digest.update(part)
        write_all(fd, part)
        size += len(part)
    report = {"size": size, "sha256": digest.hexdigest()}
    if args.get("size") not in (None, size):
        raise Refused(errno.EIO, "%d bytes arrived of %d" % (size, args["size"]), path, **report)
    if args.get("sha256") not in (None, report["sha256"]):
        raise Refused(errno.EIO, "what arrived has another SHA-256", path, **report)
    return report


def _pack(path: bytes, _args: Dict[str, Any]) -> Report:
    return archives.pack(path, STDOUT)


def _unpack(path: bytes, _args: Dict[str, Any]) -> Report:
    return archives.unpack(path, STDIN)


BUILTINS: Dict[str, Callable[[bytes, Dict[str, Any]], Report]] = {
    "read": read,
    "write": write,
    "pack": _pack,
    "unpack": _unpack,
}
