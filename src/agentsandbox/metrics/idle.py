# SPDX-License-Identifier: Apache-2.0
"""What the accelerators wait for while no training step runs. Pure: time is handed in."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from agentsandbox.errors import ConfigurationError, UsageError
from agentsandbox.models.limits import check_count

if TYPE_CHECKING:
    from agentsandbox.models.events import Event

__all__ = ["Cause", "IdleMeter", "IdleReport"]


class Cause(StrEnum):
    """What is waited for."""

    QUEUE = "queue"
    """Episodes that have not got a sandbox, of an image of which none is being made."""
    HYDRATE = "hydrate"
    """An image on its way to a node, where the backend tells of it."""
    START = "start"
    """A sandbox that is being made."""
    EXEC = "exec"
    """Commands in sandboxes."""
    AGENT = "agent"
    """The rollout function between commands: the policy thinks. Whether that is idle is for the trainer to say."""
    STRAGGLER = "straggler"
    """The last few episodes of a batch, whatever they do."""
    OTHER = "other"
    """No batch is under way: the trainer does something else."""


@attrs.frozen(kw_only=True)
class IdleReport:
    """Where the time went, in seconds of wall time. ``busy`` and all of ``idle`` add up to ``wall``."""

    wall: float
    """Since the first training step or batch began."""
    busy: float
    """Within training steps."""
    idle: Mapping[Cause, float]
    """Outside of them, by cause."""
    devices: int
    """Accelerators that wait together."""
    steps: int
    """Training steps that have begun."""

    @property
    def share(self) -> float:
        """The share of the wall time, 0 to 1, that is idle; 0 before anything has happened."""
        return sum(self.idle.values()) / self.wall if self.wall > 0 else 0.0

    @property
    def device_seconds(self) -> Mapping[Cause, float]:
        """What is lost by cause: idle seconds times accelerators."""
        return {cause: seconds * self.devices for cause, seconds in self.idle.items()}

    def __str__(self) -> str:
        lost = sorted(self.idle.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in lost if seconds > 0)
        return f"idle {self.share:.0%} of {self.wall:.1f} s on {self.devices} devices" + (f": {parts}" if parts else "")


@attrs.define(eq=False)
class _Episode:
    image: str
    granted: bool = False
    commands: int = 0


@attrs.define(eq=False, repr=False)
class IdleMeter:
    """
    Attributes every instant outside of training steps to what the episodes of the batch are doing.

    An instant with several unfinished episodes is split among their causes in equal parts, so that the parts always add
    up to the wall time. As soon as no more than *stragglers* of the batch are left, all of it is theirs.

    Args:
        devices: Accelerators that wait together.
        stragglers: The share of a batch, 0 to 1, whose last episodes are stragglers; at least one episode.

    Raises:
        ConfigurationError: If an argument is out of range.

    """

    _devices: int = attrs.field(default=1, kw_only=True)
    _stragglers: float = attrs.field(default=0.05, kw_only=True)
    _idle: dict[Cause, float] = attrs.field(factory=lambda: dict.fromkeys(Cause, 0.0), init=False)
    _busy: float = attrs.field(default=0.0, init=False)
    _began: float | None = attrs.field(default=None, init=False)
    _at: float = attrs.field(default=0.0, init=False)
    _stepping: int = attrs.field(default=0, init=False)
    _steps: int = attrs.field(default=0, init=False)
    _total: int = attrs.field(default=0, init=False)
    _left: int = attrs.field(default=0, init=False)
    _batches: int = attrs.field(default=0, init=False)
    _images: dict[str, str] = attrs.field(factory=dict, init=False)
    _episodes: dict[str, _Episode] = attrs.field(factory=dict, init=False)
    _making: Counter[str] = attrs.field(factory=Counter, init=False)
    _pulling: Counter[str] = attrs.field(factory=Counter, init=False)
    _image_of: dict[str, str] = attrs.field(factory=dict, init=False)
    _waiting: Counter[str] = attrs.field(factory=Counter, init=False)
    _working: int = attrs.field(default=0, init=False)
    _thinking: int = attrs.field(default=0, init=False)
    _acts: Mapping[str, Callable[[Event], None]] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        """Check the arguments."""
        check_count("devices", self._devices)
        if not 0 <= self._stragglers <= 1:
            raise ConfigurationError(f"stragglers must be a share from 0 to 1, not {self._stragglers!r}")
        self._acts = {
            "sandbox.created": self._made,
            "sandbox.ready": self._settled,
            "sandbox.failed": self._settled,
            "sandbox.deleted": self._settled,
            "image.pulling": self._pull,
            "image.pulled": self._pulled,
            "attempt.started": self._asked,
            "attempt.granted": self._granted,
            "attempt.ended": self._drop,
            "command.started": self._command,
            "command.ended": self._commanded,
            "episode.ended": self._ended,
        }

    def __repr__(self) -> str:
        state = "in a training step" if self._stepping else f"{self._left} episodes left" if self._batches else "quiet"
        return f"<IdleMeter [{self._steps} steps, {state}]>"

    # Marks of the trainer and of the pool.

    def begin_step(self, now: float) -> None:
        """Note that the accelerators train."""
        self._advance(now)
        self._stepping += 1
        self._steps += 1

    def end_step(self, now: float) -> None:
        """
        Note that they wait again.

        Raises:
            UsageError: If no step is under way.

        """
        if not self._stepping:
            raise UsageError("no training step is under way")
        self._advance(now)
        self._stepping -= 1

    def begin_batch(self, images: Mapping[str, str], now: float) -> None:
        """
        Note that a batch is under way; several at once count as one.

        Args:
            images: Episode id → its image.
            now: In seconds.

        """
        self._advance(now)
        self._batches += 1
        self._total += len(images)
        self._left += len(images)
        self._images.update(images)

    def end_batch(self, now: float) -> None:
        """Note that it is over, whatever has become of its episodes."""
        self._advance(now)
        self._batches -= 1
        if not self._batches:
            self._total = self._left = self._working = self._thinking = 0
            self._episodes.clear()
            self._images.clear()
            self._waiting.clear()

    def __call__(self, event: Event) -> None:
        """Take in an event of the pool."""
        if (act := self._acts.get(event.name)) is not None:
            self._advance(event.at)
            act(event)

    def report(self, now: float) -> IdleReport:
        """Return where the time went so far."""
        self._advance(now)
        wall = 0.0 if self._began is None else self._at - self._began
        idle = dict(self._idle)
        return IdleReport(wall=wall, busy=self._busy, idle=idle, devices=self._devices, steps=self._steps)

    # What events change.

    def _made(self, event: Event) -> None:
        image = str(event.data.get("image", ""))
        self._image_of[str(event.sandbox)] = image
        self._making[image] += 1

    def _settled(self, event: Event) -> None:
        if (image := self._image_of.pop(str(event.sandbox), None)) is not None:
            self._making[image] -= 1

    def _pull(self, event: Event) -> None:
        self._pulling[str(event.data.get("image", ""))] += 1

    def _pulled(self, event: Event) -> None:
        image = str(event.data.get("image", ""))
        self._pulling[image] = max(0, self._pulling[image] - 1)

    def _asked(self, event: Event) -> None:
        self._drop(event)
        episode = self._episodes[str(event.episode)] = _Episode(self._images.get(str(event.episode), ""))
        self._waiting[episode.image] += 1

    def _granted(self, event: Event) -> None:
        episode = self._episodes.get(str(event.episode))
        if episode is not None and not episode.granted:
            self._waiting[episode.image] -= 1
            episode.granted = True
            self._thinking += 1

    def _command(self, event: Event) -> None:
        episode = self._episodes.get(str(event.episode))
        if episode is not None and episode.granted:
            episode.commands += 1
            if episode.commands == 1:
                self._thinking -= 1
                self._working += 1

    def _commanded(self, event: Event) -> None:
        episode = self._episodes.get(str(event.episode))
        if episode is not None and episode.commands:
            episode.commands -= 1
            if not episode.commands:
                self._working -= 1
                self._thinking += 1

    def _drop(self, event: Event) -> None:
        episode = self._episodes.pop(str(event.episode), None)
        if episode is None:
            return
        if not episode.granted:
            self._waiting[episode.image] -= 1
        elif episode.commands:
            self._working -= 1
        else:
            self._thinking -= 1

    def _ended(self, event: Event) -> None:
        self._drop(event)
        self._left = max(0, self._left - 1)

    # Time.

    def _advance(self, now: float) -> None:
        if self._began is None:
            self._began = self._at = now
        passed = max(0.0, now - self._at)  # events of two sources may be told in either order
        self._at += passed
        if not passed:
            return
        if self._stepping:
            self._busy += passed
            return
        for cause, share in self._shares().items():
            self._idle[cause] += passed * share

    def _shares(self) -> dict[Cause, float]:
        if not self._left:
            return {Cause.OTHER: 1.0}
        if self._left < self._total and self._left <= max(1, math.floor(self._stragglers * self._total)):
            return {Cause.STRAGGLER: 1.0}
        weights: Counter[Cause] = Counter({Cause.EXEC: self._working, Cause.AGENT: self._thinking})
        queued = self._left - self._working - self._thinking
        for image, count in self._waiting.items():
            cause = Cause.HYDRATE if self._pulling[image] > 0 else Cause.START if self._making[image] > 0 else None
            if cause is not None and count > 0:
                weights[cause] += count
                queued -= count
        weights[Cause.QUEUE] = max(0, queued)
        whole = weights.total()
        return {cause: weight / whole for cause, weight in weights.items() if weight} if whole else {Cause.OTHER: 1.0}
