# SPDX-License-Identifier: Apache-2.0
"""Bytes into and out of a sandbox that has a shell: files of ours, code of any length, and transfers of their own."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

import anyio

from agentsandbox.errors import InfrastructureError, SandboxLost, StreamBroken
from agentsandbox.session.files import in_thread
from agentsandbox.session.levels import bulk
from agentsandbox.session.levels.scripts import quote
from agentsandbox.session.output import halves

if TYPE_CHECKING:
    from agentsandbox.session.levels.asking import Reply
    from agentsandbox.session.levels.control import Control

__all__ = ["TRANSFER", "Store"]

BLOCK = 4096
"""Bytes of a block of ``dd``, in which files are read."""

PIECE = 256 * 1024
"""Bytes read in one request. Others wait meanwhile."""

INLINE = 6 * 1024
"""Bytes of code that go in a request itself: the shell reads them one by one."""

TRANSFER = 1024 * 1024
"""Bytes from which on data goes over a connection of its own."""

TRANSFER_TIMEOUT = 300.0
"""Seconds that one transfer may take."""

TRANSFER_AGAIN = 60.0
"""Seconds within which a transfer is begun anew when its connection is lost."""

LONGEST_WAIT = 2.0
"""The longest pause before that, in seconds; the first is a tenth of a second, and they double."""


class Store:
    """
    The private directory of a session, and everything that is too much for a request.

    Args:
        control: Where requests go.

    """

    def __init__(self, control: Control) -> None:
        self.control = control
        self._transfers = anyio.Semaphore(4)
        self._asked = 0

    def __repr__(self) -> str:
        return f"<Store {self.control.facts.get('state', 'nowhere')}>"

    # Out of the sandbox.

    async def whole(self, name: str, limit: int) -> tuple[bytes, int]:
        """Read a file of ours: all of it, or its head and its tail; return its size, too."""
        blocks = min(PIECE, -(-(limit + 1) // BLOCK) * BLOCK) // BLOCK
        reply = await self.control.request(f'[ ! -s "$_aS/{name}" ]||_aget {name} 0 {blocks}')
        if len(reply.data) < blocks * BLOCK:
            return reply.data, len(reply.data)
        size = await self.size(name)
        if size <= limit:
            return await self.read_range(name, 0, size), size
        head, tail = halves(limit)
        return await self.read_range(name, 0, head) + await self.read_range(name, size - tail, tail), size

    async def size(self, name: str) -> int:
        """Return the size of a file of ours; 0 if it is not there."""
        reply = await self.control.request(f'_asize "$_aS/{name}"')
        return int(reply.result) if reply.result.isdigit() else 0

    async def read_range(self, name: str, start: int, size: int) -> bytes:
        """Read a range of a file of ours, which must have it."""
        data = b""
        if size > TRANSFER:
            skip, blocks = start // BLOCK, -(-(start + size) // BLOCK) - start // BLOCK
            path = quote(f"{self.control.facts['state']}/{name}")
            outcome = await self.transfer(f"exec dd if={path} bs={BLOCK} skip={skip} count={blocks} 2>/dev/null")
            data = outcome.stdout[start % BLOCK :][:size]
        else:
            parts: list[bytes] = []
            have = 0
            while have < size and (part := await self.read_some(name, start + have)):
                parts.append(part)
                have += len(part)
            data = b"".join(parts)[:size]
        if len(data) != size:
            self.control.lose(StreamBroken("damaged", f"{len(data)} bytes of {size} were left of a command's output"))
            raise self.control.loss()
        return data

    async def read_some(self, name: str, start: int) -> bytes:
        """Read a file of ours from *start* on: what there is, up to a piece."""
        reply = await self.control.request(f"_aget {quote(name)} {start // BLOCK} {PIECE // BLOCK}")
        return reply.data[start % BLOCK :]

    # Into the sandbox.

    async def ask(self, code: str, data: bytes = b"") -> Reply:
        """Have any code run, however long; it ends with its result in ``_ar``."""
        self._asked += 1
        name = f"ask{self._asked}"
        short = await self.short(code, name)
        return await self.control.request(short if short is code else f'{short};rm -f "$_aS/{name}"', data)

    async def short(self, code: str, name: str) -> str:
        """Return code that does the same and is short text: the rest goes into a file."""
        try:
            size = len(code.encode())
        except UnicodeEncodeError:  # some shells read lines as text
            size = INLINE + 1
        if size <= INLINE:
            return code
        await self.stage(name, os.fsencode(code))
        return f'[ ! -r "$_aS/{name}" ]||. "$_aS/{name}"'

    async def stage(self, name: str, data: bytes) -> None:
        """Put a file of ours into the sandbox, whole."""
        if self.control.facts.get("exact") and len(data) <= TRANSFER:
            if not data:
                reply = await self.control.request(f"_ar=1;{{ printf '' >\"$_aS/{name}\"&&_ar=0;}} 2>/dev/null")
            else:
                reply = await self.control.request(f'_aput "$_aS/{name}" {len(data)}', data)
            if reply.result != "0":
                await self._no_room(name)
            return
        path = quote(f"{self.control.facts['state']}/{name}")
        # What was cut off may still write: only what came whole gets the name.
        part = f"{path}.$$"
        code = f'umask 077;head -c {len(data)} >{part};[ "$(($(wc -c <{part})))" = {len(data)} ]&&mv {part} {path}'
        code = f"{code}||{{ rm -f {part};exit 1;}}"
        for _ in range(2):  # it may have been cut short on the way
            if (await self.transfer(code, data=data)).exit_code == 0:
                return
        await self._no_room(name)

    async def _no_room(self, name: str) -> None:
        reply = await self.control.request('_ar=gone;[ ! -s "$_aS/key" ]||_ar=there')
        if reply.result == "gone":
            self.control.lose(SandboxLost("no_state", "the directory with the state of commands is gone"))
            raise self.control.loss()
        raise SandboxLost("disk_full", f"{name!r} could not be stored in the sandbox")

    async def transfer(
        self, code: str, *, data: bytes = b"", take: bulk.Take | None = None, timeout: float = TRANSFER_TIMEOUT
    ) -> bulk.Outcome:
        """Run code over a connection of its own, again if that is lost and nobody took anything yet."""
        give_up = anyio.current_time() + TRANSFER_AGAIN
        wait = 0.1
        while True:
            try:
                return await self._transfer(code, bulk.reader(data), take, timeout)
            except InfrastructureError as error:
                late = anyio.current_time() + wait > give_up
                if late or take is not None or self.control.lost is not None or not bulk.passing(error):
                    raise
            await anyio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    async def transfer_file(self, code: str, file: IO[bytes], *, timeout: float) -> bulk.Outcome | None:
        """Run code that reads a file of this side, once; ``None`` if its connection was lost."""

        async def read() -> bytes:
            data: bytes = await in_thread(file.read, PIECE)
            return data

        try:
            return await self._transfer(code, read, None, timeout)
        except InfrastructureError as error:
            if self.control.lost is not None or not bulk.passing(error):
                raise
            return None

    async def _transfer(self, code: str, read: bulk.Read, take: bulk.Take | None, timeout: float) -> bulk.Outcome:
        if self.control.lost is not None:
            raise self.control.loss()
        control = self.control
        async with self._transfers:
            return await bulk.run(control.connect, control.shell, code, read=read, take=take, timeout=timeout)
