# SPDX-License-Identifier: Apache-2.0
"""Files of a sandbox that has a shell and no Python."""

from __future__ import annotations

import errno
import os
import secrets
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from agentsandbox.errors import ConfigurationError, OutputLimitExceeded, SandboxLost, StreamBroken
from agentsandbox.protocol import archives
from agentsandbox.session.files import in_thread, sha256
from agentsandbox.session.levels.scripts import FUNCTIONS, quote
from agentsandbox.session.levels.store import TRANSFER
from agentsandbox.session.trees import MODES, TIMEOUT, directory

if TYPE_CHECKING:
    from agentsandbox.session.levels.commands import Commands

__all__ = ["download_dir", "read_file", "upload_dir", "write_file"]

SHORT = 256 * 1024
"""Bytes of a file that is sent over the connection for requests; others wait meanwhile."""

NO_TAR = 92
NO_DIRECTORY = 91
"""Exit codes of ours."""


def _absolute(commands: Commands, path: str) -> str:
    if "\0" in path:
        raise ValueError("embedded null byte")
    return path if path.startswith("/") else f"{commands.control.facts['workdir'].rstrip('/')}/{path}"


def _os_error(name: str, path: str) -> OSError:
    number = getattr(errno, name, errno.EIO)
    return OSError(number, "not a regular file" if number == errno.EINVAL else os.strerror(number), path)


def _prelude(commands: Commands) -> str:
    """Return our functions for a shell that does not serve requests."""
    control = commands.control
    state = quote(control.facts["state"])
    return f"_ak=none;_ash={quote(control.shell)};_aS={state};_auid={control.facts.get('uid', '')};umask 077{FUNCTIONS}"


async def read_file(commands: Commands, path: str, *, limit: int | None) -> bytes:
    """Return the contents of a file; see :meth:`agentsandbox.session.Session.read_file`."""
    name = quote(_absolute(commands, path))
    most = "''" if limit is None else str(limit)
    for _ in range(3):
        reply = await commands.store.ask(f"_aread {name} {most} {SHORT}")
        kind, what = [*reply.result.split(), "", ""][:2]
        if kind == "E":
            raise _os_error(what, path)
        if kind == "B" and limit is not None:
            raise OutputLimitExceeded(limit)
        if kind == "D":
            if what != "0":
                raise _os_error("EIO", path)
            data = reply.data
        else:
            outcome = await commands.store.transfer(f"exec cat {name}")
            data = outcome.stdout
            if outcome.exit_code or str(len(data)) != what:
                # Lost on the way, unless it grew while it was read.
                now = (await commands.store.ask(f"_aread {name} 0 0")).result.split()[-1]
                if outcome.exit_code or not int(what) <= len(data) <= int(now if now.isdigit() else 0):
                    continue
        if limit is not None and len(data) > limit:
            raise OutputLimitExceeded(limit)
        return data
    raise _damaged(commands, f"{path!r} did not arrive with the size that it has")


async def write_file(commands: Commands, path: str, data: bytes, *, mode: int | None) -> None:
    """Write a file; see :meth:`agentsandbox.session.Session.write_file`."""
    target = _absolute(commands, path)
    digest = await sha256(data)
    permissions = "''" if mode is None else f"{mode & 0o7777:o}"
    for _ in range(3):
        words = f"{quote(target)} {secrets.token_hex(8)} {len(data)} {digest} {permissions}"
        if not data:
            result = (await commands.store.ask(f"_awrite {words} _azero")).result
        elif len(data) <= TRANSFER and commands.control.facts.get("exact"):
            result = (await commands.store.ask(f"_awrite {words} _aput", data)).result
        else:
            code = f"{_prelude(commands)}_ar=\n_awrite {words} _ahead\nprintf '%s\\n' \"$_ar\""
            outcome = await commands.store.transfer(code, data=data)
            result = outcome.stdout.decode("utf-8", "replace").strip()
        kind, _, what = result.partition(" ")
        if kind == "W" and what == str(len(data)):
            return
        if kind == "E" and what not in ("EIO", ""):
            raise _os_error(what, path)
    raise _damaged(commands, f"{path!r} did not arrive as it was sent")


async def upload_dir(commands: Commands, source: Path, target: str) -> None:
    """Copy a directory into the sandbox; see :meth:`agentsandbox.session.Session.upload_dir`."""
    source = await directory(source)
    _needs_tar(commands)
    where = quote(_absolute(commands, target))
    with tempfile.TemporaryFile(buffering=0) as file:
        size = await in_thread(_pack, source, file.fileno())
        # One that is cut off may still write: each attempt has an archive of its own, named after its shell.
        archive = f"{quote(commands.control.facts['state'])}/tree-$$.tar"
        code = (
            f"umask 022;mkdir -p {where} 2>/dev/null;cd {where} 2>/dev/null||exit {NO_DIRECTORY};[ -w . ]||exit 93\n"
            f'(umask 077;head -c {size} >{archive})&&[ "$(($(wc -c <{archive})))" = {size} ]&&tar -xf {archive} >&2\n'
            f"_ar=$?;rm -f {archive};exit $_ar"
        )
        for _ in range(3):
            file.seek(0)
            outcome = await commands.store.transfer_file(code, file, timeout=TIMEOUT)
            if outcome is not None:
                break
        else:
            raise _damaged(commands, f"the archive for {target!r} did not arrive")
    if outcome.exit_code == NO_DIRECTORY:
        reply = await commands.store.ask(
            f"_ar=NONE;[ -d {where} ]||{{ [ -e {where} ]&&_aw=ENOTDIR||_awhy {where};_ar=$_aw;}}"
        )
        raise _os_error("EACCES" if reply.result in ("NONE", "ENOENT") else reply.result, target)
    if outcome.exit_code == 93:
        raise _os_error("EACCES", target)
    if outcome.exit_code:
        words = outcome.stderr.decode("utf-8", "replace").strip()
        raise OSError(errno.EIO, f"tar: {words[-500:]}", target)


async def download_dir(commands: Commands, source: str, target: Path) -> None:
    """Copy a directory out of the sandbox; see :meth:`agentsandbox.session.Session.download_dir`."""
    _needs_tar(commands)
    where = quote(_absolute(commands, source))
    reply = await commands.store.ask(
        f"_ar=ok;if [ ! -e {where} ];then _awhy {where};_ar=$_aw;elif [ ! -d {where} ];then _ar=ENOTDIR;"
        f"elif [ ! -r {where} ]||[ ! -x {where} ];then _ar=EACCES;fi"
    )
    if reply.result != "ok":
        raise _os_error(reply.result, source)
    # GNU's tar ends with 1 when a file changed while it was read: what came is the directory all the same.
    code = f"cd {where}||exit {NO_DIRECTORY};tar -cf - .;_ar=$?;[ $_ar != 1 ]||_ar=0;exit $_ar"
    with tempfile.TemporaryFile() as file:
        for _ in range(3):
            file.seek(0)
            file.truncate()

            async def take(data: bytes) -> None:
                await in_thread(file.write, data)

            try:
                outcome = await commands.store.transfer(code, take=take, timeout=TIMEOUT)
            except StreamBroken:
                if commands.control.lost is not None:
                    raise
                await anyio.sleep(0.2)
                continue
            break
        else:
            raise _damaged(commands, f"the archive of {source!r} did not arrive")
        if outcome.exit_code:
            words = outcome.stderr.decode("utf-8", "replace").strip()
            raise OSError(errno.EIO, f"tar: {words[-500:]}", source)
        file.seek(0)
        try:
            await in_thread(_unpack, Path(target), file.fileno())
        except archives.Refused as error:
            raise PermissionError(errno.EPERM, f"refused: {error}", source) from error
        except archives.Malformed as error:
            raise _damaged(commands, f"the archive of {source!r} is damaged: {error}") from error


def _pack(source: Path, out: int) -> int:
    # Small tar programs know GNU's way of long names, and not that of POSIX.
    return int(archives.pack(os.fsencode(source), out, style=tarfile.GNU_FORMAT)["size"])


def _unpack(target: Path, source: int) -> None:
    archives.unpack(os.fsencode(target), source, modes=MODES, foreign=True)


def _needs_tar(commands: Commands) -> None:
    if "tar" in commands.control.missing:
        raise ConfigurationError("this sandbox has no program 'tar': copy files one by one")


def _damaged(commands: Commands, detail: str) -> SandboxLost:
    """Return the error for data that was lost on the way, and trust the session no more."""
    commands.control.lose(StreamBroken("damaged", detail))
    return commands.control.loss()
