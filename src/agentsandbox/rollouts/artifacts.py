# SPDX-License-Identifier: Apache-2.0
"""Saving what an attempt left behind, before its sandbox is given back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import anyio.to_thread
import attrs

from agentsandbox.errors import OutputLimitExceeded

if TYPE_CHECKING:
    from agentsandbox.models.episode import Episode
    from agentsandbox.rollouts.source import RolloutLease

__all__ = ["ARTIFACT_LIMIT", "ArtifactStore", "path_component"]

ARTIFACT_LIMIT = 64 * 1024 * 1024
"""The largest artifact that is saved, in bytes: far above any patch or report, far below the memory of a driver."""

SAVE_TIMEOUT = 60.0
"""How long saving may take an attempt, in seconds: 64 MiB arrive in less over any usable stream."""

_LONGEST_NAME = 120


def path_component(text: str) -> str:
    """
    Turn an episode id, or part of a path, into one safe path component.

    Different texts give different names, and none of them leads out of its directory.
    """
    name = quote(text, safe=" +,=@~")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        name = f"{name[: _LONGEST_NAME - 33]}-{digest[:32]}"
    return name


@attrs.frozen(kw_only=True)
class Saved:
    """What became of an attempt's artifacts."""

    paths: Mapping[str, Path] = attrs.field(factory=dict)
    """Where each was saved."""
    missing: Mapping[str, str] = attrs.field(factory=dict)
    """Why each of the others was not."""


@attrs.define(eq=False, repr=False)
class ArtifactStore:
    """
    A directory that takes the artifacts of a batch.

    An attempt gets ``<root>/<episode>/attempt-<number>/`` with ``files/`` (what the episode names), ``patch.diff`` and
    ``commands.jsonl``, so that a second attempt never mixes with the first.

    Args:
        root: The directory; made when the first artifact is saved.

    """

    root: Path
    # Threads of our own: whoever fills the default pool must not hold up the end of an episode.
    _threads: anyio.CapacityLimiter = attrs.field(factory=lambda: anyio.CapacityLimiter(4), init=False)
    _saved: int = attrs.field(default=0, init=False)

    async def save(
        self, lease: RolloutLease, episode: Episode, number: int, *, patch: str | None, files: bool = True
    ) -> Saved:
        """
        Save the files that *episode* names, its patch and its command log.

        A file that is missing, too large, unreadable or that cannot be written is noted and changes nothing else.

        Args:
            lease: Where the files are.
            episode: Whose they are.
            number: The attempt.
            patch: What it changed, if it said so.
            files: Whether the sandbox is still there to be asked for files.

        Returns:
            What was saved, and what was not.

        """
        paths: dict[str, Path] = {}
        missing: dict[str, str] = {}
        base = self.root / path_component(episode.id) / f"attempt-{number}"

        async def keep(name: str, path: Path, data: bytes) -> None:
            try:
                paths[name] = await self._write(path, data)
            except OSError as error:
                missing[name] = f"{type(error).__name__}: {error}"

        with anyio.move_on_after(SAVE_TIMEOUT):
            if lease.commands:
                await keep("commands.jsonl", base / "commands.jsonl", _lines(lease.commands))
            if patch is not None:
                await keep("patch.diff", base / "patch.diff", _bytes(patch))
            for name in dict.fromkeys(episode.artifacts) if files else ():
                try:
                    data = await lease.read_file(name, limit=ARTIFACT_LIMIT)
                    data = getattr(lease, "redact", _same)(data)
                except OutputLimitExceeded:
                    missing[name] = f"larger than {ARTIFACT_LIMIT} bytes"
                except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, the reward stands
                    missing[name] = f"{type(error).__name__}: {error}"
                else:
                    parts = (path_component(part) for part in PurePosixPath(name).parts if part != "/")
                    await keep(name, base.joinpath("files", *parts), data)
        reason = f"not saved within {SAVE_TIMEOUT:g} s" if files else "the sandbox was gone"
        for name in episode.artifacts:
            if name not in paths:
                missing.setdefault(name, reason)
        return Saved(paths=paths, missing=missing)

    async def _write(self, path: Path, data: bytes) -> Path:
        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

        await anyio.to_thread.run_sync(write, limiter=self._threads)
        self._saved += 1
        return path

    def __repr__(self) -> str:
        return f"<ArtifactStore {str(self.root)!r} [{self._saved} saved]>"


def _bytes(text: str) -> bytes:
    """Encode text whose lone surrogates are bytes, as those of a diff are; or whatever else they are."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _same(data: bytes) -> bytes:
    return data


def _lines(commands: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(dict(entry), default=repr).encode() + b"\n" for entry in commands)
