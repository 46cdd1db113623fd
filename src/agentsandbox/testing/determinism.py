# SPDX-License-Identifier: Apache-2.0
"""
Show that reused sandboxes change no results: an episode has the same fingerprint in a fresh sandbox and in a used one.

The episode is yours; it returns whatever describes its result: outputs, rewards, a trajectory. Anything in it that
comes from a clock or from chance without a seed differs by itself, and is found here as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from agentsandbox.errors import UsageError

if TYPE_CHECKING:
    from agentsandbox.client import Lease, SandboxClient
    from agentsandbox.pool import SandboxPool

__all__ = ["Determinism", "Difference", "check_reuse", "fingerprint"]

Episode = Callable[["Lease"], Awaitable[Any]]
"""Runs in a sandbox that it is given, and returns what describes its result."""


@attrs.frozen(kw_only=True)
class Difference:
    """A run whose result was not that of the first."""

    run: int
    """Which one, counted from 0."""
    sandbox: str
    """Where it ran."""
    start: str
    """How that sandbox was come by: ``cold``, ``warm`` or ``reused``."""
    fingerprint: str
    """Of its result."""


@attrs.frozen(kw_only=True)
class Determinism:
    """What came of running the same episode several times."""

    fingerprint: str
    """Of the first run, in a sandbox that nobody had used."""
    runs: int
    """How many there were."""
    reused: int
    """How many of them ran in a sandbox that had been used before."""
    differences: tuple[Difference, ...] = ()
    """Those with another result."""

    @property
    def ok(self) -> bool:
        """Whether a used sandbox was seen, and every run had the same result."""
        return self.reused > 0 and not self.differences


def fingerprint(result: Any) -> str:
    """
    Return the SHA-256 of a result, the same for equal results in any process.

    Args:
        result: Numbers, strings, bytes, ``None``, and mappings, sequences and sets of them.

    Raises:
        UsageError: If it holds something whose text may differ from process to process.

    """
    digest = hashlib.sha256()
    _feed(digest.update, result)
    return digest.hexdigest()


def _feed(update: Callable[[bytes], None], value: Any) -> None:
    if isinstance(value, bytes | bytearray):
        parts: Iterable[Any] = ()
        head = b"b" + bytes(value)
    elif value is None or isinstance(value, bool | int | float | str):
        parts, head = (), f"{type(value).__name__}:{value!r}".encode("utf-8", "surrogateescape")
    elif isinstance(value, Mapping):
        parts, head = sorted((fingerprint(key), fingerprint(item)) for key, item in value.items()), b"mapping"
    elif isinstance(value, set | frozenset):
        parts, head = sorted(map(fingerprint, value)), b"set"
    elif isinstance(value, list | tuple):
        parts, head = value, b"sequence"
    else:
        raise UsageError(f"a fingerprint is of plain values, not of {type(value).__name__}; return what matters of it")
    items = list(parts)
    update(b"%d:%d:" % (len(items), len(head)) + head)
    for item in items:
        _feed(update, item)


async def check_reuse(
    client: SandboxClient | SandboxPool,
    image: str,
    episode: Episode,
    *,
    between: Episode | None = None,
    runs: int = 3,
) -> Determinism:
    """
    Run the same episode in a fresh sandbox and, one after the other, in used ones.

    For the sandbox to be used again the client needs no spares and a policy that keeps sandboxes, such as
    ``SandboxClient(..., spares=0, reset=ResetPolicy(rungs=("files", "replace")))``.

    Args:
        client: Where sandboxes come from; nobody else should use that image meanwhile.
        image: Of which image.
        episode: What to run. It gets the sandbox and returns its result.
        between: Another episode, run before each repetition, to leave behind whatever it likes.
        runs: How often to run, the first time included.

    Returns:
        The fingerprint of the first run, and the runs that had another one.

    Raises:
        UsageError: If *runs* is below 2, or the first sandbox had been used already.

    """
    if runs < 2:
        raise UsageError(f"one run shows nothing: runs must be at least 2, not {runs}")
    first, reused, differences = "", 0, []
    for run in range(runs):
        if run and between is not None:
            async with await client.acquire(image) as lease:
                await between(lease)
        async with await client.acquire(image) as lease:
            used = lease.reused
            if not run and used:
                raise UsageError("the first sandbox was used before; take a client that nobody has used yet")
            found = fingerprint(await episode(lease))
            reused += used
            if not run:
                first = found
            elif found != first:
                differences.append(
                    Difference(run=run, sandbox=lease.sandbox, start=str(lease.start), fingerprint=found)
                )
    return Determinism(fingerprint=first, runs=runs, reused=reused, differences=tuple(differences))
