# SPDX-License-Identifier: Apache-2.0
"""What an episode changed, and what was kept of a sandbox."""

from __future__ import annotations

from enum import StrEnum

import attrs

__all__ = ["Change", "ChangeKind", "Checkpoint", "Diff"]


class ChangeKind(StrEnum):
    """What became of a path."""

    ADDED = "added"
    """There was nothing of that name."""
    DELETED = "deleted"
    """There is nothing of that name any more."""
    MODIFIED = "modified"
    """It is not what it was: other contents, mode, owner, target, or of another type altogether."""


@attrs.frozen(kw_only=True)
class Change:
    """One path that is not as it was."""

    path: str
    """The absolute path; bytes that are no UTF-8 are lone surrogates, as :func:`os.fsdecode` has them."""
    kind: ChangeKind
    """What became of it."""
    type: str | None = None
    """What it is: ``file``, ``directory``, ``symlink``, ``fifo``, ``socket`` or ``device``; ``None`` if it is gone."""
    old_type: str | None = None
    """What it was; ``None`` if it is new."""
    mode: int | None = None
    """Its permission bits."""
    old_mode: int | None = None
    """What they were."""
    owner: tuple[int, int] | None = None
    """Its user and group id."""
    old_owner: tuple[int, int] | None = None
    """What they were."""
    size: int | None = None
    """Bytes in it, if it is a file."""
    old_size: int | None = None
    """Bytes that were in it, if it was a file."""
    target: str | None = None
    """Where it leads, if it is a symbolic link."""
    old_target: str | None = None
    """Where it led."""
    binary: bool = False
    """Whether its contents, before or after, are not text."""
    links: tuple[str, ...] = ()
    """Other names of the same file, if it has any in the scope."""
    patched: bool = True
    """Whether applying the patch makes all of this change: owners, empty directories and the like do not fit in one."""


@attrs.frozen(kw_only=True)
class Diff:
    """What an episode changed."""

    changes: tuple[Change, ...]
    """Every path of the scope that is not as it was, in order of their names."""
    patch: bytes = attrs.field(default=b"", repr=lambda value: f"<{len(value)} bytes>")
    """What changed below :attr:`root`, for ``git apply`` or ``patch -p1`` there."""
    root: str
    """The directory that the patch is about."""
    scope: tuple[str, ...] = ()
    """The directories that were compared."""

    @property
    def text(self) -> str:
        """The patch as text; bytes that are no UTF-8 are lone surrogates."""
        return self.patch.decode("utf-8", "surrogateescape")

    @property
    def unpatched(self) -> tuple[Change, ...]:
        """The changes that the patch does not make, or not all of them."""
        return tuple(change for change in self.changes if not change.patched)

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return bool(self.changes)


@attrs.frozen(kw_only=True)
class Checkpoint:
    """What was kept of a sandbox."""

    id: str
    """SHA-256 of its manifest: the same for the same contents, names, modes, owners and times."""
    scope: tuple[str, ...]
    """The directories that it holds."""
    entries: int
    """Names in them."""
    size: int
    """Bytes in their files."""
    stored: int = 0
    """Bytes that the store did not have yet."""
    skipped: tuple[str, ...] = ()
    """Sockets and devices, which nothing can be kept of."""
    seconds: float = 0.0
    """How long it took."""
