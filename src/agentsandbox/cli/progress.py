# SPDX-License-Identifier: Apache-2.0
"""How far a batch is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console

    from agentsandbox.models.events import Event

__all__ = ["BatchProgress"]

PLAIN_LINES = 20


class BatchProgress:
    """
    Shows the progress of a batch. It is an event sink and a context manager.

    Args:
        total: How many episodes the batch has.
        console: Where to show it.

    """

    def __init__(self, total: int, console: Console) -> None:
        self._total = total
        self._console = console
        self._ended = 0
        self._without = 0
        self._step = max(1, total // PLAIN_LINES)
        self._bar = Progress(
            TextColumn("episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[without]} without reward"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("episodes", total=total, without=0)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        """Take an event; only the end of an episode moves anything."""
        if event.name not in ("episode.ended", "episode.restored"):
            return
        self._ended += 1
        self._without += event.data.get("status") != "rewarded"
        self._bar.update(self._task, completed=self._ended, without=self._without)
        if not self._console.is_terminal and (self._ended % self._step == 0 or self._ended == self._total):
            self._console.print(
                f"{self._ended}/{self._total} episodes, {self._without} without reward", highlight=False
            )
