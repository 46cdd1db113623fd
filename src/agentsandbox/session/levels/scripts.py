# SPDX-License-Identifier: Apache-2.0
"""The shell program of a session as it is sent, and how text of the user's gets into it unharmed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from agentsandbox.session.levels.program import COMMANDS, FILES
from agentsandbox.session.levels.serving import LOOP, SETUP

__all__ = ["BOOT", "FUNCTIONS", "LAUNCH", "PLACES", "PROGRAM", "exports", "quote"]

BOOT = '_al=;_ac=;while IFS= read -r _al&&[ "$_al" != . ];do _ac="$_ac$_al\n";done;eval "$_ac"'
"""Runs the code on its standard input up to a line with a dot; ``read`` takes no byte beyond it."""

PLACES = ("/var/tmp", "/tmp", "/run", "/dev/shm")  # noqa: S108
"""Where the private directory may be; then the home and the working directory."""

LAUNCH = 'shopt -s execfail 2>/dev/null;trap "printf %s \\$? >\\"\\$0\\"" EXIT;exec "$@"'
"""Becomes the program that its arguments name, or writes why not into the file ``$0``."""

FUNCTIONS = (COMMANDS + FILES + SETUP).replace("@LAUNCH@", shlex.quote(LAUNCH))
"""Everything that the shell can be asked for."""

PROGRAM = FUNCTIONS + LOOP
"""What the connection for requests runs."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

# Variables that mean something to a shell while it runs, or that one will not have assigned.
_SHELLS_OWN = re.compile(
    r"(_|_a.*|IFS|PS[0-4]|OPT(IND|ARG|ERR)|PPID|UID|EUID|GROUPS|LINENO|RANDOM|SECONDS|SHELLOPTS|BASH.*|ENV|CDPATH|PWD|OLDPWD"
    r"|FUNCNAME|DIRSTACK|PIPESTATUS|MAIL.*|FIGNORE|HIST.*|LC_.*|LANG|PATH_SEPARATOR|SHLVL|HOSTNAME|COLUMNS|LINES)\Z"
)


def quote(text: str) -> str:
    """Return *text* as one word of a shell program, byte for byte."""
    return shlex.quote(text)


def exports(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """
    Return how to set variables for a command.

    Args:
        env: The variables.

    Returns:
        Code for what the shell itself can export, and ``NAME=value`` words for the program ``env``: names that are none
        in a shell, and those that would change how it works.

    """
    own = {name: value for name, value in env.items() if _NAME.match(name) and not _SHELLS_OWN.match(name)}
    code = "".join(f"export {name}={quote(value)}\n" for name, value in own.items())
    return code, [f"{name}={value}" for name, value in env.items() if name not in own]
