# SPDX-License-Identifier: Apache-2.0
"""What a START frame asks for, checked field by field."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Union

from .spawn import StartFailed

SCRIPT_IN_ARGUMENT = 96 * 1024
"""Scripts shorter than this, in bytes, travel as an argument of the shell; longer ones in an anonymous file."""

BUILTINS = (
    *("read", "write", "pack", "unpack", "baseline", "reset"),
    *("capture", "changes", "contents", "install"),
    "jail",
)

MAX_WINDOW = 2**31


class Request:
    """A START frame."""

    __slots__ = (
        "args",
        "argv",
        "builtin",
        "cwd",
        "env",
        "grace",
        "merge",
        "no_output_timeout",
        "script",
        "stdin",
        "timeout",
        "user",
        "window",
    )

    def __init__(self, value: Dict[str, Any]) -> None:
        self.argv: List[bytes] = []
        self.script: Optional[bytes] = None
        self.builtin: Optional[str] = None
        self.args: Dict[str, Any] = {}
        kinds = [key for key in ("argv", "script", "builtin") if value.get(key) is not None]
        if len(kinds) != 1:
            raise _bad("exactly one of argv, script and builtin is needed, not %s" % (" and ".join(kinds) or "none"))
        if kinds[0] == "argv":
            argv = value["argv"]
            if not isinstance(argv, list) or not argv:
                raise _bad("argv must be a list of at least one string")
            self.argv = [_bytes("argv", word) for word in argv]
            if not self.argv[0]:
                raise StartFailed("not_found", "''", "the name of the program is empty")
        elif kinds[0] == "script":
            script = _bytes("script", value["script"])
            if len(script) < SCRIPT_IN_ARGUMENT:
                self.argv = [b"/bin/sh", b"-c", script]
            else:
                self.script = script
        else:
            if value["builtin"] not in BUILTINS:
                raise _bad("there is no builtin %r" % (value["builtin"],))
            self.builtin = value["builtin"]
            args = value.get("args")
            if not isinstance(args, dict):
                raise _bad("args must be an object")
            _bytes("args.path", args.get("path"))
            for name in ("size", "limit", "mode"):
                number = args.get(name)
                if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
                    raise _bad("args.%s must be a number of at least 0, not %r" % (name, number))
            self.args = args
        cwd, env = value.get("cwd"), value.get("env") or {}
        self.cwd = None if cwd is None else _bytes("cwd", cwd)
        if not isinstance(env, dict):
            raise _bad("env must be an object")
        self.env: Dict[bytes, bytes] = {_bytes("env", key): _bytes("env", text) for key, text in env.items()}
        if any(not key or b"=" in key for key in self.env):
            raise _bad("env has a name that is empty or contains '='")
        self.user: Union[str, int, None] = value.get("user")
        if self.user is not None and (isinstance(self.user, bool) or not isinstance(self.user, (str, int))):
            raise _bad("user must be a name or an id")
        self.stdin = bool(value.get("stdin"))
        self.merge = bool(value.get("merge"))
        self.timeout = _seconds(value, "timeout")
        self.no_output_timeout = _seconds(value, "no_output_timeout")
        self.grace = seconds_of_grace(value)
        window = value.get("window", 0)
        if not isinstance(window, int) or isinstance(window, bool) or not 0 <= window <= MAX_WINDOW:
            raise _bad("window must be a number of bytes, not %r" % (window,))
        self.window = window


def seconds_of_grace(value: Dict[str, Any]) -> float:
    """Return how long TERM may take before KILL, in seconds."""
    grace = _seconds(value, "grace")
    return 1.0 if grace is None else grace


def _seconds(value: Dict[str, Any], name: str) -> Optional[float]:
    seconds = value.get(name)
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        raise _bad("%s must be a number of seconds, not %r" % (name, seconds))
    return float(seconds)


def _bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise _bad("%s must be a string, not %r" % (name, value))
    try:
        encoded = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise _bad("%s has a character that is no text: %s" % (name, error.reason)) from error
    if b"\0" in encoded:
        raise _bad("%s contains a NUL character" % name)
    return encoded


def path_of(args: Dict[str, Any], workdir: bytes) -> bytes:
    """Return the path that a builtin is about."""
    return os.path.join(workdir, _bytes("args.path", args["path"]))


def _bad(reason: str) -> StartFailed:
    return StartFailed("bad_request", "", reason)
