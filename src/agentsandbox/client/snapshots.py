# SPDX-License-Identifier: Apache-2.0
"""What changed in a sandbox, keeping what is in it, and going on with that in another one."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import anyio
import anyio.lowlevel
import attrs

from agentsandbox.client.changes import diff_of
from agentsandbox.client.checkpoints import CheckpointStore, Manifest
from agentsandbox.errors import CheckpointError, ContentTooLarge, SandboxLost, UsageError
from agentsandbox.models.changes import Checkpoint, Diff
from agentsandbox.models.sandbox import ExecLevel
from agentsandbox.session import changes
from agentsandbox.session.changes import Refused
from agentsandbox.session.files import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from agentsandbox.backends.base import BackendSandbox
    from agentsandbox.reset.baseline import Baseline
    from agentsandbox.session.changes import Entry

__all__ = ["FILE_LIMIT", "KEPT", "checkpoint", "declared", "diff", "need_runner", "restore"]

KEPT = ("/tmp", "/var/tmp")  # noqa: S108 - inside sandboxes
"""What is kept beside the working directory, the home and the scope of the reset policy: no memory, no sockets."""

FILE_LIMIT = 1024**3
"""Bytes that one file may have when nothing is said."""

MOVING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE)
"""What is said of a file that is not any more what it was a moment ago."""

T = TypeVar("T")

TRIES = 3
"""How often to look again when something is written while it is kept."""


def need_runner(sandbox: BackendSandbox, what: str) -> None:
    """
    Refuse what only a runner can do.

    Raises:
        UsageError: Naming the level at which commands reach the sandbox.

    """
    level = sandbox.capabilities.exec_level
    if level is not ExecLevel.RUNNER:
        raise UsageError(f"{what} needs a runner in the sandbox, and commands reach this one at level '{level}'")


def declared(sandbox: BackendSandbox, scope: Sequence[str]) -> tuple[str, ...]:
    """Return the directories that a checkpoint holds when nothing is said."""
    facts = sandbox.session.facts
    return tuple(dict.fromkeys(str(place) for place in (facts["workdir"], facts["home"], *KEPT, *scope) if place))


async def diff(
    sandbox: BackendSandbox, baseline: Baseline | None, *, root: str | None, limit: int, skip: Collection[str]
) -> Diff:
    """Say what changed; see :meth:`Lease.diff`."""
    need_runner(sandbox, "a diff")
    if baseline is None:
        why = sandbox.capabilities.facts.get("files")
        raise UsageError(
            "this sandbox has no baseline to compare with"
            + (f" ({why})" if why else "; SandboxPool(..., baseline=True) has one taken before each first command")
        )
    try:
        pairs, links, scope = await _again(
            lambda: changes.changes(
                sandbox.session, manifest=baseline.manifest, stamps=baseline.stamps, limit=limit, skip=sorted(skip)
            )
        )
    except Refused as error:
        raise UsageError(f"what changed cannot be told: {error}") from error
    except _Changed as error:
        raise UsageError(f"{error} is written to while it is compared; stop what writes to it") from error
    if root is None:
        root = str(sandbox.session.facts["workdir"])
    if root != "/":
        root = root.rstrip("/")
    found: Diff = await in_thread(lambda: diff_of(pairs, links, root=root, scope=scope))
    return found


async def checkpoint(
    sandbox: BackendSandbox, store: CheckpointStore, scope: Sequence[str], *, limit: int, skip: Collection[str]
) -> Checkpoint:
    """Keep what is in some directories; see :meth:`Lease.checkpoint`."""
    need_runner(sandbox, "a checkpoint")
    began, stored = anyio.current_time(), 0
    for attempt in range(1, TRIES + 1):
        manifest = await _look(sandbox, scope, skip)
        for path, entry in manifest.files:
            if entry.size > limit:
                raise ContentTooLarge(path, entry.size, f"a file of a checkpoint may have {limit} bytes; raise limit")
        paths = {entry.sha256: (path, entry.size) for path, entry in manifest.files}
        lacking = await store.missing({digest: size for digest, (_, size) in paths.items()})
        try:
            stored += await _fetch(sandbox, store, {paths[digest][0]: digest for digest in lacking}, manifest.entries)
        except (_Changed, OSError) as error:
            if isinstance(error, OSError) and error.errno not in MOVING:
                raise
            if attempt == TRIES:
                raise CheckpointError(f"{error} is written to while it is kept; stop what writes to it") from error
            continue
        break
    id = await store.save(manifest)
    return Checkpoint(
        id=id,
        scope=manifest.scope,
        entries=len(manifest.entries),
        size=manifest.size,
        stored=stored,
        skipped=manifest.skipped,
        seconds=anyio.current_time() - began,
    )


async def restore(
    sandbox: BackendSandbox, store: CheckpointStore, id: str, *, begins: Callable[[], None]
) -> Checkpoint:
    """
    Make a sandbox hold what a checkpoint does; see :meth:`Lease.restore`.

    Args:
        sandbox: The sandbox.
        store: Where the checkpoint is.
        id: Which one.
        begins: Called before anything is changed.

    Raises:
        CheckpointError: If the checkpoint cannot be used; nothing was changed.
        SandboxLost: If it did not work; something was.

    """
    need_runner(sandbox, "restoring a checkpoint")
    began = anyio.current_time()
    manifest = await store.load(id)
    checked: dict[str, tuple[int, str]] = {}
    # Once as it is, so that a checkpoint that is not whole is refused before anything is touched, and once at rest.
    for kill in (False, True):
        if kill:
            await anyio.lowlevel.checkpoint_if_cancelled()
            begins()
        roots, present = await _capture(sandbox, manifest.scope, kill=kill)
        if roots != manifest.scope:
            lacking = sorted(set(manifest.scope) - set(roots)) or list(roots)
            raise CheckpointError(f"checkpoint {id} does not fit this sandbox: {', '.join(lacking)}")
        needed = _needed(manifest, present)
        await store.check({digest: about for digest, about in needed.items() if digest not in checked})
        checked |= needed
    times = {root: attrs.evolve(manifest.entries[root], modified=present[root].modified) for root in roots}
    try:
        await changes.install(
            sandbox.session,
            manifest.scope,
            {**manifest.entries, **times},
            [(digest, size) for digest, (size, _) in needed.items()],
            lambda digest, take: store.read(digest, *needed[digest], take),
        )
    except Refused as error:
        if not error.touched:
            raise CheckpointError(f"checkpoint {id} cannot be restored here: {error}") from error
        raise SandboxLost("restore_failed", str(error)) from error
    after = await _look(sandbox, manifest.scope, ())
    if after.id != id:
        different = sorted(
            path
            for path in {*after.entries, *manifest.entries}
            if after.entries.get(path) != manifest.entries.get(path)
        )
        raise SandboxLost("restore_failed", f"not the same after it was restored: {', '.join(different[:10])}")
    return Checkpoint(
        id=id,
        scope=manifest.scope,
        entries=len(manifest.entries),
        size=manifest.size,
        seconds=anyio.current_time() - began,
    )


class _Changed(Exception):
    """A file is not what it was a moment ago."""


async def _capture(
    sandbox: BackendSandbox, scope: Sequence[str], skip: Collection[str] = (), *, kill: bool = False
) -> tuple[tuple[str, ...], dict[str, Entry]]:
    try:
        return await _again(lambda: changes.capture(sandbox.session, scope, skip=sorted(skip), kill=kill))
    except Refused as error:
        raise CheckpointError(f"what is in the sandbox cannot be told: {error}") from error
    except _Changed as error:
        raise CheckpointError(f"{error} is written to while it is kept; stop what writes to it") from error


async def _again(look: Callable[[], Awaitable[T]]) -> T:
    """Look once more when a file was gone between its name and itself."""
    for attempt in range(1, TRIES + 1):
        try:
            return await look()
        except OSError as error:
            if error.errno not in MOVING:
                raise
            if attempt == TRIES:
                raise _Changed(repr(error.filename)) from error
    raise AssertionError("the last try returns or raises")


async def _look(sandbox: BackendSandbox, scope: Sequence[str], skip: Collection[str]) -> Manifest:
    roots, entries = await _capture(sandbox, scope, skip)
    manifest: Manifest = await in_thread(Manifest.of, roots, entries)
    return manifest


async def _fetch(
    sandbox: BackendSandbox, store: CheckpointStore, wanted: Mapping[str, str], entries: Mapping[str, Entry]
) -> int:
    """Have contents sent and store them; return how many bytes these are."""
    if not wanted:
        return 0

    def take(path: str, size: int, source: BinaryIO) -> None:
        if path not in wanted or size != entries[path].size or not store.store(wanted[path], size, source):
            raise _Changed(repr(path))

    try:
        await changes.contents(sandbox.session, sorted(wanted), take)
    except Refused as error:
        raise CheckpointError(f"what is in the sandbox cannot be read: {error}") from error
    return sum(entries[path].size for path in wanted)


def _needed(manifest: Manifest, present: Mapping[str, Entry]) -> dict[str, tuple[int, str]]:
    """Return what has to be sent: SHA-256, size, and a path of it."""
    needed = {}
    for path, entry in manifest.files:
        there = present.get(path)
        same = there is not None and there.kind == "f" and there.sha256 == entry.sha256
        if not same or entry.group or (there is not None and there.links != 1):
            needed[entry.sha256] = (entry.size, path)
    return needed
