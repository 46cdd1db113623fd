# SPDX-License-Identifier: Apache-2.0
"""The part of a lease that is about all that its sandbox holds: what changed, what is kept, and what is secret."""

from __future__ import annotations

import os
import secrets as tokens
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentsandbox.client import snapshots
from agentsandbox.client.changes import DIFF_LIMIT
from agentsandbox.client.checkpoints import CheckpointStore, as_store
from agentsandbox.client.hold import LeaseHold
from agentsandbox.client.redaction import check_secret, check_secrets
from agentsandbox.client.snapshots import FILE_LIMIT
from agentsandbox.errors import ConfigurationError, SandboxLost
from agentsandbox.models.changes import Checkpoint, Diff
from agentsandbox.models.limits import check_count

if TYPE_CHECKING:
    from agentsandbox.warmpool.tenure import Tenure

__all__ = ["LeaseContents"]

SECRETS = "/dev/shm"  # noqa: S108 - inside sandboxes
"""Where files with credentials are: in memory, never on a disk, in no checkpoint, and in the scope of every reset."""


class LeaseContents(LeaseHold):
    """What a lease knows of its sandbox's contents. Not to be used by itself: see :class:`Lease`."""

    _store: CheckpointStore | None = None
    _checkpoints: tuple[str, ...] = ()
    restored: str | None = None
    """The id of the checkpoint that its sandbox was last made to hold, if any."""

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The ids of the checkpoints that were made of its sandbox, in order."""
        return self._checkpoints

    def use_secrets(self, secrets: Mapping[str, str]) -> None:
        """
        Give credentials to every command that is started from now on, as variables of its environment.

        They are kept in the memory of the driver and of those commands, and are gone with the next :meth:`reset` or
        :meth:`release`. For a single command, use ``exec(secrets=...)``.

        Args:
            secrets: Name of the variable → value.

        Raises:
            ConfigurationError: If a value is none that can be kept out of logs: not a string, or too short.
            UsageError: If the lease was released, or commands reach its sandbox in a way that others can read.

        """
        self._given |= self._secrets(self._current(), secrets)

    async def place_secret(self, value: str, *, user: str | int | None = None) -> str:
        """
        Put a credential into a file that only one user of the sandbox can read, for programs that want a file.

        It is in memory and never in a checkpoint or a diff; the next reset removes it and says so.

        Args:
            value: The credential.
            user: Whose file; ``None`` is the sandbox's user.

        Returns:
            The path of the file in the sandbox.

        Raises:
            ConfigurationError: If it is no string, or too short.
            OSError: If it cannot be written.
            SandboxLost: If the sandbox is not the one it was.
            UsageError: If the lease was released, or commands reach its sandbox in a way that others can read.

        """
        tenure = self._current()
        check_secret(value, "of a file")
        snapshots.need_runner(tenure.sandbox, "a secret")
        self._redactor.learn([value])
        path = f"{SECRETS}/.secret-{tokens.token_hex(8)}"
        self._placed.add(path)
        self._engine.resets.placed(tenure.sandbox, path)
        data = value.encode("utf-8", "surrogateescape")
        async with self._fence(tenure):
            await tenure.sandbox.session.write_file(path, data, mode=0o600, user=user)
        self._emit("secret.placed", path=path)
        return path

    async def diff(self, *, root: str | None = None, limit: int = DIFF_LIMIT) -> Diff:
        """
        Say what changed in the sandbox since its baseline, which was taken before its first command.

        Nothing in the sandbox is run or believed for it; git is not needed. When a file was modified last is no change.

        Args:
            root: The directory that the patch is about, and relative to; ``None`` is the working directory. The list of
                changes is about everything that the reset policy has in its scope.
            limit: Bytes that all names, old and new contents together may have.

        Returns:
            The changes, and a patch for ``git apply`` or ``patch -p1``.

        Raises:
            ContentTooLarge: If more changed than *limit*, naming the file.
            UsageError: If the sandbox has no baseline, or commands reach it at a level without a runner.
            SandboxLost: If the sandbox is not the one it was.

        """
        if root is not None and (not isinstance(root, str) or not root.startswith("/")):
            raise ConfigurationError(f"root is an absolute path such as '/workspace', not {root!r}")
        check_count("limit", limit)
        tenure = self._current()
        async with self._fence(tenure):
            baseline = self._engine.resets.baseline(tenure.sandbox)
            return await snapshots.diff(tenure.sandbox, baseline, root=root, limit=limit, skip=self._placed)

    async def checkpoint(
        self,
        store: CheckpointStore | str | os.PathLike[str] | None = None,
        *,
        scope: Sequence[str] | None = None,
        limit: int = FILE_LIMIT,
    ) -> Checkpoint:
        """
        Keep what the sandbox holds, so that another one can go on from here.

        Only contents that the store does not have yet are moved. What runs goes on; what is written to at that moment
        is looked at again.

        Args:
            store: Where: a directory, a URL or a store; ``None`` is the pool's.
            scope: Which directories; ``None`` is the working directory, the home, ``/tmp``, ``/var/tmp``, and what the
                reset policy adds to its scope.
            limit: Bytes that one file may have.

        Returns:
            What was kept; its ``id`` is all that :meth:`restore` needs.

        Raises:
            CheckpointError: If it cannot be written, or the sandbox does not hold still.
            ContentTooLarge: If a file is larger than *limit*.
            ConfigurationError: If there is no store.
            UsageError: If commands reach the sandbox at a level without a runner.
            SandboxLost: If the sandbox is not the one it was.

        """
        place = as_store(store if store is not None else self._store)
        check_count("limit", limit)
        if isinstance(scope, str):
            raise ConfigurationError(f"scope is a list of directories; use [{scope!r}]")
        tenure = self._current()
        snapshots.need_runner(tenure.sandbox, "a checkpoint")
        wanted = tuple(scope) if scope is not None else self._scope(tenure)
        async with self._fence(tenure):
            made = await snapshots.checkpoint(tenure.sandbox, place, wanted, limit=limit, skip=self._placed)
        self._checkpoints += (made.id,)
        self._emit("lease.checkpoint", checkpoint=made.id, size=made.size, stored=made.stored, seconds=made.seconds)
        return made

    async def restore(
        self,
        checkpoint: Checkpoint | str,
        store: CheckpointStore | str | os.PathLike[str] | None = None,
    ) -> Checkpoint:
        """
        Make the sandbox hold what a checkpoint does, and nothing else in the directories of that.

        Every process in the sandbox is ended first. Owners, modes and times are restored, too, and all of it is
        compared afterwards. What a reset goes back to stays the same: the sandbox as it was before its first command.

        Args:
            checkpoint: What :meth:`checkpoint` returned, or its id.
            store: Where it is kept; ``None`` is the pool's.

        Returns:
            What was restored.

        Raises:
            CheckpointError: If it is missing, damaged or does not fit. Nothing was changed.
            ConfigurationError: If there is no store.
            UsageError: If commands reach the sandbox at a level without a runner.
            SandboxLost: If it did not come out the same, or the sandbox is not the one it was. The lease is dead.

        """
        place = as_store(store if store is not None else self._store)
        id = checkpoint.id if isinstance(checkpoint, Checkpoint) else checkpoint
        tenure, begun = self._current(), False

        def begins() -> None:
            nonlocal begun
            begun = True

        async with self._fence(tenure):
            try:
                done = await snapshots.restore(tenure.sandbox, place, id, begins=begins)
            except Exception:
                raise
            except BaseException:  # cancelled
                if begun:  # nobody knows how far it came
                    self._engine.lose(tenure, SandboxLost("restore_failed", "it was interrupted"))
                raise
        self.restored = id
        self._emit("lease.restored", checkpoint=id, size=done.size, seconds=done.seconds)
        return done

    def _scope(self, tenure: Tenure) -> tuple[str, ...]:
        return snapshots.declared(tenure.sandbox, self._engine.resets.policy.scope)

    def _secrets(self, tenure: Tenure, secrets: Mapping[str, str] | None) -> dict[str, str]:
        """Check credentials, and know them from now on."""
        found = check_secrets(secrets)
        if found:
            snapshots.need_runner(tenure.sandbox, "a secret")
            self._redactor.learn(found.values())
        return found
