# SPDX-License-Identifier: Apache-2.0
"""
Time that passes only when everybody waits: an hour of timeouts tested in a millisecond.

:func:`run` runs an async function so, on asyncio or trio, and the same seed gives the same run. As pytest's fixture
``anyio_backend`` return :func:`virtual_time`. Not for real sockets, threads or processes: the clock would jump while
they work.
"""

from __future__ import annotations

import asyncio
import selectors
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any, TypeVar

import anyio

from agentsandbox.errors import ConfigurationError

__all__ = ["VirtualTimeLoop", "deterministic_trio", "run", "virtual_time"]

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Where a selector would wait for time to pass, move the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task waits, and no timer is set")
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """
    An event loop whose clock jumps to the next timer as soon as nothing else is to be done.

    Raises:
        RuntimeError: From the loop, if everything waits for something that no timer will end.

    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual time in seconds; 0 at the start."""
        return self._jumping.now


def virtual_time(backend: str = "asyncio") -> tuple[str, dict[str, Any]]:
    """
    Return what pytest's fixture ``anyio_backend`` has to return for virtual time.

    Args:
        backend: ``asyncio`` or ``trio``.

    Raises:
        ConfigurationError: If it is neither.

    """
    if backend == "asyncio":
        return "asyncio", {"loop_factory": VirtualTimeLoop}
    if backend == "trio":
        from trio.testing import MockClock

        return "trio", {"clock": MockClock(autojump_threshold=0)}
    raise ConfigurationError(f"virtual time is for asyncio and trio, not {backend!r}")


@contextmanager
def deterministic_trio(seed: int = 0) -> Iterator[bool]:
    """
    Have trio run tasks that are ready at the same instant in an order that the seed decides.

    Trio shuffles them, so that nobody relies on an order. It has a switch for property-based tests, under which the
    shuffle starts from the same order each time and takes its chance from one place; this sets the switch and the seed,
    and puts both back. It counts for every trio loop of the process, so only one run at a time repeats.

    Args:
        seed: Any number.

    Yields:
        Whether this trio has the switch. If not, a warning says so: runs then differ in the order of what happens at
        the same instant.

    """
    import trio
    from trio._core import _run as scheduler

    if isinstance(getattr(scheduler, _SWITCH, None), bool) and isinstance(getattr(scheduler, _CHANCE, None), Random):
        before = {name: getattr(scheduler, name) for name in (_SWITCH, _CHANCE)}
        setattr(scheduler, _SWITCH, True)
        setattr(scheduler, _CHANCE, Random(f"trio {seed}"))  # noqa: S311 - no secret
        try:
            yield True
        finally:
            for name, value in before.items():
                setattr(scheduler, name, value)
        return
    warnings.warn(
        f"trio {trio.__version__} has no switch for deterministic scheduling: runs of one seed may differ in the order "
        "of what happens at the same instant",
        RuntimeWarning,
        stacklevel=3,
    )
    yield False


_SWITCH, _CHANCE = "_ALLOW_DETERMINISTIC_SCHEDULING", "_r"


def run(function: Callable[..., Awaitable[T]], *args: Any, backend: str = "asyncio", seed: int = 0) -> T:
    """
    Run an async function in virtual time, from 0 s on; the same seed gives the same run, event for event.

    Args:
        function: What to run.
        *args: Its arguments.
        backend: ``asyncio``, where tasks run in the order in which they became ready, or ``trio``.
        seed: Decides the order on trio of what is ready at the same instant.

    Returns:
        What the function returns.

    Raises:
        ConfigurationError: If there is no such backend.

    """
    name, options = virtual_time(backend)
    with deterministic_trio(seed) if name == "trio" else nullcontext():
        return anyio.run(function, *args, backend=name, backend_options=options)
