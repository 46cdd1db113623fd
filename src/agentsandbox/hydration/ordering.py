# SPDX-License-Identifier: Apache-2.0
"""In which order a node fetches its images, and which of them are there at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from agentsandbox.hydration.records import Wave

if TYPE_CHECKING:
    from agentsandbox.hydration.placing import Load
    from agentsandbox.hydration.records import ImageUse

__all__ = ["complete", "waves"]

_CLEARLY = 0.95
"""Only what is predicted to be faster by more than a twentieth is worth leaving the long episodes for later."""


@attrs.define(eq=False)
class _Open:
    """A wave that is being filled."""

    uses: list[ImageUse] = attrs.field(factory=list)
    layers: dict[str, int] = attrs.field(factory=dict)

    def with_(self, use: ImageUse) -> int:
        more = {layer.digest: layer.unpacked for layer in use.image.layers}
        return sum((self.layers | more).values())

    def add(self, use: ImageUse) -> None:
        self.uses.append(use)
        self.layers.update({layer.digest: layer.unpacked for layer in use.image.layers})


def waves(load: Load) -> tuple[Wave, ...]:
    """
    Put the images of a node into waves that its disk can hold, and order them.

    If all fit at once there is one wave. Otherwise a wave takes half of the disk's budget at most, so that the next one
    is fetched while the episodes of one run; relatives stay in one wave as far as possible.
    """
    uses = list(load.images.values())
    if not uses:
        return ()
    whole = _Open()
    for use in uses:
        whole.add(use)
    budget = load.node.budget
    fits = sum(whole.layers.values()) <= budget
    groups = [whole.uses] if fits else [opened.uses for opened in _pack(uses, budget)]
    return tuple(_wave(load, group) for group in _in_turn(load, groups))


def _pack(uses: Sequence[ImageUse], budget: int) -> list[_Open]:
    packed = [_Open()]
    # The base is the first layer: images of one family come one after another.
    for use in sorted(uses, key=lambda use: (use.image.layers[0].digest, -use.image.unpacked, use.name)):
        if packed[-1].uses and packed[-1].with_(use) > budget // 2:
            packed.append(_Open())
        packed[-1].add(use)
    return packed


def _in_turn(load: Load, groups: list[list[ImageUse]]) -> list[list[ImageUse]]:
    """
    Order the images of each wave.

    What takes longest comes first, so that nothing long is left for the end; unless fetching is the bottleneck, where
    Johnson's rule for two machines may be better.
    """
    longest = [sorted(group, key=lambda use: (-use.seconds, use.name)) for group in groups]
    johnson = _by_johnson(load, groups)
    seconds = [complete(load, [_wave(load, group) for group in order])[0] for order in (longest, johnson)]
    return johnson if seconds[1] < seconds[0] * _CLEARLY else longest


def _by_johnson(load: Load, groups: list[list[ImageUse]]) -> list[list[ImageUse]]:
    there: dict[str, int] = {}
    ordered = []
    for group in groups:
        parts = []
        for use in sorted(group, key=lambda use: use.name):
            parts.append((_fetch(load, use, there), load.runs(use), use))
            there.update({layer.digest: layer.unpacked for layer in use.image.layers})
        early = sorted((part for part in parts if part[0] <= part[1]), key=lambda part: (part[0], -part[2].seconds))
        late = sorted((part for part in parts if part[0] > part[1]), key=lambda part: -part[1])
        ordered.append([use for _, _, use in (*early, *late)])
    return ordered


def _wave(load: Load, uses: Sequence[ImageUse]) -> Wave:
    opened = _Open()
    pull = 0.0
    for use in uses:
        pull += _fetch(load, use, opened.layers)
        opened.add(use)
    return Wave(
        images=tuple(use.name for use in uses),
        size=sum(opened.layers.values()),
        pull_seconds=pull,
        run_seconds=sum(load.runs(use) for use in uses),
    )


def _fetch(load: Load, use: ImageUse, there: Mapping[str, int]) -> float:
    node = load.node
    if use.name in node.images:
        return 0.0
    missing = [layer for layer in use.image.layers if layer.digest not in there and layer.digest not in node.layers]
    return sum(load.weights[layer.digest] for layer in missing) + node.pull_overhead / node.pulls_at_once


def complete(load: Load, planned: Sequence[Wave]) -> tuple[float, float]:
    """
    Predict when a node is through, fetching one image after another while the episodes of earlier ones run.

    Returns:
        Seconds until its last episode is over, and seconds of fetching.

    """
    fetched = ran = fetching = longest = 0.0
    through: list[float] = []
    before: dict[str, int] = {}
    for number, wave in enumerate(planned):
        if number:
            # The kubelet keeps what is used: a wave has room when the one before the last is through, or the last one.
            together = wave.size + planned[number - 1].size <= load.node.budget
            at = number - 2 if together else number - 1
            fetched = max(fetched, through[at] if at >= 0 else 0.0)
        here: dict[str, int] = {}
        for name in wave.images:
            use = load.images[name]
            seconds = _fetch(load, use, before | here)
            fetched += seconds
            fetching += seconds
            here.update({layer.digest: layer.unpacked for layer in use.image.layers})
            ran = max(ran, fetched) + load.runs(use)
            longest = max(longest, fetched + use.seconds)
        before = here
        through.append(ran)
    return max(ran, longest), fetching
