# SPDX-License-Identifier: Apache-2.0
"""From a command of the command line to asyncio, and from an error to an exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import typer
from rich.console import Console

from agentsandbox.errors import BatchFailed, SandboxError

__all__ = ["refusing", "running"]

T = TypeVar("T")


def refusing(action: Callable[[], T]) -> T:
    """Run *action*; what we raise on purpose becomes one line on standard error, and exit code 2, or 1 of a batch."""
    try:
        return action()
    except SandboxError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, BatchFailed) else 2) from error


def running(action: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """Run *action* on asyncio, like :func:`refusing`. SIGTERM ends it as Ctrl-C does: what it has made is removed."""
    with _terminable():
        return refusing(lambda: anyio.run(lambda: action(*args, **options)))


@contextmanager
def _terminable() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
